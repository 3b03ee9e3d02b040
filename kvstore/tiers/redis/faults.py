"""Maps errors of redis-py, of the operating system and of the servers to tier errors.

TierUnavailable means that the server does not answer reads now, and may do so later. A server that
rejects only writes still answers reads: it is full, a replica, or cannot save to its disk. Its
errors are TierFull and TierError, because they must not open the circuit breaker.
"""

from __future__ import annotations

from typing import Final

from redis import exceptions as redis_errors

from kvstore.errors import TierError, TierFull, TierUnavailable
from kvstore.tiers.redis.resp import ErrorReply, ProtocolError

REDIRECTS: Final = frozenset({"MOVED", "ASK", "TRYAGAIN"})
"""Errors of a cluster node that does not have the key, or only during a migration."""

CALL_ERRORS: Final = (
    redis_errors.RedisError,
    redis_errors.RedisClusterException,  # not a subclass of RedisError
    OSError,
    ErrorReply,
    ProtocolError,
)
"""All exceptions that a call to a server may raise."""

_UNAVAILABLE_CODES: Final = frozenset({"LOADING", "CLUSTERDOWN", "MASTERDOWN", "BUSY", *REDIRECTS})
_UNAVAILABLE_TEXTS: Final = ("max number of clients", "max number of connections")
_WRONG_CREDENTIALS: Final = "the server rejects this user and password"
_NEEDS_PASSWORD: Final = "the server requires a password; set password (and user)"
_ADVICE: Final = {
    "NOAUTH": _NEEDS_PASSWORD,
    "WRONGPASS": _WRONG_CREDENTIALS,
    "NOPERM": "the user does not have the permission for this command",
    "READONLY": "the server is a replica and rejects writes; use the address of its master",
    "MISCONF": "the server rejects writes because it cannot save to its disk",
    "NOREPLICAS": "the server rejects writes because it has too few replicas",
}
_ADVICE_BY_TEXT: Final = {
    "invalid username-password": _WRONG_CREDENTIALS,
    "invalid password": _WRONG_CREDENTIALS,
    "without any password configured": "password is set, but the server has none",
    "Authentication required": _NEEDS_PASSWORD,
    "Cluster mode is not enabled": "the server is not a cluster; use the key host for it",
    "certificate verify failed": "the server's certificate is not trusted; check tls_ca",
}
"""Advice by the text of errors that redis-py wraps into its own exceptions."""
_CODE_BY_TYPE: Final[tuple[tuple[type[Exception], str], ...]] = (
    (redis_errors.BusyLoadingError, "LOADING"),
    (redis_errors.NoPermissionError, "NOPERM"),
    (redis_errors.ReadOnlyError, "READONLY"),
    (redis_errors.OutOfMemoryError, "OOM"),
    (redis_errors.ClusterDownError, "CLUSTERDOWN"),
)
"""Exceptions whose text redis-py stores without the error code."""


def is_redirect(error: BaseException) -> bool:
    return isinstance(error, ErrorReply) and error.code in REDIRECTS


def is_connection_fault(error: BaseException) -> bool:
    """Whether the server or the connection to it failed."""
    return isinstance(
        error, OSError | redis_errors.ConnectionError | redis_errors.TimeoutError
    ) and not isinstance(error, redis_errors.AuthenticationError | redis_errors.BusyLoadingError)


def may_have_moved(error: BaseException) -> bool:
    """Whether the key may be on another server now."""
    code = error.code if isinstance(error, ErrorReply) else ""
    return is_connection_fault(error) or code in ("READONLY", "CLUSTERDOWN")


def rejects_getex(error: ErrorReply) -> bool:
    """Whether the server rejects GETEX but may accept GET: it is a replica or older than 6.2, or
    the user may only read."""
    return error.code in ("READONLY", "NOPERM") or "unknown command" in str(error)


def map_error(error: BaseException, where: str, *, secrets: tuple[str, ...] = ()) -> TierError:
    """The tier error for an exception: one line that names the server, without secrets."""
    text = " ".join(str(error).split()) or type(error).__name__
    for secret in secrets:
        text = text.replace(secret, "***")
    code = _code(error, text)
    advice = _ADVICE.get(code) or next(
        (advice for words, advice in _ADVICE_BY_TEXT.items() if words in text), ""
    )
    if code == "OOM":
        return TierFull(f"{where} is full: {text}")
    if advice:
        return TierError(f"{where}: {advice} ({text})")
    if code in _UNAVAILABLE_CODES or any(words in text for words in _UNAVAILABLE_TEXTS):
        return TierUnavailable(f"{where}: {text}")
    if isinstance(error, ProtocolError):
        return TierUnavailable(f"{where}: protocol error: {text}")
    if isinstance(error, ErrorReply | redis_errors.ResponseError) and not is_connection_fault(
        error
    ):
        return TierError(f"{where}: {text}")
    return TierUnavailable(f"{where} does not respond: {text}")


def _code(error: BaseException, text: str) -> str:
    """The server's error code in an exception; "" if it has none."""
    for kind, code in _CODE_BY_TYPE:
        if isinstance(error, kind):
            return code
    return (
        text.partition(" ")[0] if isinstance(error, ErrorReply | redis_errors.ResponseError) else ""
    )
