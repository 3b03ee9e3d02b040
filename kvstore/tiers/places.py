"""Where blocks are known to lie in tiers that cannot say so from memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.blocks import Key

KNOWN_MAX: Final = 1 << 20
"""Keys remembered; the longest unconfirmed are forgotten first."""


class Places:
    """A bounded memory of positive answers. Negative ones are not kept: another node may write.

    Called under the brain's lock.
    """

    def __init__(self, known_max: int = KNOWN_MAX) -> None:
        self._known_max = known_max
        self._tiers_of: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tiers_of)

    def learn(self, tier: int, keys: Iterable[Key]) -> None:
        """This tier has these keys."""
        for key in keys:
            self._tiers_of[key] = self._tiers_of.pop(key, 0) | 1 << tier
            if len(self._tiers_of) > self._known_max:
                self._tiers_of.popitem(last=False)

    def forget(self, tier: int, keys: Iterable[Key] | None = None) -> None:
        """This tier has not; without keys: it was emptied."""
        for key in list(self._tiers_of) if keys is None else keys:
            tiers = self._tiers_of.get(key, 0) & ~(1 << tier)
            if tiers:
                self._tiers_of[key] = tiers
            else:
                self._tiers_of.pop(key, None)

    def known(self, tier: int, keys: Sequence[Key]) -> list[bool]:
        """For each key, whether this tier is known to have it."""
        return [bool(self._tiers_of.get(key, 0) >> tier & 1) for key in keys]
