"""The segments that this node knows, and the location of each block in them.

Not thread-safe: the tier's lock guards it. It does no I/O and uses no clock.

A key is in several segments if two nodes packed it at the same time. Every node then reads the
*primary* copy, which is in the segment with the smallest name. All nodes agree on it, so two
collectors never delete both copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

from kvstore.blocks.key import Key
from kvstore.tiers.base import IO_ALIGNMENT
from kvstore.tiers.disk.index import Index
from kvstore.tiers.s3.layout import Footer

_LENGTH_BITS: Final = 19
_SECTOR_BITS: Final = 21
MAX_FRAME_SECTORS: Final = (1 << _LENGTH_BITS) - 1
"""Maximum frame in a location: 2 GiB."""
MAX_SEGMENT_SECTORS: Final = 5 << 18
"""Maximum segment: 5 GiB, the largest object of one put."""
MAX_SEGMENTS: Final = 1 << 20
"""Maximum number of tracked segments, because a location must fit into 63 bits."""


class Segment:
    """One segment in the bucket and its state.

    modified_s: time of the upload by the service's clock, in seconds since 1970. own: this process
    uploaded it. primary_count: number of blocks whose primary copy is in it. deleted_sectors: first
    sectors of deleted blocks. tombstones: names of its tombstones. tombstone_pending: no tombstone
    lists all deleted sectors yet.
    """

    __slots__ = (
        "deleted_sectors",
        "entries",
        "etag",
        "identity",
        "modified_s",
        "name",
        "nbytes",
        "own",
        "primary_count",
        "segment_no",
        "serial",
        "tombstone_pending",
        "tombstones",
    )

    def __init__(
        self, name: str, footer: Footer, *, etag: str, modified_s: float, own: bool
    ) -> None:
        self.name = name
        self.entries = footer.entries
        self.identity = footer.identity
        self.nbytes = footer.nbytes
        self.etag = etag
        self.modified_s = modified_s
        self.own = own
        self.deleted_sectors: set[int] = set()
        self.tombstones: set[str] = set()
        self.tombstone_pending = False
        self.segment_no = -1
        self.serial = 0
        self.primary_count = 0

    @property
    def all_deleted(self) -> bool:
        """Whether all blocks in the segment are deleted."""
        return len(self.deleted_sectors) == len(self.entries)


class SegmentIndex:
    """Maps keys to segments, and records the order in which segments were used."""

    def __init__(self) -> None:
        self.index = Index()
        self.segments: dict[str, Segment] = {}
        self.used_bytes = 0
        self.serial = 0
        """Number of segments added so far. It tells which segments are older than a listing."""
        self._segments_by_no: list[Segment | None] = []
        self._free_numbers: list[int] = []
        self._lru: OrderedDict[Segment, None] = OrderedDict()
        self._copies: dict[Key, list[int]] = {}
        """Locations of the other copies of keys that are in several segments."""

    def find(self, key: Key) -> tuple[Segment, int, int] | None:
        """(segment, sector, sectors) of a block's primary copy."""
        location = self.index.get(key)
        return self._unpack_location(location) if location else None

    def touch(self, segment: Segment) -> None:
        """Record a use of the segment."""
        if segment in self._lru:
            self._lru.move_to_end(segment)

    def lru_order(self) -> Iterator[Segment]:
        """All segments, least recently used first. The index must not change meanwhile."""
        return iter(self._lru)

    def mru_order(self) -> list[Segment]:
        """All segments, most recently used first."""
        return list(reversed(self._lru))

    def blocks_of(self, segment: Segment) -> list[tuple[Key, int]]:
        """Keys whose primary copy is in a segment, with the sizes of their frames in bytes.

        Empty if the segment was removed.
        """
        if segment not in self._lru:
            return []
        return [
            (key, sectors * IO_ALIGNMENT)
            for key, sector, sectors in segment.entries
            if self.index.get(key) == _pack_location(segment.segment_no, sector, sectors)
        ]

    def add_segment(self, segment: Segment) -> None:
        """Add a segment with its `deleted_sectors`. The index has no segment of that name."""
        assert segment.name not in self.segments, "added twice"
        assert len(self.segments) < MAX_SEGMENTS, "too many segments"
        if self._free_numbers:
            segment.segment_no = self._free_numbers.pop()
            self._segments_by_no[segment.segment_no] = segment
        else:
            segment.segment_no = len(self._segments_by_no)
            self._segments_by_no.append(segment)
        self.serial += 1
        segment.serial = self.serial
        self.segments[segment.name] = segment
        self._lru[segment] = None
        self.used_bytes += segment.nbytes
        for key, sector, sectors in segment.entries:
            if sector not in segment.deleted_sectors:
                self._put(key, _pack_location(segment.segment_no, sector, sectors), segment)

    def remove_segment(self, segment: Segment) -> int:
        """Remove a segment; returns the number of keys without another copy."""
        assert self.segments.pop(segment.name) is segment
        lost = 0
        for key, sector, sectors in segment.entries:
            if sector not in segment.deleted_sectors:
                lost += self._remove(key, _pack_location(segment.segment_no, sector, sectors))
        assert segment.primary_count == 0, "a block is still read from a dropped segment"
        del self._lru[segment]
        self._segments_by_no[segment.segment_no] = None
        self._free_numbers.append(segment.segment_no)
        self.used_bytes -= segment.nbytes
        return lost

    def mark_deleted(self, key: Key) -> list[Segment]:
        """Delete a key; returns the segments that have a copy of it."""
        location = self.index.get(key)
        if not location:
            return []
        segments = []
        for each in [location, *self._copies.get(key, ())]:
            segment, sector, _ = self._unpack_location(each)
            segment.deleted_sectors.add(sector)
            segment.tombstone_pending = True
            segments.append(segment)
            self._remove(key, each)
        return segments

    def apply_tombstone(self, segment: Segment, sectors: Collection[int]) -> None:
        """Delete the blocks at these sectors of a tracked segment."""
        new = set(sectors) - segment.deleted_sectors
        if not new:
            return
        for key, sector, length in segment.entries:
            if sector in new:
                segment.deleted_sectors.add(sector)
                self._remove(key, _pack_location(segment.segment_no, sector, length))

    def check_invariants(self) -> None:
        """Assert every invariant; for tests."""
        total = 0
        for segment in self.segments.values():
            live = [row for row in segment.entries if row[1] not in segment.deleted_sectors]
            locations = {
                key: _pack_location(segment.segment_no, sector, sectors)
                for key, sector, sectors in live
            }
            won = [key for key, location in locations.items() if self.index.get(key) == location]
            assert len(won) == segment.primary_count, "wrong count of primary copies"
            total += segment.primary_count
            for key, location in locations.items():
                primary = self._unpack_location(self.index.get(key))[0]
                assert primary.name <= segment.name, "a copy precedes the primary"
                assert primary is segment or location in self._copies[key], "an untracked copy"
        assert total == len(self.index), "a block in no segment"
        assert all(self.index.get(key) for key in self._copies), "a copy without a primary"
        assert self.used_bytes == sum(segment.nbytes for segment in self.segments.values())
        assert set(self._lru) == set(self.segments.values())

    def _put(self, key: Key, location: int, segment: Segment) -> None:
        current = self.index.get(key)
        if current and self._unpack_location(current)[0].name < segment.name:
            self._copies.setdefault(key, []).append(location)
            return
        if current:
            self._copies.setdefault(key, []).append(current)
            self._unpack_location(current)[0].primary_count -= 1
        self.index.put(key, location)
        segment.primary_count += 1

    def _remove(self, key: Key, location: int) -> int:
        """Remove one location of a key; returns 1 if it was the last one."""
        copies = self._copies.get(key, [])
        if self.index.get(key) != location:
            if location in copies:
                copies.remove(location)
                if not copies:
                    del self._copies[key]
            return 0
        self._unpack_location(location)[0].primary_count -= 1
        self.index.remove(key, location)
        if not copies:
            return 1
        best = min(copies, key=lambda each: self._unpack_location(each)[0].name)
        copies.remove(best)
        if not copies:
            del self._copies[key]
        self.index.put(key, best)
        self._unpack_location(best)[0].primary_count += 1
        return 0

    def _unpack_location(self, location: int) -> tuple[Segment, int, int]:
        rest = location >> _LENGTH_BITS
        segment = self._segments_by_no[rest >> _SECTOR_BITS]
        assert segment is not None, "location in a removed segment"
        return segment, rest & ((1 << _SECTOR_BITS) - 1), location & MAX_FRAME_SECTORS


def _pack_location(segment_no: int, sector: int, sectors: int) -> int:
    """The location of a frame as one integer, never 0."""
    return ((segment_no << _SECTOR_BITS) | sector) << _LENGTH_BITS | sectors
