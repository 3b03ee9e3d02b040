"""The policy that follows whichever is best on the traffic at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Generic

from kvstore.tiers.policies.eviction.base import EvictionPolicy, K
from kvstore.tiers.policies.eviction.cost import Cost
from kvstore.tiers.policies.eviction.lfu import LFU
from kvstore.tiers.policies.eviction.lru import LRU
from kvstore.tiers.policies.eviction.s3fifo import S3FIFO
from kvstore.tiers.policies.eviction.uses import mixed

SHADOW_KEYS: Final = 4096
"""Keys a shadow cache holds at most. A larger cache is watched by a sample of its keys."""
SHADOW_SLACK: Final = 64
"""Keys, and half of its capacity, that a shadow may have too many before it is trimmed between
two `asked`."""
HALF_LIFE_RUNS: Final = 2000
"""Runs after which what a shadow hit counts half."""
LEAD_SHARE: Final = 0.003
"""Another policy is followed when it leads by this part of the keys asked for,"""
LEAD_CAPACITY: Final = 0.02
"""and by this part of its shadow's capacity (what a change throws away must be won back),"""
LEAD_DEVIATIONS: Final = 0.0
"""and by so many standard deviations of the lead."""
START: Final = "lru"
"""Followed at first. The gaps in its favour are the widest (agents, small caches: 15 points over
S3-FIFO), and appear at once; what the others gain over it is won in long traces."""

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
    is more than noise and worth the change.

    All policies also order the real resident keys, all the time. So a change of policy is one
    assignment: nothing is moved, nothing stalls, and the new order knows everything that it would
    know had it been followed from the start. That costs the time and memory of four orders.

    capacity: keys that the owner holds at most.
    """

    name = "auto"

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        shift = 0
        while capacity >> shift > SHADOW_KEYS:
            shift += 1
        self._mask = ((1 << shift) - 1) << _SAMPLE_SHIFT
        size = capacity >> shift
        cost: Cost[K] = Cost(capacity)
        self._orders = {**_followed(capacity, 1), cost.name: cost}
        self._all = tuple(self._orders.values())
        self._sizes = cost
        self._shadows = {n: Shadow(p, size) for n, p in _followed(size, 1 << shift).items()}
        self._now = START
        self._lead_least = LEAD_CAPACITY * size
        self._asked_keys = 0.0
        self._spread = {(a, b): 0.0 for a in self._shadows for b in self._shadows if a != b}
        self._keeps: float = 0.5 ** (1 / HALF_LIFE_RUNS)
        self._knows_runs = False
        self._switches = 0

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
        return self._orders[self._now].victims()

    def stats(self) -> dict[str, int | float | str]:
        asked = max(1.0, self._asked_keys)
        return {
            "policy": self.name,
            "following": self._now,
            "switches": self._switches,
            "resident": int(self._orders["lru"].stats()["resident"]),
            **{f"shadow_{name}": s.score / asked for name, s in self._shadows.items()},
        }

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
        keeps = self._keeps
        hits = {name: shadow.ask(run) for name, shadow in self._shadows.items()}
        self._asked_keys = self._asked_keys * keeps + len(run)
        for name, shadow in self._shadows.items():
            shadow.score = shadow.score * keeps + hits[name]
        spread = self._spread
        for pair in spread:
            spread[pair] = spread[pair] * keeps + (hits[pair[0]] - hits[pair[1]]) ** 2
        best = max(self._shadows, key=lambda name: self._shadows[name].score)
        if best != self._now:
            lead = self._shadows[best].score - self._shadows[self._now].score
            noise = LEAD_DEVIATIONS * spread[best, self._now] ** 0.5
            if lead > self._lead_least + LEAD_SHARE * self._asked_keys + noise:
                self._now = best
                self._switches += 1


FOLLOWED: Final = tuple(_followed(1, 1))
"""The policies that `Auto` chooses from."""
