"""The interface between a connector and the store. Start reading here: this page is the tour.

A **connector** is the part of an inference engine that talks to kvstore. It looks up, loads and
saves blocks through a `BlockStore`. There are two implementations:

- `store.Session`: the store runs in this process.
- `ipc.Client`: the store runs in the node's sidecar, and this process maps the sidecar's slab.

A connector cannot tell them apart. No call blocks: each one returns an `Operation` at once. The
store fills it in the background, and `poll` returns the operations that changed. An operation is a
kind of future whose result grows: a load reports each block as soon as it is readable.

Life of a load:  match -> (poll) -> load -> (poll) -> copy out of the slots -> release
Life of a save:  save -> (poll) -> copy into the slots -> commit, or release to give up

Threads: the connector uses a store from one thread at a time. The store's threads (for a client,
its reader thread) write an operation's fields, and the connector reads them. No lock is needed:
the fields only grow, and `done` is set last.

Leases: the slots in a `Load` or a `Save` are leased to that operation from the moment they appear
until `release` or `commit`. A leased slot is neither evicted nor overwritten. The caller must not
release or commit while a copy into or out of the slots may still run. A caller that gives up early
(max wait, abort) calls `release`. Blocks that are still being read then go to L2 for the next
reader, or are cancelled.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.blocks.key import Namespace


class LookupStatus(enum.Enum):
    """Result of a lookup. A lookup that failed is a MISS; the operation's `fault` says why."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


class Operation:
    """Progress of one match, load or save."""

    __slots__ = ("done", "fault", "hashes", "operation_id")

    def __init__(self, operation_id: int, hashes: Sequence[bytes]) -> None:
        self.operation_id = operation_id
        self.hashes: tuple[bytes, ...] = tuple(hashes)
        self.done = False
        """The operation has ended; its fields no longer change."""
        self.fault = ""
        """Why the result is shorter than requested; empty if nothing failed."""


class Match(Operation):
    """Lookup: how many of the leading blocks of `hashes` are cached, and where.

    tiers: for each leading block, the fastest tier that has it ("l2", "disk", ...). Before `done`
    the list may still grow, and the blocks in it are valid already.
    beyond_gap: once done, indices of cached blocks after the first missing one. Empty if a client
    answered from the shared index, without the sidecar.
    """

    __slots__ = ("beyond_gap", "tiers")

    def __init__(self, operation_id: int, hashes: Sequence[bytes]) -> None:
        super().__init__(operation_id, hashes)
        self.tiers: list[str] = []
        self.beyond_gap: list[int] = []

    @property
    def status(self) -> LookupStatus:
        """PENDING until done; then HIT if at least the first block is cached, else MISS."""
        if not self.done:
            return LookupStatus.PENDING
        return LookupStatus.HIT if self.tiers else LookupStatus.MISS


class Load(Operation):
    """Load of the leading blocks of `hashes` into slots.

    slots: slots of the leading blocks that are readable; they are leased to this operation.
    tiers: the tier that each of them came from. It has as many entries as `slots` (the store
    appends to tiers first).
    """

    __slots__ = ("slots", "tiers")

    def __init__(self, operation_id: int, hashes: Sequence[bytes]) -> None:
        super().__init__(operation_id, hashes)
        self.tiers: list[str] = []
        self.slots: list[int] = []


class Save(Operation):
    """Slots to copy new blocks into.

    slot_assignments: (index into hashes, slot) of each block to copy. Blocks that are not in the
    list are already cached, in flight, or dropped because no slot was available.
    dropped: number of blocks that got no slot.
    """

    __slots__ = ("dropped", "slot_assignments")

    def __init__(self, operation_id: int, hashes: Sequence[bytes]) -> None:
        super().__init__(operation_id, hashes)
        self.slot_assignments: list[tuple[int, int]] = []
        self.dropped = 0


class SlabView(Protocol):
    """A mapped slab, as a connector sees it. `shm.slab.Slab` implements it."""

    slot_bytes: int
    slots: int

    def view(self, slot: int) -> memoryview:
        """Writable bytes of one slot: `slot_bytes` long, aligned to 4 KiB."""
        ...


class BlockStore(Protocol):
    """The store as one engine sees it, bound to one tenant and one namespace.

    Call it from one thread at a time. No call blocks, and no call raises when the store fails: if
    the store is unreachable, the call returns an empty operation that is done and has `fault` set.

    A forked child of the process cannot use the store: each call returns such an operation there,
    `slab` is None, and `close` changes nothing for the parent. A child opens its own store.
    """

    @property
    def namespace(self) -> Namespace: ...

    @property
    def slab(self) -> SlabView | None:
        """The slab of current operations; None while the store is unreachable.

        After a reconnect this is a new slab, and operations of the old one are done with `fault`
        set. Their slots are still in the old slab: use `slab_of`.
        """
        ...

    def slab_of(self, operation: Load | Save) -> SlabView:
        """The slab of this operation's slots. It stays mapped until `release` or `commit`."""
        ...

    def match(self, hashes: Sequence[bytes]) -> Match:
        """Look up how many leading blocks are cached. Does no disk or network I/O."""
        ...

    def load(self, hashes: Sequence[bytes]) -> Load:
        """Load the leading blocks into slots, each from the fastest tier that has it.

        The load is truncated at the first block that is missing or corrupt, or gets no slot.
        """
        ...

    def save(self, hashes: Sequence[bytes]) -> Save:
        """Request slots for the blocks that are not cached yet."""
        ...

    def commit(self, save: Save) -> None:
        """Publish the blocks of a save and end it. All assigned slots must be filled.

        The next match of any engine on this slab finds every block that was committed.
        """
        ...

    def release(self, operation: Load | Save) -> None:
        """End an operation, done or not. Slots assigned to a save become free again.

        Call it exactly once per operation (`commit` counts); a second call raises AssertionError.
        """
        ...

    def poll(self, timeout_s: float = 0.0) -> list[Operation]:
        """Operations that changed since the last poll; waits up to timeout_s for the first one."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters as plain numbers and nested dicts, for people and metrics."""
        ...

    def close(self) -> None:
        """Release every lease. The caller must have no copy running."""
        ...


@dataclass(slots=True)
class HookMatch:
    """A connector's reply when its engine asks how much of a request can be loaded.

    blocks, tiers: number of blocks to load, and the tier of each; only if HIT.
    more: later blocks of this request are loaded or still loading; only if HIT.
    compute: number of blocks, from `first_block` on, for the engine to compute meanwhile; 0 to
        wait. Only if PENDING.
    """

    status: LookupStatus
    blocks: int = 0
    tiers: tuple[str, ...] = ()
    more: bool = False
    compute: int = 0


MISS = HookMatch(LookupStatus.MISS)
