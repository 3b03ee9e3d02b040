"""The Redis and Valkey tier: each frame is one string of a server, a Sentinel service or a cluster.

    [[tiers]]
    kind = "redis"
    url = "rediss://cache-1:6380/0"
    password = "..."

`tier` has the verbs, `calls` the connections they use, `exchange` one request on one of them,
`resp` the protocol of values, `servers` which server holds what, `address` where they are, `keys`
what a block is called there, `info` what servers say of themselves, `faults` what goes wrong.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, SecretStr

from kvstore.config.settings import Milliseconds, Section
from kvstore.errors import ConfigError, TierError
from kvstore.tiers.redis.address import PORT, Address, address_of
from kvstore.tiers.redis.info import Info
from kvstore.tiers.redis.servers import servers_at
from kvstore.tiers.redis.tier import RedisTier

__all__ = ["Config", "RedisTier", "check", "open"]

log = logging.getLogger(__name__)


def _hidden(value: Any) -> SecretStr:
    """Whatever was given, so that no message repeats it."""
    return value if isinstance(value, SecretStr) else SecretStr(str(value))


Secret = Annotated[SecretStr, BeforeValidator(_hidden)]
NO_SECRET: Final = SecretStr("")


class Config(Section):
    """The Redis tier's part of the configuration. One of url, host, socket, sentinels, cluster."""

    name: str = "redis"
    url: Secret = NO_SECRET
    """redis:// or valkey://, rediss:// or valkeys:// for TLS, unix:// for a socket's path. It may
    hold a password."""
    host: str = ""
    """A single server."""
    port: int = Field(default=PORT, ge=1, le=65535)
    """Port of `host`."""
    socket: str = ""
    """Path of a single server's Unix socket."""
    sentinels: tuple[str, ...] = ()
    """Sentinels ("host:port") that know which server is the master of `service`."""
    service: str = ""
    """The service's name with the sentinels."""
    cluster: tuple[str, ...] = ()
    """Some nodes ("host:port") of a cluster; they name the others."""
    user: str = ""
    """User of the servers' access lists; "": the default user."""
    password: Secret = NO_SECRET
    """Its password."""
    sentinel_password: Secret = NO_SECRET
    """The sentinels' own password, where they ask for one."""
    database: int = Field(default=0, ge=0)
    """Number of the database; a cluster has 0 only."""
    tls: bool = False
    """Speak TLS, to sentinels too."""
    tls_ca: str = ""
    """File of the authorities that servers' certificates are checked against; "": the system's."""
    tls_cert: str = ""
    """File of our own certificate, where servers ask for one."""
    tls_key: str = ""
    """File of its key."""
    tls_verify: bool = True
    """Check the servers' certificates and names."""
    prefix: str = "kvstore"
    """Beginning of all names; two stores that share blocks agree on it."""
    ttl: Milliseconds = Field(default=0.0, ge=0)
    """How long a block stays after it was last written or read; "0": for ever."""
    connections: int = Field(default=4, ge=1, le=64)
    """Transfers at once."""
    timeout_ms: Milliseconds = Field(default=1000.0, gt=0)
    """Longest a server may say nothing."""
    connect_timeout_ms: Milliseconds = Field(default=500.0, gt=0)
    """Longest a connection may take to come about."""


def check(config: Config) -> None:
    """Raises ConfigError: the address is none. No server is asked."""
    address_of(config)


def open(config: Config) -> RedisTier:
    """Open the tier.

    A server that is away is no error: the tier serves when it is back. Raises ConfigError: the
    address is none, the server refuses our user or password, or it is of another kind than said.
    """
    address = address_of(config)
    tier = RedisTier(
        servers_at(address),
        prefix=config.prefix,
        ttl_ms=round(config.ttl),
        connections=config.connections,
        timeout_s=config.timeout_ms / 1e3,
        name=config.name,
    )
    try:
        _check(tier, address, expires=bool(config.ttl))
    except ConfigError:
        tier.close()
        raise
    return tier


def _check(tier: RedisTier, address: Address, *, expires: bool) -> None:
    """Look at the servers, if they are there, for what an operator would want to know at once."""
    try:
        infos = tier.ask_info()
    except TierError as error:
        if type(error) is TierError:  # permanent: refused, not away
            raise ConfigError(f"the redis tier cannot be opened: {error}") from None
        log.warning("%s: not there yet: %s", tier.name, error)
        return
    clustered = any(info.get("redis_mode", info.get("server_mode")) == "cluster" for info in infos)
    if clustered and not address.cluster:
        raise ConfigError(f"{address} is a node of a cluster; give it as cluster")
    for info in infos:
        warning = _memory_warning(info, expires=expires)
        if warning:
            log.warning("%s: %s %s", tier.name, address, warning)
            break


def _memory_warning(info: Info, *, expires: bool) -> str:
    """What is unwise in how a server bounds its memory; "" when nothing is."""
    policy = info.get("maxmemory_policy", "")
    if info.get("maxmemory", "0") == "0":
        return "has no maxmemory: it grows until its machine has no memory left"
    if policy == "noeviction":
        return "has maxmemory-policy noeviction: once full it takes no more; allkeys-lru is right"
    if policy.startswith("volatile") and not expires:
        return f"has maxmemory-policy {policy}, which evicts only what has a ttl, and ttl is 0"
    return ""
