"""Least frequently used first, with dynamic ageing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Generic

from kvstore.tiers.policies.eviction.base import K
from kvstore.tiers.policies.eviction.ranked import Ranked

USES_MAX: Final = 255
"""Uses of a key counted at most: the bound of how long a key once popular stays."""


class LFU(Generic[K]):
    """Least frequently used first, with dynamic ageing (LFU-DA; Arlitt, Cherkasova, Dilley,
    Friedrich, Jin: Evaluating content management techniques for web proxy caches, 1999).

    A key's rank is its number of uses plus the age of the cache when it was last used; the age is
    the rank of the key evicted last. So what was popular long ago ends below what is new. Of equal
    rank the least recently used goes first. Nothing is remembered of keys that left.
    """

    name = "lfu"

    def __init__(self) -> None:
        self._ranked: Ranked[K] = Ranked()
        self._uses: dict[K, int] = {}
        self._age = 0
        self._offered: K | None = None

    def asked(self, run: Sequence[K]) -> None:
        """Of no interest here."""

    def inserted(self, key: K, nbytes: int = 1) -> None:
        assert key not in self._uses, "inserted twice"
        self._uses[key] = 1
        self._ranked.put(key, self._age + 1)

    def touched(self, key: K) -> None:
        uses = self._uses[key] = min(self._uses[key] + 1, USES_MAX)
        self._ranked.put(key, self._age + uses)

    def removed(self, key: K) -> None:
        del self._uses[key]
        rank = self._ranked.drop(key)
        # A key that was deleted, hot as it may be, says nothing of the age; only a victim does.
        if key == self._offered:
            self._age = max(self._age, rank)
        self._offered = None

    def victims(self) -> Iterator[K]:
        for key in self._ranked:
            self._offered = key
            yield key

    def stats(self) -> dict[str, int | float | str]:
        return {"policy": self.name, "resident": len(self._uses), "age": self._age}
