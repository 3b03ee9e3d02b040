"""What the brain decides, as data: the store's threads carry it out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.blocks.key import Key

MISSING: Final = "missing"
"""Why a run was cut: no tier is known to have its next block."""


COUNTERS: Final = (
    "admitted",
    "rejected",
    "busy",
    "over_quota",
    "expired",
    "warmed",
    "spills_written",
    "spills_dropped",
    "spills_failed",
)
"""What the brain counts, besides what its tables do."""


class Landing(enum.Enum):
    """How a flight ended in one tier."""

    ARRIVED = "arrived"
    MISSING = "missing"
    """The tier does not have it (any more)."""
    CORRUPT = "corrupt"
    """It has something else than was written; deleted there."""
    UNAVAILABLE = "unavailable"
    """The tier did not answer."""


class Spilled(enum.Enum):
    """How a spill ended."""

    WRITTEN = "written"
    DROPPED = "dropped"
    """No place in the queue."""
    FAILED = "failed"
    """The tier refused it."""


class Waiter:
    """One ticket's interest in one block on its way. `owner` is opaque to the brain."""

    __slots__ = ("client", "index", "owner")

    def __init__(self, client: int, owner: Any, index: int) -> None:
        self.client = client
        self.owner = owner
        self.index = index


class Flight:
    """One load in progress, from `tier` into `slot`, shared by its waiters."""

    __slots__ = ("cancelled", "key", "nbytes", "slot", "started", "tier", "waiters")

    def __init__(self, key: Key, slot: int, nbytes: int, tier: int) -> None:
        self.key = key
        self.slot = slot
        self.nbytes = nbytes
        self.tier = tier
        self.waiters: list[Waiter] = []
        self.started = False
        """A worker may be writing to the slot."""
        self.cancelled = False
        """Nobody waits any more and no worker had begun: the slot is free again."""


class Spill:
    """Write the block in `slot` to `tier`. The slot is leased until `Brain.spilled`."""

    __slots__ = ("cancelled", "key", "nbytes", "slot", "tier")

    def __init__(self, key: Key, slot: int, nbytes: int, tier: int) -> None:
        self.key = key
        self.slot = slot
        self.nbytes = nbytes
        self.tier = tier
        self.cancelled = False
        """Its slot was needed before a worker began: not to be written, nor reported."""


@dataclass(slots=True)
class Admission:
    """Answer to an offer of blocks: slots to fill, and what had no room."""

    grants: list[tuple[int, int]] = field(default_factory=list)
    """(index into the offered keys, slot)"""
    rejected: int = 0
    """Held already, or on their way."""
    dropped: int = 0
    """Found no slot: the tail of the run."""
    spills: list[Spill] = field(default_factory=list)


@dataclass(slots=True)
class LoadPlan:
    """What a load may have: leased slots, blocks to wait for, and where its run ends."""

    ready: list[tuple[int, int]] = field(default_factory=list)
    """(index, slot) of blocks in L2, leased to the client"""
    waiting: list[tuple[Waiter, Flight]] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    """Those of the flights above that are new: to be given to a worker"""
    cut_at: int = 0
    """Index of the first block that will not come; len(keys) when all will"""
    reason: str = ""
    spills: list[Spill] = field(default_factory=list)
