"""Names and contents of the objects in the bucket.

A segment is one object: frames, then a footer

    index    the blocks: key, first sector, sectors (disk.index.Entries, packed)
    trailer  56 bytes: magic, version, number of blocks, bytes of frames, bytes and checksum of the
             index, the segment's identity (16 random bytes), checksum of the trailer

A segment's name is a digest of its keys, so nodes that put the same blocks use the same name:

    <prefix><shard>/<digest>.seg          shard: 2 hex digits, digest: 32

A tombstone lists the sectors of deleted blocks of one segment. It contains the segment's identity,
so it does not apply to a later segment of the same name:

    <prefix><shard>/<digest>.dead-<16 hex digits: checksum of the content>
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgpack
import numpy as np

from kvstore.blocks.frame import checksum
from kvstore.blocks.key import Key
from kvstore.tiers.base import IO_ALIGNMENT
from kvstore.tiers.disk.index import Entries, max_entry_bytes
from kvstore.tiers.s3.faults import Invalid, Unsupported

VERSION: Final = 1
IDENTITY_BYTES: Final = 16
MAX_SHARDS: Final = 256
FOOTER_GUESS_BYTES: Final = 32 << 10
"""Bytes read from the end of an unknown segment: enough for the footer of some hundred blocks."""
MAX_TOMBSTONE_BYTES: Final = 4 << 20
MAX_FOOTER_BYTES: Final = 64 << 20

_TRAILER = struct.Struct("<8sIIQQQ16s")
_TOMBSTONE = struct.Struct("<8sIIQ16s")
_START = struct.Struct("<8sI")
"""Magic and version of a trailer or tombstone, at the same place in every version."""
TOMBSTONE_START_BYTES: Final = _START.size
_SUM = struct.Struct("<Q")
_TRAILER_MAGIC: Final = b"KVS3SEGM"
_TOMBSTONE_MAGIC: Final = b"KVS3DEAD"
TRAILER_BYTES: Final = _TRAILER.size + _SUM.size

SEGMENT_SUFFIX: Final = ".seg"
_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}\.(seg|dead-[0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Footer:
    """The footer of a segment. frames_bytes: size of the frames, and offset of the index."""

    entries: Entries
    identity: bytes
    frames_bytes: int
    nbytes: int


def is_tier_object(name: str, prefix: str) -> bool:
    """Whether an object with this name belongs to the tier."""
    return name.startswith(prefix) and _NAME.fullmatch(name, len(prefix)) is not None


def segment_name(prefix: str, shards: int, keys: Iterable[Key], attempt: int) -> str:
    """The name of a segment with these keys, in any order.

    attempt: 0, or another number for another name if the first one cannot be used.
    """
    digest = hashlib.sha256(b"%d %d" % (VERSION, attempt))
    for key in sorted(keys):
        for part in (key.tenant.encode(), key.namespace.encode(), key.hash):
            digest.update(len(part).to_bytes(4, "little") + part)
    text = digest.hexdigest()
    return f"{prefix}{int(text[-8:], 16) % shards:02x}/{text[:32]}{SEGMENT_SUFFIX}"


def tombstone_stem(segment: str) -> str:
    """The common prefix of the names of a segment's tombstones."""
    return segment.removesuffix(SEGMENT_SUFFIX) + ".dead-"


def segment_of(tombstone: str) -> str:
    """The name of a tombstone's segment."""
    return tombstone.rpartition(".dead-")[0] + SEGMENT_SUFFIX


def max_footer_bytes(keys: Iterable[Key]) -> int:
    """Maximum size of the footer of a segment with these keys."""
    return 64 + TRAILER_BYTES + sum(map(max_entry_bytes, keys))


def pack_footer(entries: Entries, identity: bytes, frames_bytes: int) -> bytes:
    """The bytes of a footer. frames_bytes: total size of the segment's frames."""
    assert len(identity) == IDENTITY_BYTES
    body = entries.pack()
    head = (_TRAILER_MAGIC, VERSION, len(entries), frames_bytes, len(body), checksum(body))
    trailer = _TRAILER.pack(*head, identity)
    return b"".join((body, trailer, _SUM.pack(checksum(trailer))))


def footer_bytes(tail: bytes, nbytes: int) -> int:
    """Size of the footer. tail: the last bytes of a segment of `nbytes`.

    Raises Invalid, Unsupported.
    """
    _, _, _, frames_bytes, body_bytes, _, _ = _parse_trailer(tail)
    if frames_bytes + body_bytes + TRAILER_BYTES != nbytes or frames_bytes % IO_ALIGNMENT:
        raise Invalid("the trailer does not match the object's length")
    return body_bytes + TRAILER_BYTES


def parse_footer(footer: bytes, nbytes: int) -> Footer:
    """Parse the footer of a segment of `nbytes`. Raises Invalid."""
    _, _, count, frames_bytes, body_bytes, body_sum, identity = _parse_trailer(footer)
    body = footer[:-TRAILER_BYTES]
    if len(body) != body_bytes or checksum(body) != body_sum:
        raise Invalid("the index does not match its checksum")
    try:
        entries = Entries.unpack(body)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Invalid(f"corrupt index: {error}") from None
    first, sectors = (
        np.asarray(entries.first_sectors, np.int64),
        np.asarray(entries.sector_counts, np.int64),
    )
    if len(entries) != count or not count or len(set(entries.first_sectors)) != count:
        raise Invalid("the index does not match the number of blocks in the trailer")
    if (sectors < 2).any() or (first + sectors > frames_bytes // IO_ALIGNMENT).any():
        raise Invalid("the index points past the frames")
    return Footer(entries, identity, frames_bytes, nbytes)


def identity_of(tail: bytes) -> bytes:
    """The identity of a segment. tail: its last bytes. Raises Invalid."""
    identity: bytes = _parse_trailer(tail)[-1]
    return identity


def pack_tombstone(identity: bytes, sectors: Iterable[int]) -> bytes:
    """The bytes of a tombstone for these sectors of a segment."""
    body = np.array(sorted(sectors), "<u4").tobytes()
    head = _TOMBSTONE.pack(_TOMBSTONE_MAGIC, VERSION, len(body) // 4, checksum(body), identity)
    return b"".join((head, _SUM.pack(checksum(head)), body))


def tombstone_name(segment: str, tombstone: bytes) -> str:
    """The name of a segment's tombstone."""
    return f"{tombstone_stem(segment)}{checksum(tombstone):016x}"


def parse_tombstone(tombstone: bytes) -> tuple[bytes, set[int]]:
    """The identity of the segment, and the sectors of its deleted blocks.

    Raises Invalid, Unsupported.
    """
    check_tombstone_version(tombstone)
    head, body = tombstone[: _TOMBSTONE.size], tombstone[_TOMBSTONE.size + _SUM.size :]
    if len(tombstone) < _TOMBSTONE.size + _SUM.size:
        raise Invalid("truncated tombstone")
    magic, version, count, body_sum, identity = _TOMBSTONE.unpack(head)
    (total,) = _SUM.unpack_from(tombstone, _TOMBSTONE.size)
    if magic != _TOMBSTONE_MAGIC or version != VERSION or total != checksum(head):
        raise Invalid("not a tombstone of this version")
    if len(body) != 4 * count or checksum(body) != body_sum:
        raise Invalid("the tombstone does not match its checksum")
    return identity, set(np.frombuffer(body, "<u4").tolist())


def check_tombstone_version(start: bytes) -> None:
    """Raise Unsupported if these are the first bytes of a tombstone of a later version."""
    _check_version(start, _TOMBSTONE_MAGIC)


def _check_version(start: bytes, magic: bytes) -> None:
    if len(start) >= _START.size:
        found, version = _START.unpack_from(start)
        if found == magic and version > VERSION:
            raise Unsupported(f"version {version}; this kvstore reads {VERSION}")


def _parse_trailer(tail: bytes) -> tuple[bytes, int, int, int, int, int, bytes]:
    if len(tail) < TRAILER_BYTES:
        raise Invalid("the object is shorter than a trailer")
    packed = tail[-TRAILER_BYTES : -_SUM.size]
    _check_version(packed, _TRAILER_MAGIC)
    fields = _TRAILER.unpack(packed)
    (total,) = _SUM.unpack(tail[-_SUM.size :])
    if fields[0] != _TRAILER_MAGIC or total != checksum(packed):
        raise Invalid("the trailer is missing or corrupt")
    if fields[1] != VERSION:
        raise Invalid(f"version {fields[1]}; this kvstore supports {VERSION}")
    return fields
