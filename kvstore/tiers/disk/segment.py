"""One segment file: frames one after another, and an index of them at its end once it is sealed.

    page 0            header: magic, version, checksum, number, size, a secret of 16 bytes
    page 1 ...        frames, each in one run of pages; gaps where a write failed
    ...               footer body: the packed `Entries`
    ...               one byte per entry: 1 when the block was deleted after sealing
    last page         trailer: magic, version, checksum, number, secret, where the body lies

A frame's header is bound (`frame.bind`) to the segment's secret and to its page, so the scan of a
segment without a footer finds the frames that this tier put there and no other: not one that
lies inside a block's bytes, not one at a wrong place. The last page of a segment in use is zero:
it is written by `seal` and cleared by `reopen`.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import xxhash

from kvstore.blocks import Key
from kvstore.errors import FrameInvalid
from kvstore.frame import (
    HEADER_BYTES,
    MAGIC,
    FrameHeader,
    aligned_buffer,
    bind,
    checksum,
    decode_header,
    padded,
)
from kvstore.tiers.disk.files import PAGE, Files
from kvstore.tiers.disk.index import MAX_NAMES, MAX_SEGMENT_PAGES, Entries, entry_bytes

SEGMENT_VERSION: Final = 1
SUFFIX: Final = ".kvseg"
SECRET_BYTES: Final = 16
SCAN_BYTES: Final = 4 << 20
"""Read at a time when a segment is scanned."""
MIN_SEGMENT_BYTES: Final = 16 * PAGE

# magic, version, checksum of the rest of the page, segment number, segment bytes, secret
_HEADER = struct.Struct("<6sHQQQ16s")
_HEADER_MAGIC = b"KVSEGM"
# ..., then: body's page, body bytes, body checksum, entries, next free page
_TRAILER = struct.Struct("<6sHQQQ16sQQQQQ")
_TRAILER_MAGIC = b"KVSEGF"
_SUMMED_FROM = 16
_FIXED_FOOTER_BYTES = 3 * PAGE
"""Rounding of the body and of the deletion marks, and the trailer."""


class SegmentInvalid(Exception):
    """A file that is no segment of ours, or whose first page is damaged."""


@dataclass(frozen=True)
class Found:
    """A frame met by a scan. `fault`: why its payload cannot be what was written, or empty."""

    header: FrameHeader
    page: int
    pages: int
    fault: str


class Segment:
    """A segment and its open descriptor. The tier's lock guards every field but the file."""

    def __init__(self, path: str, fd: int, number: int, nbytes: int, secret: bytes) -> None:
        self.path = path
        self.fd = fd
        self.number = number
        self.nbytes = nbytes
        self.secret = secret
        self.slot = 0
        """This segment's number in places."""
        self.entries = Entries()
        self.next_page = 1
        self.names: set[tuple[str, str]] = set()
        self.footer_bytes = _FIXED_FOOTER_BYTES
        """Most bytes the footer takes with everything reserved until now."""
        self.users = 0
        """Calls that hold the descriptor, one reference each."""
        self.writers = 0
        """How many of them are writing a frame."""
        self.last_used = 0
        """The tier's count of uses when this segment was last written or read."""
        self.dead = False
        """Out of the table: the last user closes the descriptor."""
        self.short = False
        """The file is not as long as it says: read from it, do not append."""
        self.sealing = False
        """Somebody is writing the footer."""
        self.sealed = False
        self.marks = bytearray()
        """Deletion mark of each entry of a sealed segment."""
        self.marks_page = 0
        self.killed: set[int] = set()
        """Pages of frames deleted from an unsealed segment."""
        self.file_lock = threading.Lock()
        """Held while the footer or a deletion is written; only `_sync_lock` is taken inside."""
        self.sync_fault = ""
        """Why a sync failed; it stays, and the segment takes no more frames."""
        self._sync_lock = threading.Lock()

    # ------------------------------------------------------------------ room

    def reserve(self, key: Key, pages: int) -> int:
        """Take `pages` pages for a frame; its first page, or 0 when there is no room."""
        if self.sync_fault:
            return 0
        footer = self.footer_bytes + entry_bytes(key) + 1
        if (self.next_page + pages) * PAGE + footer > self.nbytes:
            return 0
        if len(self.names | {key[:2]}) > MAX_NAMES:
            return 0
        page = self.next_page
        self.next_page += pages
        self.footer_bytes = footer
        self.names.add(key[:2])
        return page

    def salt(self, page: int) -> int:
        """What the header of a frame at `page` is bound with."""
        return checksum(self.secret + page.to_bytes(8, "little"))

    # ------------------------------------------------------------------ file

    @classmethod
    def create(
        cls, files: Files, directory: str, number: int, nbytes: int, *, sync: bool = False
    ) -> Segment:
        """A new, empty, fully allocated segment, synced if `sync`. Raises OSError."""
        path = os.path.join(directory, f"{number:012d}{SUFFIX}")
        fd = files.create(path, nbytes)
        segment = cls(path, fd, number, nbytes, os.urandom(SECRET_BYTES))
        try:
            segment._write_header(files)
            if sync:
                segment.sync(files)
            files.sync_directory(directory)
        except BaseException:
            files.close(fd)
            files.unlink(path)
            raise
        return segment

    @classmethod
    def open(cls, files: Files, path: str, *, writable: bool = True) -> Segment:
        """An existing segment, its footer not yet read. Raises SegmentInvalid, OSError."""
        fd = files.open(path, writable=writable)
        try:
            number, nbytes, secret, damaged = _identity(files, fd)
            if os.path.basename(path) != f"{number:012d}{SUFFIX}":
                raise SegmentInvalid(f"it says that it is segment {number}")
            if nbytes % PAGE or not MIN_SEGMENT_BYTES <= nbytes <= MAX_SEGMENT_PAGES * PAGE:
                raise SegmentInvalid(f"it says that it has {nbytes} bytes")
            segment = cls(path, fd, number, nbytes, secret)
            segment.short = os.fstat(fd).st_size != nbytes
            if damaged and writable:
                segment._write_header(files)
            return segment
        except BaseException:
            files.close(fd)
            raise

    def _write_header(self, files: Files) -> None:
        page = _page(_HEADER, _HEADER_MAGIC, self.number, self.nbytes, self.secret)
        files.write_at(self.fd, [page], 0)

    def sync(self, files: Files) -> None:
        """Return when every frame written is on stable storage. Raises OSError, and from then on.

        A failed fdatasync has dropped pages that the next one knows nothing of, and it tells only
        one of those who wait at the same time: so they take turns, and one failure is for good.
        Frames stay readable, as far as their checksums hold.
        """
        with self._sync_lock:
            if self.sync_fault:
                raise OSError(errno.EIO, f"an earlier sync failed: {self.sync_fault}")
            try:
                files.sync(self.fd)
            except OSError as error:
                self.sync_fault = str(error)
                raise

    def seal(self, files: Files) -> None:
        """Write the footer; every frame before it is on stable storage first. Raises OSError.

        No write is in flight, and none comes until `reopen`.
        """
        with self.file_lock:
            self._seal(files)

    def _seal(self, files: Files) -> None:
        self.entries = self.entries.in_page_order(without=self.killed)
        body = self.entries.pack()
        marks = bytearray(len(self.entries))
        body_page = (self.nbytes - padded(len(body)) - padded(len(marks))) // PAGE - 1
        assert body_page >= self.next_page, "a footer over frames"
        self.sync(files)
        buffer = aligned_buffer(padded(len(body)) + padded(len(marks)) or PAGE)
        buffer[: len(body)] = body
        files.write_at(self.fd, [buffer], body_page * PAGE)
        where = (body_page, len(body), checksum(body), len(marks), self.next_page)
        trailer = _page(_TRAILER, _TRAILER_MAGIC, self.number, self.nbytes, self.secret, *where)
        files.write_at(self.fd, [trailer], self.nbytes - PAGE)
        self.sync(files)
        self.marks, self.marks_page = marks, body_page + padded(len(body)) // PAGE
        self.killed.clear()
        self.sealed = True

    def load_footer(self, files: Files) -> bool:
        """Take entries, marks and the end from the footer; False when there is no valid one."""
        page = aligned_buffer(PAGE)
        if files.read_at(self.fd, [page], self.nbytes - PAGE) != PAGE:
            return False
        try:
            number, nbytes, secret, *where = _fields(_TRAILER, _TRAILER_MAGIC, page)
            if (number, nbytes, secret) != (self.number, self.nbytes, self.secret):
                return False
            body_page, body_bytes, body_sum, count, next_page = where
            last = self.nbytes // PAGE - 1
            if body_page * PAGE + padded(body_bytes) + padded(count) > last * PAGE:
                return False
            buffer = aligned_buffer(padded(body_bytes) + padded(count) or PAGE)
            if files.read_at(self.fd, [buffer], body_page * PAGE) != len(buffer):
                return False
            body = bytes(buffer[:body_bytes])
            if checksum(body) != body_sum:
                return False
            entries = Entries.unpack(body)
        except (SegmentInvalid, ValueError, TypeError, msgpack.UnpackException):
            return False
        if len(entries) != count or next_page > last:
            return False
        self.adopt(entries, next_page)
        at = padded(body_bytes)
        marks = bytearray(buffer[at : at + count])
        self.marks, self.marks_page = marks, body_page + at // PAGE
        self.sealed = True
        return True

    def adopt(self, entries: Entries, next_page: int) -> None:
        """Make `entries` this segment's, frames ending before `next_page`."""
        self.entries, self.next_page = entries, next_page

    def reopen(self, files: Files) -> None:
        """Make ready for appending, sealed or not; deleted blocks are left out. Raises OSError.

        Their marks go with the footer. From then on their headers tell, which are cleared here
        once more: a kill may have come between a mark and its header.
        """
        marked = zip(self.entries.page_of, self.marks, strict=self.sealed)
        deleted = {page for page, mark in marked if mark}
        zeros = aligned_buffer(PAGE)
        for page in deleted:
            files.write_at(self.fd, [zeros], page * PAGE)
        files.write_at(self.fd, [zeros], self.nbytes - PAGE)
        self.sealed, self.marks, self.marks_page = False, bytearray(), 0
        self.entries = self.entries.in_page_order(without=deleted)
        self.names = set(self.entries.names)
        self.footer_bytes = _FIXED_FOOTER_BYTES + len(self.entries.pack()) + len(self.entries)

    def kill(self, files: Files, page: int) -> None:
        """Make sure the frame at `page` stays deleted after a restart. Raises OSError."""
        with self.file_lock:
            if self.sealed:
                self._mark(files, page)
            else:
                self.killed.add(page)
            files.write_at(self.fd, [aligned_buffer(PAGE)], page * PAGE)

    def _mark(self, files: Files, page: int) -> None:
        """Set the deletion mark of the entry at `page`, and write the page of marks it is in."""
        at = bisect_left(self.entries.page_of, page)
        assert self.entries.page_of[at] == page, "no entry of this segment"
        self.marks[at] = 1
        first = at - at % PAGE
        scratch = aligned_buffer(PAGE)
        marks = self.marks[first : first + PAGE]
        scratch[: len(marks)] = marks
        files.write_at(self.fd, [scratch], self.marks_page * PAGE + first)

    # ------------------------------------------------------------------ scan

    def scan(self, files: Files) -> Iterator[Found]:
        """Every frame of this tier's in the segment, its payload checked; without the footer."""
        buffer, scratch = aligned_buffer(SCAN_BYTES), aligned_buffer(SCAN_BYTES)
        start, filled, page = 0, 0, 1
        while True:
            at = page * PAGE - start
            if at + PAGE > filled:
                start, at = page * PAGE, 0
                filled = files.read_at(self.fd, [buffer], start)
                if filled < PAGE:
                    return
            header = self.header_at(buffer[at : at + PAGE], page)
            if header is None:
                page += 1
                continue
            pages = 1 + header.payload_bytes // PAGE
            yield Found(header, page, pages, self.payload_fault(files, header, page, scratch))
            page += pages

    def header_at(self, view: memoryview, page: int) -> FrameHeader | None:
        """The header in `view`, read from `page`, if this tier put it there; changes `view`."""
        if view[: len(MAGIC)].tobytes() != MAGIC:
            return None
        bind(view, self.salt(page))
        try:
            return decode_header(view)
        except FrameInvalid:
            return None

    def payload_fault(
        self, files: Files, header: FrameHeader, page: int, buffer: memoryview
    ) -> str:
        """What is wrong with the stored bytes behind a header at `page`; empty when nothing.

        buffer: aligned scratch they are read through.
        """
        total = xxhash.xxh3_64()
        done = 0
        while done < header.stored_bytes:
            want = buffer[: min(len(buffer), header.payload_bytes - done)]
            got = files.read_at(self.fd, [want], page * PAGE + HEADER_BYTES + done)
            if got < len(want):
                return "the file ends inside the payload"
            total.update(want[: header.stored_bytes - done])
            done += got
        if total.intdigest() != header.stored_sum:
            return "the payload does not match its checksum"
        return ""


def _identity(files: Files, fd: int) -> tuple[int, int, bytes, bool]:
    """Number, size and secret, by the header or else the trailer; whether the header is damaged.

    Raises SegmentInvalid when neither can be read.
    """
    page = aligned_buffer(PAGE)
    if files.read_at(fd, [page], 0) != PAGE:
        raise SegmentInvalid("it is shorter than a page")
    try:
        number, nbytes, secret = _fields(_HEADER, _HEADER_MAGIC, page)
        return number, nbytes, secret, False
    except SegmentInvalid as fault:
        end = os.fstat(fd).st_size // PAGE * PAGE
        if files.read_at(fd, [page], end - PAGE) != PAGE:
            raise
        try:
            number, nbytes, secret, *_ = _fields(_TRAILER, _TRAILER_MAGIC, page)
        except SegmentInvalid:
            raise fault from None
        return number, nbytes, secret, True


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
