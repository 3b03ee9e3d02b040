"""The policy that follows whichever is best on the traffic at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, Generic

from kvstore.cache.eviction.base import EvictionPolicy, K
from kvstore.cache.eviction.cost import Cost
from kvstore.cache.eviction.lfu import LFU
from kvstore.cache.eviction.lru import LRU
from kvstore.cache.eviction.s3fifo import S3FIFO
from kvstore.cache.eviction.uses import mixed

SHADOW_KEYS: Final = 8192
"""Keys a shadow cache holds at most. A larger cache is watched by a sample of its keys; 4096 made
conversations at 5,000 blocks lose 0.6 points to wrong turns."""
SHADOW_SLACK: Final = 64
"""Keys, and half of its capacity, that a shadow may have too many before it is trimmed between
two `asked`."""
HALF_LIFE_CAPACITIES: Final = 24
"""A hit counts half after keys of so many times the capacity were asked for: a small cache turns
over, and changes its mind, within some requests, a large one must not follow noise."""
LEAD_CAPACITY: Final = 0.05
"""Another policy is followed when its score leads by this part of the capacity,"""
LEAD_ROOT: Final = 3.0
"""or by so many times the root of the capacity, if that is less (the noise of a sum of hits grows
with its root; and a large cache sees its capacity asked for only a few times),"""
LEAD_KEYS: Final = 3
"""and by these keys."""
FOLLOW_SCAN: Final = 64
"""Keys at the cold end among which one that the followed shadow does not hold goes first. With it
a change of policy takes effect sooner: small caches gained up to 0.8 points (RAG at 7 blocks)."""
START: Final = "lfu"
"""Followed at first: the best single default (docs/decisions/0009-eviction.md)."""

_SAMPLE_SHIFT: Final = 20
"""The bits of a key's mixed hash that choose the sample are not those that `PastUses` places by."""


def _followed(capacity: int, stride: int) -> dict[str, EvictionPolicy[Any]]:
    """A fresh one of each policy that `auto` chooses from."""
    return {
        "lru": LRU(),
        "lfu": LFU(capacity),
        "s3fifo": S3FIFO(capacity),
        "cost": Cost(capacity, stride),
    }


class Shadow(Generic[K]):
    """A cache without contents that does what a policy says."""

    def __init__(self, policy: EvictionPolicy[K], capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.score = 0.0
        self._resident: set[K] = set()

    def __contains__(self, key: K) -> bool:
        return key in self._resident

    def ask(self, run: Sequence[K]) -> int:
        """Length of the leading run that is resident."""
        self.trim()
        self.policy.asked(run)
        resident = self._resident
        return next((n for n, key in enumerate(run) if key not in resident), len(run))

    def use(self, key: K, nbytes: int) -> None:
        """The key is used, and resident if it was not."""
        if key in self._resident:
            self.policy.touched(key)
            return
        if len(self._resident) > self.capacity + self.capacity // 2 + SHADOW_SLACK:
            self.trim()
        self._resident.add(key)
        self.policy.inserted(key, nbytes)

    def trim(self) -> None:
        """Evict down to the capacity."""
        while len(self._resident) > self.capacity:
            key = next(iter(self.policy.victims()))
            self.policy.removed(key)
            self._resident.remove(key)


class Auto(Generic[K]):
    """Follows the policy whose shadow cache would hit most.

    Every policy runs a shadow cache (`Shadow`) of the same capacity, fed with the same uses; a
    capacity above SHADOW_KEYS is watched through one key in 2^n, chosen by hash, by shadows of
    2^n times less (spatial sampling; Waldspurger, Saemundson, Ahmad, Park: Cache modeling and
    optimization using miniature simulations, ATC 2017). A request hits its longest leading run: in
    a sample, that is the leading sampled keys. The shadows' decayed hits are compared at each
    `asked` (where the owner knows no runs: at each use), and the leader is followed when its lead
    is more than noise.

    All policies also order the real resident keys, all the time. So a change of policy is one
    assignment: nothing is moved, nothing stalls, and the new order knows everything that it would
    know had it been followed from the start. That costs the time and memory of four orders. After
    a change, what the new policy would not have kept is what the cache holds and its shadow does
    not: of the keys at the cold end those go first, until the two agree.

    capacity: keys that the owner holds at most.
    """

    name = "auto"

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        shift = 0
        while capacity >> shift > SHADOW_KEYS:
            shift += 1
        self._mask = ((1 << shift) - 1) << _SAMPLE_SHIFT
        self._capacity = capacity
        size = capacity >> shift
        self._sizes: Cost[K] = Cost(capacity)
        self._orders = {**_followed(capacity, 1), Cost.name: self._sizes}
        self._all = tuple(self._orders.values())
        self._shadows = {n: Shadow(p, size) for n, p in _followed(size, 1 << shift).items()}
        self._half_life_keys = HALF_LIFE_CAPACITIES * size
        root = LEAD_ROOT * math.sqrt(capacity) / (1 << shift)
        self._lead_least = LEAD_KEYS + min(LEAD_CAPACITY * size, root)
        self._now = START
        self._asked_keys = 0.0
        self._knows_runs = False
        self._switches = 0
        self._scans_left = 0
        """Scans of the cold end that may still find nothing, after the last change."""

    def asked(self, run: Sequence[K]) -> None:
        self._knows_runs = True
        for order in self._all:
            order.asked(run)
        self._score(run)

    def inserted(self, key: K, nbytes: int = 1) -> None:
        for order in self._all:
            order.inserted(key, nbytes)
        self._shadow(key, nbytes)

    def touched(self, key: K) -> None:
        if not self._knows_runs:
            self._score((key,))
        for order in self._all:
            order.touched(key)
        self._shadow(key, self._sizes.nbytes(key))

    def removed(self, key: K) -> None:
        for order in self._all:
            order.removed(key)

    def victims(self) -> Iterator[K]:
        order = self._orders[self._now]
        if self._mask or not self._scans_left:
            return order.victims()
        return self._strays_first(order, self._shadows[self._now])

    def stats(self) -> dict[str, int | float | str]:
        asked = max(1.0, self._asked_keys)
        return {
            "policy": self.name,
            "following": self._now,
            "switches": self._switches,
            "resident": len(self._sizes),
            **{f"shadow_{name}": s.score / asked for name, s in self._shadows.items()},
        }

    def _strays_first(self, order: EvictionPolicy[K], shadow: Shadow[K]) -> Iterator[K]:
        """The order's victims, but first those of the coldest that the shadow has evicted."""
        shadow.trim()
        strays = set()
        for key in islice(order.victims(), FOLLOW_SCAN):
            if key not in shadow:
                strays.add(key)
                yield key
        if not strays:
            self._scans_left -= 1
        yield from (key for key in order.victims() if key not in strays)

    def _shadow(self, key: K, nbytes: int) -> None:
        if not mixed(key) & self._mask:
            for shadow in self._shadows.values():
                shadow.use(key, nbytes)

    def _score(self, run: Sequence[K]) -> None:
        """What each shadow hits of the run, and who is followed from here on."""
        if self._mask:
            run = [key for key in run if not mixed(key) & self._mask]
        if not run:
            return
        keeps: float = 0.5 ** (len(run) / self._half_life_keys)
        self._asked_keys = self._asked_keys * keeps + len(run)
        for shadow in self._shadows.values():
            shadow.score = shadow.score * keeps + shadow.ask(run)
        best = max(self._shadows, key=lambda name: self._shadows[name].score)
        if self._shadows[best].score - self._shadows[self._now].score > self._lead_least:
            self._now = best
            self._switches += 1
            self._scans_left = self._capacity


FOLLOWED: Final = tuple(_followed(1, 1))
"""The policies that `Auto` chooses from."""
