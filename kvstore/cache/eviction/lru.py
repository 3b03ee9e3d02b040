"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic

from kvstore.cache.eviction.base import K


class LRU(Generic[K]):
    """Least recently used first. O(1) per call, one dictionary entry per resident key."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def on_lookup(self, keys: Sequence[K]) -> None:
        """LRU does not use lookups."""

    def on_insert(self, key: K, nbytes: int = 1) -> None:
        assert key not in self._order, "inserted twice"
        self._order[key] = None

    def on_access(self, key: K) -> None:
        self._order.move_to_end(key)

    def on_remove(self, key: K) -> None:
        del self._order[key]

    def eviction_order(self) -> Iterator[K]:
        return iter(self._order)

    def stats(self) -> dict[str, int | float | str]:
        return {"policy": self.name, "resident": len(self._order)}
