"""Least frequently used first, with dynamic ageing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic

from kvstore.cache.eviction.base import K
from kvstore.cache.eviction.ghost_frequencies import USES_MAX, GhostFrequencies
from kvstore.cache.eviction.ranked_keys import RankedKeys


class LFU(Generic[K]):
    """Least frequently used first, with dynamic ageing (LFU-DA; Arlitt, Cherkasova, Dilley,
    Friedrich, Jin: Evaluating content management techniques for web proxy caches, 1999).

    A key's rank is its number of uses plus the cache's age at its last use. The age is the rank of
    the last evicted key. So keys that were popular long ago rank below new ones. Among keys of
    equal rank the least recently used is evicted first. The use counts of evicted keys are kept
    (`GhostFrequencies`): between two turns of a conversation, more keys pass than fit the cache.

    A block is useless without the blocks before it in its prompt. The blocks of a prompt are used
    from last to first. So each key of the last lookup gets at least the rank of the key used just
    before it, if that one is the next block of the prompt. A key whose use count was overwritten
    therefore leaves no gap in the prefix.

    capacity: maximum number of keys of the owner.
    """

    name = "lfu"

    def __init__(self, capacity: int) -> None:
        self._ranked: RankedKeys[K] = RankedKeys()
        self._uses: dict[K, int] = {}
        self._ghosts = GhostFrequencies(capacity)
        self._age = 0
        self._next_victim: K | None = None
        self._lookup_positions: dict[K, int] = {}
        """Position of each key in the last lookup."""
        self._last = (-1, 0)
        """(position, rank) of the last used key."""

    def on_lookup(self, keys: Sequence[K]) -> None:
        self._lookup_positions = {key: position for position, key in enumerate(keys)}
        self._last = (-1, 0)

    def on_insert(self, key: K, nbytes: int = 1) -> None:
        assert key not in self._uses, "inserted twice"
        self._count_use(key, self._ghosts.get(key) + 1)

    def on_access(self, key: K) -> None:
        self._count_use(key, self._uses[key] + 1)

    def on_remove(self, key: K) -> None:
        self._ghosts.put(key, self._uses.pop(key))
        rank = self._ranked.remove(key)
        # Only an evicted key sets the age; a deleted key may have any rank.
        if key == self._next_victim:
            self._age = max(self._age, rank)

    def eviction_order(self) -> Iterator[K]:
        for key in self._ranked:
            self._next_victim = key
            yield key

    def stats(self) -> dict[str, int | float | str]:
        return {"policy": self.name, "resident": len(self._uses), "age": self._age}

    def _count_use(self, key: K, uses: int) -> None:
        uses = self._uses[key] = min(uses, USES_MAX)
        position, rank = self._lookup_positions.get(key, -1), self._age + uses
        last_position, last_rank = self._last
        if 0 <= position == last_position - 1:
            rank = max(rank, last_rank)
        self._last = (position, rank)
        self._ranked.put(key, rank)
