"""The header and the footer of a segment file: their bytes, and reading and writing them."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np

from kvstore.blocks.frame import aligned_buffer, checksum, padded_bytes
from kvstore.tiers.disk.files import SECTOR_BYTES, Files
from kvstore.tiers.disk.index import Entries

SEGMENT_VERSION: Final = 1
SUFFIX: Final = ".kvseg"
SECRET_BYTES: Final = 16

# magic, version, checksum of the rest of the sector, sequence number, segment bytes, secret, time
# of creation in milliseconds since 1970 (0 in files of the first builds: use the file's mtime)
_HEADER = struct.Struct("<6sHQQQ16sQ")
_HEADER_MAGIC: Final = b"KVSEGM"
# ..., then: sector of the body, body bytes, body checksum, entries, next free sector, time of
# creation
_TRAILER = struct.Struct("<6sHQQQ16sQQQQQQ")
SEALED: Final = b"KVSEGF"
"""Magic of the trailer of a sealed segment: no more frames are appended."""
CHECKPOINT: Final = b"KVSEGC"
"""Magic of the trailer of a segment in use: frames may follow those in its index."""
_SUMMED_FROM = 16
_NO_INDEX = (0, 0, 0, 0, 1)
"""The fields of a checkpoint's trailer that has no index: it only repeats the identity."""
_BLANK_READ_BYTES = 4 << 20


class SegmentInvalid(Exception):
    """The file is not a segment, or its header and its trailers are corrupt."""


class SegmentDiscarded(SegmentInvalid):
    """The file has no blocks to recover: a kill came before its first use or its next use."""


@dataclass(frozen=True)
class SegmentIdentity:
    """The identity of a segment file.

    sequence_no: also in the file's name. secret: random bytes. created_ms: milliseconds since 1970;
    0: not recorded.
    """

    sequence_no: int
    nbytes: int
    secret: bytes
    created_ms: int


@dataclass(frozen=True)
class Footer:
    """The index at the end of a segment file. All its frames end before `next_sector`."""

    entries: Entries
    tombstones: bytearray
    tombstones_sector: int
    next_sector: int


def sequence_no_of(path: str) -> int:
    """The sequence number in the name of a segment file."""
    return int(os.path.basename(path).removesuffix(SUFFIX))


def write_identity(files: Files, fd: int, identity: SegmentIdentity) -> None:
    """Write the first sector of a new segment, and the second copy at its end. Raises OSError."""
    write_header(files, fd, identity)
    write_identity_copy(files, fd, identity)


def write_header(files: Files, fd: int, identity: SegmentIdentity) -> None:
    """Write the first sector. Raises OSError."""
    sector = _pack_sector(
        _HEADER,
        _HEADER_MAGIC,
        identity.sequence_no,
        identity.nbytes,
        identity.secret,
        identity.created_ms,
    )
    files.write_at(fd, [sector], 0)


def write_identity_copy(files: Files, fd: int, identity: SegmentIdentity) -> None:
    """Write a trailer without an index: the second copy of the identity of a segment in use.

    It replaces a checkpoint or a footer. Releases before this trailer read the identity from it,
    and then scan the segment. Raises OSError.
    """
    _write_trailer(files, fd, identity, CHECKPOINT, _NO_INDEX)


def read_identity(files: Files, fd: int, sequence_no: int) -> tuple[SegmentIdentity, bool]:
    """The identity of the segment with this number, from the header or else from the trailer.

    The second value says whether the header is corrupt. If both are corrupt, a copy counts that
    differs from a valid one in one bit of its fields, or in the zeros behind them.

    Raises SegmentDiscarded; SegmentInvalid (no copy can be read); OSError.
    """
    header = aligned_buffer(SECTOR_BYTES)
    if files.read_at(fd, [header], 0) != SECTOR_BYTES:
        raise SegmentInvalid("the file is shorter than one sector")
    try:
        identity = SegmentIdentity(*_unpack_sector(_HEADER, _HEADER_MAGIC, header))
    except SegmentInvalid as error:
        reason = error
    else:
        if identity.sequence_no > sequence_no:
            raise SegmentDiscarded(f"it became segment {identity.sequence_no}, but kept its name")
        if identity.sequence_no < sequence_no:
            raise SegmentInvalid(f"its header has sequence number {identity.sequence_no}")
        return identity, False
    trailer = aligned_buffer(SECTOR_BYTES)
    end = os.fstat(fd).st_size // SECTOR_BYTES * SECTOR_BYTES
    files.read_at(fd, [trailer], max(0, end - SECTOR_BYTES))
    for unpack in (_unpack_sector, _unpack_repaired):
        for layout, magic, sector in (
            (_HEADER, _HEADER_MAGIC, header),
            (_TRAILER, SEALED, trailer),
            (_TRAILER, CHECKPOINT, trailer),
        ):
            try:
                number, nbytes, secret, *_, created_ms = unpack(layout, magic, sector)
            except SegmentInvalid:
                continue
            if number == sequence_no:
                return SegmentIdentity(number, nbytes, secret, created_ms), True
    raise reason


def is_blank(files: Files, fd: int) -> bool:
    """Whether a file has only zeros: it was created, and nothing was written to it.

    Raises OSError.
    """
    buffer = aligned_buffer(_BLANK_READ_BYTES)
    offset = 0
    while got := files.read_at(fd, [buffer], offset):
        if np.frombuffer(buffer[:got], np.uint8).any():
            return False
        offset += got
    return os.fstat(fd).st_size % SECTOR_BYTES == 0


def footer_sector(nbytes: int, body_bytes: int, entries: int) -> int:
    """The first sector of the body of a footer in a segment of `nbytes`."""
    return (nbytes - padded_bytes(body_bytes) - padded_bytes(entries)) // SECTOR_BYTES - 1


def write_footer(
    files: Files,
    fd: int,
    identity: SegmentIdentity,
    entries: Entries,
    next_sector: int,
    magic: bytes,
) -> int:
    """Write a footer without tombstones; returns the first sector of its tombstones.

    Raises OSError.
    """
    body = entries.pack()
    body_sector = footer_sector(identity.nbytes, len(body), len(entries))
    assert body_sector >= next_sector, "a footer over frames"
    buffer = aligned_buffer(padded_bytes(len(body)) + padded_bytes(len(entries)) or SECTOR_BYTES)
    buffer[: len(body)] = body
    files.write_at(fd, [buffer], body_sector * SECTOR_BYTES)
    index_fields = (body_sector, len(body), checksum(body), len(entries), next_sector)
    _write_trailer(files, fd, identity, magic, index_fields)
    return body_sector + padded_bytes(len(body)) // SECTOR_BYTES


def _write_trailer(
    files: Files, fd: int, identity: SegmentIdentity, magic: bytes, index_fields: tuple[int, ...]
) -> None:
    trailer = _pack_sector(
        _TRAILER,
        magic,
        identity.sequence_no,
        identity.nbytes,
        identity.secret,
        *index_fields,
        identity.created_ms,
    )
    files.write_at(fd, [trailer], identity.nbytes - SECTOR_BYTES)


def read_footer(files: Files, fd: int, identity: SegmentIdentity, magic: bytes) -> Footer | None:
    """The footer of a segment; None: the segment has no valid footer. Raises OSError."""
    sector = aligned_buffer(SECTOR_BYTES)
    if files.read_at(fd, [sector], identity.nbytes - SECTOR_BYTES) != SECTOR_BYTES:
        return None
    try:
        sequence_no, nbytes, secret, *index_fields, _ = _unpack_sector(_TRAILER, magic, sector)
        if (sequence_no, nbytes, secret) != (
            identity.sequence_no,
            identity.nbytes,
            identity.secret,
        ):
            return None
        body_sector, body_bytes, body_sum, count, next_sector = index_fields
        if not body_bytes:
            return None
        trailer_sector = nbytes // SECTOR_BYTES - 1
        if (
            body_sector * SECTOR_BYTES + padded_bytes(body_bytes) + padded_bytes(count)
            > trailer_sector * SECTOR_BYTES
        ):
            return None
        buffer = aligned_buffer(padded_bytes(body_bytes) + padded_bytes(count) or SECTOR_BYTES)
        if files.read_at(fd, [buffer], body_sector * SECTOR_BYTES) != len(buffer):
            return None
        body = bytes(buffer[:body_bytes])
        if checksum(body) != body_sum:
            return None
        entries = Entries.unpack(body)
    except (SegmentInvalid, ValueError, TypeError, msgpack.UnpackException):
        return None
    if len(entries) != count or next_sector > trailer_sector:
        return None
    at = padded_bytes(body_bytes)
    return Footer(
        entries, bytearray(buffer[at : at + count]), body_sector + at // SECTOR_BYTES, next_sector
    )


def _pack_sector(layout: struct.Struct, magic: bytes, *fields: int | bytes) -> memoryview:
    """A sector with magic, version, checksum and `fields`."""
    sector = aligned_buffer(SECTOR_BYTES)
    layout.pack_into(sector, 0, magic, SEGMENT_VERSION, 0, *fields)
    total = checksum(sector[_SUMMED_FROM:])
    layout.pack_into(sector, 0, magic, SEGMENT_VERSION, total, *fields)
    return sector


def _unpack_sector(layout: struct.Struct, magic: bytes, sector: memoryview) -> list[Any]:
    """The fields of a sector that `_pack_sector` wrote. Raises SegmentInvalid."""
    found, version, total, *fields = layout.unpack_from(sector)
    if found != magic or version != SEGMENT_VERSION:
        raise SegmentInvalid("wrong magic bytes or version")
    if checksum(sector[_SUMMED_FROM:]) != total:
        raise SegmentInvalid("the checksum of the sector does not match")
    return fields


def _unpack_repaired(layout: struct.Struct, magic: bytes, sector: memoryview) -> list[Any]:
    """`_unpack_sector` of a sector with one flipped bit in its fields. Raises SegmentInvalid.

    The bytes behind the fields are zero, so any number of bits may be flipped there. The version is
    not repaired: a sector of a later version could differ from ours in one bit.
    """
    found, version, total, *_ = layout.unpack_from(sector)
    wrong_bits = _bit_count(int.from_bytes(found, "big") ^ int.from_bytes(magic, "big"))
    if version != SEGMENT_VERSION or wrong_bits > 1:
        raise SegmentInvalid("wrong magic bytes or version")
    copy = bytearray(SECTOR_BYTES)
    copy[: layout.size] = sector[: layout.size]
    summed = memoryview(copy)[_SUMMED_FROM:]
    if _bit_count(checksum(summed) ^ total) <= 1:
        return list(layout.unpack_from(copy)[3:])
    for bit in range(_SUMMED_FROM * 8, layout.size * 8):
        copy[bit // 8] ^= 1 << bit % 8
        if checksum(summed) == total:
            return list(layout.unpack_from(copy)[3:])
        copy[bit // 8] ^= 1 << bit % 8
    raise SegmentInvalid("the checksum of the sector does not match")


def _bit_count(number: int) -> int:
    return bin(number).count("1")
