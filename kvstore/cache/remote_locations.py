"""The keys that remote tiers are known to have. Only a query of the tier could tell otherwise."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.blocks.key import Key

MAX_KEYS: Final = 1 << 20
"""Maximum keys per tier; the key that was confirmed longest ago is dropped first."""


class RemoteLocations:
    """A bounded set of keys per tier. It has no negative entries: another node may write the block.

    Call it under the L2 manager's lock.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._by_tier: dict[int, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_tier.values()))

    def add(self, tier: int, keys: Iterable[Key]) -> None:
        """Record that the tier has these keys."""
        known = self._by_tier.setdefault(tier, OrderedDict())
        for key in keys:
            known[key] = None
            known.move_to_end(key)
            if len(known) > self._max_keys:
                known.popitem(last=False)

    def remove(self, tier: int, keys: Iterable[Key] | None = None) -> None:
        """Record that the tier does not have these keys; None: it was emptied."""
        if keys is None:
            self._by_tier.pop(tier, None)
            return
        known = self._by_tier.get(tier, OrderedDict())
        for key in keys:
            known.pop(key, None)

    def contains(self, tier: int, keys: Sequence[Key]) -> list[bool]:
        """For each key, whether the tier is known to have it."""
        known = self._by_tier.get(tier, OrderedDict())
        return [key in known for key in keys]
