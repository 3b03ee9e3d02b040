"""Keys in order of a whole number, for policies that score what they hold."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from kvstore.cache.eviction.base import K


class Ranked(Generic[K]):
    """Keys by rank, lowest first; of one rank, the one put there first.

    O(1) but for a rank that nobody has yet, or has no more: that moves the list of the ranks in
    use. Its owner keeps those few (a named bound), so that it is some hundred numbers.
    """

    def __init__(self) -> None:
        self._rank: dict[K, int] = {}
        self._keys: dict[int, OrderedDict[K, None]] = {}
        self._ranks: list[int] = []

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, key: K) -> bool:
        return key in self._rank

    def __iter__(self) -> Iterator[K]:
        for rank in self._ranks:
            yield from self._keys[rank]

    def rank(self, key: K) -> int:
        """Its rank; KeyError when it has none."""
        return self._rank[key]

    def put(self, key: K, rank: int) -> None:
        """The key is the last of this rank from here on."""
        before = self._rank.get(key)
        if before is not None:
            if before == rank:
                self._keys[rank].move_to_end(key)
                return
            self._leave(key, before)
        self._rank[key] = rank
        keys = self._keys.get(rank)
        if keys is None:
            keys = self._keys[rank] = OrderedDict()
            insort(self._ranks, rank)
        keys[key] = None

    def drop(self, key: K) -> int:
        """Forget the key; returns the rank it had."""
        rank = self._rank.pop(key)
        self._leave(key, rank)
        return rank

    def _leave(self, key: K, rank: int) -> None:
        keys = self._keys[rank]
        del keys[key]
        if not keys:
            del self._keys[rank]
            del self._ranks[bisect_left(self._ranks, rank)]
