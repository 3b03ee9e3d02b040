"""The part of the Redis protocol (RESP2) that transfers frames: packing commands, reading replies.

The functions do no I/O. A `Receive` supplies the bytes, so a test can split the stream anywhere. A
reply is read to its last byte and no further. One request has one reply. Bytes after it are a
protocol error, and the caller must close the connection.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kvstore.tiers.base import IO_ALIGNMENT

Receive = Callable[[list[memoryview]], int]
"""Fills the views in order with at least one byte; returns the number of bytes."""

MAX_VALUE_BYTES: Final = 512 << 20
"""Maximum length of a string with the server's default `proto-max-bulk-len`."""
MAX_LINE_BYTES: Final = 2048
"""Maximum length of a one-line reply; a longer one is a protocol error."""
SCRATCH_BYTES: Final = IO_ALIGNMENT + 64
"""Size of the first receive: the first line of a reply and the header of a frame."""
MAX_DRAIN_BYTES: Final = 1 << 20
"""Maximum length of an unwanted value that is received and discarded. For a longer one the
connection is closed."""

_MIN_SCRATCH_BYTES: Final = MAX_LINE_BYTES + 2
_NIL: Final = b"$-1"
_CRLF: Final = b"\r\n"


class ProtocolError(Exception):
    """The received bytes are not a valid reply to the request."""


class ErrorReply(Exception):
    """The server sent an error reply."""

    @property
    def code(self) -> str:
        """The error code: "OOM", "MOVED", "ERR"."""
        return str(self).partition(" ")[0]


class ValueKind(enum.Enum):
    """The kind of a received value."""

    FRAME = "frame"
    MISSING = "missing"
    FOREIGN = "foreign"
    """Not a frame by its length: too short, or not a multiple of 4,096 bytes."""
    TOO_LARGE = "too large"
    """Larger than the caller's buffer."""


class Value(NamedTuple):
    """The reply to GET. drained: it was received completely, so the connection is reusable."""

    kind: ValueKind
    payload_bytes: int = 0
    drained: bool = True


def pack_command(*words: bytes) -> bytes:
    """The bytes of a command."""
    head = b"*%d\r\n" % len(words)
    return head + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def pack_commands(command: bytes, names: Iterable[bytes]) -> bytes:
    """The bytes of the same command for each name."""
    head = b"*2\r\n$%d\r\n%s\r\n$" % (len(command), command)
    return b"".join([head + b"%d\r\n%s\r\n" % (len(name), name) for name in names])


def pack_set(name: bytes, value_bytes: int, ttl_ms: int) -> tuple[bytes, bytes]:
    """The bytes before and after a value of `value_bytes` in a SET NX. ttl_ms: 0 for no expiry."""
    expiry = (b"PX", b"%d" % ttl_ms) if ttl_ms else ()
    tail = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in (b"NX", *expiry))
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n"
    return head % (4 + len(expiry), len(name), name, value_bytes), _CRLF + tail


def is_frame_length(nbytes: int) -> bool:
    """Whether a value of this length can be a frame: a header and a payload, both aligned."""
    return nbytes >= 2 * IO_ALIGNMENT and nbytes % IO_ALIGNMENT == 0


class LineReplies:
    """Collects `count` one-line replies: statuses, errors (with their "-"), numbers and nil.

    Raises ProtocolError for anything else.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._received = bytearray()
        self._ends = 0

    @property
    def complete(self) -> bool:
        """Whether all replies have arrived."""
        return self._ends >= self._count

    def feed(self, piece: memoryview) -> None:
        """Add received bytes."""
        if len(self._received) > self._count * MAX_LINE_BYTES:
            raise ProtocolError("replies are too long")
        data = bytes(piece)
        self._ends += data.count(b"\n")
        self._received += data

    def replies(self) -> list[bytes]:
        """All replies; call it when they are complete."""
        replies = bytes(self._received).split(_CRLF)
        if self._ends != self._count or len(replies) != self._count + 1 or replies.pop():
            raise ProtocolError(f"received {self._ends} reply lines instead of {self._count}")
        for line in replies:
            if line[:1] not in (b"+", b"-", b":") and line != _NIL:
                raise ProtocolError(f"unexpected reply {line[:16]!r}")
        return replies


def read_lines(receive: Receive, scratch: memoryview, count: int) -> list[bytes]:
    """Receive `count` one-line replies; see `LineReplies`."""
    lines = LineReplies(count)
    while not lines.complete:
        lines.feed(scratch[: receive([scratch])])
    return lines.replies()


def parse_error(line: bytes) -> ErrorReply | None:
    """The error in a one-line reply, or None."""
    return ErrorReply(line[1:].decode("utf-8", "replace")) if line[:1] == b"-" else None


def read_value(
    receive: Receive, scratch: memoryview, header: memoryview, payload: memoryview
) -> Value:
    """Receive the reply to GET: a frame goes into `header` (4,096 bytes) and `payload`.

    Of any other value the first bytes go into `header`. Raises ErrorReply; ProtocolError: the reply
    is not a value.
    """
    assert len(scratch) >= _MIN_SCRATCH_BYTES
    have, end = 0, -1
    while end < 0:
        if have > MAX_LINE_BYTES:
            raise ProtocolError("the first line of the reply is too long")
        have += receive([scratch[have:]])
        end = bytes(scratch[: min(have, MAX_LINE_BYTES)]).find(_CRLF)
    line, rest = bytes(scratch[:end]), scratch[end + len(_CRLF) : have]
    if line[:1] == b"-" or line == _NIL:
        if rest:
            raise ProtocolError(f"{len(rest)} extra bytes after a reply")
        error = parse_error(line)
        if error:
            raise error
        return Value(ValueKind.MISSING)
    if line[:1] != b"$" or not line[1:].isdigit() or len(line) > 12:
        raise ProtocolError(f"unexpected reply {line[:16]!r}")
    nbytes = int(line[1:])
    if nbytes > MAX_VALUE_BYTES or len(rest) > nbytes + len(_CRLF):
        raise ProtocolError(f"value of {nbytes} bytes is too long")
    payload_bytes = nbytes - IO_ALIGNMENT
    is_frame = is_frame_length(nbytes)
    if not is_frame or payload_bytes > len(payload):
        start = header[: min(IO_ALIGNMENT, nbytes)]
        _fill(receive, [start] if start else [], rest[: len(start)])
        drained = _drain(receive, scratch, rest[len(start) :], nbytes - len(start))
        return (
            Value(ValueKind.TOO_LARGE, payload_bytes, drained)
            if is_frame
            else Value(ValueKind.FOREIGN, 0, drained)
        )
    end_ = memoryview(bytearray(len(_CRLF)))
    _fill(receive, [header[:IO_ALIGNMENT], payload[:payload_bytes], end_], rest)
    _check_end(end_)
    return Value(ValueKind.FRAME, payload_bytes)


def _fill(receive: Receive, views: list[memoryview], front: memoryview) -> None:
    """Fill all views: first with the bytes in `front`, then from the connection."""
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
    """Receive and discard a value; returns False if it is too long for that."""
    left = nbytes - len(rest)
    if left > MAX_DRAIN_BYTES:
        return False
    end = memoryview(bytearray(len(_CRLF)))
    front = rest[nbytes:].tobytes()  # a copy: `receive` overwrites the scratch buffer
    while left > 0:
        left -= receive([scratch[:left]])
    _fill(receive, [end], memoryview(front))
    _check_end(end)
    return True


def _check_end(end: memoryview) -> None:
    """Check the CRLF after a value."""
    if bytes(end) != _CRLF:
        raise ProtocolError("value is longer than its declared length")
