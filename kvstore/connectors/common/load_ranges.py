"""A prefix loaded in several ranges, the last one first, while the engine computes its head.

A store's load returns a leading part of the requested blocks and reads them in the requested order.
So the prefix is loaded in ranges: first the blocks in L2, then the others from the end backwards.
When the engine's computation meets the loaded ranges, every later block has arrived. If the engine
computes nothing of a prefix, the prefix is one range, which is split if it is late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.interface import Load

RANGES_MAX: Final = 16
"""Maximum number of ranges of one prefix, besides its part in L2."""
RANGE_BLOCKS_MIN: Final = 4
"""Minimum number of blocks in a range, unless the prefix is shorter."""


@dataclass(eq=False, slots=True)
class LoadRange:
    """Blocks first..end of the prompt. cancelled: blocks that have not arrived are not needed."""

    first: int
    load: Load
    cancelled: bool = False

    @property
    def end(self) -> int:
        return self.first + len(self.load.hashes)

    @property
    def arrived_end(self) -> int:
        """First block after those that have arrived."""
        return self.first + len(self.load.slots)

    @property
    def pending(self) -> range:
        """Blocks that may still arrive."""
        done = self.load.done or self.cancelled
        return range(0) if done else range(self.arrived_end, self.end)


@dataclass(eq=False)
class LoadRanges:
    """The loads of one request, in the order of their blocks in the prompt.

    hashes: hashes of the whole prompt. tiers: tier of each block from `base` on at the lookup.
    released_blocks: blocks that had arrived in ranges released since.
    """

    store: GuardedStore
    hashes: Sequence[bytes]
    base: int
    tiers: Sequence[str]
    ranges: list[LoadRange] = field(default_factory=list)
    released_blocks: set[int] = field(default_factory=set)

    def start(self, leading: int) -> None:
        """Load every block of `tiers`: the first `leading` ones, then the others from the end."""
        start = self.base + leading
        self._start_range(self.base, start)
        self._start_from_end(start, self.base + len(self.tiers))

    def start_whole(self) -> None:
        """Load every block of `tiers` as one range, in order."""
        self._start_range(self.base, self.base + len(self.tiers))

    def split(self) -> None:
        """Load the pending blocks again, from the end backwards."""
        for part in [part for part in self.ranges if part.pending]:
            self.ranges.remove(part)
            self._start_range(part.first, part.arrived_end)  # before the old lease ends
            self._start_from_end(part.arrived_end, part.end)
            self._release(part)

    def _start_from_end(self, start: int, end: int) -> None:
        size = max(RANGE_BLOCKS_MIN, -(-(end - start) // RANGES_MAX))
        for first in reversed(range(start, end, size)):
            self._start_range(first, min(first + size, end))

    def tier(self, block: int) -> str:
        """Tier of a block at the lookup."""
        return self.tiers[block - self.base]

    def blocks_ready(self, first: int) -> int:
        """Number of contiguous blocks from `first` on that have arrived in one slab."""
        end, slab = first, None
        for part in self.ranges:
            if part.first > end or part.first < first:
                break
            here = self.store.store.slab_of(part.load)
            if slab is not None and here is not slab:
                break
            end, slab = part.arrived_end, here
            if end < part.end:
                break
        return max(0, end - first)

    def pending(self, first: int) -> list[int]:
        """Blocks from `first` on that may still arrive, in order."""
        return [block for part in self.ranges for block in part.pending if block >= first]

    def next_arrived(self, first: int) -> int | None:
        """The first block from `first` on that has arrived."""
        found = (s.first for s in self.ranges if s.first >= first and s.load.slots)
        return next(found, None)

    def arrived_by_tier(self) -> Counter[str]:
        """Blocks that have arrived so far, by tier. A block loaded twice counts once."""
        blocks = set(self.released_blocks)
        for part in self.ranges:
            blocks.update(range(part.first, part.arrived_end))
        return Counter(self.tier(block) for block in blocks)

    def release_before(self, first: int) -> None:
        """Release the blocks before `first`: they are not needed."""
        while self.ranges and self.ranges[0].first < first:
            part = self.ranges.pop(0)
            if part.end > first:
                # Before the old lease ends, so that no block is evicted in between.
                self._start_range(first, part.end)
            self._release(part)

    def cancel_pending(self) -> int:
        """Cancel the blocks that have not arrived; returns their number."""
        count = 0
        for part in list(self.ranges):
            count += len(part.pending)
            part.cancelled = True
            if not part.load.slots:
                self.ranges.remove(part)
                self._release(part)
        return count

    def take(self, first: int, blocks: int) -> list[Load]:
        """Return the loads of `blocks` blocks that have arrived; the caller releases them."""
        loads, end = [], first + blocks
        while self.ranges and self.ranges[0].first < end:
            part = self.ranges.pop(0)
            assert part.first >= first
            loads.append(part.load)
            self.released_blocks.update(range(part.first, part.arrived_end))
            if end < part.end and (part.pending or end < part.arrived_end):
                self._start_range(end, part.end)
        return loads

    def slot_counts(self) -> tuple[int, int]:
        """Number of leased slots, and the number of slots leased or still pending."""
        arrived = sum(len(part.load.slots) for part in self.ranges)
        return arrived, arrived + sum(len(part.pending) for part in self.ranges)

    def operation_ids(self) -> Iterator[int]:
        """Operation ids of all ranges."""
        return (part.load.operation_id for part in self.ranges)

    def close(self) -> None:
        """Release every range."""
        ranges, self.ranges = self.ranges, []
        for part in ranges:
            self._release(part)

    def _start_range(self, first: int, end: int) -> None:
        """Load blocks first..end as one range. If the store raises, the range is a gap."""
        if first >= end:
            return
        load = self.store.load(self.hashes[first:end])
        if load is not None:
            self.ranges.append(LoadRange(first, load))
            self.ranges.sort(key=lambda part: part.first)

    def _release(self, part: LoadRange) -> None:
        self.released_blocks.update(range(part.first, part.arrived_end))
        self.store.release(part.load)
