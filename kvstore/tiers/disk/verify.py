"""Checks every frame of tier directories without changing them: `kvstore verify DIR...`."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvstore import codecs
from kvstore.blocks.frame import (
    FrameHeader,
    aligned_buffer,
    padded_bytes,
    parse_header,
    verify_raw,
    verify_stored,
)
from kvstore.blocks.key import Key
from kvstore.errors import ConfigError, FrameInvalid, FrameUnsupported
from kvstore.tiers.disk.files import SECTOR_BYTES, Files
from kvstore.tiers.disk.layout import SegmentInvalid, SegmentUnsupported
from kvstore.tiers.disk.lockfile import DirectoryLock, segment_paths
from kvstore.tiers.disk.scan import decode_header_at, scan_frames
from kvstore.tiers.disk.segment import Segment

log = logging.getLogger(__name__)

MAX_REPORTED = 1000
"""Maximum number of corrupt frames, and of reasons, that a report describes; all are counted."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes) after each frame."""


@dataclass(frozen=True)
class CorruptFrame:
    """segment: path of the file. offset_bytes: offset of the header. block: the key as text."""

    segment: str
    offset_bytes: int
    block: str
    reason: str


@dataclass
class VerifyReport:
    """The result of a check. frames: number of frames found, corrupt and unsupported ones
    included."""

    segments: int = 0
    segments_corrupt: int = 0
    """Number of unreadable segment files: header and trailer are corrupt."""
    segments_unsupported: int = 0
    """Number of segments that are not, or not completely, checked: files of a later version, and
    files with frames or an index of another release."""
    segments_unsealed: int = 0
    """Number of segments without a valid footer, after a kill or because it is corrupt. They are
    scanned for frames."""
    frames: int = 0
    bytes_checked: int = 0
    corrupt_count: int = 0
    corrupt: list[CorruptFrame] = field(default_factory=list)
    unsupported: Counter[str] = field(default_factory=Counter)
    """Number of frames of other releases, which are not checked, by reason."""

    @property
    def ok(self) -> bool:
        """Whether nothing is corrupt."""
        return not self.corrupt_count and not self.segments_corrupt

    @property
    def unsupported_count(self) -> int:
        """Number of frames of other releases."""
        return self.unsupported.total()


def verify(
    directories: Sequence[str], progress: Progress = lambda done, total: None
) -> VerifyReport:
    """Read, verify and decode every frame. No store may have the directories open.

    Raises ConfigError: a directory is in use, or is not a directory of a disk tier.
    """
    with ExitStack() as locks:
        for directory in directories:
            lock = DirectoryLock(directory, create=False)
            locks.callback(lock.release)
        paths = [path for directory in directories for path in segment_paths(directory)]
        return _Verifier(progress).run(paths)


class _Verifier:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._report = VerifyReport()
        self._files = Files()
        self._frame = aligned_buffer(SECTOR_BYTES)
        self._block = aligned_buffer(SECTOR_BYTES)

    def run(self, paths: list[str]) -> VerifyReport:
        sizes = [os.stat(path).st_size for path in paths]
        done, total = 0, sum(sizes)
        for path, size in zip(paths, sizes, strict=True):
            self._report.segments += 1
            try:
                segment = Segment.open(self._files, path, writable=False)
            except SegmentUnsupported as error:
                log.warning("%s: segment of another release: %s", path, error)
                self._report.segments_unsupported += 1
            except SegmentInvalid as error:
                log.warning("%s: unreadable segment: %s", path, error)
                self._report.segments_corrupt += 1
            except OSError as error:
                raise ConfigError(f"cannot read {path!r}: {error.strerror}") from None
            else:
                try:
                    for at in self._check_segment(segment):
                        self._progress(done + min(at, size), total)
                finally:
                    self._files.close(segment.fd)
            done += size
            self._progress(done, total)
        return self._report

    def _check_segment(self, segment: Segment) -> Iterator[int]:
        """Check one segment; yields the number of bytes done."""
        if not segment.load_footer(self._files):
            self._report.segments_unsealed += 1
            for found in scan_frames(self._files, segment):
                self._check_codec(found.header)
                self._record(segment, found.sector, found.sectors, found.header.key, found.error)
                yield (found.sector + found.sectors) * SECTOR_BYTES
            self._report.segments_unsupported += segment.left_as_it_is
            self._report.frames += segment.unsupported_frames
            self._count_unsupported("frame header of another release", segment.unsupported_frames)
            return
        for (key, sector, sectors), tombstone in zip(
            segment.entries, segment.tombstones, strict=True
        ):
            if not tombstone:
                self._record(
                    segment, sector, sectors, key, self._frame_error(segment, key, sector, sectors)
                )
            yield (sector + sectors) * SECTOR_BYTES

    def _frame_error(self, segment: Segment, key: Key, sector: int, sectors: int) -> str:
        """Why the frame at `sector` is corrupt; "" if it is intact, or of another release."""
        if len(self._frame) < sectors * SECTOR_BYTES:
            self._frame = aligned_buffer(sectors * SECTOR_BYTES)
        frame = self._frame[: sectors * SECTOR_BYTES]
        try:
            if self._files.read_at(segment.fd, [frame], sector * SECTOR_BYTES) < len(frame):
                return "the file ends inside the frame"
            decode_header_at(segment, frame[:SECTOR_BYTES], sector)  # unmasks the checksum
            header = parse_header(frame, key)
            verify_stored(header, frame[SECTOR_BYTES:])
            self._decode(header, frame[SECTOR_BYTES:])
        except OSError as error:
            return f"read error: {error.strerror}"
        except FrameUnsupported as error:
            self._count_unsupported(str(error))
        except FrameInvalid as error:
            return str(error)
        return ""

    def _check_codec(self, header: FrameHeader) -> None:
        """Count a frame whose codec is unknown."""
        try:
            codecs.codec_by_frame_id(header.codec)
        except FrameUnsupported as error:
            self._count_unsupported(str(error))

    def _count_unsupported(self, reason: str, frames: int = 1) -> None:
        counts = self._report.unsupported
        if frames:
            counts[reason if reason in counts or len(counts) < MAX_REPORTED else "other"] += frames

    def _decode(self, header: FrameHeader, payload: memoryview) -> None:
        """Decode the block and verify its checksum. Raises FrameInvalid."""
        if len(self._block) < header.raw_bytes:
            self._block = aligned_buffer(padded_bytes(header.raw_bytes))
        codec = codecs.codec_by_frame_id(header.codec)
        length = codec.decode(payload[: header.stored_bytes], self._block[: header.raw_bytes])
        if length != header.raw_bytes:
            raise FrameInvalid(f"the payload decodes to {length} bytes, not {header.raw_bytes}")
        verify_raw(header, self._block)

    def _record(self, segment: Segment, sector: int, sectors: int, key: Key, error: str) -> None:
        self._report.frames += 1
        self._report.bytes_checked += sectors * SECTOR_BYTES
        if not error:
            return
        self._report.corrupt_count += 1
        if len(self._report.corrupt) < MAX_REPORTED:
            block = f"{key.tenant}/{key.namespace}/{key.hash.hex()}"
            self._report.corrupt.append(
                CorruptFrame(segment.path, sector * SECTOR_BYTES, block, error)
            )
