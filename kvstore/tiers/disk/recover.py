"""Opening what an earlier process left, however it ended.

Sealed segments are taken by their footers. A segment without a valid footer was in use when the
process was killed (or its footer is damaged): its frames are found by a scan, from its last
checkpoint on if there is one, and their payloads are checked once, because the order in which one
write's pages reach the file is not known.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.index import unpack_place
from kvstore.tiers.disk.layout import SegmentInvalid
from kvstore.tiers.disk.lockfile import MEDIUM_FAULTS, DirectoryGone, segment_paths
from kvstore.tiers.disk.scan import scan
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import Limits, Shared

log = logging.getLogger(__name__)


@dataclass
class Recovered:
    """segments: oldest first, none in the index yet. torn: frames dropped by scans."""

    segments: list[Segment] = field(default_factory=list)
    torn: int = 0


def recover(files: Files, directory: str, limits: Limits, most: int) -> Recovered:
    """Open every segment of a directory. Unusable and expired files of ours are removed, others
    let be.

    Raises ConfigError when a segment cannot be opened at all or there are more than `most`;
    DirectoryGone when the disk is at fault.
    """
    found = Recovered()
    now_ms = limits.now_ms()
    try:
        for path in segment_paths(directory):
            try:
                segment = Segment.open(files, path)
            except SegmentInvalid as fault:
                log.warning("removing %s, which is no segment: %s", path, fault)
                files.unlink(path)
                continue
            # Of a clock that was ahead: else it would stay longer than it may.
            segment.made_ms = min(segment.made_ms, now_ms)
            if limits.ttl_ms and segment.made_ms + limits.ttl_ms <= now_ms:
                files.close(segment.fd)
                files.unlink(path)
                continue
            found.segments.append(segment)
            _read_entries(files, segment, found)
        if len(found.segments) > most:
            raise ConfigError(f"{directory!r} holds more than {most} segments; move it away")
    except OSError as error:
        _close(files, found)
        kind = DirectoryGone if error.errno in MEDIUM_FAULTS else ConfigError
        raise kind(
            f"the disk tier cannot open {directory!r}: {error.strerror}; make its files readable "
            "and writable for this user, or raise the limit on open files"
        ) from None
    except ConfigError:
        _close(files, found)
        raise
    return found


def _close(files: Files, found: Recovered) -> None:
    for segment in found.segments:
        files.close(segment.fd)


def fill(files: Files, shared: Shared, segment: Segment) -> None:
    """Put a segment's live entries into the index; a later segment's win over an earlier's.

    A block may lie twice: it was written again while the disk of the first one was not there. The
    loser is deleted, or it would be back when the winner is.
    """
    index, entries = shared.index, segment.entries
    places = entries.places(segment.slot)
    old: list[int] = []
    if len(entries.names) == 1 and not any(segment.marks):
        (name,) = entries.names
        old = index.put_many(name, entries.hashes, places)
    else:
        marks = segment.marks or bytearray(len(places))
        for (key, _, _), place, mark in zip(entries, places, marks, strict=True):
            if not mark:
                old.append(index.get(key))
                index.put(key, place)
    for place in filter(None, old):
        slot, page, _ = unpack_place(place)
        with contextlib.suppress(OSError):
            shared.segments[slot].kill(files, page)


def _read_entries(files: Files, segment: Segment, found: Recovered) -> None:
    """By the footer, else by a scan from the checkpoint or from the start."""
    start = 1
    if segment.short:
        log.warning("%s is shorter than it was; taking what is left", segment.path)
    elif segment.load_footer(files):
        return
    elif segment.load_checkpoint(files):
        start = segment.next_page
    entries, end = segment.entries, start
    torn = []
    for frame in scan(files, segment, start):
        end = frame.page + frame.pages
        if frame.fault:
            torn.append(frame.page)
        else:
            entries.add(frame.header.key, frame.page, frame.pages)
    segment.adopt(entries, end)
    found.torn += len(torn)
    if torn:
        log.warning("%s: %d unfinished or damaged frames dropped", segment.path, len(torn))
    for page in torn:
        # So that the next scan does not meet them again.
        with contextlib.suppress(OSError):
            segment.kill(files, page)
