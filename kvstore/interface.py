"""The verbs a connector calls, and the tickets they answer with. This file is the tour.

Two implementations: `store.Session` (the store lives in this process) and `client.Client` (the
store lives in the node's sidecar, and this process maps its slab). A connector cannot tell which
it holds, and neither ever blocks it: every verb returns at once with a *ticket* that the store
goes on filling in, and `poll` hands over the tickets that moved.

A ticket's fields are written by the store's threads (or the client's reader) and read by the one
thread that asked for it. They only ever grow, and `done` is written last, so reading them needs
no lock.

Life of a load:   match -> (poll) -> load -> (poll) -> copy out of slots -> release
Life of a save:   save -> (poll) -> copy into slots -> commit          (or release: give up)

Leases: the slots named by a `Load` or a `Save` are leased to that ticket, from the moment they
appear in it until `release` or `commit`. While leased, a slot is neither evicted nor overwritten.
The caller must not hand a ticket back while a copy into or out of its slots may still run.
Whoever gives up early (a deadline, an abort) simply releases: what was still on its way goes to
L2 for the next reader, or nowhere.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.blocks.key import Namespace


class Answer(enum.Enum):
    """What a verb can say. Faults are MISS with a reason in the ticket's `fault`."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"
    BUSY = "busy"


class Ticket:
    """One verb's progress."""

    __slots__ = ("done", "fault", "hashes", "ticket_id")

    def __init__(self, ticket_id: int, hashes: Sequence[bytes]) -> None:
        self.ticket_id = ticket_id
        self.hashes: tuple[bytes, ...] = tuple(hashes)
        self.done = False
        """Nothing more will be added to this ticket."""
        self.fault = ""
        """Why the answer is shorter than it might have been; empty when nothing failed."""


class Match(Ticket):
    """How long a leading run of `hashes` the store holds, and where.

    tiers: for each block of the run, the name of the fastest tier that holds it ("l2", "disk",
    ...). A valid, maybe growing, leading run also while not done.
    behind: once done, indices of blocks behind the run that the store holds too, for who needs
    more than a run. Left empty where the run was known without asking.
    """

    __slots__ = ("behind", "tiers")

    def __init__(self, ticket_id: int, hashes: Sequence[bytes]) -> None:
        super().__init__(ticket_id, hashes)
        self.tiers: list[str] = []
        self.behind: list[int] = []

    @property
    def answer(self) -> Answer:
        """PENDING until done; then HIT for a run of at least one block, else MISS."""
        if not self.done:
            return Answer.PENDING
        return Answer.HIT if self.tiers else Answer.MISS


class Load(Ticket):
    """A run being brought into slots.

    slots: slot of each block of the leading run that is readable and leased to this ticket.
    tiers: where each of them came from. Always as long as `slots` (append to tiers first).
    """

    __slots__ = ("slots", "tiers")

    def __init__(self, ticket_id: int, hashes: Sequence[bytes]) -> None:
        super().__init__(ticket_id, hashes)
        self.tiers: list[str] = []
        self.slots: list[int] = []


class Save(Ticket):
    """Slots to fill with blocks the store lacks.

    grants: (index into hashes, slot) for each block to copy. A block absent from it is already
    held or on its way, or found no slot (`dropped` counts those).
    """

    __slots__ = ("dropped", "grants")

    def __init__(self, ticket_id: int, hashes: Sequence[bytes]) -> None:
        super().__init__(ticket_id, hashes)
        self.grants: list[tuple[int, int]] = []
        self.dropped = 0


class SlotBuffer(Protocol):
    """A mapped slab, as a connector needs it. `leases.Slab` is one."""

    slot_bytes: int
    slots: int

    def view(self, slot: int) -> memoryview:
        """Writable bytes of one slot, `slot_bytes` long and 4 KiB aligned."""
        ...


class BlockStore(Protocol):
    """The store as one engine sees it: bound to one tenant and one namespace.

    All verbs are called from one thread at a time. None blocks, none raises for a fault of the
    store: a store that is gone answers with done tickets that hold nothing, and `fault` set.
    """

    @property
    def namespace(self) -> Namespace: ...

    @property
    def slab(self) -> SlotBuffer | None:
        """The slab behind the slots of live tickets; None while the store cannot be reached.

        After a reconnect this is another slab, and tickets of the old one are done with `fault`
        set; their slots still lie in the slab that `slab_of` names.
        """
        ...

    def slab_of(self, ticket: Load | Save) -> SlotBuffer:
        """The slab this ticket's slots lie in; stays mapped until the ticket is handed back."""
        ...

    def match(self, hashes: Sequence[bytes]) -> Match:
        """Ask how much of this run is held. Touches no disk and no network."""
        ...

    def load(self, hashes: Sequence[bytes]) -> Load:
        """Bring this run into slots, from whatever tier is fastest for each block.

        The run is cut at the first block that is missing, corrupt, or finds no slot.
        """
        ...

    def save(self, hashes: Sequence[bytes]) -> Save:
        """Ask for slots for those of these blocks that are not held yet."""
        ...

    def commit(self, save: Save) -> None:
        """Every granted slot is filled: publish them and hand the ticket back.

        What commit acknowledged, the next match sees, from any engine on the slab.
        """
        ...

    def release(self, ticket: Load | Save) -> None:
        """Hand a ticket back, done or not. Unfilled grants become free slots.

        Exactly once per ticket (commit counts); a second time raises AssertionError.
        """
        ...

    def poll(self, timeout_s: float = 0.0) -> list[Ticket]:
        """Tickets that moved since the last poll; waits up to timeout_s for the first."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters, as plain numbers and nested dicts; for humans and metrics."""
        ...

    def close(self) -> None:
        """Hand back every lease. The caller has no copy running."""
        ...


@dataclass(slots=True)
class HookMatch:
    """Answer to an engine that asks its connector how much of a request it can load.

    blocks, tiers, more: count only when HIT; one tier name per block. more: later blocks are held
        or on their way for this request.
    compute: counts only when PENDING; blocks from `first_block` on that the engine computes
        meanwhile, 0 to wait.
    """

    answer: Answer
    blocks: int = 0
    tiers: tuple[str, ...] = ()
    more: bool = False
    compute: int = 0


MISS = HookMatch(Answer.MISS)
