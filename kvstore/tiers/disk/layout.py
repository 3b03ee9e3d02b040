"""The fixed pages of a segment file, the first and the last, and what they say."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from kvstore.blocks.frame import aligned_buffer, checksum, padded
from kvstore.tiers.disk.files import PAGE, Files
from kvstore.tiers.disk.index import Entries

SEGMENT_VERSION: Final = 1
SUFFIX: Final = ".kvseg"
SECRET_BYTES: Final = 16

# magic, version, checksum of the rest of the page, segment number, segment bytes, secret, then when
# it was made in milliseconds since 1970 (0 in files of the first builds: then, when last written)
_HEADER = struct.Struct("<6sHQQQ16sQ")
_HEADER_MAGIC: Final = b"KVSEGM"
# ..., then: body's page, body bytes, body checksum, entries, next free page, time made
_TRAILER = struct.Struct("<6sHQQQ16sQQQQQQ")
SEALED: Final = b"KVSEGF"
"""Magic of the trailer of a segment that takes no more frames."""
CHECKPOINT: Final = b"KVSEGC"
"""Magic of the trailer of one in use: frames may follow those that its index names."""
_SUMMED_FROM = 16


class SegmentInvalid(Exception):
    """A file that is no segment of ours, or whose first page is damaged."""


@dataclass(frozen=True)
class Identity:
    """Which segment a file is. made_ms: milliseconds since 1970, 0 when it does not say."""

    number: int
    nbytes: int
    secret: bytes
    made_ms: int


@dataclass(frozen=True)
class Footer:
    """An index read from the end of a file. Frames end before `next_page`."""

    entries: Entries
    marks: bytearray
    marks_page: int
    next_page: int


def write_header(files: Files, fd: int, who: Identity) -> None:
    """Write the first page. Raises OSError."""
    page = _page(_HEADER, _HEADER_MAGIC, who.number, who.nbytes, who.secret, who.made_ms)
    files.write_at(fd, [page], 0)


def read_identity(files: Files, fd: int) -> tuple[Identity, bool]:
    """Which segment this is, by the header or else a trailer; whether the header is damaged.

    Raises SegmentInvalid when neither can be read, and OSError.
    """
    page = aligned_buffer(PAGE)
    if files.read_at(fd, [page], 0) != PAGE:
        raise SegmentInvalid("it is shorter than a page")
    try:
        return Identity(*_fields(_HEADER, _HEADER_MAGIC, page)), False
    except SegmentInvalid as fault:
        end = os.fstat(fd).st_size // PAGE * PAGE
        if files.read_at(fd, [page], end - PAGE) != PAGE:
            raise
        for magic in (SEALED, CHECKPOINT):
            try:
                number, nbytes, secret, *_, made_ms = _fields(_TRAILER, magic, page)
            except SegmentInvalid:
                continue
            return Identity(number, nbytes, secret, made_ms), True
        raise fault from None


def footer_page(nbytes: int, body_bytes: int, entries: int) -> int:
    """Where the body of a footer begins in a segment of `nbytes`."""
    return (nbytes - padded(body_bytes) - padded(entries)) // PAGE - 1


def write_footer(
    files: Files, fd: int, who: Identity, entries: Entries, next_page: int, magic: bytes
) -> int:
    """Write an index behind the frames, no block marked as deleted; the page of its marks.

    Raises OSError.
    """
    body = entries.pack()
    body_page = footer_page(who.nbytes, len(body), len(entries))
    assert body_page >= next_page, "a footer over frames"
    buffer = aligned_buffer(padded(len(body)) + padded(len(entries)) or PAGE)
    buffer[: len(body)] = body
    files.write_at(fd, [buffer], body_page * PAGE)
    where = (body_page, len(body), checksum(body), len(entries), next_page, who.made_ms)
    trailer = _page(_TRAILER, magic, who.number, who.nbytes, who.secret, *where)
    files.write_at(fd, [trailer], who.nbytes - PAGE)
    return body_page + padded(len(body)) // PAGE


def read_footer(files: Files, fd: int, who: Identity, magic: bytes) -> Footer | None:
    """The index at the end of a segment; None when there is no valid one. Raises OSError."""
    page = aligned_buffer(PAGE)
    if files.read_at(fd, [page], who.nbytes - PAGE) != PAGE:
        return None
    try:
        number, nbytes, secret, *where, _ = _fields(_TRAILER, magic, page)
        if (number, nbytes, secret) != (who.number, who.nbytes, who.secret):
            return None
        body_page, body_bytes, body_sum, count, next_page = where
        last = nbytes // PAGE - 1
        if body_page * PAGE + padded(body_bytes) + padded(count) > last * PAGE:
            return None
        buffer = aligned_buffer(padded(body_bytes) + padded(count) or PAGE)
        if files.read_at(fd, [buffer], body_page * PAGE) != len(buffer):
            return None
        body = bytes(buffer[:body_bytes])
        if checksum(body) != body_sum:
            return None
        entries = Entries.unpack(body)
    except (SegmentInvalid, ValueError, TypeError, msgpack.UnpackException):
        return None
    if len(entries) != count or next_page > last:
        return None
    at = padded(body_bytes)
    return Footer(entries, bytearray(buffer[at : at + count]), body_page + at // PAGE, next_page)


def _page(layout: struct.Struct, magic: bytes, *fields: int | bytes) -> memoryview:
    """A page of `fields` under magic, version and checksum."""
    page = aligned_buffer(PAGE)
    layout.pack_into(page, 0, magic, SEGMENT_VERSION, 0, *fields)
    total = checksum(page[_SUMMED_FROM:])
    layout.pack_into(page, 0, magic, SEGMENT_VERSION, total, *fields)
    return page


def _fields(layout: struct.Struct, magic: bytes, page: memoryview) -> list[Any]:
    """The fields of a page that `_page` made. Raises SegmentInvalid for any other."""
    found, version, total, *fields = layout.unpack_from(page)
    if found != magic or version != SEGMENT_VERSION:
        raise SegmentInvalid("its magic bytes are missing")
    if checksum(page[_SUMMED_FROM:]) != total:
        raise SegmentInvalid("the checksum of its first page does not match")
    return fields
