"""The header and the footer of a segment file: their bytes, and reading and writing them."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack

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


class SegmentInvalid(Exception):
    """The file is not a segment, or its header and its trailers are corrupt."""


class SegmentUnsupported(SegmentInvalid):
    """A segment file of a later version. It is left as it is, for the release that wrote it."""


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


def read_identity(files: Files, fd: int) -> tuple[SegmentIdentity, bool]:
    """The identity from the header, or from the trailer if the header is corrupt.

    The second value says whether the header is corrupt: also if only its version differs from that
    of the trailer. Raises SegmentInvalid (both are corrupt), SegmentUnsupported, OSError.
    """
    sector = aligned_buffer(SECTOR_BYTES)
    if files.read_at(fd, [sector], 0) != SECTOR_BYTES:
        raise SegmentInvalid("the file is shorter than one sector")
    try:
        return SegmentIdentity(*_unpack_sector(_HEADER, _HEADER_MAGIC, sector)), False
    except SegmentInvalid as error:
        claimed = _HEADER.unpack_from(sector)[3:6]
        end = os.fstat(fd).st_size // SECTOR_BYTES * SECTOR_BYTES
        if files.read_at(fd, [sector], end - SECTOR_BYTES) != SECTOR_BYTES:
            raise
        for magic in (SEALED, CHECKPOINT):
            try:
                sequence_no, nbytes, secret, *_, created_ms = _unpack_sector(
                    _TRAILER, magic, sector
                )
            except SegmentUnsupported:
                raise
            except SegmentInvalid:
                continue
            if isinstance(error, SegmentUnsupported) and claimed != (sequence_no, nbytes, secret):
                break
            return SegmentIdentity(sequence_no, nbytes, secret, created_ms), True
        raise error from None


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
    index_fields = (
        body_sector,
        len(body),
        checksum(body),
        len(entries),
        next_sector,
        identity.created_ms,
    )
    trailer = _pack_sector(
        _TRAILER, magic, identity.sequence_no, identity.nbytes, identity.secret, *index_fields
    )
    files.write_at(fd, [trailer], identity.nbytes - SECTOR_BYTES)
    return body_sector + padded_bytes(len(body)) // SECTOR_BYTES


def read_footer(files: Files, fd: int, identity: SegmentIdentity, magic: bytes) -> Footer | None:
    """The footer of a segment; None: the segment has no valid footer.

    Raises SegmentUnsupported, OSError.
    """
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
    except SegmentUnsupported:
        raise
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
    """The fields of a sector that `_pack_sector` wrote. Raises SegmentInvalid, SegmentUnsupported.

    Magic and version are at the same place in every version.
    """
    found, version, total, *fields = layout.unpack_from(sector)
    if found == magic and version > SEGMENT_VERSION:
        raise SegmentUnsupported(f"version {version}; this kvstore reads {SEGMENT_VERSION}")
    if found != magic or version != SEGMENT_VERSION:
        raise SegmentInvalid("wrong magic bytes or version")
    if checksum(sector[_SUMMED_FROM:]) != total:
        raise SegmentInvalid("the checksum of the sector does not match")
    return fields
