"""Several stores asked as one: the scheduler's view of tensor-parallel ranks.

Each rank keeps its own part of a block under a namespace of its own. A run is held as far as every
rank holds it, and the leases here keep all parts of it in L2 until the ranks have loaded them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.blocks.key import Namespace
from kvstore.interface import BlockStore, Load, Match, Save, SlotBuffer, Ticket

L2 = "l2"

TicketT = TypeVar("TicketT", Match, Load)


@dataclass
class Share:
    """What one run may take of a slab that holds each of its blocks once for every rank."""

    slots: int
    slot_bytes: int

    def view(self, slot: int) -> memoryview:
        raise AssertionError("a share has no bytes: ranks copy, not the scheduler")


class RankStores:
    """`verbs.BlockStore` for matching and holding; it never saves, and its slots have no bytes.

    Tickets grow when `poll` is called.
    """

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        assert stores, "at least one rank"
        self._stores = tuple(stores)
        self._parts: dict[int, tuple[Match | Load, list[Any]]] = {}
        self._last_id = 0

    @property
    def namespace(self) -> Namespace:
        """Of rank 0: ranks differ in their number only."""
        return self._stores[0].namespace

    @property
    def slab(self) -> SlotBuffer | None:
        slabs = [store.slab for store in self._stores]
        if any(slab is None for slab in slabs):
            return None
        slots = min(slab.slots for slab in slabs if slab is not None)
        return Share(slots // len(slabs), self.namespace.block_bytes)

    def slab_of(self, ticket: Load | Save) -> SlotBuffer:
        raise AssertionError("ranks copy, not the scheduler")

    def match(self, hashes: Sequence[bytes]) -> Match:
        return self._ask(Match, [store.match(hashes) for store in self._stores], hashes)

    def load(self, hashes: Sequence[bytes]) -> Load:
        return self._ask(Load, [store.load(hashes) for store in self._stores], hashes)

    def save(self, hashes: Sequence[bytes]) -> Save:
        raise AssertionError("ranks save, not the scheduler")

    def commit(self, save: Save) -> None:
        raise AssertionError("ranks save, not the scheduler")

    def release(self, ticket: Load | Save) -> None:
        _, parts = self._parts.pop(ticket.ticket_id, (None, None))
        assert parts is not None, "a ticket handed back twice"
        for store, part in zip(self._stores, parts, strict=True):
            store.release(part)

    def poll(self, timeout_s: float = 0.0) -> list[Ticket]:
        for store in self._stores:
            store.poll(timeout_s / len(self._stores))
        moved: list[Ticket] = []
        for number, (ticket, parts) in list(self._parts.items()):
            before = len(ticket.tiers), ticket.done
            _grow(ticket, parts)
            if (len(ticket.tiers), ticket.done) != before:
                moved.append(ticket)
            if ticket.done and isinstance(ticket, Match):
                del self._parts[number]
        return moved

    def stats(self) -> dict[str, Any]:
        return {f"rank{rank}": store.stats() for rank, store in enumerate(self._stores)}

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _ask(self, kind: type[TicketT], parts: list[TicketT], hashes: Sequence[bytes]) -> TicketT:
        self._last_id += 1
        ticket = kind(self._last_id, hashes)
        self._parts[ticket.ticket_id] = (ticket, parts)
        _grow(ticket, parts)
        return ticket


def _grow(ticket: Match | Load, parts: Sequence[Any]) -> None:
    """Let a ticket grow to what all its parts have. `done` is written last."""
    if ticket.done:
        return
    done = all(part.done for part in parts)
    blocks = min(len(part.tiers if isinstance(part, Match) else part.slots) for part in parts)
    for index in range(len(ticket.tiers), blocks):
        ticket.tiers.append(_slowest([part.tiers[index] for part in parts]))
    if isinstance(ticket, Load):
        ticket.slots.extend(range(len(ticket.slots), blocks))
    ticket.fault = next((part.fault for part in parts if part.fault), "")
    ticket.done = done


def _slowest(tiers: Sequence[str]) -> str:
    """The tier to wait for: any other than L2."""
    return next((tier for tier in tiers if tier != L2), L2)
