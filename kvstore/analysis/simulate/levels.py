"""One level of cache in a replay: keys, an order of eviction, counts. No bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.cache.eviction import EvictionPolicy, eviction_policy


class Level:
    """A cache of `capacity_blocks` blocks; None: it never evicts.

    A request's blocks are used from the last to the first, so that of equally old ones the first
    stays longest; only then the level evicts what it holds too many (`trim`). It may so hold one
    run more than its capacity for a moment, and a run longer than the capacity keeps its start.
    """

    def __init__(
        self, capacity_blocks: int | None, eviction: str | EvictionPolicy[Any] = "lru"
    ) -> None:
        assert capacity_blocks is None or capacity_blocks > 0
        self.capacity_blocks = capacity_blocks
        self.evictions = 0
        self._resident: set[int] = set()
        self._policy: EvictionPolicy[Any] | None = None
        if capacity_blocks is not None:
            self._policy = (
                eviction_policy(eviction, capacity_blocks)
                if isinstance(eviction, str)
                else eviction
            )

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: int) -> bool:
        return key in self._resident

    def asked(self, run: Sequence[int]) -> int:
        """A request asks for the run; length of its leading part that is here."""
        if self._policy is not None:
            self._policy.asked(run)
        resident = self._resident
        return next((n for n, key in enumerate(run) if key not in resident), len(run))

    def use(self, key: int, nbytes: int = 1) -> bool:
        """The block is here from now on, and was used; whether it is new."""
        if key in self._resident:
            if self._policy is not None:
                self._policy.touched(key)
            return False
        self._resident.add(key)
        if self._policy is not None:
            self._policy.inserted(key, nbytes)
        return True

    def use_run(self, run: Sequence[int], sizes: Sequence[int]) -> int:
        """`use` of each block of a run, from the last to the first; bytes of those that are new."""
        resident, policy, nbytes = self._resident, self._policy, 0
        if policy is None:
            fresh = {key: size for key, size in zip(run, sizes, strict=True) if key not in resident}
            resident.update(fresh)
            return sum(fresh.values())
        inserted, touched, add = policy.inserted, policy.touched, resident.add
        for key, size in zip(reversed(run), reversed(sizes), strict=True):
            if key in resident:
                touched(key)
            else:
                add(key)
                nbytes += size
                inserted(key, size)
        return nbytes

    def trim(self) -> list[int]:
        """Evict down to the capacity; returns what went, coldest first."""
        gone: list[int] = []
        if self._policy is None or self.capacity_blocks is None:
            return gone
        policy, forget = self._policy, self._resident.remove
        for _ in range(len(self._resident) - self.capacity_blocks):
            key = next(iter(policy.victims()))
            policy.removed(key)
            forget(key)
            gone.append(key)
        self.evictions += len(gone)
        return gone

    def stats(self) -> dict[str, int | float | str]:
        """What the policy says of itself; nothing for a level that never evicts."""
        return {} if self._policy is None else self._policy.stats()
