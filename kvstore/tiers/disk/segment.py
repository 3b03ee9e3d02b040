"""One segment file: frames one after another, and an index of them at its end once it is sealed.

    page 0            header: magic, version, checksum, number, size, a secret of 16 bytes, its age
    page 1 ...        frames, each in one run of pages; gaps where a write failed
    ...               footer body: the packed `Entries`
    ...               one byte per entry: 1 when the block was deleted after sealing
    last page         trailer: the header's fields again, and where the body lies

A frame's header is bound (`frame.bind`) to the segment's secret and to its page, so the scan of a
segment without a footer finds the frames that this tier put there and no other: not one that
lies inside a block's bytes, not one at a wrong place. The last page of a segment in use is zero,
or the trailer of a checkpoint: a footer like the others, of the frames until then. What it takes
lies within what is kept free for the last one, so frames that follow do not touch it.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_left
from typing import Final

from kvstore.blocks.frame import aligned_buffer, checksum
from kvstore.blocks.key import Key
from kvstore.tiers.disk.files import PAGE, Files
from kvstore.tiers.disk.index import MAX_NAMES, MAX_SEGMENT_PAGES, Entries, entry_bytes
from kvstore.tiers.disk.layout import (
    CHECKPOINT,
    SEALED,
    SECRET_BYTES,
    SUFFIX,
    Identity,
    SegmentInvalid,
    read_footer,
    read_identity,
    write_footer,
    write_header,
)

MIN_SEGMENT_BYTES: Final = 16 * PAGE
_FIXED_FOOTER_BYTES = 3 * PAGE
"""Rounding of the body and of the deletion marks, and the trailer."""


class Segment:
    """A segment and its open descriptor. The tier's lock guards every field but the file."""

    def __init__(self, path: str, fd: int, who: Identity, *, named: bool) -> None:
        """named: its name is on stable storage."""
        self.path = path
        self.fd = fd
        self.who = who
        self.made_ms = who.made_ms
        """When it was made, in milliseconds since 1970."""
        self.slot = 0
        """This segment's number in places."""
        self.stripe = 0
        """Number of the directory it lies in."""
        self.entries = Entries()
        self.next_page = 1
        self.names: set[tuple[str, str]] = set()
        self.footer_bytes = _FIXED_FOOTER_BYTES
        """Most bytes the footer takes with everything reserved until now."""
        self.users = 0
        """Calls that hold the descriptor, one reference each."""
        self.writing: set[int] = set()
        """Pages of frames that some of them are writing."""
        self.last_used = 0
        """The tier's count of uses when this segment was last written or read."""
        self.dead = False
        """Out of the table: the last user closes the descriptor."""
        self.short = False
        """The file is not as long as it says: read from it, do not append."""
        self.sealing = False
        """It waits for its footer."""
        self.sealed = False
        self.marks = bytearray()
        """Deletion mark of each entry of a sealed segment."""
        self.marks_page = 0
        self.killed: set[int] = set()
        """Pages of frames deleted from an unsealed segment."""
        self.saved_page = 0
        """The page up to which a checkpoint names every frame; 0 without one."""
        self.file_lock = threading.Lock()
        """Held while the footer or a deletion is written; only `_sync_lock` is taken inside."""
        self.sync_fault = ""
        """Why a sync failed; it stays, and the segment takes no more frames."""
        self._named = named
        self._sync_lock = threading.Lock()

    @property
    def number(self) -> int:
        return self.who.number

    @property
    def nbytes(self) -> int:
        return self.who.nbytes

    # ------------------------------------------------------------------ room

    def reserve(self, key: Key, pages: int) -> int:
        """Take `pages` pages for a frame; its first page, or 0 when there is no room."""
        if self.sync_fault:
            return 0
        footer = self.footer_bytes + entry_bytes(key) + 1
        if (self.next_page + pages) * PAGE + footer > self.who.nbytes:
            return 0
        if key[:2] not in self.names:
            if len(self.names) >= MAX_NAMES:
                return 0
            self.names.add(key[:2])
        page = self.next_page
        self.next_page += pages
        self.footer_bytes = footer
        return page

    def salt(self, page: int) -> int:
        """What the header of a frame at `page` is bound with."""
        return checksum(self.who.secret + page.to_bytes(8, "little"))

    # ------------------------------------------------------------------ file

    @classmethod
    def create(
        cls,
        files: Files,
        directory: str,
        number: int,
        nbytes: int,
        made_ms: int,
        *,
        reuse: Segment | None = None,
    ) -> Segment:
        """A new, empty, fully allocated segment; its name is durable after a sync. Raises OSError.

        made_ms: now, in milliseconds since 1970. reuse: a dead segment of that size that nobody
        holds: its file becomes the new one's. A file system writes faster to what was written
        before, and what lies in it is no frame under another secret. A kill before the file has
        its new name leaves one that says it is another segment, and is removed.
        """
        path = os.path.join(directory, f"{number:012d}{SUFFIX}")
        who = Identity(number, nbytes, os.urandom(SECRET_BYTES), made_ms)
        fd, lies_at = (reuse.fd, reuse.path) if reuse else (files.create(path, nbytes), path)
        try:
            write_header(files, fd, who)
            if reuse:
                files.rename(reuse.path, path)
        except BaseException:
            files.close(fd)
            files.unlink(lies_at)
            raise
        return cls(path, fd, who, named=False)

    @classmethod
    def open(cls, files: Files, path: str, *, writable: bool = True) -> Segment:
        """An existing segment, its footer not yet read. Raises SegmentInvalid, OSError."""
        fd = files.open(path, writable=writable)
        try:
            who, damaged = read_identity(files, fd)
            if os.path.basename(path) != f"{who.number:012d}{SUFFIX}":
                raise SegmentInvalid(f"it says that it is segment {who.number}")
            if who.nbytes % PAGE or not MIN_SEGMENT_BYTES <= who.nbytes <= MAX_SEGMENT_PAGES * PAGE:
                raise SegmentInvalid(f"it says that it has {who.nbytes} bytes")
            segment = cls(path, fd, who, named=True)
            status = os.fstat(fd)
            segment.short = status.st_size != who.nbytes
            segment.made_ms = who.made_ms or int(status.st_mtime * 1000)
            if damaged and writable:
                write_header(files, fd, who)
            return segment
        except BaseException:
            files.close(fd)
            raise

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
                if not self._named:
                    files.sync_directory(os.path.dirname(self.path))
                    self._named = True
            except OSError as error:
                self.sync_fault = str(error)
                raise

    def seal(self, files: Files) -> None:
        """Write the footer; every frame before it is on stable storage first. Raises OSError.

        No write is in flight, and none comes until `reopen`. The footer itself need not be on
        stable storage: without it, or with half of it, the segment is scanned.
        """
        with self.file_lock:
            self.sync(files)
            entries = self.entries.in_page_order(without=self.killed)
            self.marks_page = self._write_footer(files, entries, self.next_page, SEALED)
            self.entries, self.marks = entries, bytearray(len(entries))
            self.killed.clear()
            self.saved_page = 0
            self.sealed = True

    def checkpoint(self, files: Files, entries: Entries, page: int, killed: int) -> None:
        """Write down the index of the frames before `page`, for the case of a kill. Raises OSError.

        Those frames are on stable storage. killed: how many pages were in `self.killed` when
        `entries` was taken; with more now, it says too much, and is left.
        """
        with self.file_lock:
            if not self.sealed and killed == len(self.killed):
                self._write_footer(files, entries, page, CHECKPOINT)
                self.saved_page = page

    def load_footer(self, files: Files) -> bool:
        """Take entries, marks and the end from the footer; False when there is no valid one."""
        footer = read_footer(files, self.fd, self.who, SEALED)
        if footer is None:
            return False
        self.adopt(footer.entries, footer.next_page)
        self.marks, self.marks_page = footer.marks, footer.marks_page
        self.sealed = True
        return True

    def load_checkpoint(self, files: Files) -> bool:
        """Take entries from a checkpoint, if there is one; frames may follow at `next_page`."""
        footer = read_footer(files, self.fd, self.who, CHECKPOINT)
        if footer is None:
            return False
        self.adopt(footer.entries, footer.next_page)
        self.saved_page = footer.next_page
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
        for page in deleted:
            files.write_at(self.fd, [aligned_buffer(PAGE)], page * PAGE)
        if self.sealed or not self.saved_page:
            files.write_at(self.fd, [aligned_buffer(PAGE)], self.nbytes - PAGE)
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
                if self.saved_page:
                    self.saved_page = 0
                    files.write_at(self.fd, [aligned_buffer(PAGE)], self.nbytes - PAGE)
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

    def _write_footer(self, files: Files, entries: Entries, next_page: int, magic: bytes) -> int:
        return write_footer(files, self.fd, self.who, entries, next_page, magic)
