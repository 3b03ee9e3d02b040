"""The records that the L2 manager returns; the store's threads carry them out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.blocks.key import Key

MISSING: Final = "missing"
"""Reason for a truncated load: no tier is known to have the next block."""


COUNTERS: Final = (
    "stored",
    "already_cached",
    "no_slot",
    "over_quota",
    "expired",
    "warmed",
    "tier_writes_written",
    "tier_writes_dropped",
    "tier_writes_failed",
)
"""Counters of the L2 manager; its tables have more."""


class LoadOutcome(enum.Enum):
    """Result of reading one block from one tier."""

    LOADED = "loaded"
    MISSING = "missing"
    """The tier does not have the block, or no longer has it."""
    CORRUPT = "corrupt"
    """The tier's bytes are not those that were written; the tier's copy is deleted."""
    UNSUPPORTED = "unsupported"
    """The tier has a frame of another release, which stays there. Of a write: it was not done."""
    UNAVAILABLE = "unavailable"
    """The tier did not answer."""


class WriteOutcome(enum.Enum):
    """Result of writing one block to one tier."""

    WRITTEN = "written"
    DROPPED = "dropped"
    """The write queue was full."""
    FAILED = "failed"
    """The tier returned an error."""


class Waiter:
    """One operation that waits for one in-flight load. `owner` is opaque to the L2 manager."""

    __slots__ = ("client", "index", "owner")

    def __init__(self, client: int, owner: Any, index: int) -> None:
        self.client = client
        self.owner = owner
        self.index = index


class InFlightLoad:
    """A read of one block from `tier` into `slot`, shared by all its waiters."""

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
        """The last waiter left before a worker started; the slot is free again."""


class TierWrite:
    """A write of the block in `slot` to `tier`. The slot is leased until `complete_write`."""

    __slots__ = ("cancelled", "key", "nbytes", "slot", "tier")

    def __init__(self, key: Key, slot: int, nbytes: int, tier: int) -> None:
        self.key = key
        self.slot = slot
        self.nbytes = nbytes
        self.tier = tier
        self.cancelled = False
        """The slot was needed before a worker started: do not write, do not report."""


@dataclass(slots=True)
class SaveAllocation:
    """Result of `allocate_save`: slots to fill, and the blocks that get none."""

    slot_assignments: list[tuple[int, int]] = field(default_factory=list)
    """(index into the keys, slot)"""
    already_cached: int = 0
    """Blocks that are cached or in flight."""
    dropped: int = 0
    """Blocks that got no slot: the last ones."""
    tier_writes: list[TierWrite] = field(default_factory=list)


@dataclass(slots=True)
class LeaseResult:
    """Result of `lease`: leased slots, in-flight loads to wait for, and where the load ends."""

    ready: list[tuple[int, int]] = field(default_factory=list)
    """(index, slot) of blocks in L2, leased to the client."""
    waiting: list[tuple[Waiter, InFlightLoad]] = field(default_factory=list)
    new_loads: list[InFlightLoad] = field(default_factory=list)
    """The loads of `waiting` that are new: the caller gives them to a worker."""
    truncated_at: int = 0
    """Index of the first block that will not be loaded; len(keys) if all will."""
    reason: str = ""
    """Why the load is truncated; empty if it is not."""
    tier_writes: list[TierWrite] = field(default_factory=list)
