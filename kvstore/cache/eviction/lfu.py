"""Least frequently used first, with dynamic ageing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic

from kvstore.cache.eviction.base import K
from kvstore.cache.eviction.ranked import Ranked
from kvstore.cache.eviction.uses import USES_MAX, PastUses


class LFU(Generic[K]):
    """Least frequently used first, with dynamic ageing (LFU-DA; Arlitt, Cherkasova, Dilley,
    Friedrich, Jin: Evaluating content management techniques for web proxy caches, 1999).

    A key's rank is its number of uses plus the age of the cache when it was last used; the age is
    the rank of the key evicted last. So what was popular long ago ends below what is new. Of equal
    rank the least recently used goes first. The uses of keys that left are remembered (`PastUses`):
    between two turns of a conversation lies more than a cache holds.

    A key is of no use without those in front of it in its run. A run is used from its end to its
    start, so each of the run asked for last is raised to the rank of the one used just before it,
    if that is the next of the run; what was forgotten of one key so makes no hole.

    capacity: keys that the owner holds at most.
    """

    name = "lfu"

    def __init__(self, capacity: int) -> None:
        self._ranked: Ranked[K] = Ranked()
        self._uses: dict[K, int] = {}
        self._past = PastUses(capacity)
        self._age = 0
        self._offered: K | None = None
        self._places: dict[K, int] = {}
        """Places in the run asked for last."""
        self._last = (-1, 0)
        """(place, rank) of the key used last."""

    def asked(self, run: Sequence[K]) -> None:
        self._places = {key: place for place, key in enumerate(run)}
        self._last = (-1, 0)

    def inserted(self, key: K, nbytes: int = 1) -> None:
        assert key not in self._uses, "inserted twice"
        self._used(key, self._past.get(key) + 1)

    def touched(self, key: K) -> None:
        self._used(key, self._uses[key] + 1)

    def removed(self, key: K) -> None:
        self._past.keep(key, self._uses.pop(key))
        rank = self._ranked.drop(key)
        # A key that was deleted, hot as it may be, says nothing of the age; only a victim does.
        if key == self._offered:
            self._age = max(self._age, rank)

    def victims(self) -> Iterator[K]:
        for key in self._ranked:
            self._offered = key
            yield key

    def stats(self) -> dict[str, int | float | str]:
        return {"policy": self.name, "resident": len(self._uses), "age": self._age}

    def _used(self, key: K, uses: int) -> None:
        uses = self._uses[key] = min(uses, USES_MAX)
        place, rank = self._places.get(key, -1), self._age + uses
        last_place, last_rank = self._last
        if 0 <= place == last_place - 1:
            rank = max(rank, last_rank)
        self._last = (place, rank)
        self._ranked.put(key, rank)
