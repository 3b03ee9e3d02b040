"""The blocks of L2 that a tier does not have yet, and that have no place in its write queue.

The queue was full, or a write failed, or the tier does not take writes now. Such a block has no
lease for the write: L2 may evict it, and then the write is dropped. Until then the store's workers
take it from here when the queue has room again. Call it under the L2 manager's lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvstore.blocks.key import Key
from kvstore.cache.block import Block

STALE_MIN: Final = 64
"""A heap is rebuilt when most of its entries, and at least this many, are of removed writes."""


@dataclass(frozen=True, slots=True)
class DeferredWrite:
    """number, tries: see `commands.TierWrite`."""

    block: Block
    number: int
    tries: int


class DeferredWrites:
    """tiers: number of tiers. Each has at most one write of each block of L2."""

    def __init__(self, tiers: int) -> None:
        self._by_tier: list[dict[Key, DeferredWrite]] = [{} for _ in range(tiers)]
        self._heaps: list[list[tuple[int, Key]]] = [[] for _ in range(tiers)]
        """(number, key) of each write, and of removed ones."""

    def __len__(self) -> int:
        return sum(map(len, self._by_tier))

    def add(self, tier: int, write: DeferredWrite) -> None:
        """Add a write; it replaces one of the same block to the same tier."""
        writes, heap = self._by_tier[tier], self._heaps[tier]
        self.discard(write.block, tier)
        writes[write.block.key] = write
        write.block.deferred += 1
        heapq.heappush(heap, (write.number, write.block.key))
        if len(heap) > 2 * len(writes) + STALE_MIN:
            heap[:] = [(each.number, key) for key, each in writes.items()]
            heapq.heapify(heap)

    def pop(self, tier: int) -> DeferredWrite | None:
        """Remove and return the write with the lowest number to this tier."""
        writes, heap = self._by_tier[tier], self._heaps[tier]
        while heap:
            number, key = heapq.heappop(heap)
            write = writes.get(key)
            if write is not None and write.number == number:
                self.discard(write.block, tier)
                return write
        return None

    def discard(self, block: Block, tier: int) -> None:
        """Remove the write of a block to a tier, if there is one."""
        block.deferred -= self._by_tier[tier].pop(block.key, None) is not None

    def forget(self, block: Block) -> int:
        """Remove all writes of a block; returns their number."""
        count = block.deferred
        for tier in range(len(self._by_tier)):
            self.discard(block, tier)
        return count

    def keys(self, tier: int) -> Iterable[Key]:
        """The blocks to be written to this tier."""
        return self._by_tier[tier].keys()

    def check(self) -> None:
        """Assert every invariant; for tests."""
        counts: dict[Key, int] = {}
        for writes, heap in zip(self._by_tier, self._heaps, strict=True):
            assert {(each.number, key) for key, each in writes.items()} <= set(heap)
            for key, each in writes.items():
                assert each.block.key == key
                counts[key] = counts.get(key, 0) + 1
        for writes in self._by_tier:
            assert all(each.block.deferred == counts[key] for key, each in writes.items())
