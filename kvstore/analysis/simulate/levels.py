"""One cache level in a replay: keys, an eviction policy and counts. No bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.cache.eviction import EvictionPolicy, eviction_policy


class Level:
    """A cache of `capacity_blocks` blocks. None: it never evicts.

    A request uses its blocks from the last to the first, so among equally old blocks the first
    stays longest. Only `trim` evicts. So a level can briefly exceed its capacity by one request,
    and of a request longer than the capacity the start stays.
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

    def lookup(self, run: Sequence[int]) -> int:
        """Look up a request's blocks. Returns the number of leading ones that are cached."""
        if self._policy is not None:
            self._policy.on_lookup(run)
        resident = self._resident
        return next((n for n, key in enumerate(run) if key not in resident), len(run))

    def use(self, key: int, nbytes: int = 1) -> bool:
        """Insert or access a block. Returns whether it is new."""
        if key in self._resident:
            if self._policy is not None:
                self._policy.on_access(key)
            return False
        self._resident.add(key)
        if self._policy is not None:
            self._policy.on_insert(key, nbytes)
        return True

    def use_run(self, run: Sequence[int], sizes: Sequence[int]) -> int:
        """`use` each block, from the last to the first. Returns the bytes of the new ones."""
        resident, policy, nbytes = self._resident, self._policy, 0
        if policy is None:
            fresh = {key: size for key, size in zip(run, sizes, strict=True) if key not in resident}
            resident.update(fresh)
            return sum(fresh.values())
        inserted, touched, add = policy.on_insert, policy.on_access, resident.add
        for key, size in zip(reversed(run), reversed(sizes), strict=True):
            if key in resident:
                touched(key)
            else:
                add(key)
                nbytes += size
                inserted(key, size)
        return nbytes

    def trim(self) -> list[int]:
        """Evict down to the capacity. Returns the evicted keys in order."""
        gone: list[int] = []
        if self._policy is None or self.capacity_blocks is None:
            return gone
        policy, discard = self._policy, self._resident.remove
        for _ in range(len(self._resident) - self.capacity_blocks):
            key = next(iter(policy.eviction_order()))
            policy.on_remove(key)
            discard(key)
            gone.append(key)
        self.evictions += len(gone)
        return gone

    def stats(self) -> dict[str, int | float | str]:
        """Return the policy's statistics. Empty for a level that never evicts."""
        return {} if self._policy is None else self._policy.stats()
