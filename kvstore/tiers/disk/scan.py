"""Finds the frames of a segment without its index: after a kill, and for `kvstore verify`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from kvstore.blocks.frame import (
    MAGIC,
    FrameHeader,
    aligned_buffer,
    checksum,
    decode_header,
    mask_checksum,
    matches_checksum,
)
from kvstore.errors import FrameInvalid, FrameUnsupported
from kvstore.tiers.disk.files import SECTOR_BYTES, Files
from kvstore.tiers.disk.segment import Segment

SCAN_BYTES: Final = 4 << 20
"""Bytes of one read."""


@dataclass(frozen=True)
class ScannedFrame:
    """A frame found by a scan. error: why its payload is corrupt; "": it is intact."""

    header: FrameHeader
    sector: int
    sectors: int
    error: str


def scan_frames(files: Files, segment: Segment, start: int = 1) -> Iterator[ScannedFrame]:
    """Yield every frame of the segment from sector `start`, with its payload verified.

    Frames of other releases are counted in `unsupported_frames` of the segment. Raises OSError.
    """
    window = _Window(files, segment)
    sector = start
    while (view := window.sector_at(sector)) is not None:
        header = decode_header_at(segment, view, sector)
        if header is None:
            if unsupported_reason(view):
                segment.unsupported_frames += 1
                segment.left_as_it_is = True
            sector += 1
            continue
        sectors = 1 + header.payload_bytes // SECTOR_BYTES
        yield ScannedFrame(header, sector, sectors, window.payload_error(header, sector))
        sector += sectors


def decode_header_at(segment: Segment, view: memoryview, sector: int) -> FrameHeader | None:
    """Decode the header in `view`, read from `sector`; None unless this segment wrote it there.

    Changes `view`.
    """
    if view[: len(MAGIC)].tobytes() != MAGIC:
        return None
    mask_checksum(view, segment.segment_nonce(sector))
    try:
        return decode_header(view)
    except FrameInvalid:
        return None


def unsupported_reason(view: memoryview) -> str:
    """Why this release does not understand the header in `view`, which `decode_header_at` has
    unmasked; "" if it does, or if the segment has no header there."""
    try:
        decode_header(view)
    except FrameUnsupported as error:
        return str(error) if matches_checksum(view) else ""
    except FrameInvalid:
        return ""
    return ""


class _Window:
    """A part of the file in memory that moves forward with the scan."""

    def __init__(self, files: Files, segment: Segment) -> None:
        self._files = files
        self._fd = segment.fd
        self._buffer = aligned_buffer(SCAN_BYTES)
        self._large = self._buffer[:0]
        self._start = self._end = 0

    def sector_at(self, sector: int) -> memoryview | None:
        """The bytes of one sector; None at the end of the file."""
        if not self._covers(sector, 1) and not self._read_from(sector, 1):
            return None
        at = sector * SECTOR_BYTES - self._start
        return self._buffer[at : at + SECTOR_BYTES]

    def payload_error(self, header: FrameHeader, sector: int) -> str:
        """Why the payload of the header at `sector` is corrupt; "" if it is intact."""
        sectors = header.payload_bytes // SECTOR_BYTES
        if sectors * SECTOR_BYTES > SCAN_BYTES:
            total = self._checksum_large(header, sector + 1)
        elif self._covers(sector + 1, sectors) or self._read_from(sector + 1, sectors):
            at = (sector + 1) * SECTOR_BYTES - self._start
            total = checksum(self._buffer[at : at + header.stored_bytes])
        else:
            total = None
        if total is None:
            return "the file ends inside the payload"
        return "" if total == header.stored_sum else "the payload does not match its checksum"

    def _checksum_large(self, header: FrameHeader, sector: int) -> int | None:
        """The checksum of a payload larger than the window, read through a separate buffer."""
        if not self._large:
            self._large = aligned_buffer(SCAN_BYTES)
        total = xxhash.xxh3_64()
        done = 0
        while done < header.stored_bytes:
            part = self._large[: min(SCAN_BYTES, header.payload_bytes - done)]
            if self._files.read_at(self._fd, [part], sector * SECTOR_BYTES + done) < len(part):
                return None
            total.update(part[: header.stored_bytes - done])
            done += len(part)
        return int(total.intdigest())

    def _covers(self, sector: int, sectors: int) -> bool:
        return (
            self._start <= sector * SECTOR_BYTES and (sector + sectors) * SECTOR_BYTES <= self._end
        )

    def _read_from(self, sector: int, sectors: int) -> bool:
        """Move the window to `sector`; returns whether it covers `sectors` sectors."""
        self._start = sector * SECTOR_BYTES
        self._end = self._start + self._files.read_at(self._fd, [self._buffer], self._start)
        return self._covers(sector, sectors)
