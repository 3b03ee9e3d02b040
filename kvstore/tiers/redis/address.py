"""Where the servers are and how to get in, out of the configuration."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from kvstore.config.settings import nearest
from kvstore.errors import ConfigError
from kvstore.tiers.redis.keys import PREFIX

if TYPE_CHECKING:
    from kvstore.tiers.redis import Config

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
PROTOCOL: Final = 2
"""RESP2: a server never speaks unasked, so a reply is always the one to the last request."""

SCHEMES: Final = {
    "redis": False,
    "valkey": False,
    "rediss": True,
    "valkeys": True,
    "unix": False,
}
"""Schemes of URLs, and whether they mean TLS."""

_URL_EXAMPLE: Final = "redis://user@host:6379/0 is right, or rediss:// for TLS"


@dataclass(frozen=True)
class Address:
    """One of three kinds: a server, the sentinels that know it, or a cluster's first nodes.

    hosts: (host, port) of each; empty for a Unix socket. options: redis-py's arguments for a
    connection, the password among them.
    """

    hosts: tuple[tuple[str, int], ...]
    socket: str = ""
    service: str = ""
    cluster: bool = False
    options: dict[str, Any] = field(repr=False, default_factory=dict)
    sentinel_options: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def tls(self) -> bool:
        return "ssl_cert_reqs" in self.options

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no message may repeat."""
        found = (options.get("password") for options in (self.options, self.sentinel_options))
        return tuple(secret for secret in found if secret)

    def __str__(self) -> str:
        places = ", ".join(f"{host}:{port}" for host, port in self.hosts)
        if self.service:
            return f"redis service {self.service!r} of the sentinels {places}"
        return f"redis cluster {places}" if self.cluster else f"redis {self.socket or places}"


def address_of(config: Config) -> Address:
    """The address that a configuration gives. Raises ConfigError: it gives none, or two, or parts
    that do not belong together; no message repeats a password or a URL."""
    given = [
        name for name in ("url", "host", "socket", "sentinels", "cluster") if _set(config, name)
    ]
    if len(given) != 1:
        raise ConfigError(
            "the redis tier needs one of url, host, socket, sentinels or cluster; "
            + (f"{' and '.join(given)} are given" if given else "none is given")
        )
    if bool(config.sentinels) != bool(config.service):
        raise ConfigError("the redis tier needs sentinels and service together, or neither")
    if PREFIX.fullmatch(config.prefix) is None:
        raise ConfigError(
            f"prefix = {config.prefix!r} of the redis tier; 1 to 64 of letters, digits, . _ : - "
            "are right"
        )
    if config.cluster and config.database:
        raise ConfigError(f"database = {config.database}; a redis cluster has database 0 only")
    url = _split(config.url.get_secret_value()) if config.url else None
    tls = config.tls or (url is not None and SCHEMES[url.scheme])
    user, password, database = config.user, config.password.get_secret_value(), config.database
    hosts: tuple[tuple[str, int], ...] = ()
    socket = config.socket
    if url is not None:
        user, password = _credentials(url, user, password)
        database = _database(url, database)
        if url.scheme == "unix":
            socket = unquote(url.path)
        else:
            hosts = ((url.hostname or "", url.port or PORT),)
    elif config.host:
        hosts = ((config.host, config.port),)
    else:
        default = SENTINEL_PORT if config.sentinels else PORT
        hosts = tuple(_host(text, default) for text in config.sentinels or config.cluster)
    if socket and tls:
        raise ConfigError("the redis tier has no TLS over a Unix socket; leave tls off")
    common = _timeouts(config, bool(socket)) | (_tls_options(config) if tls else _no_tls(config))
    login = {"username": user or None, "password": password or None}
    sentinel_login = {
        "username": None,
        "password": config.sentinel_password.get_secret_value() or None,
    }
    place = {"db": database} if not config.cluster else {}
    return Address(
        hosts=hosts,
        socket=socket,
        service=config.service,
        cluster=bool(config.cluster),
        options=common | login | place,
        sentinel_options=common | sentinel_login,
    )


def _set(config: Config, name: str) -> bool:
    return bool(getattr(config, name))


def _split(url: str) -> SplitResult:
    """The parts of a URL of ours."""
    try:
        parts = urlsplit(url)
        port = parts.port  # reading it is what checks it
    except ValueError:
        raise ConfigError(f"url of the redis tier is none; {_URL_EXAMPLE}") from None
    if parts.scheme not in SCHEMES:
        scheme = parts.scheme or "(none)"
        raise ConfigError(
            f"url of the redis tier has scheme {scheme!r}; {nearest(scheme, SCHEMES)}"
        )
    lacking = not parts.path if parts.scheme == "unix" else not parts.hostname or port == 0
    if lacking or parts.query or parts.fragment:
        raise ConfigError(
            "url of the redis tier lacks its host, or has options that belong into keys of their "
            f"own; {_URL_EXAMPLE}"
        )
    return parts


def _credentials(url: SplitResult, user: str, password: str) -> tuple[str, str]:
    """User and password: of the URL, else of the keys beside it."""
    if (url.username and user) or (url.password and password):
        raise ConfigError("the redis tier has its user or password twice: in url, and beside it")
    return unquote(url.username or "") or user, unquote(url.password or "") or password


def _database(url: SplitResult, database: int) -> int:
    """The database: of the URL's path, else of the key beside it."""
    text = "" if url.scheme == "unix" else url.path.strip("/")
    if not text:
        return database
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"url of the redis tier ends in {text[:20]!r}; a database's number is right"
        )
    if database not in (0, int(text)):
        raise ConfigError("the redis tier has its database twice: in url, and as database")
    return int(text)


def _host(text: str, default_port: int) -> tuple[str, int]:
    """(host, port) of "host", "host:port" or "[v6]:port"."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0 or "@" in text or parts.path:
        raise ConfigError(f"{text!r} of the redis tier is no host; write one like cache-1:6379")
    return host, port or default_port


def _timeouts(config: Config, unix: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": config.timeout_ms / 1e3,
        "socket_connect_timeout": config.connect_timeout_ms / 1e3,
        "protocol": PROTOCOL,
    }
    if unix:
        # redis-py's connection over a Unix socket connects within its one timeout.
        del options["socket_connect_timeout"]
    else:
        options["socket_keepalive"] = True
    return options


def _tls_options(config: Config) -> dict[str, Any]:
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("the redis tier needs tls_cert and tls_key together, or neither")
    for name in ("tls_ca", "tls_cert", "tls_key"):
        path = getattr(config, name)
        try:
            if path:
                builtins.open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"{name} = {path!r} of the redis tier: {error.strerror}") from None
    return {
        "ssl_ca_certs": config.tls_ca or None,
        "ssl_certfile": config.tls_cert or None,
        "ssl_keyfile": config.tls_key or None,
        "ssl_cert_reqs": "required" if config.tls_verify else "none",
        "ssl_check_hostname": config.tls_verify,
    }


def _no_tls(config: Config) -> dict[str, Any]:
    given = [name for name in ("tls_ca", "tls_cert", "tls_key") if _set(config, name)]
    if given:
        raise ConfigError(f"{given[0]} of the redis tier is set, and tls is not")
    return {}
