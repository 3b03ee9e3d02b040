"""Opening the segments of an earlier process, after a clean close or a kill.

The entries of a sealed segment come from its footer, and from a scan if frames follow those in the
footer. A segment without a valid footer was in use when the process was killed, or its footer is
corrupt. A scan then finds its frames, starting at the last checkpoint if the segment has one. The
scan verifies each payload, because the sectors of one write may reach the file in any order.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.tiers.disk.aside import SetAside
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.index import unpack_location
from kvstore.tiers.disk.layout import SegmentDiscarded, SegmentInvalid, sequence_no_of
from kvstore.tiers.disk.lockfile import DISK_ERRNOS, DirectoryUnavailable, segment_paths
from kvstore.tiers.disk.scan import frames_after_footer, scan_frames
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import DiskLimits, DiskState

log = logging.getLogger(__name__)


@dataclass
class RecoveryResult:
    """segments: oldest first, not yet indexed. torn: number of frames that scans dropped. aside:
    unreadable files, also of earlier openings. unreadable: number of files set aside now.
    last_sequence_no: the highest number of any segment file; 0: none."""

    segments: list[Segment] = field(default_factory=list)
    torn: int = 0
    aside: SetAside | None = None
    unreadable: int = 0
    last_sequence_no: int = 0


def recover(files: Files, directory: str, limits: DiskLimits, max_segments: int) -> RecoveryResult:
    """Open every segment of a directory. Expired segment files are deleted, unreadable ones are set
    aside; other files are not touched.

    Raises ConfigError: a segment cannot be opened, or there are more than `max_segments`.
    Raises DirectoryUnavailable: the disk fails.
    """
    result = RecoveryResult()
    try:
        aside = result.aside = SetAside(files, directory)
        for path in segment_paths(directory):
            segment = _open_segment(files, path, result, aside)
            if segment is None:
                continue
            # Without a recorded time, no age counts from before the newest segment.
            limits.clock.advance(segment.identity.created_ms, segment.identity.created_ms)
            now_ms = limits.now_ms()
            # A file's time in the future would extend the segment's life.
            segment.created_ms = min(segment.created_ms, now_ms)
            if limits.ttl_ms and segment.created_ms + limits.ttl_ms <= now_ms:
                files.close(segment.fd)
                files.unlink(path)
                continue
            result.segments.append(segment)
            _load_entries(files, segment, result)
        result.last_sequence_no = max(result.last_sequence_no, aside.last_sequence_no())
        if limits.ttl_ms:
            aside.delete_written_before(limits.now_ms() - limits.ttl_ms)
        aside.trim(limits.capacity_bytes // 2)
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


def _open_segment(
    files: Files, path: str, result: RecoveryResult, aside: SetAside
) -> Segment | None:
    """Open one segment file, or set it aside and return None. Raises OSError."""
    result.last_sequence_no = max(result.last_sequence_no, sequence_no_of(path))
    try:
        segment = Segment.open(files, path)
    except SegmentDiscarded as error:
        log.warning("deleting %s, which has no blocks: %s", path, error)
        files.unlink(path)
        return None
    except SegmentInvalid as error:
        target = aside.add(path)
        result.unreadable += 1
        log.error("%s: unreadable segment, set aside as %s: %s", path, target, error)
        return None
    if segment.header_restored:
        log.warning("%s: the first sector was corrupt; restored from its copy", path)
    return segment


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
    elif segment.load_footer(files) or segment.load_checkpoint(files):
        start = segment.next_sector
    frames = (
        frames_after_footer(files, segment)
        if segment.sealed
        else scan_frames(files, segment, start)
    )
    entries, end = segment.entries, start
    torn = []
    for frame in frames:
        if segment.sealed:
            log.warning("%s: frames follow the footer; recovering them", segment.path)
            segment.reopen(files)
            entries = segment.entries
        end = frame.sector + frame.sectors
        if frame.error:
            torn.append(frame.sector)
        else:
            entries.add(frame.header.key, frame.sector, frame.sectors)
    segment.restore_entries(entries, end)
    result.torn += len(torn)
    if torn:
        log.warning("%s: dropped %d incomplete or corrupt frames", segment.path, len(torn))
    for sector in torn:
        # The next scan then skips them.
        with contextlib.suppress(OSError):
            segment.mark_deleted(files, sector)
