"""Opening what an earlier process left, however it ended.

Sealed segments are taken by their footers. A segment without a valid footer was in use when the
process was killed (or its footer is damaged): its frames are found by a scan, and their payloads
are checked once, because the order in which one write's pages reach the file is not known.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.tiers.disk.directory import segment_paths
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.index import MAX_SLOTS, Entries, Index
from kvstore.tiers.disk.segment import Segment, SegmentInvalid

log = logging.getLogger(__name__)


@dataclass
class Recovered:
    """segments: oldest first, none in the index yet. torn: frames dropped by scans."""

    segments: list[Segment] = field(default_factory=list)
    torn: int = 0
    scanned: int = 0


def recover(files: Files, directory: str) -> Recovered:
    """Open every segment of a directory. Unusable files of ours are removed, others let be.

    Raises ConfigError when a segment cannot be opened at all.
    """
    found = Recovered()
    for path in segment_paths(directory):
        try:
            segment = Segment.open(files, path)
        except SegmentInvalid as fault:
            log.warning("removing %s, which is no segment: %s", path, fault)
            files.unlink(path)
            continue
        except OSError as error:
            for opened in found.segments:
                files.close(opened.fd)
            raise ConfigError(
                f"the disk tier cannot open {path!r}: {error.strerror}; make it readable and "
                "writable for this user, or raise the limit on open files"
            ) from None
        found.segments.append(segment)
        _read_entries(files, segment, found)
    if len(found.segments) > MAX_SLOTS:
        raise ConfigError(f"{directory!r} holds more than {MAX_SLOTS} segments; move it away")
    return found


def fill(index: Index, segment: Segment) -> None:
    """Put a segment's live entries into the index; a later segment's win over an earlier's."""
    places = segment.entries.places(segment.slot)
    if len(segment.entries.names) == 1 and not any(segment.marks):
        (name,) = segment.entries.names
        index.put_many(name, segment.entries.hashes, places)
        return
    marks = segment.marks or bytearray(len(places))
    for (key, _, _), place, mark in zip(segment.entries, places, marks, strict=True):
        if not mark:
            index.put(key, place)


def _read_entries(files: Files, segment: Segment, found: Recovered) -> None:
    """By the footer, else by a scan."""
    if segment.short:
        log.warning("%s is shorter than it was; taking what is left", segment.path)
    elif segment.load_footer(files):
        return
    entries, end = Entries(), 1
    torn = []
    for frame in segment.scan(files):
        end = frame.page + frame.pages
        if frame.fault:
            torn.append(frame.page)
        else:
            entries.add(frame.header.key, frame.page, frame.pages)
    segment.adopt(entries, end)
    found.scanned += 1
    found.torn += len(torn)
    if torn:
        log.warning("%s: %d unfinished or damaged frames dropped", segment.path, len(torn))
    for page in torn:
        # So that the next scan does not meet them again.
        with contextlib.suppress(OSError):
            segment.kill(files, page)
