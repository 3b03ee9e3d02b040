"""Several stores used as one: the scheduler's view of tensor-parallel ranks.

Each rank saves its part of a block under its own namespace. A block is cached if every rank's part
is. The leases here keep all parts in L2 until the ranks have loaded them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.blocks.key import Namespace
from kvstore.interface import BlockStore, Load, Match, Operation, Save, SlabView

L2 = "l2"

OperationT = TypeVar("OperationT", Match, Load)


@dataclass
class RankSlab:
    """Size of the slab in blocks that have one slot for every rank. It has no bytes."""

    slots: int
    slot_bytes: int

    def view(self, slot: int) -> memoryview:
        raise AssertionError("no bytes here: ranks copy, not the scheduler")


class RankStores:
    """A `BlockStore` for matches and leases only: it never saves, and its slots have no bytes.

    `poll` updates the operations.
    """

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        assert stores, "at least one rank"
        self._stores = tuple(stores)
        self._parts: dict[int, tuple[Match | Load, list[Any]]] = {}
        self._last_operation_id = 0

    @property
    def namespace(self) -> Namespace:
        """The namespace of rank 0: those of other ranks differ in the rank only."""
        return self._stores[0].namespace

    @property
    def slab(self) -> SlabView | None:
        slabs = [store.slab for store in self._stores]
        if any(slab is None for slab in slabs):
            return None
        slots = min(slab.slots for slab in slabs if slab is not None)
        return RankSlab(slots // len(slabs), self.namespace.block_bytes)

    def slab_of(self, operation: Load | Save) -> SlabView:
        raise AssertionError("ranks copy, not the scheduler")

    def match(self, hashes: Sequence[bytes]) -> Match:
        return self._combine(Match, [store.match(hashes) for store in self._stores], hashes)

    def load(self, hashes: Sequence[bytes]) -> Load:
        return self._combine(Load, [store.load(hashes) for store in self._stores], hashes)

    def save(self, hashes: Sequence[bytes]) -> Save:
        raise AssertionError("ranks save, not the scheduler")

    def commit(self, save: Save) -> None:
        raise AssertionError("ranks save, not the scheduler")

    def release(self, operation: Load | Save) -> None:
        _, parts = self._parts.pop(operation.operation_id, (None, None))
        assert parts is not None, "an operation released twice"
        for store, part in zip(self._stores, parts, strict=True):
            store.release(part)

    def poll(self, timeout_s: float = 0.0) -> list[Operation]:
        for store in self._stores:
            store.poll(timeout_s / len(self._stores))
        updated: list[Operation] = []
        for operation_id, (operation, parts) in list(self._parts.items()):
            before = len(operation.tiers), operation.done
            _apply_parts(operation, parts)
            if (len(operation.tiers), operation.done) != before:
                updated.append(operation)
            if operation.done and isinstance(operation, Match):
                del self._parts[operation_id]
        return updated

    def stats(self) -> dict[str, Any]:
        return {f"rank{rank}": store.stats() for rank, store in enumerate(self._stores)}

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _combine(
        self, kind: type[OperationT], parts: list[OperationT], hashes: Sequence[bytes]
    ) -> OperationT:
        self._last_operation_id += 1
        operation = kind(self._last_operation_id, hashes)
        self._parts[operation.operation_id] = (operation, parts)
        _apply_parts(operation, parts)
        return operation


def _apply_parts(operation: Match | Load, parts: Sequence[Any]) -> None:
    """Extend an operation to the blocks that all of its parts have. `done` is written last."""
    if operation.done:
        return
    done = all(part.done for part in parts)
    blocks = min(len(part.tiers if isinstance(part, Match) else part.slots) for part in parts)
    for index in range(len(operation.tiers), blocks):
        operation.tiers.append(_slowest([part.tiers[index] for part in parts]))
    if isinstance(operation, Load):
        operation.slots.extend(range(len(operation.slots), blocks))
    operation.fault = next((part.fault for part in parts if part.fault), "")
    operation.done = done


def _slowest(tiers: Sequence[str]) -> str:
    """The tier to wait for: any tier other than L2."""
    return next((tier for tier in tiers if tier != L2), L2)
