"""State that all directories of a disk tier share: the lock, the index and segment references.

A segment has one reference of its volume and one of each call that uses its descriptor. Removing a
segment from its volume deletes the file immediately. The last reference closes the descriptor, so a
read in progress completes. The segment's bytes count towards the capacity until then.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.blocks.key import Key
from kvstore.tiers.disk.index import MAX_OPEN_SEGMENTS, Index, pack_location, unpack_location
from kvstore.tiers.disk.segment import Segment

TTL_PARTS = 8
"""With a TTL, a segment takes new frames for 1/8 of the TTL. All its frames expire with the first
one, at most that much early."""
MAX_SUPERSEDED = 1 << 16
"""Maximum number of blocks with recorded older copies; see `DiskState.publish`."""
CHECKPOINT_BYTES = 1 << 30
"""Bytes written to a segment since its last checkpoint that trigger the next one."""


@dataclass(frozen=True)
class DiskLimits:
    """Limits of one directory. ttl_ms: 0 for no limit."""

    capacity_bytes: int
    segment_bytes: int
    eviction: str = "lru"
    ttl_ms: int = 0
    checkpoint_bytes: int = CHECKPOINT_BYTES
    clock: Callable[[], float] = time.time
    """Seconds since 1970."""

    @property
    def append_window_ms(self) -> float:
        """How long a segment takes new frames, in milliseconds; 0: until it is full."""
        return self.ttl_ms / TTL_PARTS

    def now_ms(self) -> int:
        return int(self.clock() * 1000)


class DiskState:
    """The shared state. `lock` guards all fields; no thread does I/O while it owns the lock.

    The caller of each method owns the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.index = Index()
        self.segments: dict[int, Segment] = {}
        """Segments of all directories by their number in locations."""
        self.evictions = 0
        """Number of blocks removed with their segment."""
        self.expired = 0
        """Number of those that had reached the TTL."""
        self.torn = 0
        """Number of incomplete or corrupt frames that recovery dropped."""
        self._superseded: OrderedDict[Key, list[tuple[Segment, int]]] = OrderedDict()
        self._acquired = 0
        self._uses = 0

    def add_segment(self, segment: Segment) -> None:
        """Give a segment its number and the reference of its volume."""
        segment.segment_no = next(
            segment_no for segment_no in range(MAX_OPEN_SEGMENTS) if segment_no not in self.segments
        )
        segment.refs += 1
        self.segments[segment.segment_no] = segment
        self.touch(segment)

    def publish(self, key: Key, segment: Segment, sector: int, sectors: int) -> None:
        """Make a written frame visible to readers.

        The key may have an older frame in a directory that is disabled. Its location is recorded,
        so that a delete removes both. Otherwise the older frame would reappear after a restart.
        """
        old = self.index.get(key)
        if old:
            segment_no, old_sector, _ = unpack_location(old)
            self._superseded.setdefault(key, []).append((self.segments[segment_no], old_sector))
            if len(self._superseded) > MAX_SUPERSEDED:
                self._superseded.popitem(last=False)
        self.index.put(key, pack_location(segment.segment_no, sector, sectors))

    def remove_key(self, key: Key) -> list[tuple[Segment, int]]:
        """Remove a key from the index; returns (segment, sector) of each of its frames on disk."""
        found = self._superseded.pop(key, [])
        location = self.index.get(key)
        if location:
            segment_no, sector, _ = unpack_location(location)
            self.index.remove(key, location)
            found.append((self.segments[segment_no], sector))
        return [(segment, sector) for segment, sector in found if not segment.removed]

    def remove_segment(self, segment: Segment) -> int:
        """Remove a segment and its blocks; returns the number of blocks."""
        segment.removed = True
        del self.segments[segment.segment_no]
        removed = self.index.remove_all(segment.entries, segment.segment_no)
        removed += segment.unsupported_frames
        self.evictions += removed
        return removed

    def touch(self, segment: Segment) -> None:
        """Record a use of the segment."""
        self._uses += 1
        segment.last_used = self._uses

    def acquire(self, segment: Segment) -> None:
        """Take a reference: the descriptor stays open until `release`."""
        segment.refs += 1
        self._acquired += 1

    def release(self, segment: Segment) -> bool:
        """Drop a reference. If True, it was the last: the caller must call `close_segment`."""
        self._acquired -= 1
        segment.refs -= 1
        assert segment.refs >= 0, "segment released twice"
        if not self._acquired:
            self.changed.notify_all()
        return segment.refs == 0

    def is_busy(self) -> bool:
        """Whether any call uses a segment."""
        return self._acquired > 0
