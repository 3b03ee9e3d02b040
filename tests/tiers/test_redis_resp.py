"""The wire protocol: any byte stream, split anywhere, is read correctly or rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.base import IO_ALIGNMENT
from kvstore.tiers.redis import resp
from kvstore.tiers.redis.resp import ErrorReply, ProtocolError, Value, ValueKind

PAYLOAD_BYTES = 3 * IO_ALIGNMENT

cuts = st.lists(st.integers(1, 5000), max_size=40)
"""Maximum bytes of the first receives. Later receives are not limited."""
lines = st.one_of(
    st.just(b"$-1"),
    st.integers(-(10**12), 10**12).map(lambda n: b":%d" % n),
    st.binary(max_size=80).map(lambda text: b"+" + text.translate(None, b"\r\n")),
    st.binary(max_size=80).map(lambda text: b"-ERR " + text.translate(None, b"\r\n")),
)


class Ended(Exception):
    """The stream has no more bytes. A socket would wait."""


class Stream:
    """A stream that delivers bytes in parts."""

    def __init__(self, data: bytes, cut: Sequence[int] = ()) -> None:
        self.data = data
        self.cut = list(cut)
        self.taken = 0

    def receive(self, views: list[memoryview]) -> int:
        room = sum(len(view) for view in views)
        assert room, "no buffer to receive into"
        limit = self.cut.pop(0) if self.cut else room
        piece = self.data[self.taken : self.taken + min(limit, room)]
        if not piece:
            raise Ended
        self.taken += len(piece)
        left = piece
        for view in views:
            part, left = left[: len(view)], left[len(view) :]
            view[: len(part)] = part
        return len(piece)


def scratch() -> memoryview:
    return memoryview(bytearray(resp.SCRATCH_BYTES))


def value_of(stream: Stream, payload_bytes: int = PAYLOAD_BYTES) -> tuple[Value, bytes]:
    """The value read, and the bytes of header and payload."""
    header = memoryview(bytearray(IO_ALIGNMENT))
    payload = memoryview(bytearray(payload_bytes))
    value = resp.read_value(stream.receive, scratch(), header, payload)
    return value, bytes(header) + bytes(payload[: value.payload_bytes])


def noise(nbytes: int) -> bytes:
    return bytes((i * 37 + i // 256) % 251 for i in range(nbytes))


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


@settings(deadline=None)
@given(pages=st.integers(1, 3), cut=cuts)
def test_a_frame_arrives_whole_however_it_is_cut(pages: int, cut: list[int]) -> None:
    frame = noise((1 + pages) * IO_ALIGNMENT)
    stream = Stream(bulk(frame), cut)
    value, data = value_of(stream)
    assert value == Value(ValueKind.FRAME, pages * IO_ALIGNMENT)
    assert data == frame
    assert stream.taken == len(stream.data)


@settings(deadline=None)
@given(nbytes=st.integers(0, 70_000), cut=cuts)
def test_any_value_is_taken_to_its_end(nbytes: int, cut: list[int]) -> None:
    stream = Stream(bulk(noise(nbytes)), cut)
    value, data = value_of(stream, IO_ALIGNMENT)
    start = data[:IO_ALIGNMENT]
    assert start == noise(nbytes)[:IO_ALIGNMENT].ljust(IO_ALIGNMENT, b"\0"), "the first bytes"
    if nbytes % IO_ALIGNMENT or nbytes < 2 * IO_ALIGNMENT:
        assert value.kind is ValueKind.FOREIGN
    else:
        assert value.kind is (
            ValueKind.FRAME if nbytes == 2 * IO_ALIGNMENT else ValueKind.TOO_LARGE
        )
    assert value.drained
    assert stream.taken == len(stream.data)


def test_a_value_too_long_to_throw_away_is_left() -> None:
    stream = Stream(bulk(noise(resp.MAX_DRAIN_BYTES + 8 * IO_ALIGNMENT)))
    value, data = value_of(stream)
    assert data[:IO_ALIGNMENT] == noise(IO_ALIGNMENT)
    assert value == Value(
        ValueKind.TOO_LARGE, resp.MAX_DRAIN_BYTES + 7 * IO_ALIGNMENT, drained=False
    )


@settings(deadline=None)
@given(cut=cuts)
def test_a_missing_value(cut: list[int]) -> None:
    stream = Stream(b"$-1\r\n", cut)
    assert value_of(stream)[0] == Value(ValueKind.MISSING)
    assert stream.taken == 5


@settings(deadline=None)
@given(text=st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1), cut=cuts)
def test_an_error_is_raised_and_taken_to_its_end(text: str, cut: list[int]) -> None:
    stream = Stream(b"-OOM %s\r\n" % text.encode(), cut)
    with pytest.raises(ErrorReply) as caught:
        value_of(stream)
    assert (caught.value.code, str(caught.value)) == ("OOM", f"OOM {text}")
    assert stream.taken == len(stream.data)


@settings(deadline=None)
@given(pages=st.integers(1, 3), at=st.floats(0, 1, exclude_max=True), cut=cuts)
def test_a_reply_that_ends_early_is_never_a_value(pages: int, at: float, cut: list[int]) -> None:
    whole = bulk(noise((1 + pages) * IO_ALIGNMENT))
    with pytest.raises(Ended):
        value_of(Stream(whole[: int(at * len(whole))], cut))


@settings(deadline=None)
@given(pages=st.integers(1, 2), more=st.binary(min_size=1, max_size=64), cut=cuts)
def test_a_value_longer_than_it_says_is_refused(pages: int, more: bytes, cut: list[int]) -> None:
    frame = noise((1 + pages) * IO_ALIGNMENT)
    head = b"$%d\r\n" % len(frame)
    if more.startswith((b"\r\n", b"\r")) or more == b"\r":
        more = b"x" + more
    with pytest.raises((ProtocolError, Ended)):
        value_of(Stream(head + frame + more, cut))


@pytest.mark.parametrize(
    "data",
    [
        b"+OK\r\n",
        b":5\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"$\r\n",
        b"$-2\r\n",
        b"$+8192\r\n",
        b"$ 8192\r\n",
        b"$8192 \r\n",
        b"$\xd9\xa8\r\n",
        b"$99999999999999\r\n",
        b"$600000000\r\n",
        b"$-1\r\n+OK\r\n",
        b"-ERR x\r\n:1\r\n",
        b"$1\r\nxx\r\n",
        b"$1\r\nx\r\n+",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 5000,
    ],
)
def test_what_is_no_value_is_out_of_step(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        value_of(Stream(data))


@settings(deadline=None)
@given(data=st.binary(max_size=300), cut=cuts)
def test_noise_is_refused_and_never_a_frame(data: bytes, cut: list[int]) -> None:
    reads: list[Callable[[Stream], object]] = [
        lambda stream: value_of(stream)[0].kind,
        lambda stream: resp.read_lines(stream.receive, scratch(), 2),
    ]
    for read in reads:
        try:
            assert read(Stream(data, cut)) is not ValueKind.FRAME
        except (ProtocolError, ErrorReply, Ended):
            continue


@settings(deadline=None)
@given(replies=st.lists(lines, min_size=1, max_size=50), cut=cuts)
def test_lines_arrive_in_order_however_they_are_cut(replies: list[bytes], cut: list[int]) -> None:
    stream = Stream(b"".join(line + b"\r\n" for line in replies), cut)
    assert resp.read_lines(stream.receive, scratch(), len(replies)) == replies
    assert stream.taken == len(stream.data)


@settings(deadline=None)
@given(replies=st.lists(lines, min_size=2, max_size=9), cut=cuts)
def test_lines_more_than_asked_for_are_out_of_step(replies: list[bytes], cut: list[int]) -> None:
    """If they have not arrived yet, the next call on the connection detects them."""
    data = b"".join(line + b"\r\n" for line in replies)
    stream = Stream(data, cut)
    asked = len(replies) - 1
    try:
        assert resp.read_lines(stream.receive, scratch(), asked) == replies[:asked]
        assert stream.taken == sum(len(line) + 2 for line in replies[:asked])
    except ProtocolError:
        assert stream.taken > sum(len(line) + 2 for line in replies[:asked])


@pytest.mark.parametrize("data", [b"OK\r\n", b"$2\r\n", b"+a\n", b"+a\r", b"\r\n", b"$-1x\r\n"])
def test_what_is_no_line_is_out_of_step(data: bytes) -> None:
    with pytest.raises((ProtocolError, Ended)):
        resp.read_lines(Stream(data).receive, scratch(), 1)


def test_a_line_without_end_is_out_of_step() -> None:
    with pytest.raises(ProtocolError, match="replies are too long"):
        resp.read_lines(Stream(b"+" + b"x" * 50_000).receive, scratch(), 1)


@settings(deadline=None)
@given(words=st.lists(st.binary(max_size=40), min_size=1, max_size=6))
def test_a_command_says_the_length_of_each_word(words: list[bytes]) -> None:
    data = resp.pack_command(*words)
    count, _, rest = data[1:].partition(b"\r\n")
    assert (data[:1], int(count)) == (b"*", len(words))
    for word in words:
        nbytes, _, rest = rest[1:].partition(b"\r\n")
        assert rest[: int(nbytes)] == word
        assert rest[int(nbytes) :][:2] == b"\r\n"
        rest = rest[int(nbytes) + 2 :]
    assert rest == b""


@settings(deadline=None)
@given(names=st.lists(st.binary(max_size=40), max_size=6))
def test_many_commands_are_each_of_them(names: list[bytes]) -> None:
    each = [resp.pack_command(b"EXISTS", name) for name in names]
    assert resp.pack_commands(b"EXISTS", names) == b"".join(each)


@pytest.mark.parametrize("ttl_ms", [0, 5000])
def test_setting_a_value_is_the_command_around_it(ttl_ms: int) -> None:
    head, tail = resp.pack_set(b"name", 3, ttl_ms)
    expiry = [b"PX", b"5000"] if ttl_ms else []
    assert head + b"abc" + tail == resp.pack_command(b"SET", b"name", b"abc", b"NX", *expiry)
