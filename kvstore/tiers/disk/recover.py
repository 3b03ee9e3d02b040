"""Opening the segments of an earlier process, after a clean close or a kill.

The entries of a sealed segment come from its footer. A segment without a valid footer was in use
when the process was killed, or its footer is corrupt. A scan then finds its frames, starting at the
last checkpoint if the segment has one. The scan verifies each payload, because the sectors of one
write may reach the file in any order.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.index import unpack_location
from kvstore.tiers.disk.layout import SegmentInvalid, SegmentUnsupported
from kvstore.tiers.disk.lockfile import (
    DISK_ERRNOS,
    DirectoryUnavailable,
    segment_paths,
    sequence_no_of,
)
from kvstore.tiers.disk.scan import scan_frames
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import DiskLimits, DiskState

log = logging.getLogger(__name__)


class UnsupportedSegments:
    """Segment files of later versions. They are not opened, and stay as they are."""

    def __init__(self) -> None:
        self._paths: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def nbytes(self) -> int:
        """Size of all files: they take room of the directory's capacity."""
        return sum(self._paths.values())

    def add(self, path: str, error: SegmentUnsupported) -> None:
        """Set a file aside. Raises OSError."""
        if not self._paths:
            log.warning("leaving segments of a later version as they are: %s: %s", path, error)
        self._paths[path] = os.path.getsize(path)

    def delete(self, files: Files) -> int:
        """Delete all files, on request; returns their size. Raises OSError."""
        nbytes = self.nbytes
        for path in list(self._paths):
            files.unlink(path)
            del self._paths[path]
        return nbytes


@dataclass
class RecoveryResult:
    """segments: oldest first, not yet indexed. torn: number of frames that scans dropped.
    next_sequence_no: above the number of every segment file."""

    segments: list[Segment] = field(default_factory=list)
    torn: int = 0
    unsupported: UnsupportedSegments = field(default_factory=UnsupportedSegments)
    next_sequence_no: int = 1


def recover(files: Files, directory: str, limits: DiskLimits, max_segments: int) -> RecoveryResult:
    """Open every segment of a directory. Invalid and expired segment files are deleted; segment
    files of later versions and other files are not touched.

    Raises ConfigError: a segment cannot be opened, or there are more than `max_segments`.
    Raises DirectoryUnavailable: the disk fails.
    """
    result = RecoveryResult()
    now_ms = limits.now_ms()
    try:
        for path in segment_paths(directory):
            result.next_sequence_no = sequence_no_of(path) + 1
            try:
                segment = Segment.open(files, path)
            except SegmentUnsupported as error:
                result.unsupported.add(path, error)
                continue
            except SegmentInvalid as error:
                log.warning("deleting invalid segment %s: %s", path, error)
                files.unlink(path)
                continue
            # A time in the future (from a clock that was ahead) would extend the segment's life.
            segment.created_ms = min(segment.created_ms, now_ms)
            if limits.ttl_ms and segment.created_ms + limits.ttl_ms <= now_ms:
                files.close(segment.fd)
                files.unlink(path)
                continue
            result.segments.append(segment)
            _load_entries(files, segment, result)
        if len(result.segments) > max_segments:
            raise ConfigError(
                f"{directory!r} contains more than {max_segments} segments; move some away, or use "
                "another directory"
            )
    except OSError as error:
        _close_segments(files, result)
        kind = DirectoryUnavailable if error.errno in DISK_ERRNOS else ConfigError
        raise kind(
            f"the disk tier cannot open {directory!r}: {error.strerror}; make its files readable "
            "and writable for this user, or raise the limit on open files"
        ) from None
    except ConfigError:
        _close_segments(files, result)
        raise
    return result


def _close_segments(files: Files, result: RecoveryResult) -> None:
    for segment in result.segments:
        files.close(segment.fd)


def index_segment(files: Files, state: DiskState, segment: Segment) -> None:
    """Add a segment's live entries to the index; later segments replace entries of earlier ones.

    A block has two copies if it was written again while the disk of the first copy was missing. The
    replaced copy is deleted. Otherwise it would reappear after the newer copy is deleted.
    """
    index, entries = state.index, segment.entries
    locations = entries.locations(segment.segment_no)
    replaced: list[int] = []
    if len(entries.namespaces) == 1 and not any(segment.tombstones):
        (namespace,) = entries.namespaces
        replaced = index.put_many(namespace, entries.hashes, locations)
    else:
        tombstones = segment.tombstones or bytearray(len(locations))
        for (key, _, _), location, tombstone in zip(entries, locations, tombstones, strict=True):
            if not tombstone:
                replaced.append(index.get(key))
                index.put(key, location)
    for location in filter(None, replaced):
        segment_no, sector, _ = unpack_location(location)
        with contextlib.suppress(OSError):
            state.segments[segment_no].mark_deleted(files, sector)


def _load_entries(files: Files, segment: Segment, result: RecoveryResult) -> None:
    """Load entries from the footer, else by a scan from the checkpoint or from the start."""
    start = 1
    if segment.truncated:
        log.warning("%s is truncated; recovering the frames that remain", segment.path)
    elif segment.load_footer(files):
        return
    elif segment.load_checkpoint(files):
        start = segment.next_sector
    entries, end = segment.entries, start
    torn = []
    for frame in scan_frames(files, segment, start):
        end = frame.sector + frame.sectors
        if frame.error:
            torn.append(frame.sector)
        else:
            entries.add(frame.header.key, frame.sector, frame.sectors)
    segment.restore_entries(entries, end)
    result.torn += len(torn)
    if segment.left_as_it_is:
        frames = segment.unsupported_frames
        log.warning(
            "%s: left as it is: another release wrote %d frames, or its index", segment.path, frames
        )
    if torn:
        log.warning("%s: dropped %d incomplete or corrupt frames", segment.path, len(torn))
    for sector in torn:
        # The next scan then skips them.
        with contextlib.suppress(OSError):
            segment.mark_deleted(files, sector)
