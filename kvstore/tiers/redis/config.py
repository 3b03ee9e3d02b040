"""Configuration of the Redis tier."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, SecretStr

from kvstore.config.field_types import Milliseconds
from kvstore.config.settings import Section

PORT: Final = 6379
NO_SECRET: Final = SecretStr("")


def _hide(value: Any) -> SecretStr:
    """Wrap any value in SecretStr, so that no message repeats it."""
    return value if isinstance(value, SecretStr) else SecretStr(str(value))


Secret = Annotated[SecretStr, BeforeValidator(_hide)]


class Config(Section):
    """Configuration of the Redis tier: one of url, host, socket, sentinels or cluster."""

    name: str = "redis"
    url: Secret = NO_SECRET
    """URL of a single server: redis:// or valkey://, rediss:// or valkeys:// for TLS, unix:// for
    the path of a Unix socket. It may contain a password."""
    host: str = ""
    """Host name or address of a single server."""
    port: int = Field(default=PORT, ge=1, le=65535)
    """Port of `host`."""
    socket: str = ""
    """Path of the Unix socket of a single server."""
    sentinels: tuple[str, ...] = ()
    """Sentinels ("host:port") that monitor the master named in `sentinel_master`."""
    sentinel_master: str = ""
    """Name of the master, as configured in the sentinels."""
    cluster: tuple[str, ...] = ()
    """Some nodes ("host:port") of a cluster. The other nodes are discovered."""
    user: str = ""
    """ACL user name. "": the default user."""
    password: Secret = NO_SECRET
    """Password of `user`."""
    sentinel_password: Secret = NO_SECRET
    """Password of the sentinels, if they require one."""
    database: int = Field(default=0, ge=0)
    """Number of the database. A cluster has database 0 only."""
    tls: bool = False
    """Use TLS for servers and sentinels."""
    tls_ca: str = ""
    """Path of a file with the CA certificates that verify the servers. "": the system's
    certificates."""
    tls_cert: str = ""
    """Path of the client certificate, if the servers require one."""
    tls_key: str = ""
    """Path of the private key of `tls_cert`."""
    tls_verify: bool = True
    """Verify the certificates and host names of the servers."""
    prefix: str = "kvstore"
    """Prefix of all key names. Stores that share blocks use the same prefix."""
    ttl: Milliseconds = Field(default=0.0, ge=0)
    """Time after the last read or write at which a block expires. 0: never."""
    connections: int = Field(default=4, ge=1, le=64)
    """Maximum number of concurrent transfers."""
    timeout: Milliseconds = Field(default=1000.0, gt=0)
    """Maximum time without data from a server during a call."""
    connect_timeout: Milliseconds = Field(default=500.0, gt=0)
    """Maximum time to open a connection."""
