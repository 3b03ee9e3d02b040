"""The frames of a segment without its index: what is read after a kill, and by `kvstore verify`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from kvstore.blocks.frame import MAGIC, FrameHeader, aligned_buffer, bind, checksum, decode_header
from kvstore.errors import FrameInvalid
from kvstore.tiers.disk.files import PAGE, Files
from kvstore.tiers.disk.segment import Segment

SCAN_BYTES: Final = 4 << 20
"""Read at a time."""


@dataclass(frozen=True)
class Found:
    """A frame met by a scan. `fault`: why its payload cannot be what was written, or empty."""

    header: FrameHeader
    page: int
    pages: int
    fault: str


def scan(files: Files, segment: Segment, start: int = 1) -> Iterator[Found]:
    """Every frame of this tier's in the segment from page `start` on, its payload checked.

    Raises OSError.
    """
    window = _Window(files, segment)
    page = start
    while (view := window.at(page)) is not None:
        header = header_at(segment, view, page)
        if header is None:
            page += 1
            continue
        pages = 1 + header.payload_bytes // PAGE
        yield Found(header, page, pages, window.payload_fault(header, page))
        page += pages


def header_at(segment: Segment, view: memoryview, page: int) -> FrameHeader | None:
    """The header in `view`, read from `page`, if this tier put it there; changes `view`."""
    if view[: len(MAGIC)].tobytes() != MAGIC:
        return None
    bind(view, segment.salt(page))
    try:
        return decode_header(view)
    except FrameInvalid:
        return None


class _Window:
    """A part of the file in memory, moved forward as it is asked for."""

    def __init__(self, files: Files, segment: Segment) -> None:
        self._files = files
        self._fd = segment.fd
        self._buffer = aligned_buffer(SCAN_BYTES)
        self._large = self._buffer[:0]
        self._start = self._end = 0

    def at(self, page: int) -> memoryview | None:
        """One page; None where the file ends."""
        if not self._holds(page, 1) and not self._move(page, 1):
            return None
        at = page * PAGE - self._start
        return self._buffer[at : at + PAGE]

    def payload_fault(self, header: FrameHeader, page: int) -> str:
        """What is wrong with the stored bytes behind a header at `page`; empty when nothing."""
        pages = header.payload_bytes // PAGE
        if pages * PAGE > SCAN_BYTES:
            total = self._sum_large(header, page + 1)
        elif self._holds(page + 1, pages) or self._move(page + 1, pages):
            at = (page + 1) * PAGE - self._start
            total = checksum(self._buffer[at : at + header.stored_bytes])
        else:
            total = None
        if total is None:
            return "the file ends inside the payload"
        return "" if total == header.stored_sum else "the payload does not match its checksum"

    def _sum_large(self, header: FrameHeader, page: int) -> int | None:
        """The checksum of a payload larger than the window, read through a buffer of its own."""
        if not self._large:
            self._large = aligned_buffer(SCAN_BYTES)
        total = xxhash.xxh3_64()
        done = 0
        while done < header.stored_bytes:
            part = self._large[: min(SCAN_BYTES, header.payload_bytes - done)]
            if self._files.read_at(self._fd, [part], page * PAGE + done) < len(part):
                return None
            total.update(part[: header.stored_bytes - done])
            done += len(part)
        return int(total.intdigest())

    def _holds(self, page: int, pages: int) -> bool:
        return self._start <= page * PAGE and (page + pages) * PAGE <= self._end

    def _move(self, page: int, pages: int) -> bool:
        """Read from `page` on; whether `pages` are there."""
        self._start = page * PAGE
        self._end = self._start + self._files.read_at(self._fd, [self._buffer], self._start)
        return self._holds(page, pages)
