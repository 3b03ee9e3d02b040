"""The eviction policy that follows the best of the others on the current traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, Generic

from kvstore.cache.eviction.base import EvictionPolicy, K
from kvstore.cache.eviction.gdsf import GDSF
from kvstore.cache.eviction.ghost_frequencies import mix_hash
from kvstore.cache.eviction.lfu import LFU
from kvstore.cache.eviction.lru import LRU
from kvstore.cache.eviction.s3fifo import S3FIFO

GHOST_CACHE_KEYS: Final = 8192
"""Maximum keys of a ghost cache. A larger cache is represented by a sample of its keys. With 4096,
wrong changes of policy cost conversations at 5,000 blocks 0.6 points."""
GHOST_CACHE_SLACK: Final = 64
"""A ghost cache may exceed its capacity by half of it and this many keys between two lookups."""
HALF_LIFE_CAPACITIES: Final = 24
"""The weight of a hit halves after lookups of this many times the capacity. So a small cache
changes its policy within a few requests, and a large one does not follow noise."""
LEAD_CAPACITY_FRACTION: Final = 0.05
"""Another policy takes over if its score leads by this fraction of the capacity,"""
LEAD_ROOT: Final = 3.0
"""or by this many times the square root of the capacity, if that is less (the noise of a sum of
hits grows with its root, and a large cache sees few lookups relative to its capacity),"""
LEAD_KEYS: Final = 3
"""plus this many keys."""
STRAY_SCAN: Final = 64
"""Of this many keys at the front of the eviction order, those that the leader's ghost cache has
evicted go first. So a change of policy takes effect sooner: small caches gained up to 0.8 points
(RAG at 7 blocks)."""
INITIAL_POLICY: Final = "lfu"
"""Leader at start: the best single default (docs/decisions/0009-eviction.md)."""

_SAMPLE_SHIFT: Final = 20
"""The sample is chosen by other bits of a key's mixed hash than the slots of `GhostFrequencies`."""


def _make_policies(capacity: int, stride: int) -> dict[str, EvictionPolicy[Any]]:
    """A new instance of each policy that `auto` chooses from."""
    return {
        "lru": LRU(),
        "lfu": LFU(capacity),
        "s3fifo": S3FIFO(capacity),
        "gdsf": GDSF(capacity, stride),
    }


class GhostCache(Generic[K]):
    """A simulated cache: keys only, evicted by a policy."""

    def __init__(self, policy: EvictionPolicy[K], capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.score = 0.0
        self._resident: set[K] = set()

    def __contains__(self, key: K) -> bool:
        return key in self._resident

    def lookup(self, keys: Sequence[K]) -> int:
        """Number of leading keys that are resident."""
        self.trim()
        self.policy.on_lookup(keys)
        resident = self._resident
        return next((n for n, key in enumerate(keys) if key not in resident), len(keys))

    def access(self, key: K, nbytes: int) -> None:
        """Record a use of the key; it becomes resident."""
        if key in self._resident:
            self.policy.on_access(key)
            return
        if len(self._resident) > self.capacity + self.capacity // 2 + GHOST_CACHE_SLACK:
            self.trim()
        self._resident.add(key)
        self.policy.on_insert(key, nbytes)

    def trim(self) -> None:
        """Evict down to the capacity."""
        while len(self._resident) > self.capacity:
            key = next(iter(self.policy.eviction_order()))
            self.policy.on_remove(key)
            self._resident.remove(key)


class Auto(Generic[K]):
    """Follows the policy whose ghost cache has the most hits.

    Every policy runs a ghost cache (`GhostCache`) of the same capacity that sees the same uses. For
    a capacity above GHOST_CACHE_KEYS it sees one key in 2^n, chosen by hash, and has 2^n times less
    capacity (spatial sampling; Waldspurger, Saemundson, Ahmad, Park: Cache modeling and
    optimization using miniature simulations, ATC 2017). A request hits its longest cached prefix;
    in a sample, these are the leading sampled keys. At each lookup (without lookups: at each use)
    the decayed hits of the ghost caches are compared. The best policy becomes the leader if its
    lead is more than noise.

    All policies also order the real resident keys at all times. So a change of leader is one
    assignment: no key moves, no call stalls, and the new leader's order is as if it had led from
    the start. The cost is the time and memory of four policies. After a change, the real cache has
    keys that the new leader would have evicted. Those among the first in its eviction order are
    evicted first, until the real cache agrees with the ghost cache.

    capacity: maximum number of keys of the owner.
    """

    name = "auto"

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        shift = 0
        while capacity >> shift > GHOST_CACHE_KEYS:
            shift += 1
        self._mask = ((1 << shift) - 1) << _SAMPLE_SHIFT
        self._capacity = capacity
        size = capacity >> shift
        self._gdsf: GDSF[K] = GDSF(capacity)
        self._policies = {**_make_policies(capacity, 1), GDSF.name: self._gdsf}
        self._all_policies = tuple(self._policies.values())
        self._ghost_caches = {
            n: GhostCache(p, size) for n, p in _make_policies(size, 1 << shift).items()
        }
        self._half_life_keys = HALF_LIFE_CAPACITIES * size
        root = LEAD_ROOT * math.sqrt(capacity) / (1 << shift)
        self._min_lead = LEAD_KEYS + min(LEAD_CAPACITY_FRACTION * size, root)
        self._leader = INITIAL_POLICY
        self._lookup_keys = 0.0
        self._gets_lookups = False
        self._switches = 0
        self._scans_left = 0
        """Scans without a stray key that are left since the last change of leader."""

    def on_lookup(self, keys: Sequence[K]) -> None:
        self._gets_lookups = True
        for policy in self._all_policies:
            policy.on_lookup(keys)
        self._update_scores(keys)

    def on_insert(self, key: K, nbytes: int = 1) -> None:
        for policy in self._all_policies:
            policy.on_insert(key, nbytes)
        self._access_ghosts(key, nbytes)

    def on_access(self, key: K) -> None:
        if not self._gets_lookups:
            self._update_scores((key,))
        for policy in self._all_policies:
            policy.on_access(key)
        self._access_ghosts(key, self._gdsf.nbytes(key))

    def on_remove(self, key: K) -> None:
        for policy in self._all_policies:
            policy.on_remove(key)

    def eviction_order(self) -> Iterator[K]:
        policy = self._policies[self._leader]
        if self._mask or not self._scans_left:
            return policy.eviction_order()
        return self._not_in_ghost_first(policy, self._ghost_caches[self._leader])

    def stats(self) -> dict[str, int | float | str]:
        lookups = max(1.0, self._lookup_keys)
        return {
            "policy": self.name,
            "leader": self._leader,
            "switches": self._switches,
            "resident": len(self._gdsf),
            **{f"ghost_{name}": g.score / lookups for name, g in self._ghost_caches.items()},
        }

    def _not_in_ghost_first(self, policy: EvictionPolicy[K], ghost: GhostCache[K]) -> Iterator[K]:
        """The eviction order, but keys near its front that the ghost cache has evicted go first."""
        ghost.trim()
        strays = set()
        for key in islice(policy.eviction_order(), STRAY_SCAN):
            if key not in ghost:
                strays.add(key)
                yield key
        if not strays:
            self._scans_left -= 1
        yield from (key for key in policy.eviction_order() if key not in strays)

    def _access_ghosts(self, key: K, nbytes: int) -> None:
        if not mix_hash(key) & self._mask:
            for ghost in self._ghost_caches.values():
                ghost.access(key, nbytes)

    def _update_scores(self, keys: Sequence[K]) -> None:
        """Count the hits of each ghost cache, and choose the leader."""
        if self._mask:
            keys = [key for key in keys if not mix_hash(key) & self._mask]
        if not keys:
            return
        keeps: float = 0.5 ** (len(keys) / self._half_life_keys)
        self._lookup_keys = self._lookup_keys * keeps + len(keys)
        for ghost in self._ghost_caches.values():
            ghost.score = ghost.score * keeps + ghost.lookup(keys)
        best = max(self._ghost_caches, key=lambda name: self._ghost_caches[name].score)
        if self._ghost_caches[best].score - self._ghost_caches[self._leader].score > self._min_lead:
            self._leader = best
            self._switches += 1
            self._scans_left = self._capacity
