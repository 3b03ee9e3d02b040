"""Every frame of some directories checked, without changing anything: `kvstore verify DIR...`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvstore import codecs
from kvstore.blocks.frame import (
    FrameHeader,
    aligned_buffer,
    padded,
    parse_header,
    verify_raw,
    verify_stored,
)
from kvstore.blocks.key import Key
from kvstore.errors import ConfigError, FrameInvalid
from kvstore.tiers.disk.files import PAGE, Files
from kvstore.tiers.disk.layout import SegmentInvalid
from kvstore.tiers.disk.lockfile import DirectoryLock, segment_paths
from kvstore.tiers.disk.scan import header_at, scan
from kvstore.tiers.disk.segment import Segment

log = logging.getLogger(__name__)

MAX_REPORTED = 1000
"""Bad frames that a report describes; the others are counted."""

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) as it goes."""


@dataclass(frozen=True)
class BadFrame:
    """segment: path of the file. offset_bytes: of the header page. block: its key, as text."""

    segment: str
    offset_bytes: int
    block: str
    reason: str


@dataclass
class VerifyReport:
    """What was found. `frames` are all that should be whole, the bad ones among them."""

    segments: int = 0
    segments_bad: int = 0
    """Segment files of which nothing can be read: their first page is damaged."""
    segments_unsealed: int = 0
    """Segments without a valid footer: left by a kill, or damaged. Their frames are scanned for."""
    frames: int = 0
    bytes_checked: int = 0
    bad_count: int = 0
    bad: list[BadFrame] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.bad_count and not self.segments_bad


def verify(
    directories: Sequence[str], progress: Progress = lambda done, total: None
) -> VerifyReport:
    """Read, checksum and decode every frame. No store may have a directory open.

    Raises ConfigError when one is no directory of a disk tier, or is in use.
    """
    with ExitStack() as locks:
        for directory in directories:
            lock = DirectoryLock(directory, create=False)
            locks.callback(lock.release)
        paths = [path for directory in directories for path in segment_paths(directory)]
        return _Check(progress).run(paths)


class _Check:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._report = VerifyReport()
        self._files = Files()
        self._frame = aligned_buffer(PAGE)
        self._block = aligned_buffer(PAGE)

    def run(self, paths: list[str]) -> VerifyReport:
        sizes = [os.stat(path).st_size for path in paths]
        done, total = 0, sum(sizes)
        for path, size in zip(paths, sizes, strict=True):
            self._report.segments += 1
            try:
                segment = Segment.open(self._files, path, writable=False)
            except SegmentInvalid as fault:
                log.warning("%s is no readable segment: %s", path, fault)
                self._report.segments_bad += 1
            except OSError as error:
                raise ConfigError(f"cannot read {path!r}: {error.strerror}") from None
            else:
                try:
                    for at in self._segment(segment):
                        self._progress(done + min(at, size), total)
                finally:
                    self._files.close(segment.fd)
            done += size
            self._progress(done, total)
        return self._report

    def _segment(self, segment: Segment) -> Iterator[int]:
        """Check one segment; yields how many of its bytes are done."""
        if not segment.load_footer(self._files):
            self._report.segments_unsealed += 1
            for found in scan(self._files, segment):
                self._note(segment, found.page, found.pages, found.header.key, found.fault)
                yield (found.page + found.pages) * PAGE
            return
        for (key, page, pages), mark in zip(segment.entries, segment.marks, strict=True):
            if not mark:
                self._note(segment, page, pages, key, self._fault(segment, key, page, pages))
            yield (page + pages) * PAGE

    def _fault(self, segment: Segment, key: Key, page: int, pages: int) -> str:
        """What is wrong with the frame at `page`; empty when nothing."""
        if len(self._frame) < pages * PAGE:
            self._frame = aligned_buffer(pages * PAGE)
        frame = self._frame[: pages * PAGE]
        try:
            if self._files.read_at(segment.fd, [frame], page * PAGE) < len(frame):
                return "the file ends inside it"
            if header_at(segment, frame[:PAGE], page) is None:
                return "its header is damaged"
            header = parse_header(frame, key)
            verify_stored(header, frame[PAGE:])
            self._decode(header, frame[PAGE:])
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        except FrameInvalid as fault:
            return str(fault)
        return ""

    def _decode(self, header: FrameHeader, payload: memoryview) -> None:
        """The block as an engine would get it. Raises FrameInvalid."""
        if len(self._block) < header.raw_bytes:
            self._block = aligned_buffer(padded(header.raw_bytes))
        codec = codecs.open(header.codec)
        length = codec.decode(payload[: header.stored_bytes], self._block[: header.raw_bytes])
        if length != header.raw_bytes:
            raise FrameInvalid(f"it decodes to {length} bytes, not {header.raw_bytes}")
        verify_raw(header, self._block)

    def _note(self, segment: Segment, page: int, pages: int, key: Key, fault: str) -> None:
        self._report.frames += 1
        self._report.bytes_checked += pages * PAGE
        if not fault:
            return
        self._report.bad_count += 1
        if len(self._report.bad) < MAX_REPORTED:
            block = f"{key.tenant}/{key.namespace}/{key.hash.hex()}"
            self._report.bad.append(BadFrame(segment.path, page * PAGE, block, fault))
