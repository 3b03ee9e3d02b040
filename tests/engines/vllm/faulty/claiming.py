"""A tier that claims to have every block, and fails every read: `kind = "faulty.claiming"`."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.blocks.key import Key
from kvstore.config.settings import Section
from kvstore.errors import TierUnavailable
from kvstore.tiers.base import Tier


class Config(Section):
    """The keys of this kind of tier."""

    name: str = "claiming"
    broken: bool = True
    """True: a read raises. False: it finds no block."""


class ClaimingTier(Tier):
    """See the module."""

    def __init__(self, config: Config) -> None:
        self.name = config.name
        self._broken = config.broken

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [True] * len(keys)

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        if self._broken:
            raise TierUnavailable("it claimed too much")
        return 0

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        return None

    def delete(self, keys: Sequence[Key]) -> None:
        return None

    def close(self) -> None:
        return None


def open(config: Config) -> ClaimingTier:
    """The tier."""
    return ClaimingTier(config)
