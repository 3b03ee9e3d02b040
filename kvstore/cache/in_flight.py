"""The in-flight loads: at most one per key, and a maximum number per tier."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.blocks.key import Key
from kvstore.cache.commands import InFlightLoad
from kvstore.cache.slots import SlotTable


class InFlightLoads:
    """Call it under the L2 manager's lock.

    tiers: number of tiers. max_per_tier: maximum loads from one tier at a time.
    """

    def __init__(self, tiers: int, max_per_tier: int) -> None:
        assert max_per_tier >= 0
        self._max_per_tier = max_per_tier
        self._by_key: dict[Key, InFlightLoad] = {}
        self._tier_counts = [0] * tiers

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_key)

    def get(self, key: Key) -> InFlightLoad | None:
        """The load of this key."""
        return self._by_key.get(key)

    def all(self) -> list[InFlightLoad]:
        """Every load."""
        return list(self._by_key.values())

    def is_full(self, tier: int) -> bool:
        """Whether this tier has the maximum number of loads."""
        return self._tier_counts[tier] >= self._max_per_tier

    def start(self, load: InFlightLoad) -> None:
        """Add a load; its tier must not be full."""
        assert load.key not in self._by_key, "two in-flight loads of one key"
        assert not self.is_full(load.tier)
        self._by_key[load.key] = load
        self._tier_counts[load.tier] += 1

    def redirect(self, load: InFlightLoad, tier: int) -> None:
        """Continue the load from another tier, where no worker has started it."""
        self._tier_counts[load.tier] -= 1
        self._tier_counts[tier] += 1
        load.tier = tier
        load.started = False

    def end(self, load: InFlightLoad) -> None:
        """Remove a load that has ended, whatever its outcome."""
        ended = self._by_key.pop(load.key)
        assert ended is load
        self._tier_counts[load.tier] -= 1

    def check(self, table: SlotTable) -> None:
        """Assert every invariant; for tests."""
        assert sum(self._tier_counts) == len(self._by_key)
        assert all(count >= 0 for count in self._tier_counts)
        for key, load in self._by_key.items():
            assert table.block_at(load.slot).key == key
            assert not load.cancelled
