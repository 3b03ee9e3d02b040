"""The part of Redis' protocol (RESP2) that carries frames: commands out, replies in.

Pure: bytes come from a `Receive`, so that a test can cut the stream wherever it likes. A reply is
taken to its last byte and no further. One request has one reply, so bytes that follow it are not
the beginning of another: the connection is out of step, and whoever owns it must close it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kvstore.tiers.base import PAGE_BYTES

Receive = Callable[[list[memoryview]], int]
"""Fills views, one after the other, with at least one byte, and says with how many."""

MAX_VALUE_BYTES: Final = 512 << 20
"""Longest string a server takes, unless its `proto-max-bulk-len` says otherwise."""
LINE_MAX_BYTES: Final = 2048
"""Longest one-line reply that is believed."""
SCRATCH_BYTES: Final = PAGE_BYTES + 64
"""What is received in one piece before the payload: a reply's first line and a frame's header."""
DRAIN_MAX_BYTES: Final = 1 << 20
"""A value that is not wanted is received and thrown away up to this length; a longer one costs
the connection."""

_SCRATCH_MIN_BYTES: Final = LINE_MAX_BYTES + 2
_NIL: Final = b"$-1"
_END: Final = b"\r\n"


class OutOfStep(Exception):
    """Bytes that are no reply to what was asked."""


class ErrorReply(Exception):
    """The server's answer is an error."""

    @property
    def code(self) -> str:
        """Its first word: "OOM", "MOVED", "ERR"."""
        return str(self).partition(" ")[0]


class Got(enum.Enum):
    """What a value turned out to be."""

    FRAME = "frame"
    MISSING = "missing"
    FOREIGN = "foreign"
    """Too short for a frame, or not in whole pages: somebody else's."""
    TOO_LARGE = "too large"
    """Longer than the buffer it should go into."""


class Value(NamedTuple):
    """A value's reply. drained: it was received to its end, so the connection is in step."""

    got: Got
    payload_bytes: int = 0
    drained: bool = True


def command(*words: bytes) -> bytes:
    """A command as it is sent."""
    head = b"*%d\r\n" % len(words)
    return head + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def commands(word: bytes, names: Iterable[bytes]) -> bytes:
    """The same command for each of some names, as they are sent."""
    head = b"*2\r\n$%d\r\n%s\r\n$" % (len(word), word)
    return b"".join([head + b"%d\r\n%s\r\n" % (len(name), name) for name in names])


def set_around(name: bytes, value_bytes: int, ttl_ms: int) -> tuple[bytes, bytes]:
    """What is sent before and after a value of `value_bytes` to set it if `name` is not there."""
    expiry = (b"PX", b"%d" % ttl_ms) if ttl_ms else ()
    tail = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in (b"NX", *expiry))
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n"
    return head % (4 + len(expiry), len(name), name, value_bytes), _END + tail


def is_frame_length(nbytes: int) -> bool:
    """Whether a value of this length can be a frame: a header page and a payload of pages."""
    return nbytes >= 2 * PAGE_BYTES and nbytes % PAGE_BYTES == 0


class Lines:
    """`count` one-line replies, taken as they come: statuses, errors (still with their "-"),
    numbers, and nil. Raises OutOfStep for anything else."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken = bytearray()
        self._ends = 0

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return self._ends >= self._count

    def take(self, piece: memoryview) -> None:
        """What came next."""
        if len(self._taken) > self._count * LINE_MAX_BYTES:
            raise OutOfStep("replies without end")
        data = bytes(piece)
        self._ends += data.count(b"\n")
        self._taken += data

    def replies(self) -> list[bytes]:
        """All of them, when they are complete."""
        replies = bytes(self._taken).split(_END)
        if self._ends != self._count or len(replies) != self._count + 1 or replies.pop():
            raise OutOfStep(f"{self._ends} lines of replies where {self._count} are right")
        for line in replies:
            if line[:1] not in (b"+", b"-", b":") and line != _NIL:
                raise OutOfStep(f"a reply that begins with {line[:16]!r}")
        return replies


def read_lines(receive: Receive, scratch: memoryview, count: int) -> list[bytes]:
    """`count` one-line replies; see `Lines`."""
    lines = Lines(count)
    while not lines.complete:
        lines.take(scratch[: receive([scratch])])
    return lines.replies()


def error_in(line: bytes) -> ErrorReply | None:
    """The error that a one-line reply is; None when it is none."""
    return ErrorReply(line[1:].decode("utf-8", "replace")) if line[:1] == b"-" else None


def read_value(
    receive: Receive, scratch: memoryview, header: memoryview, payload: memoryview
) -> Value:
    """The reply to GET, a frame going into `header` (4,096 bytes) and the front of `payload`.

    Raises ErrorReply for an error, OutOfStep for what is no value.
    """
    assert len(scratch) >= _SCRATCH_MIN_BYTES
    have, end = 0, -1
    while end < 0:
        if have > LINE_MAX_BYTES:
            raise OutOfStep("a reply without an end of its first line")
        have += receive([scratch[have:]])
        end = bytes(scratch[: min(have, LINE_MAX_BYTES)]).find(_END)
    line, rest = bytes(scratch[:end]), scratch[end + len(_END) : have]
    if line[:1] == b"-" or line == _NIL:
        if rest:
            raise OutOfStep(f"{len(rest)} bytes after a reply")
        error = error_in(line)
        if error:
            raise error
        return Value(Got.MISSING)
    if line[:1] != b"$" or not line[1:].isdigit() or len(line) > 12:
        raise OutOfStep(f"a reply that begins with {line[:16]!r}")
    nbytes = int(line[1:])
    if nbytes > MAX_VALUE_BYTES or len(rest) > nbytes + len(_END):
        raise OutOfStep(f"a value of {nbytes} bytes, or more than that")
    payload_bytes = nbytes - PAGE_BYTES
    if not is_frame_length(nbytes):
        return Value(Got.FOREIGN, 0, _drain(receive, scratch, rest, nbytes))
    if payload_bytes > len(payload):
        return Value(Got.TOO_LARGE, payload_bytes, _drain(receive, scratch, rest, nbytes))
    end_ = memoryview(bytearray(len(_END)))
    _fill(receive, [header[:PAGE_BYTES], payload[:payload_bytes], end_], rest)
    _check_end(end_)
    return Value(Got.FRAME, payload_bytes)


def _fill(receive: Receive, views: list[memoryview], front: memoryview) -> None:
    """Fill all of `views`, first with what was received already."""
    while views and front:
        have = min(len(front), len(views[0]))
        views[0][:have] = front[:have]
        views[0], front = views[0][have:], front[have:]
        if not views[0]:
            views.pop(0)
    while views:
        have = receive(views)
        while views and have >= len(views[0]):
            have -= len(views.pop(0))
        if have:
            views[0] = views[0][have:]


def _drain(receive: Receive, scratch: memoryview, rest: memoryview, nbytes: int) -> bool:
    """Throw a value away; False when it is too long for that."""
    left = nbytes - len(rest)
    if left > DRAIN_MAX_BYTES:
        return False
    end = memoryview(bytearray(len(_END)))
    front = rest[nbytes:].tobytes()  # of the scratch, which is received into
    while left > 0:
        left -= receive([scratch[:left]])
    _fill(receive, [end], memoryview(front))
    _check_end(end)
    return True


def _check_end(end: memoryview) -> None:
    """The two bytes after a value."""
    if bytes(end) != _END:
        raise OutOfStep("a value that is longer than it was said to be")
