"""S3-FIFO: three queues, so that what is used once leaves quickly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, Generic

from kvstore.cache.eviction.base import K

SMALL_SHARE: Final = 0.1
"""Part of the capacity that new keys queue in."""
USES_MAX: Final = 3
"""Uses of a key counted at most."""


class S3FIFO(Generic[K]):
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: FIFO queues are all you need for cache eviction,
    SOSP 2023).

    New keys queue in a small queue. Who was used at least twice there moves to the main queue when
    its turn comes; others leave, and their hashes are remembered as ghosts, as many as the main
    queue may hold. A ghost that returns goes to the main queue at once. The main queue gives every
    key one more round for each use.

    capacity: keys that the owner holds at most.
    """

    name = "s3fifo"

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._small_max = max(1, int(capacity * SMALL_SHARE))
        self._ghosts_max = max(1, capacity - self._small_max)
        self._small: OrderedDict[K, None] = OrderedDict()
        self._main: OrderedDict[K, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[K, int] = {}

    def asked(self, run: Sequence[K]) -> None:
        """Of no interest here."""

    def inserted(self, key: K, nbytes: int = 1) -> None:
        assert key not in self._uses, "inserted twice"
        self._uses[key] = 0
        ghost = hash(key)
        if ghost in self._ghosts:
            del self._ghosts[ghost]
            self._main[key] = None
        else:
            self._small[key] = None

    def touched(self, key: K) -> None:
        self._uses[key] = min(self._uses[key] + 1, USES_MAX)

    def removed(self, key: K) -> None:
        del self._uses[key]
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._ghosts[hash(key)] = None
        if len(self._ghosts) > self._ghosts_max:
            self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[K]:
        small_first = self._settle()
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

    def _settle(self) -> bool:
        """Bring a key that may leave to the head of the queue that is to give one; whether that is
        the small one. Each step takes a use off a key or moves it to the main queue once."""
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
