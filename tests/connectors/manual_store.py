"""A `BlockStore` that answers when it is told to: late, in parts, with a fault, or never.

Held to the contract of `verbs`: a slot belongs to one ticket at a time, tickets go back exactly
once, and what is granted to a ticket that went back is freed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.blocks.key import Namespace
from kvstore.errors import StoreClosed
from kvstore.interface import Load, Match, Save, Ticket


class ManualClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class ManualSlab:
    """Slots in plain memory."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._memory = bytearray(slots * slot_bytes)

    def view(self, slot: int) -> memoryview:
        start = slot * self.slot_bytes
        return memoryview(self._memory)[start : start + self.slot_bytes]


class ManualStore:
    """A dict of blocks behind tickets.

    auto: verbs that answer at once ("match", "load", "save"); the others wait for `answer`.
    """

    def __init__(self, namespace: Namespace, slots: int, auto: Sequence[str] = ()) -> None:
        self._namespace = namespace
        self.auto = set(auto)
        self.slab: ManualSlab | None = ManualSlab(slots, namespace.block_bytes + 64)
        self.blocks: dict[bytes, tuple[str, bytes]] = {}
        self.open: dict[int, Ticket] = {}
        self.free = list(range(slots))
        self.slabs: dict[int, ManualSlab] = {}
        self.asked: list[Ticket] = []
        self.raising = False
        self._moved: dict[int, Ticket] = {}
        self._next_id = 0

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    def put(self, block_hash: bytes, data: bytes, tier: str = "l2") -> None:
        assert len(data) == self.namespace.block_bytes
        self.blocks[block_hash] = (tier, data)

    def last(self, kind: type) -> Any:
        """The newest ticket of a kind."""
        return [ticket for ticket in self.asked if isinstance(ticket, kind)][-1]

    # Answers.

    def answer(self, ticket: Any, *, blocks: int | None = None, done: bool = True) -> None:
        """Let a ticket grow to `blocks` blocks (all it can have when None)."""
        if isinstance(ticket, Match):
            run = self._run(ticket.hashes)
            ticket.tiers = [self.blocks[key][0] for key in run[:blocks]]
        elif isinstance(ticket, Load):
            for key in self._run(ticket.hashes)[len(ticket.slots) : blocks]:
                self._fill(ticket, key)
        else:
            self._grant(ticket, blocks)
        self.end(ticket, done=done)

    def end(self, ticket: Ticket, *, fault: str = "", done: bool = True) -> None:
        ticket.fault = fault
        ticket.done = done
        self._moved[ticket.ticket_id] = ticket

    def _run(self, hashes: Sequence[bytes]) -> list[bytes]:
        run = []
        for key in hashes:
            if key not in self.blocks:
                break
            run.append(key)
        return run

    def _fill(self, ticket: Load, key: bytes) -> None:
        if ticket.ticket_id not in self.open or not self.free:
            return  # handed back meanwhile: goes to nobody
        tier, data = self.blocks[key]
        slot = self.free.pop()
        self.slabs[ticket.ticket_id].view(slot)[: len(data)] = data
        ticket.tiers.append(tier)
        ticket.slots.append(slot)

    def _grant(self, ticket: Save, blocks: int | None) -> None:
        granted = 0
        for index, key in enumerate(ticket.hashes):
            if key in self.blocks or granted == blocks:
                continue
            if ticket.ticket_id not in self.open or not self.free:
                ticket.dropped += 1
                continue
            ticket.grants.append((index, self.free.pop()))
            granted += 1

    # Verbs.

    def match(self, hashes: Sequence[bytes]) -> Match:
        return self._new(Match, hashes, "match")

    def load(self, hashes: Sequence[bytes]) -> Load:
        return self._new(Load, hashes, "load")

    def save(self, hashes: Sequence[bytes]) -> Save:
        return self._new(Save, hashes, "save")

    def _new(self, kind: Any, hashes: Sequence[bytes], verb: str) -> Any:
        if self.raising:
            raise StoreClosed("the store is gone")
        self._next_id += 1
        ticket = kind(self._next_id, hashes)
        self.asked.append(ticket)
        if kind is not Match:
            self.open[ticket.ticket_id] = ticket
            assert self.slab is not None
            self.slabs[ticket.ticket_id] = self.slab
        if verb in self.auto:
            self.answer(ticket)
        return ticket

    def slab_of(self, ticket: Load | Save) -> ManualSlab:
        return self.slabs[ticket.ticket_id]

    def commit(self, save: Save) -> None:
        for index, slot in save.grants:
            view = self.slab_of(save).view(slot)[: self.namespace.block_bytes]
            self.blocks.setdefault(save.hashes[index], ("l2", bytes(view)))
        self._hand_back(save, [slot for _, slot in save.grants])

    def release(self, ticket: Load | Save) -> None:
        if isinstance(ticket, Load):
            self._hand_back(ticket, ticket.slots)
        else:
            self._hand_back(ticket, [slot for _, slot in ticket.grants])

    def _hand_back(self, ticket: Load | Save, slots: Sequence[int]) -> None:
        assert ticket.ticket_id in self.open, "a ticket goes back exactly once"
        del self.open[ticket.ticket_id]
        if self.slabs.pop(ticket.ticket_id) is self.slab:
            assert not set(slots) & set(self.free)
            self.free.extend(slots)

    def reconnect(self) -> None:
        """Another slab; tickets of the old one end with a fault and keep their slots there."""
        assert self.slab is not None
        for ticket in self.open.values():
            self.end(ticket, fault="the connection was lost")
        self.slab = ManualSlab(self.slab.slots, self.slab.slot_bytes)
        self.free = list(range(self.slab.slots))

    def poll(self, timeout_s: float = 0.0) -> list[Ticket]:
        if self.raising:
            raise StoreClosed("the store is gone")
        moved, self._moved = list(self._moved.values()), {}
        return moved

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        assert not self.open

    def check_idle(self) -> None:
        """Every ticket went back and every slot is free."""
        assert not self.open
        assert self.slab is not None
        assert sorted(self.free) == list(range(self.slab.slots))
