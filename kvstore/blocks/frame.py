"""Frames: the format of a block at rest and on the wire, for disk, Redis, S3 and HTTP.

A frame is a header of one sector (4,096 bytes) and then the payload (the block as its codec encoded
it), zero padded to whole sectors. The header, all integers little endian:

    offset  bytes  field
         0      6  magic "KVFRAM"
         6      2  version of this layout (FRAME_VERSION)
         8      8  xxh3_64 of bytes 16..4095 of the header
        16      2  length of the map that follows
        18      n  a msgpack map with the fields of `FIELDS`, and perhaps optional ones
      18+n         zeros up to 4,096

Parsing trusts no input: for any 4,096 bytes the result is a `FrameHeader` with every field within
its limits, or `FrameInvalid`. The checksum detects accidental corruption, not an attacker who can
write to the tier. Against an attacker the limits help, and an encrypting tier wrapper.

A header is corrupt if its magic, or the checksum of a header of this version, does not match. A
header of a later version, and one whose checksum matches around a map that this release does not
understand, is `FrameUnsupported`: another release wrote it and may read it. A reader ignores
unknown fields whose name begins with `OPTIONAL_PREFIX`. docs/formats.md has the rules for later
versions.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import xxhash

from kvstore.blocks.key import Key
from kvstore.errors import (
    ChecksumMismatch,
    FrameInvalid,
    FrameUnsupported,
    NamespaceMismatch,
)

HEADER_BYTES: Final = 4096
"""Size of the header: one sector; also the alignment of payloads and buffers."""

FRAME_VERSION: Final = 1
MAGIC: Final = b"KVFRAM"

MAX_BLOCK_BYTES: Final = 1 << 30
"""Maximum size of a raw block and of a stored payload in a header."""
MAX_TENANT_BYTES: Final = 255
MAX_NAMESPACE_BYTES: Final = 64
MAX_HASH_BYTES: Final = 64
MAX_CODEC_BYTES: Final = 32
MAX_NAMES: Final = 4
"""Maximum number of unknown fields that an error names."""
MAX_NAME_CHARS: Final = 40
"""Maximum characters of each of them."""

FIELDS: Final = (
    "tenant",
    "namespace",
    "hash",
    "codec",
    "raw_bytes",
    "stored_bytes",
    "raw_sum",
    "stored_sum",
)
OPTIONAL_PREFIX: Final = "optional_"
"""Start of the names of fields that a reader ignores if it does not know them."""

_PREFIX = struct.Struct("<6sHQ")
_LENGTH = struct.Struct("<H")
_SUM = struct.Struct("<Q")
_SUM_AT = _PREFIX.size - _SUM.size
_SUMMED_FROM = _PREFIX.size
_MAP_AT = _SUMMED_FROM + _LENGTH.size
_MAX_MAP_BYTES = HEADER_BYTES - _MAP_AT
_MAX_SUM = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A parsed header; every field is within its limits.

    raw_bytes: size of the block in a slot.
    stored_bytes: size of the payload before padding.
    raw_sum, stored_sum: xxh3_64 of those bytes.
    """

    key: Key
    codec: str
    raw_bytes: int
    stored_bytes: int
    raw_sum: int
    stored_sum: int

    @property
    def payload_bytes(self) -> int:
        """Size of the payload with its padding: whole sectors."""
        return padded_bytes(self.stored_bytes)


def padded_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to whole sectors of 4,096 bytes."""
    return (nbytes + HEADER_BYTES - 1) & -HEADER_BYTES


def checksum(view: memoryview | bytes | bytearray) -> int:
    """xxh3_64 (seed 0) of contiguous bytes, as an unsigned 64-bit number."""
    return int(xxhash.xxh3_64_intdigest(view))


def aligned_buffer(nbytes: int) -> memoryview:
    """A private, writable, zeroed buffer of `padded(nbytes)` bytes, 4 KiB aligned, pre-faulted.

    It exists as long as a view of it. Make it once and reuse it: a new buffer per block costs more
    than the copy into it.
    """
    assert nbytes > 0, f"a buffer of {nbytes} bytes"
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(-1, padded_bytes(nbytes), flags=flags))


def pack_header(
    header: memoryview,
    *,
    key: Key,
    codec: str,
    raw_bytes: int,
    stored_bytes: int,
    raw_sum: int,
    stored_sum: int,
) -> None:
    """Write a header over the first 4,096 bytes of `header`.

    Fields out of their limits are the caller's error and raise AssertionError.
    """
    fault = _fault(key, codec, raw_bytes, stored_bytes, raw_sum, stored_sum)
    assert not fault, fault
    values = (*key, codec, raw_bytes, stored_bytes, raw_sum, stored_sum)
    packed = msgpack.packb(dict(zip(FIELDS, values, strict=True)), use_bin_type=True)
    sector = bytearray(HEADER_BYTES)
    _LENGTH.pack_into(sector, _SUMMED_FROM, len(packed))
    sector[_MAP_AT : _MAP_AT + len(packed)] = packed
    total = checksum(memoryview(sector)[_SUMMED_FROM:])
    _PREFIX.pack_into(sector, 0, MAGIC, FRAME_VERSION, total)
    header[:HEADER_BYTES] = sector


def decode_header(header: memoryview) -> FrameHeader:
    """Parse a header of any key.

    Raises FrameUnsupported for a header of another release; FrameInvalid for bytes that no release
    can have written, ChecksumMismatch if only the checksum of the header does not match.
    """
    if len(header) < HEADER_BYTES:
        raise FrameInvalid(f"frame header has {len(header)} bytes (expected {HEADER_BYTES})")
    magic, version, _ = _PREFIX.unpack_from(header)
    if magic != MAGIC:
        raise FrameInvalid("not a frame: the magic bytes are missing")
    check_version(header)
    if version != FRAME_VERSION:
        raise FrameInvalid(f"frame version {version} (this kvstore reads {FRAME_VERSION})")
    if not matches_checksum(header):
        raise ChecksumMismatch("corrupt frame header: its checksum does not match")
    # The header is not corrupt: what is not understood from here on was written by another release.
    (length,) = _LENGTH.unpack_from(header, _SUMMED_FROM)
    if length > _MAX_MAP_BYTES:
        raise FrameUnsupported(f"frame header map longer than {_MAX_MAP_BYTES} bytes")
    tail = header[_MAP_AT + length : HEADER_BYTES].tobytes()
    if tail.count(0) != len(tail):
        raise FrameUnsupported("frame header has bytes after its map")
    return _header_of(_unpack(header[_MAP_AT : _MAP_AT + length]))


def check_version(start: memoryview) -> None:
    """Raise FrameUnsupported if these are the first bytes of a frame of a later version.

    Magic and version are at the same place in every version. start: at least 16 bytes.
    """
    magic, version, _ = _PREFIX.unpack_from(start)
    if magic == MAGIC and version > FRAME_VERSION:
        raise FrameUnsupported(f"frame version {version} (this kvstore reads {FRAME_VERSION})")


def matches_checksum(header: memoryview) -> bool:
    """Whether the checksum of the header matches. It is at the same place in every version."""
    found: int = _SUM.unpack_from(header, _SUM_AT)[0]
    return checksum(header[_SUMMED_FROM:HEADER_BYTES]) == found


def mask_checksum(header: memoryview, nonce: int) -> None:
    """XOR `nonce` into the checksum of a header, in place; a second call undoes it.

    For a tier that scans its medium. With a secret nonce per sector, the tier does not mistake a
    frame inside a client's payload for a frame that the tier wrote there.

    nonce: an unsigned 64-bit number.
    """
    (total,) = _SUM.unpack_from(header, _SUM_AT)
    _SUM.pack_into(header, _SUM_AT, total ^ nonce)


def peek_key(header: memoryview) -> Key:
    """The key in a header. Raises FrameInvalid like `decode_header`."""
    return decode_header(header).key


def parse_header(header: memoryview, expect: Key) -> FrameHeader:
    """Parse a header that must have the key `expect`.

    Raises FrameInvalid like `decode_header`; NamespaceMismatch for another key.
    """
    parsed = decode_header(header)
    if parsed.key != expect:
        wrong = [
            name
            for name, actual, expected in zip(Key._fields, parsed.key, expect, strict=True)
            if actual != expected
        ]
        raise NamespaceMismatch(f"frame has the wrong {' and '.join(wrong)}")
    return parsed


def verify_stored(header: FrameHeader, payload: memoryview) -> None:
    """Verify the stored bytes at the front of `payload`.

    Raises FrameInvalid if there are fewer than in the header, ChecksumMismatch if they are corrupt.
    """
    if len(payload) < header.stored_bytes:
        raise FrameInvalid(
            f"payload has {len(payload)} bytes (the header says {header.stored_bytes})"
        )
    if checksum(payload[: header.stored_bytes]) != header.stored_sum:
        raise ChecksumMismatch("corrupt payload: the stored bytes do not match their checksum")


def verify_raw(header: FrameHeader, block: memoryview) -> None:
    """Verify the decoded block at the front of `block`; raises like `verify_stored`."""
    if len(block) < header.raw_bytes:
        raise FrameInvalid(f"block has {len(block)} bytes (the header says {header.raw_bytes})")
    if checksum(block[: header.raw_bytes]) != header.raw_sum:
        raise ChecksumMismatch("corrupt block: the decoded bytes do not match their checksum")


def _unpack(packed: memoryview) -> Any:
    """Decode the map; every error of msgpack becomes FrameUnsupported."""
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=True, use_list=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FrameUnsupported(f"frame header has an unreadable map: {error}") from None


def _header_of(fields: Any) -> FrameHeader:
    """Build the header from an untrusted map."""
    if not isinstance(fields, dict):
        raise FrameUnsupported("frame header without a map")
    if tuple(fields) != FIELDS:
        _check_names(fields)
    tenant, namespace, hash_, codec, raw_bytes, stored_bytes, raw_sum, stored_sum = (
        fields[name] for name in FIELDS
    )
    key = Key(tenant, namespace, hash_)
    fault = _fault(key, codec, raw_bytes, stored_bytes, raw_sum, stored_sum)
    if fault:
        raise FrameUnsupported(f"frame header with an unknown value: {fault}")
    return FrameHeader(key, codec, raw_bytes, stored_bytes, raw_sum, stored_sum)


def _check_names(fields: dict[Any, Any]) -> None:
    """Raises FrameUnsupported: a field is missing, or unknown and not optional."""
    missing = [name for name in FIELDS if name not in fields]
    if missing:
        raise FrameUnsupported(f"frame header without the fields {', '.join(missing)}")
    unknown = [
        name
        for name in fields
        if name not in FIELDS and not (isinstance(name, str) and name.startswith(OPTIONAL_PREFIX))
    ]
    if unknown:
        names = ", ".join(sorted(repr(name)[:MAX_NAME_CHARS] for name in unknown[:MAX_NAMES]))
        raise FrameUnsupported(f"frame header with the unknown fields {names}")


def _fault(
    key: Any, codec: Any, raw_bytes: Any, stored_bytes: Any, raw_sum: Any, stored_sum: Any
) -> str:
    """The first fault in the fields of a header, which may have any type; empty if valid."""
    texts = (
        ("tenant", key.tenant, MAX_TENANT_BYTES),
        ("namespace", key.namespace, MAX_NAMESPACE_BYTES),
        ("codec", codec, MAX_CODEC_BYTES),
    )
    for name, text, limit in texts:
        if type(text) is not str or not 1 <= len(text.encode("utf-8", "replace")) <= limit:
            return f"{name} must be text of 1 to {limit} bytes"
    if type(key.hash) is not bytes or not 1 <= len(key.hash) <= MAX_HASH_BYTES:
        return f"hash must be 1 to {MAX_HASH_BYTES} bytes"
    for name, size in (("raw_bytes", raw_bytes), ("stored_bytes", stored_bytes)):
        if type(size) is not int or not 1 <= size <= MAX_BLOCK_BYTES:
            return f"{name} must be 1 to {MAX_BLOCK_BYTES}"
    for name, total in (("raw_sum", raw_sum), ("stored_sum", stored_sum)):
        if type(total) is not int or not 0 <= total <= _MAX_SUM:
            return f"{name} must be an unsigned 64-bit number"
    return ""
