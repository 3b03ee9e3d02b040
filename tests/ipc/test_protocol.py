"""Messages leave a stream unchanged, however it is split, and invalid bytes raise an error."""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError
from kvstore.ipc.protocol import (
    MAX_HASHES,
    PROTOCOL_VERSION,
    MalformedMessage,
    MessageType,
    Receiver,
    check_hashes,
    check_number,
    pack,
    pack_hello,
    parse_namespace,
)

NAMESPACE = Namespace(model="m", layers=2, kv_heads=1, head_dim=64, head_dim_v=0, attention="mla")

quick = settings(deadline=None, max_examples=50)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
messages = st.lists(
    st.builds(
        lambda message_type, rest: [int(message_type), *rest],
        st.sampled_from(MessageType),
        st.lists(values),
    ),
    max_size=6,
)


def receiver_of(data: bytes, cuts: list[int], max_bytes: int = 1 << 20) -> Receiver:
    """A receiver that gets `data` in parts, and then the end of the stream."""
    ours, theirs = socket.socketpair()
    theirs.shutdown(socket.SHUT_WR)
    theirs.close()
    receiver = Receiver(ours, max_bytes)
    at = 0
    for cut in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        receiver.feed(data[at:cut])
        at = cut
    return receiver


def read_all(receiver: Receiver) -> list[list[Any]]:
    read = []
    while (message := receiver.read()) is not None:
        read.append(message)
    return read


@quick
@given(messages, st.lists(st.integers(0, 400), max_size=8))
def test_messages_survive_any_split(sent: list[list[Any]], cuts: list[int]) -> None:
    data = b"".join(pack(*message) for message in sent)
    assert read_all(receiver_of(data, cuts)) == sent


@quick
@given(messages, st.lists(st.integers(0, 400), max_size=8))
def test_each_message_is_read_once_and_whole(sent: list[list[Any]], cuts: list[int]) -> None:
    """A reader that reads between the parts gets each message once and no partial one."""
    data = b"".join(pack(*message) for message in sent)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    receiver = Receiver(ours)
    read: list[list[Any]] = []
    at = 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        theirs.sendall(data[at:cut])
        at = cut
        with pytest.raises(TimeoutError):
            read.extend(iter(receiver.read, None))
    theirs.close()
    assert receiver.read() is None
    ours.close()
    assert read == sent


@quick
@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_malformed(data: bytes) -> None:
    receiver = receiver_of(data, [])
    with contextlib.suppress(MalformedMessage):
        assert all(type(message[0]) is int for message in read_all(receiver))


def test_the_announced_length_is_limited() -> None:
    with pytest.raises(MalformedMessage, match="exceeds the maximum of 64"):
        receiver_of(struct.pack("<I", 65), [], 64).read()
    body = msgpack.packb([1, "x" * 60])
    assert len(body) == 64
    assert receiver_of(struct.pack("<I", 64) + body, [], 64).read() == [1, "x" * 60]


def hello_fields(**change: Any) -> dict[str, Any]:
    about = {
        "version": PROTOCOL_VERSION,
        "namespace": asdict(NAMESPACE),
        "digest": NAMESPACE.digest,
    }
    return {**about, **change}


def test_hello_carries_the_namespace() -> None:
    message = receiver_of(pack_hello(NAMESPACE, "token", "name", 7), []).read()
    assert message is not None
    message_type, about = message
    assert (message_type, about["token"], about["client"], about["pid"]) == (
        MessageType.HELLO,
        "token",
        "name",
        7,
    )
    assert parse_namespace(about) == NAMESPACE


@quick
@given(values)
def test_any_value_for_a_namespace_is_rejected_or_equal(value: Any) -> None:
    for name in asdict(NAMESPACE):
        spec = {**asdict(NAMESPACE), name: value}
        try:
            read = parse_namespace(hello_fields(namespace=spec))
        except ConfigError:
            continue
        assert read == NAMESPACE
    with pytest.raises(ConfigError):
        parse_namespace(hello_fields(namespace=value))


def test_hashes_and_numbers_are_checked() -> None:
    assert check_hashes([b"x", bytes(64)]) == [b"x", bytes(64)]
    for wrong in (None, "x", [b""], [bytes(65)], ["x"], (b"x",), [b"x"] * (MAX_HASHES + 1)):
        with pytest.raises(MalformedMessage):
            check_hashes(wrong)
    assert check_number(0) == 0
    for wrong_number in (None, True, -1, 1.0, "1", 1 << 63):
        with pytest.raises(MalformedMessage):
            check_number(wrong_number)
