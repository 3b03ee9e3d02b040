"""A tier without room: every write ends in TierFull. `kind = "faulty.full"`."""

from __future__ import annotations

from kvstore.config.settings import Section
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import Config as Memory
from kvstore.tiers.memory import open as memory


class Config(Section):
    """The keys of this kind of tier."""

    name: str = "full"


def open(config: Config) -> Tier:
    """The tier."""
    return FaultyTier(memory(Memory(name=config.name)), always(Fault.FULL, "write"))
