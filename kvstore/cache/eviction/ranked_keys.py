"""Keys ordered by an integer rank, for policies that score their keys."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from kvstore.cache.eviction.base import K


class RankedKeys(Generic[K]):
    """Keys by rank, lowest first; keys of the same rank in the order they got it.

    O(1), except when a rank comes into use or goes out of use: that shifts the list of ranks in
    use. The owner bounds their number (a named constant), so the list has some hundred entries.
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
        """The rank of a key. Raises KeyError for an unknown key."""
        return self._rank[key]

    def put(self, key: K, rank: int) -> None:
        """Add the key to this rank, or move it there, as the last one."""
        before = self._rank.get(key)
        if before is not None:
            if before == rank:
                self._keys[rank].move_to_end(key)
                return
            self._detach(key, before)
        self._rank[key] = rank
        keys = self._keys.get(rank)
        if keys is None:
            keys = self._keys[rank] = OrderedDict()
            insort(self._ranks, rank)
        keys[key] = None

    def remove(self, key: K) -> int:
        """Remove the key; returns its rank."""
        rank = self._rank.pop(key)
        self._detach(key, rank)
        return rank

    def _detach(self, key: K, rank: int) -> None:
        keys = self._keys[rank]
        del keys[key]
        if not keys:
            del self._keys[rank]
            del self._ranks[bisect_left(self._ranks, rank)]
