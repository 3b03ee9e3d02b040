"""A block in a slot of L2."""

from __future__ import annotations

from kvstore.blocks.key import Key


class Block:
    """A block in a slot that is FILLING or READY."""

    __slots__ = (
        "child",
        "deferred",
        "dirty",
        "epoch",
        "filler",
        "hits",
        "key",
        "nbytes",
        "newer",
        "older",
        "parent",
        "ready",
        "ref_count",
        "slot",
        "written",
    )

    def __init__(self, key: Key, slot: int, nbytes: int, filler: int) -> None:
        self.key = key
        self.slot = slot
        self.nbytes = nbytes
        self.filler = filler
        self.ready = False
        self.ref_count = 1
        self.hits = 0
        self.epoch = 0
        """The table's epoch when the block was published."""
        self.dirty = False
        """Must be written to a tier before it may be evicted (write_back)."""
        self.written = False
        """Was queued for the tiers, or was read from one."""
        self.deferred = 0
        """Number of tiers that still have to get it and do not have it in their queue."""
        self.parent: Block | None = None
        """The block before it in its chain, if that is known and in L2."""
        self.child: Block | None = None
        """The newest of the blocks in L2 whose parent it is,"""
        self.older: Block | None = None
        """the next older of its parent's,"""
        self.newer: Block | None = None
        """and the next newer."""

    @property
    def evictable(self) -> bool:
        """Whether it has no lease and need not be written first."""
        return self.ready and self.ref_count == 1 and not self.dirty

    @property
    def in_tiers(self) -> bool:
        """Whether the tiers have it, if it has no lease."""
        return self.written and not self.deferred
