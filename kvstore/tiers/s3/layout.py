"""What an object is called and what lies in it.

A segment is one object: frames (a header page and whole pages of payload each), then a footer

    index    the blocks in it: key, first page, pages (disk.index.Entries, packed)
    trailer  56 bytes: magic, version, count of blocks, bytes of frames, bytes and checksum of the
             index, the segment's identity (16 random bytes), checksum of the trailer

named after the keys in it, so that whoever puts the same blocks puts the same name:

    <prefix><shard>/<digest>.seg          shard: 2 hex digits, digest: 32

A grave says which pages of one segment hold deleted blocks. It is bound to the segment's identity,
so that it means nothing to a later segment of the same name:

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
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.disk.index import Entries, entry_bytes
from kvstore.tiers.s3.faults import Invalid

VERSION: Final = 1
IDENTITY_BYTES: Final = 16
MAX_SHARDS: Final = 256
FOOTER_GUESS_BYTES: Final = 32 << 10
"""Read from the end of an unknown segment: the whole footer of some hundred blocks."""
MAX_GRAVE_BYTES: Final = 4 << 20
MAX_FOOTER_BYTES: Final = 64 << 20

_TRAILER = struct.Struct("<8sIIQQQ16s")
_GRAVE = struct.Struct("<8sIIQ16s")
_SUM = struct.Struct("<Q")
_TRAILER_MAGIC: Final = b"KVS3SEGM"
_GRAVE_MAGIC: Final = b"KVS3DEAD"
TRAILER_BYTES: Final = _TRAILER.size + _SUM.size

SEGMENT_SUFFIX: Final = ".seg"
_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}\.(seg|dead-[0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Footer:
    """What a footer says. frames_bytes: where the index begins."""

    entries: Entries
    identity: bytes
    frames_bytes: int
    nbytes: int


def is_ours(name: str, prefix: str) -> bool:
    """Whether this tier made an object of that name."""
    return name.startswith(prefix) and _NAME.fullmatch(name, len(prefix)) is not None


def segment_name(prefix: str, shards: int, keys: Iterable[Key], attempt: int) -> str:
    """The name of a segment of these keys, whatever their order.

    attempt: 0; another number gives another name, where the first may not be used.
    """
    digest = hashlib.sha256(b"%d %d" % (VERSION, attempt))
    for key in sorted(keys):
        for part in (key.tenant.encode(), key.namespace.encode(), key.hash):
            digest.update(len(part).to_bytes(4, "little") + part)
    text = digest.hexdigest()
    return f"{prefix}{int(text[-8:], 16) % shards:02x}/{text[:32]}{SEGMENT_SUFFIX}"


def grave_stem(segment: str) -> str:
    """What the names of a segment's graves begin with."""
    return segment.removesuffix(SEGMENT_SUFFIX) + ".dead-"


def segment_of(grave: str) -> str:
    """The name of the segment that a grave belongs to."""
    return grave.rpartition(".dead-")[0] + SEGMENT_SUFFIX


def footer_bound(keys: Iterable[Key]) -> int:
    """Most bytes of the footer of a segment of these keys."""
    return 64 + TRAILER_BYTES + sum(map(entry_bytes, keys))


def pack_footer(entries: Entries, identity: bytes, frames_bytes: int) -> bytes:
    """The footer of a segment whose frames take `frames_bytes`."""
    assert len(identity) == IDENTITY_BYTES
    body = entries.pack()
    head = (_TRAILER_MAGIC, VERSION, len(entries), frames_bytes, len(body), checksum(body))
    trailer = _TRAILER.pack(*head, identity)
    return b"".join((body, trailer, _SUM.pack(checksum(trailer))))


def footer_bytes(tail: bytes, nbytes: int) -> int:
    """Bytes of the footer of a segment of `nbytes`, by its last bytes. Raises Invalid."""
    _, _, _, frames_bytes, body_bytes, _, _ = _trailer(tail)
    if frames_bytes + body_bytes + TRAILER_BYTES != nbytes or frames_bytes % PAGE_BYTES:
        raise Invalid("a trailer that does not fit the object's length")
    return body_bytes + TRAILER_BYTES


def parse_footer(footer: bytes, nbytes: int) -> Footer:
    """The footer of a segment of `nbytes`. Raises Invalid for bytes that are none."""
    _, _, count, frames_bytes, body_bytes, body_sum, identity = _trailer(footer)
    body = footer[:-TRAILER_BYTES]
    if len(body) != body_bytes or checksum(body) != body_sum:
        raise Invalid("an index that does not match its checksum")
    try:
        entries = Entries.unpack(body)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Invalid(f"an unreadable index: {error}") from None
    first, pages = np.asarray(entries.page_of, np.int64), np.asarray(entries.pages_of, np.int64)
    if len(entries) != count or not count or len(set(entries.page_of)) != count:
        raise Invalid("an index of another length than its trailer says")
    if (pages < 2).any() or (first + pages > frames_bytes // PAGE_BYTES).any():
        raise Invalid("an index that points past the frames")
    return Footer(entries, identity, frames_bytes, nbytes)


def identity_of(tail: bytes) -> bytes:
    """The identity of a segment, by its last bytes. Raises Invalid."""
    identity: bytes = _trailer(tail)[-1]
    return identity


def pack_grave(identity: bytes, pages: Iterable[int]) -> bytes:
    """A grave for these pages of the segment of that identity."""
    body = np.array(sorted(pages), "<u4").tobytes()
    head = _GRAVE.pack(_GRAVE_MAGIC, VERSION, len(body) // 4, checksum(body), identity)
    return b"".join((head, _SUM.pack(checksum(head)), body))


def grave_name(segment: str, grave: bytes) -> str:
    """What a segment's grave is called."""
    return f"{grave_stem(segment)}{checksum(grave):016x}"


def parse_grave(grave: bytes) -> tuple[bytes, set[int]]:
    """Identity of the segment, and the pages of its deleted blocks. Raises Invalid."""
    head, body = grave[: _GRAVE.size], grave[_GRAVE.size + _SUM.size :]
    if len(grave) < _GRAVE.size + _SUM.size:
        raise Invalid("a grave that ends early")
    magic, version, count, body_sum, identity = _GRAVE.unpack(head)
    (total,) = _SUM.unpack_from(grave, _GRAVE.size)
    if magic != _GRAVE_MAGIC or version != VERSION or total != checksum(head):
        raise Invalid("not a grave of this version")
    if len(body) != 4 * count or checksum(body) != body_sum:
        raise Invalid("a grave that does not match its checksum")
    return identity, set(np.frombuffer(body, "<u4").tolist())


def _trailer(tail: bytes) -> tuple[bytes, int, int, int, int, int, bytes]:
    if len(tail) < TRAILER_BYTES:
        raise Invalid("shorter than a trailer")
    packed = tail[-TRAILER_BYTES : -_SUM.size]
    fields = _TRAILER.unpack(packed)
    (total,) = _SUM.unpack(tail[-_SUM.size :])
    if fields[0] != _TRAILER_MAGIC or total != checksum(packed):
        raise Invalid("its trailer is missing or damaged")
    if fields[1] != VERSION:
        raise Invalid(f"version {fields[1]}; this kvstore reads {VERSION}")
    return fields
