"""Where blocks are known to lie in tiers that cannot say so from memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.blocks.key import Key

KNOWN_MAX: Final = 1 << 20
"""Keys remembered for each tier; the longest unconfirmed are forgotten first."""


class Places:
    """A bounded memory of positive answers. Negative ones are not kept: another node may write.

    Called under the brain's lock.
    """

    def __init__(self, known_max: int = KNOWN_MAX) -> None:
        self._known_max = known_max
        self._in_tier: dict[int, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._in_tier.values()))

    def learn(self, tier: int, keys: Iterable[Key]) -> None:
        """This tier has these keys."""
        known = self._in_tier.setdefault(tier, OrderedDict())
        for key in keys:
            known[key] = None
            known.move_to_end(key)
            if len(known) > self._known_max:
                known.popitem(last=False)

    def forget(self, tier: int, keys: Iterable[Key] | None = None) -> None:
        """This tier has not; without keys: it was emptied."""
        if keys is None:
            self._in_tier.pop(tier, None)
            return
        known = self._in_tier.get(tier, OrderedDict())
        for key in keys:
            known.pop(key, None)

    def known(self, tier: int, keys: Sequence[Key]) -> list[bool]:
        """For each key, whether this tier is known to have it."""
        known = self._in_tier.get(tier, OrderedDict())
        return [key in known for key in keys]
