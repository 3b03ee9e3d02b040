"""Any header is valid, unsupported or corrupt by the rules of docs/formats.md, and of all frames
only corrupt ones are ever deleted."""

from __future__ import annotations

import struct
from typing import Any, Final

import msgpack
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.blocks import frame
from kvstore.blocks.frame import FIELDS, HEADER_BYTES, decode_header, pack_header
from kvstore.blocks.key import Key
from kvstore.cache.commands import LoadOutcome
from kvstore.errors import ChecksumMismatch, FrameInvalid, FrameUnsupported
from kvstore.store import block_io
from kvstore.store.block_io import StagingBuffers
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.unsupported import UnsupportedFrames

KEY: Final = Key("default", "0123456789abcdef" * 2, bytes(range(32)))
BLOCK: Final = bytes(range(256)) * 16
SUM: Final = xxhash.xxh3_64_intdigest(BLOCK)
VALUES: Final[dict[str, Any]] = {
    "tenant": KEY.tenant,
    "namespace": KEY.namespace,
    "hash": KEY.hash,
    "codec": "identity",
    "raw_bytes": len(BLOCK),
    "stored_bytes": len(BLOCK),
    "raw_sum": SUM,
    "stored_sum": SUM,
}
CODECS: Final = ("identity", "zstd", "zstd-planes/1", "zstd-planes/2", "zstd-planes/4")
LIMITS: Final = {
    "tenant": lambda v: isinstance(v, str) and 1 <= len(v.encode()) <= 255,
    "namespace": lambda v: isinstance(v, str) and 1 <= len(v.encode()) <= 64,
    "hash": lambda v: isinstance(v, bytes) and 1 <= len(v) <= 64,
    "codec": lambda v: isinstance(v, str) and 1 <= len(v.encode()) <= 32,
    "raw_bytes": lambda v: type(v) is int and 1 <= v <= 1 << 30,
    "stored_bytes": lambda v: type(v) is int and 1 <= v <= 1 << 30,
    "raw_sum": lambda v: type(v) is int and 0 <= v < 1 << 64,
    "stored_sum": lambda v: type(v) is int and 0 <= v < 1 << 64,
}


def header_of(packed: bytes, *, version: int = 1, length: int | None = None) -> bytes:
    """A header with a valid checksum around any bytes."""
    body = struct.pack("<H", len(packed) if length is None else length) + packed
    body = body.ljust(HEADER_BYTES - 16, b"\0")[: HEADER_BYTES - 16]
    return struct.pack("<6sHQ", b"KVFRAM", version, xxhash.xxh3_64_intdigest(body)) + body


def class_of(header: bytes) -> str:
    """The class of a header, by the rules in docs/formats.md."""
    version = int.from_bytes(header[6:8], "little")
    if header[:6] != b"KVFRAM" or version == 0:
        return "corrupt"
    if version > 1:
        return "unsupported"
    if xxhash.xxh3_64_intdigest(header[16:]) != int.from_bytes(header[8:16], "little"):
        return "corrupt"
    length = int.from_bytes(header[16:18], "little")
    try:
        fields = msgpack.unpackb(header[18 : 18 + length], strict_map_key=True)
        assert length <= HEADER_BYTES - 18
        assert not any(header[18 + length :])
        assert isinstance(fields, dict)
        assert all(name in FIELDS or str(name).startswith("optional_") for name in fields)
        assert all(LIMITS[name](fields[name]) for name in FIELDS)
    except (ValueError, KeyError, AssertionError, msgpack.UnpackException):
        return "unsupported"
    return "valid"


def decoded_class(header: bytes) -> str:
    try:
        decode_header(memoryview(header))
    except FrameUnsupported:
        return "unsupported"
    except FrameInvalid:
        return "corrupt"
    return "valid"


def packed(**changed: Any) -> bytes:
    return bytes(msgpack.packb({**VALUES, **changed}, use_bin_type=True))


names = st.sampled_from(["device", "optional_device", "Optional", "optional", "x", "hash2"])
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    st.binary(max_size=80),
    st.lists(st.integers(0, 9), max_size=2),
)
maps = st.one_of(
    st.dictionaries(names, values, max_size=3).map(lambda more: packed(**more)),
    st.tuples(st.sampled_from(FIELDS), values).map(lambda item: packed(**{item[0]: item[1]})),
    st.sampled_from(FIELDS).map(
        lambda name: msgpack.packb({n: VALUES[n] for n in FIELDS if n != name})
    ),
    st.permutations(FIELDS).map(lambda order: msgpack.packb({n: VALUES[n] for n in order})),
    st.sampled_from([*CODECS, "zstd-planes/3", "zstd2", "later/9"]).map(
        lambda codec: packed(codec=codec)
    ),
    st.binary(max_size=200),
    st.just(packed()),
)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Headers of this release, of others, and corrupt ones of both."""
    version = draw(st.sampled_from([0, 1, 1, 1, 1, 1, 2, 3, 65_535]))
    length = draw(st.sampled_from([None, None, None, None, 0, 3, 65_535]))
    header = bytearray(header_of(draw(maps), version=version, length=length))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        bit = draw(st.one_of(st.integers(0, 20 * 8), st.integers(0, HEADER_BYTES * 8 - 1)))
        header[bit // 8] ^= 1 << bit % 8
    return bytes(header)


@given(st.one_of(headers(), st.binary(max_size=64).map(lambda b: b.ljust(HEADER_BYTES, b"\0"))))
@example(header_of(packed(), version=2))
@example(b"KVFRAM\2\0".ljust(HEADER_BYTES, b"\xff"))
@example(header_of(packed(device="gpu")))
@example(header_of(packed(optional_device="gpu")))
@settings(max_examples=400)
def test_every_header_is_in_the_class_that_the_rules_say(header: bytes) -> None:
    assert decoded_class(header) == class_of(header)


def _class_with_payload(header: bytes, *, intact: bool) -> str:
    """The class of a frame whose payload is BLOCK, or corrupt. The stored bytes have a checksum
    whatever the codec."""
    if class_of(header) != "valid":
        return class_of(header)
    fields = msgpack.unpackb(header[18 : 18 + int.from_bytes(header[16:18], "little")])
    wrong = {name for name in FIELDS if fields[name] != VALUES[name]}
    if fields["codec"] not in CODECS and intact and wrong <= {"codec", "raw_sum"}:
        return "unsupported"
    return "valid" if intact and not wrong else "corrupt"


@given(headers(), st.booleans(), st.booleans())
@example(header_of(packed(codec="later/9")), True, True)
@example(header_of(packed(codec="later/9")), False, False)
@settings(max_examples=300)
def test_only_corrupt_frames_are_ever_deleted(header: bytes, intact: bool, wrapped: bool) -> None:
    """Two loads, a frame read and a save of the block, with the store's wrapper and without it."""
    payload = BLOCK if intact else BLOCK[:-1] + b"?"
    inner = MemoryTier()
    inner.write(KEY, memoryview(header), memoryview(payload))
    tier: Tier = UnsupportedFrames(inner) if wrapped else inner
    expected = _class_with_payload(header, intact=intact)
    staging, slot = StagingBuffers(len(BLOCK)), frame.aligned_buffer(len(BLOCK))
    outcomes = [
        block_io.read_block(tier, KEY, len(BLOCK), slot, staging, direct=direct).outcome
        for direct in (True, False)
    ]
    slot[:] = BLOCK
    if expected == "valid":
        assert outcomes == [LoadOutcome.LOADED] * 2
    elif expected == "unsupported":
        assert outcomes[0] is LoadOutcome.UNSUPPORTED
        assert outcomes[1] is (LoadOutcome.MISSING if wrapped else LoadOutcome.UNSUPPORTED)
        assert inner.contains([KEY]) == [True]
        again = block_io.write_block(tier, KEY, len(BLOCK), slot, _codec(), staging)
        assert not wrapped or again.outcome is LoadOutcome.UNSUPPORTED
    else:
        assert outcomes == [LoadOutcome.CORRUPT, LoadOutcome.MISSING]
        assert inner.contains([KEY]) == [False]
    copy = memoryview(bytearray(HEADER_BYTES))
    if inner.read(KEY, copy, frame.aligned_buffer(len(BLOCK))):
        assert bytes(copy) == header, "overwritten"


def _codec() -> Any:
    from kvstore.codecs import codec_by_frame_id

    return codec_by_frame_id("identity")


def test_a_flipped_bit_of_the_version_or_of_a_later_version_is_not_called_corrupt() -> None:
    """This release cannot tell them from a later version's own headers."""
    for bit in range(48, 64):
        header = bytearray(header_of(packed()))
        header[bit // 8] ^= 1 << bit % 8
        assert decoded_class(bytes(header)) == ("corrupt" if bit == 48 else "unsupported")
    later = bytearray(header_of(packed(), version=2))
    later[100] ^= 1
    assert decoded_class(bytes(later)) == "unsupported"
    with pytest.raises(ChecksumMismatch):
        decode_header(memoryview(b"KVFRAM\1\0".ljust(HEADER_BYTES, b"\xff")))


def test_optional_fields_are_ignored_and_never_written() -> None:
    plain, more = (
        decode_header(memoryview(header_of(packed(**f)))) for f in ({}, {"optional_": 1})
    )
    assert plain == more
    header = memoryview(bytearray(HEADER_BYTES))
    facts = {name: VALUES[name] for name in FIELDS[3:]}
    pack_header(header, key=KEY, **facts)
    assert bytes(header) == header_of(packed())


@pytest.mark.parametrize(
    ("packed_map", "text"),
    [
        (packed(device="gpu", b=1), "unknown fields 'b', 'device'"),
        (packed(**{f"x{n}": n for n in range(99)}), "'x0', 'x1', 'x2', 'x3'"),
        (packed(**{"y" * 99: 0}), "'" + "y" * 39),
        (msgpack.packb({"tenant": "t"}), "without the fields namespace, hash"),
        (msgpack.packb([1]), "without a map"),
        (packed(hash=b"x" * 65), "hash must be 1 to 64 bytes"),
    ],
)
def test_the_reason_is_one_short_line(packed_map: bytes, text: str) -> None:
    with pytest.raises(FrameUnsupported) as caught:
        decode_header(memoryview(header_of(packed_map)))
    assert text in str(caught.value)
    assert len(str(caught.value)) < 200
