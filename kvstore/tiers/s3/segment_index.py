"""What this node knows of the segments: where each block lies, and which segments are of no use.

Not thread-safe: the tier's lock guards it. It does no I/O and knows no clock.

A key may lie in several segments, when two nodes packed it at the same time. Then every node takes
it from the segment whose name is the smallest, so that all agree which copies are the duplicates:
two collectors never delete both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

from kvstore.blocks.key import Key
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.disk.index import Index
from kvstore.tiers.s3.layout import Footer

_PAGES_BITS: Final = 19
_PAGE_BITS: Final = 21
MAX_FRAME_PAGES: Final = (1 << _PAGES_BITS) - 1
"""Largest frame a place can name: 2 GiB."""
MAX_SEGMENT_PAGES: Final = 5 << 18
"""Pages of the largest segment: 5 GiB, the largest object that one put makes."""
MAX_SEGMENTS: Final = 1 << 20
"""Most segments known at once; a place must fit in 63 bits."""


class Segment:
    """One object, and what is known of it.

    modified_s: its age, by the service's clock. own: this process put it. wins: blocks that are
    read from it. dead: pages of deleted blocks. graves: names of the objects that say so; `dirty`
    while none says all of it.
    """

    __slots__ = (
        "dead",
        "dirty",
        "entries",
        "etag",
        "graves",
        "identity",
        "modified_s",
        "name",
        "nbytes",
        "own",
        "serial",
        "slot",
        "wins",
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
        self.dead: set[int] = set()
        self.graves: set[str] = set()
        self.dirty = False
        self.slot = -1
        self.serial = 0
        self.wins = 0

    @property
    def all_dead(self) -> bool:
        """Whether every block in it was deleted."""
        return len(self.dead) == len(self.entries)


class Catalog:
    """Keys, the segments they lie in, and the order in which segments were used."""

    def __init__(self) -> None:
        self.index = Index()
        self.segments: dict[str, Segment] = {}
        self.used_bytes = 0
        self.serial = 0
        """Grows with each segment added: tells what was known before a listing began."""
        self._slots: list[Segment | None] = []
        self._free: list[int] = []
        self._order: OrderedDict[Segment, None] = OrderedDict()
        self._copies: dict[Key, list[int]] = {}
        """The other places of keys that lie in several segments."""

    def find(self, key: Key) -> tuple[Segment, int, int] | None:
        """Segment, first page and pages of a block."""
        place = self.index.get(key)
        return self._at(place) if place else None

    def touch(self, segment: Segment) -> None:
        """It was used."""
        if segment in self._order:
            self._order.move_to_end(segment)

    def coldest(self) -> Iterator[Segment]:
        """All segments, least recently used first; nothing changes meanwhile."""
        return iter(self._order)

    def hottest(self) -> list[Segment]:
        """All segments, most recently used first."""
        return list(reversed(self._order))

    def blocks(self, segment: Segment) -> list[tuple[Key, int]]:
        """Keys that are read from a segment, and bytes of their frames; none if it is gone."""
        if segment not in self._order:
            return []
        return [
            (key, pages * PAGE_BYTES)
            for key, page, pages in segment.entries
            if self.index.get(key) == _place(segment.slot, page, pages)
        ]

    def add(self, segment: Segment) -> None:
        """A segment is there; its `dead` is set. Its name is not known yet."""
        assert segment.name not in self.segments, "added twice"
        assert len(self.segments) < MAX_SEGMENTS, "more segments than places can name"
        if self._free:
            segment.slot = self._free.pop()
            self._slots[segment.slot] = segment
        else:
            segment.slot = len(self._slots)
            self._slots.append(segment)
        self.serial += 1
        segment.serial = self.serial
        self.segments[segment.name] = segment
        self._order[segment] = None
        self.used_bytes += segment.nbytes
        for key, page, pages in segment.entries:
            if page not in segment.dead:
                self._put(key, _place(segment.slot, page, pages), segment)

    def drop(self, segment: Segment) -> int:
        """A segment is gone, or will be; how many keys are held no more."""
        assert self.segments.pop(segment.name) is segment
        lost = 0
        for key, page, pages in segment.entries:
            if page not in segment.dead:
                lost += self._remove(key, _place(segment.slot, page, pages))
        assert segment.wins == 0, "a block is still read from a dropped segment"
        del self._order[segment]
        self._slots[segment.slot] = None
        self._free.append(segment.slot)
        self.used_bytes -= segment.nbytes
        return lost

    def kill(self, key: Key) -> list[Segment]:
        """A key is deleted; the segments that hold a copy of it."""
        place = self.index.get(key)
        if not place:
            return []
        segments = []
        for each in [place, *self._copies.get(key, ())]:
            segment, page, _ = self._at(each)
            segment.dead.add(page)
            segment.dirty = True
            segments.append(segment)
            self._remove(key, each)
        return segments

    def bury(self, segment: Segment, pages: Collection[int]) -> None:
        """Somebody has deleted the blocks at these pages of a known segment."""
        fresh = set(pages) - segment.dead
        if not fresh:
            return
        for key, page, length in segment.entries:
            if page in fresh:
                segment.dead.add(page)
                self._remove(key, _place(segment.slot, page, length))

    def check(self) -> None:
        """Assert every invariant; for tests."""
        wins = 0
        for segment in self.segments.values():
            live = [row for row in segment.entries if row[1] not in segment.dead]
            places = {key: _place(segment.slot, page, pages) for key, page, pages in live}
            won = [key for key, place in places.items() if self.index.get(key) == place]
            assert len(won) == segment.wins, "blocks that are counted elsewhere"
            wins += segment.wins
            for key, place in places.items():
                winner = self._at(self.index.get(key))[0]
                assert winner.name <= segment.name, "a copy comes before its winner"
                assert winner is segment or place in self._copies[key], "a copy is not known"
        assert wins == len(self.index), "a block in no segment"
        assert all(self.index.get(key) for key in self._copies), "a copy without a winner"
        assert self.used_bytes == sum(segment.nbytes for segment in self.segments.values())
        assert set(self._order) == set(self.segments.values())

    def _put(self, key: Key, place: int, segment: Segment) -> None:
        held = self.index.get(key)
        if held and self._at(held)[0].name < segment.name:
            self._copies.setdefault(key, []).append(place)
            return
        if held:
            self._copies.setdefault(key, []).append(held)
            self._at(held)[0].wins -= 1
        self.index.put(key, place)
        segment.wins += 1

    def _remove(self, key: Key, place: int) -> int:
        """Forget one place of a key; 1 if it was the last one."""
        copies = self._copies.get(key, [])
        if self.index.get(key) != place:
            if place in copies:
                copies.remove(place)
                if not copies:
                    del self._copies[key]
            return 0
        self._at(place)[0].wins -= 1
        self.index.remove(key, place)
        if not copies:
            return 1
        best = min(copies, key=lambda each: self._at(each)[0].name)
        copies.remove(best)
        if not copies:
            del self._copies[key]
        self.index.put(key, best)
        self._at(best)[0].wins += 1
        return 0

    def _at(self, place: int) -> tuple[Segment, int, int]:
        rest = place >> _PAGES_BITS
        segment = self._slots[rest >> _PAGE_BITS]
        assert segment is not None, "a place in a segment that is gone"
        return segment, rest & ((1 << _PAGE_BITS) - 1), place & MAX_FRAME_PAGES


def _place(slot: int, page: int, pages: int) -> int:
    """One number for `pages` pages from `page` on, in the segment in that slot; never 0."""
    return ((slot << _PAGE_BITS) | page) << _PAGES_BITS | pages
