"""What foreign faults mean: redis-py's, the operating system's, and the servers' own error words.

Unavailable is what may pass by itself and keeps reads from being answered. A server that refuses
only writes (full, a replica, a disk that cannot save) still answers reads, so a breaker must not
take it for one that is away: those are TierFull and TierError.
"""

from __future__ import annotations

from typing import Final

from redis import exceptions as foreign

from kvstore.errors import TierError, TierFull, TierUnavailable
from kvstore.tiers.redis.resp import ErrorReply, OutOfStep

REDIRECTS: Final = frozenset({"MOVED", "ASK", "TRYAGAIN"})
"""Answers of a cluster's node that does not have the name, or not wholly."""

FOREIGN: Final = (
    foreign.RedisError,
    foreign.RedisClusterException,  # no RedisError
    OSError,
    ErrorReply,
    OutOfStep,
)
"""All that a call to a server can raise."""

_AWAY: Final = frozenset({"LOADING", "CLUSTERDOWN", "MASTERDOWN", "BUSY", *REDIRECTS})
_AWAY_TEXTS: Final = ("max number of clients", "max number of connections")
_REFUSED: Final = "it refuses this user and password"
_ASKS: Final = "it asks for a password: give password (and user)"
_ADVICE: Final = {
    "NOAUTH": _ASKS,
    "WRONGPASS": _REFUSED,
    "NOPERM": "this user may not do that",
    "READONLY": "it is a replica, which takes no writes: give the address of its master",
    "MISCONF": "it takes no writes because it cannot save to its own disk",
    "NOREPLICAS": "it takes no writes because too few replicas are there",
}
_ADVICE_BY_TEXT: Final = {
    "invalid username-password": _REFUSED,
    "invalid password": _REFUSED,
    "without any password configured": "it has no password, and one is given",
    "Authentication required": _ASKS,
    "Cluster mode is not enabled": "it is no cluster; give it as host",
    "certificate verify failed": "its certificate is not to be trusted; look at tls_ca",
}
"""Texts of faults that redis-py wraps into one of its own."""
_CODES: Final[tuple[tuple[type[Exception], str], ...]] = (
    (foreign.BusyLoadingError, "LOADING"),
    (foreign.NoPermissionError, "NOPERM"),
    (foreign.ReadOnlyError, "READONLY"),
    (foreign.OutOfMemoryError, "OOM"),
    (foreign.ClusterDownError, "CLUSTERDOWN"),
)
"""Errors of which redis-py takes the first word off."""


def is_redirect(error: BaseException) -> bool:
    return isinstance(error, ErrorReply) and error.code in REDIRECTS


def is_connection_fault(error: BaseException) -> bool:
    """Whether the server, or the way to it, is what failed."""
    return isinstance(
        error, OSError | foreign.ConnectionError | foreign.TimeoutError
    ) and not isinstance(error, foreign.AuthenticationError | foreign.BusyLoadingError)


def is_of_the_place(error: BaseException) -> bool:
    """Whether another server may be the right one by now."""
    code = error.code if isinstance(error, ErrorReply) else ""
    return is_connection_fault(error) or code in ("READONLY", "CLUSTERDOWN")


def refuses_refresh(error: ErrorReply) -> bool:
    """Whether a server that would answer GET refuses GETEX: a replica, a user that may only read,
    a release before 6.2."""
    return error.code in ("READONLY", "NOPERM") or "unknown command" in str(error)


def mapped(error: BaseException, where: str, *, secrets: tuple[str, ...] = ()) -> TierError:
    """One of our faults for a foreign one, in one line that says where and repeats no secret."""
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
    if code in _AWAY or any(words in text for words in _AWAY_TEXTS):
        return TierUnavailable(f"{where}: {text}")
    if isinstance(error, OutOfStep):
        return TierUnavailable(f"{where} does not speak as it should: {text}")
    if isinstance(error, ErrorReply | foreign.ResponseError) and not is_connection_fault(error):
        return TierError(f"{where}: {text}")
    return TierUnavailable(f"{where} does not answer: {text}")


def _code(error: BaseException, text: str) -> str:
    """The server's error word behind an exception; "" when there is none."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return text.partition(" ")[0] if isinstance(error, ErrorReply | foreign.ResponseError) else ""
