"""Server addresses, credentials and connection options from the configuration."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from kvstore.config.settings import suggest
from kvstore.errors import ConfigError
from kvstore.tiers.redis.config import PORT, Config
from kvstore.tiers.redis.keys import PREFIX

SENTINEL_PORT: Final = 26379
PROTOCOL: Final = 2
"""RESP2: the server sends replies only, so a reply always belongs to the last request."""

SCHEMES: Final = {
    "redis": False,
    "valkey": False,
    "rediss": True,
    "valkeys": True,
    "unix": False,
}
"""URL schemes, and whether each uses TLS."""

_URL_EXAMPLE: Final = "use a URL such as redis://user@host:6379/0, or rediss:// for TLS"


@dataclass(frozen=True)
class Address:
    """The address of a server, of the sentinels of a master, or of some nodes of a cluster.

    hosts: (host, port) of each; empty for a Unix socket. options: connection arguments of redis-py,
    including the password.
    """

    hosts: tuple[tuple[str, int], ...]
    socket: str = ""
    sentinel_master: str = ""
    cluster: bool = False
    options: dict[str, Any] = field(repr=False, default_factory=dict)
    sentinel_options: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def tls(self) -> bool:
        return "ssl_cert_reqs" in self.options

    @property
    def secrets(self) -> tuple[str, ...]:
        """Passwords, which no message may contain."""
        found = (options.get("password") for options in (self.options, self.sentinel_options))
        return tuple(secret for secret in found if secret)

    def __str__(self) -> str:
        addresses = ", ".join(f"{host}:{port}" for host, port in self.hosts)
        if self.sentinel_master:
            return f"redis master {self.sentinel_master!r} of the sentinels {addresses}"
        return f"redis cluster {addresses}" if self.cluster else f"redis {self.socket or addresses}"


def address_of(config: Config) -> Address:
    """The address in a configuration. No error message contains a password or a URL.

    Raises ConfigError: the address is missing, ambiguous or inconsistent.
    """
    given = [
        name for name in ("url", "host", "socket", "sentinels", "cluster") if _is_set(config, name)
    ]
    if len(given) != 1:
        raise ConfigError(
            "the redis tier needs one of url, host, socket, sentinels or cluster; "
            + (f"{' and '.join(given)} are set" if given else "none is set")
        )
    if bool(config.sentinels) != bool(config.sentinel_master):
        raise ConfigError("the redis tier needs both sentinels and sentinel_master, or neither")
    if PREFIX.fullmatch(config.prefix) is None:
        raise ConfigError(
            f"redis tier: invalid prefix = {config.prefix!r}; use 1 to 64 letters, digits or . _ : "
            "-"
        )
    if config.cluster and config.database:
        raise ConfigError(
            f"redis tier: database = {config.database}, but a cluster has database 0 only"
        )
    url = _parse_url(config.url.get_secret_value()) if config.url else None
    tls = config.tls or (url is not None and SCHEMES[url.scheme])
    user, password, database = config.user, config.password.get_secret_value(), config.database
    hosts: tuple[tuple[str, int], ...] = ()
    socket = config.socket
    if url is not None:
        user, password = _parse_credentials(url, user, password)
        database = _parse_database(url, database)
        if url.scheme == "unix":
            socket = unquote(url.path)
        else:
            hosts = ((url.hostname or "", url.port or PORT),)
    elif config.host:
        hosts = ((config.host, config.port),)
    else:
        default = SENTINEL_PORT if config.sentinels else PORT
        hosts = tuple(_parse_host(text, default) for text in config.sentinels or config.cluster)
    if socket and tls:
        raise ConfigError("the redis tier does not support TLS over a Unix socket; unset tls")
    common = _timeout_options(config, bool(socket)) | (
        _tls_options(config) if tls else _check_no_tls_keys(config)
    )
    login = {"username": user or None, "password": password or None}
    sentinel_login = {
        "username": None,
        "password": config.sentinel_password.get_secret_value() or None,
    }
    place = {"db": database} if not config.cluster else {}
    return Address(
        hosts=hosts,
        socket=socket,
        sentinel_master=config.sentinel_master,
        cluster=bool(config.cluster),
        options=common | login | place,
        sentinel_options=common | sentinel_login,
    )


def _is_set(config: Config, name: str) -> bool:
    return bool(getattr(config, name))


def _parse_url(url: str) -> SplitResult:
    """Split and check a URL."""
    try:
        parts = urlsplit(url)
        port = parts.port  # urlsplit checks the port only when it is read
    except ValueError:
        raise ConfigError(f"redis tier: url is not a valid URL; {_URL_EXAMPLE}") from None
    if parts.scheme not in SCHEMES:
        scheme = parts.scheme or "(none)"
        raise ConfigError(
            f"redis tier: url has an unknown scheme {scheme!r}; {suggest(scheme, SCHEMES)}"
        )
    incomplete = not parts.path if parts.scheme == "unix" else not parts.hostname or port == 0
    if incomplete or parts.query or parts.fragment:
        raise ConfigError(
            "redis tier: url has no host, or has query options (set them as configuration keys); "
            f"{_URL_EXAMPLE}"
        )
    return parts


def _parse_credentials(url: SplitResult, user: str, password: str) -> tuple[str, str]:
    """User and password from the URL, else from their own keys."""
    if (url.username and user) or (url.password and password):
        raise ConfigError("redis tier: user or password is set twice, in url and as a key")
    return unquote(url.username or "") or user, unquote(url.password or "") or password


def _parse_database(url: SplitResult, database: int) -> int:
    """The database number from the URL's path, else from the key `database`."""
    text = "" if url.scheme == "unix" else url.path.strip("/")
    if not text:
        return database
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"redis tier: url ends in {text[:20]!r}; end it with a database number, such as /0"
        )
    if database not in (0, int(text)):
        raise ConfigError("redis tier: the database is set twice, in url and as database")
    return int(text)


def _parse_host(text: str, default_port: int) -> tuple[str, int]:
    """(host, port) of "host", "host:port" or "[v6]:port"."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0 or "@" in text or parts.path:
        raise ConfigError(f"redis tier: invalid host {text!r}; use a form such as cache-1:6379")
    return host, port or default_port


def _timeout_options(config: Config, unix: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": config.timeout / 1e3,
        "socket_connect_timeout": config.connect_timeout / 1e3,
        "protocol": PROTOCOL,
    }
    if unix:
        # For a Unix socket redis-py uses socket_timeout for connecting too.
        del options["socket_connect_timeout"]
    else:
        options["socket_keepalive"] = True
    return options


def _tls_options(config: Config) -> dict[str, Any]:
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("the redis tier needs both tls_cert and tls_key, or neither")
    for name in ("tls_ca", "tls_cert", "tls_key"):
        path = getattr(config, name)
        try:
            if path:
                builtins.open(path, "rb").close()
        except OSError as error:
            raise ConfigError(
                f"redis tier: cannot read {name} = {path!r}: {error.strerror}"
            ) from None
    return {
        "ssl_ca_certs": config.tls_ca or None,
        "ssl_certfile": config.tls_cert or None,
        "ssl_keyfile": config.tls_key or None,
        "ssl_cert_reqs": "required" if config.tls_verify else "none",
        "ssl_check_hostname": config.tls_verify,
    }


def _check_no_tls_keys(config: Config) -> dict[str, Any]:
    given = [name for name in ("tls_ca", "tls_cert", "tls_key") if _is_set(config, name)]
    if given:
        raise ConfigError(f"redis tier: {given[0]} is set, but tls is not; set tls = true")
    return {}
