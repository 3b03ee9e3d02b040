"""Frames: a round trip, a frozen vector, and only FrameInvalid for invalid bytes."""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.blocks.frame import (
    FIELDS,
    HEADER_BYTES,
    MAX_BLOCK_BYTES,
    aligned_buffer,
    checksum,
    decode_header,
    pack_header,
    padded_bytes,
    parse_header,
    peek_key,
    verify_raw,
    verify_stored,
)
from kvstore.blocks.key import Key
from kvstore.errors import ChecksumMismatch, FrameInvalid, NamespaceMismatch

DATA = Path(__file__).parents[1] / "data"
KEY = Key("default", "0123456789abcdef" * 2, bytes(range(32)))
FACTS: dict[str, Any] = {
    "codec": "zstd-planes/2",
    "raw_bytes": 2 << 20,
    "stored_bytes": 1_430_001,
    "raw_sum": 0xFEDCBA9876543210,
    "stored_sum": 7,
}


def page(key: Key = KEY, **changed: Any) -> memoryview:
    header = aligned_buffer(HEADER_BYTES)
    pack_header(header, key=key, **{**FACTS, **changed})
    return header


def forged(packed: bytes, length: int | None = None) -> memoryview:
    """A header with a valid checksum around any map."""
    body = bytearray(HEADER_BYTES - 16)
    struct.pack_into("<H", body, 0, len(packed) if length is None else length)
    body[2 : 2 + len(packed)] = packed
    total = xxhash.xxh3_64_intdigest(bytes(body))
    return memoryview(struct.pack("<6sHQ", b"KVFRAM", 1, total) + bytes(body))


keys = st.builds(
    Key,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=63),
    st.text("0123456789abcdef", min_size=1, max_size=64),
    st.binary(min_size=1, max_size=64),
)
sizes = st.integers(1, MAX_BLOCK_BYTES)
sums = st.integers(0, (1 << 64) - 1)


@given(keys, sizes, sizes, sums, sums)
@settings(deadline=None)
def test_round_trip(key: Key, raw: int, stored: int, raw_sum: int, stored_sum: int) -> None:
    header = page(key, raw_bytes=raw, stored_bytes=stored, raw_sum=raw_sum, stored_sum=stored_sum)
    parsed = parse_header(header, key)
    assert parsed.key == key == peek_key(header)
    assert (parsed.codec, parsed.raw_bytes, parsed.stored_bytes) == (FACTS["codec"], raw, stored)
    assert (parsed.raw_sum, parsed.stored_sum) == (raw_sum, stored_sum)
    assert parsed.payload_bytes % HEADER_BYTES == 0
    assert 0 <= parsed.payload_bytes - stored < HEADER_BYTES


def test_a_header_is_byte_for_byte_the_frozen_one() -> None:
    vector = json.loads((DATA / "frame_header.json").read_text())
    fields = dict(vector["fields"])
    key = Key(fields.pop("tenant"), fields.pop("namespace"), bytes.fromhex(fields.pop("hash")))
    used = bytes.fromhex(vector["header_hex_without_padding"])
    frozen = used + bytes(HEADER_BYTES - len(used))
    header = aligned_buffer(HEADER_BYTES)
    pack_header(header, key=key, **fields)
    assert bytes(header) == frozen
    assert decode_header(memoryview(frozen)).key == key


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
@example(0, 1)
@example(6, 1)
@example(HEADER_BYTES - 1, 128)
@settings(max_examples=200, deadline=None)
def test_any_changed_byte_of_a_header_is_frame_invalid(at: int, flip: int) -> None:
    header = page()
    header[at] ^= flip
    with pytest.raises(FrameInvalid):
        parse_header(header, KEY)


def test_every_single_flipped_bit_of_the_used_part_is_frame_invalid() -> None:
    header = page()
    used = len(bytes(header).rstrip(b"\0")) + 2
    for bit in range(used * 8):
        header[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameInvalid):
            decode_header(header)
        header[bit // 8] ^= 1 << bit % 8
    assert decode_header(header).key == KEY


@given(st.binary(max_size=HEADER_BYTES))
@settings(deadline=None)
def test_random_bytes_are_frame_invalid(noise: bytes) -> None:
    with pytest.raises(FrameInvalid):
        decode_header(memoryview(noise.ljust(HEADER_BYTES, b"\0")))


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 65_535)))
@settings(deadline=None)
def test_random_maps_with_a_valid_checksum_are_frame_invalid(
    noise: bytes, length: int | None
) -> None:
    with pytest.raises(FrameInvalid):
        decode_header(forged(noise, length))


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    st.binary(max_size=80),
    st.lists(st.integers(), max_size=2),
)


@given(st.sampled_from(FIELDS), values)
@settings(deadline=None)
def test_any_value_in_any_field_is_in_bounds_or_frame_invalid(field: str, value: Any) -> None:
    fields = {**dict(zip(FIELDS, (*KEY, *FACTS.values()), strict=True)), field: value}
    try:
        packed = msgpack.packb(fields, use_bin_type=True)
    except OverflowError:
        return
    try:
        parsed = decode_header(forged(packed))
    except FrameInvalid:
        return
    assert 1 <= parsed.raw_bytes <= MAX_BLOCK_BYTES
    assert 1 <= parsed.stored_bytes <= MAX_BLOCK_BYTES
    assert type(parsed.raw_bytes) is type(parsed.stored_bytes) is int
    assert type(parsed.key.hash) is bytes
    assert 1 <= len(parsed.key.tenant.encode()) <= 255
    assert (type(parsed.codec), type(parsed.key.namespace)) == (str, str)


@pytest.mark.parametrize("drop", FIELDS)
def test_a_missing_field_is_frame_invalid(drop: str) -> None:
    fields = dict(zip(FIELDS, (*KEY, *FACTS.values()), strict=True))
    del fields[drop]
    with pytest.raises(FrameInvalid):
        decode_header(forged(msgpack.packb(fields)))


def test_an_extra_field_bytes_after_the_map_and_a_short_header_are_frame_invalid() -> None:
    fields = dict(zip(FIELDS, (*KEY, *FACTS.values()), strict=True))
    packed = msgpack.packb(fields)
    assert decode_header(forged(packed)).key == KEY
    with pytest.raises(FrameInvalid, match="fields"):
        decode_header(forged(msgpack.packb({**fields, "more": 1})))
    with pytest.raises(FrameInvalid, match="after its map"):
        decode_header(forged(packed + b"\0\1", len(packed)))
    with pytest.raises(FrameInvalid, match="4096"):
        decode_header(forged(packed)[:4095])


def test_another_version_is_named() -> None:
    header = page()
    header[6] = 9
    with pytest.raises(FrameInvalid, match="version 9"):
        decode_header(header)


@pytest.mark.parametrize(
    "other",
    [KEY._replace(tenant="x"), KEY._replace(namespace="f" * 32), KEY._replace(hash=b"y" * 32)],
)
def test_a_frame_of_another_key_is_a_namespace_mismatch(other: Key) -> None:
    with pytest.raises(NamespaceMismatch):
        parse_header(page(), other)


@given(st.binary(min_size=1, max_size=300), st.data())
@settings(deadline=None)
def test_payload_checks(block: bytes, data: st.DataObject) -> None:
    total = checksum(block)
    header = decode_header(
        page(raw_bytes=len(block), stored_bytes=len(block), raw_sum=total, stored_sum=total)
    )
    for verify in (verify_stored, verify_raw):
        verify(header, memoryview(block + b"padding"))
        corrupt = bytearray(block)
        corrupt[data.draw(st.integers(0, len(block) - 1))] ^= data.draw(st.integers(1, 255))
        with pytest.raises(ChecksumMismatch):
            verify(header, memoryview(corrupt))
        with pytest.raises(FrameInvalid):
            verify(header, memoryview(block)[:-1])


@pytest.mark.parametrize(
    "changed",
    [
        {"raw_bytes": 0},
        {"stored_bytes": -1},
        {"raw_sum": 1 << 64},
        {"codec": ""},
        {"raw_bytes": 1.5},
    ],
)
def test_packing_invalid_fields_raises(changed: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        page(**changed)


def test_sizes_and_buffers() -> None:
    assert [padded_bytes(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    buffer = aligned_buffer(5000)
    assert len(buffer) == 8192
    assert not buffer.readonly
    assert bytes(buffer) == bytes(8192)
    assert isinstance(buffer.obj, mmap.mmap)
