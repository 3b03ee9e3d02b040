"""S3-FIFO: three queues, so that keys used once are evicted quickly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, Generic

from kvstore.cache.eviction.base import K

SMALL_FRACTION: Final = 0.1
"""Fraction of the capacity for the small queue of new keys."""
USES_MAX: Final = 3
"""Maximum uses counted per key."""


class S3FIFO(Generic[K]):
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: FIFO queues are all you need for cache eviction,
    SOSP 2023).

    New keys enter a small queue. At the head of it, a key used at least twice moves to the main
    queue; any other key is evicted, and its hash becomes a ghost. There are as many ghosts as the
    main queue has room for keys. A ghost that returns goes to the main queue at once. The main
    queue gives every key one more round per use.

    capacity: maximum number of keys of the owner.
    """

    name = "s3fifo"

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._small_max = max(1, int(capacity * SMALL_FRACTION))
        self._ghosts_max = max(1, capacity - self._small_max)
        self._small: OrderedDict[K, None] = OrderedDict()
        self._main: OrderedDict[K, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[K, int] = {}

    def on_lookup(self, keys: Sequence[K]) -> None:
        """S3-FIFO does not use lookups."""

    def on_insert(self, key: K, nbytes: int = 1) -> None:
        assert key not in self._uses, "inserted twice"
        self._uses[key] = 0
        ghost = hash(key)
        if ghost in self._ghosts:
            del self._ghosts[ghost]
            self._main[key] = None
        else:
            self._small[key] = None

    def on_access(self, key: K) -> None:
        self._uses[key] = min(self._uses[key] + 1, USES_MAX)

    def on_remove(self, key: K) -> None:
        del self._uses[key]
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._ghosts[hash(key)] = None
        if len(self._ghosts) > self._ghosts_max:
            self._ghosts.popitem(last=False)

    def eviction_order(self) -> Iterator[K]:
        small_first = self._prepare_victim()
        if small_first:
            return chain(self._small, self._main)
        return chain(self._main, self._small)

    def stats(self) -> dict[str, int | float | str]:
        return {
            "policy": self.name,
            "resident": len(self._uses),
            "small": len(self._small),
            "ghosts": len(self._ghosts),
        }

    def _prepare_victim(self) -> bool:
        """Move a key that may be evicted to the head of its queue. True: of the small queue. Each
        step takes a use off a key or moves it to the main queue once."""
        while self._small and (len(self._small) > self._small_max or not self._main):
            key = next(iter(self._small))
            if self._uses[key] < 2:
                return True
            del self._small[key]
            self._main[key] = None
            self._uses[key] = 0
        while self._main:
            key = next(iter(self._main))
            if not self._uses[key]:
                break
            self._uses[key] -= 1
            self._main.move_to_end(key)
        return False
