"""A `BlockStore` that the test controls: it answers late, in parts, with an error, or never.

It checks the contract of `interface`: a slot belongs to one operation at a time, and an operation
is released exactly once. A slot assigned to a released operation is freed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.blocks.key import Namespace
from kvstore.errors import StoreClosed
from kvstore.interface import Load, Match, Operation, Save


class ManualClock:
    """A clock in seconds that the test advances."""

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
    """A dict of blocks as a store.

    auto: operations answered at once ("match", "load", "save"); the others wait for `answer`.
    """

    def __init__(self, namespace: Namespace, slots: int, auto: Sequence[str] = ()) -> None:
        self._namespace = namespace
        self.auto = set(auto)
        self.slab: ManualSlab | None = ManualSlab(slots, namespace.block_bytes + 64)
        self.blocks: dict[bytes, tuple[str, bytes]] = {}
        self.open: dict[int, Operation] = {}
        self.free = list(range(slots))
        self.slabs: dict[int, ManualSlab] = {}
        self.operations: list[Operation] = []
        self.raising = False
        self._updated: dict[int, Operation] = {}
        self._next_id = 0

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    def put(self, block_hash: bytes, data: bytes, tier: str = "l2") -> None:
        assert len(data) == self.namespace.block_bytes
        self.blocks[block_hash] = (tier, data)

    def last(self, kind: type) -> Any:
        """The last operation of a kind."""
        return [operation for operation in self.operations if isinstance(operation, kind)][-1]

    # Answers.

    def answer(self, operation: Any, *, blocks: int | None = None, done: bool = True) -> None:
        """Extend an operation to `blocks` blocks; None: to all that it can have."""
        if isinstance(operation, Match):
            prefix = self._stored_prefix(operation.hashes)
            operation.tiers = [self.blocks[key][0] for key in prefix[:blocks]]
        elif isinstance(operation, Load):
            for key in self._stored_prefix(operation.hashes)[len(operation.slots) : blocks]:
                self._fill(operation, key)
        else:
            self._assign_slots(operation, blocks)
        self.end(operation, done=done)

    def end(self, operation: Operation, *, fault: str = "", done: bool = True) -> None:
        operation.fault = fault
        operation.done = done
        self._updated[operation.operation_id] = operation

    def _stored_prefix(self, hashes: Sequence[bytes]) -> list[bytes]:
        prefix = []
        for key in hashes:
            if key not in self.blocks:
                break
            prefix.append(key)
        return prefix

    def _fill(self, operation: Load, key: bytes) -> None:
        if operation.operation_id not in self.open or not self.free:
            return  # released meanwhile
        tier, data = self.blocks[key]
        slot = self.free.pop()
        self.slabs[operation.operation_id].view(slot)[: len(data)] = data
        operation.tiers.append(tier)
        operation.slots.append(slot)

    def _assign_slots(self, operation: Save, blocks: int | None) -> None:
        assigned = 0
        for index, key in enumerate(operation.hashes):
            if key in self.blocks or assigned == blocks:
                continue
            if operation.operation_id not in self.open or not self.free:
                operation.dropped += 1
                continue
            operation.slot_assignments.append((index, self.free.pop()))
            assigned += 1

    # Operations.

    def match(self, hashes: Sequence[bytes]) -> Match:
        return self._new(Match, hashes, "match")

    def load(self, hashes: Sequence[bytes]) -> Load:
        return self._new(Load, hashes, "load")

    def save(self, hashes: Sequence[bytes]) -> Save:
        return self._new(Save, hashes, "save")

    def _new(self, kind: Any, hashes: Sequence[bytes], call: str) -> Any:
        if self.raising:
            raise StoreClosed("the store is gone")
        self._next_id += 1
        operation = kind(self._next_id, hashes)
        self.operations.append(operation)
        if kind is not Match:
            self.open[operation.operation_id] = operation
            assert self.slab is not None
            self.slabs[operation.operation_id] = self.slab
        if call in self.auto:
            self.answer(operation)
        return operation

    def slab_of(self, operation: Load | Save) -> ManualSlab:
        return self.slabs[operation.operation_id]

    def commit(self, save: Save) -> None:
        for index, slot in save.slot_assignments:
            view = self.slab_of(save).view(slot)[: self.namespace.block_bytes]
            self.blocks.setdefault(save.hashes[index], ("l2", bytes(view)))
        self._release(save, [slot for _, slot in save.slot_assignments])

    def release(self, operation: Load | Save) -> None:
        if isinstance(operation, Load):
            self._release(operation, operation.slots)
        else:
            self._release(operation, [slot for _, slot in operation.slot_assignments])

    def _release(self, operation: Load | Save, slots: Sequence[int]) -> None:
        assert operation.operation_id in self.open, "an operation is released exactly once"
        del self.open[operation.operation_id]
        if self.slabs.pop(operation.operation_id) is self.slab:
            assert not set(slots) & set(self.free)
            self.free.extend(slots)

    def reconnect(self) -> None:
        """Replace the slab. Open operations end with an error and keep their old slots."""
        assert self.slab is not None
        for operation in self.open.values():
            self.end(operation, fault="the connection was lost")
        self.slab = ManualSlab(self.slab.slots, self.slab.slot_bytes)
        self.free = list(range(self.slab.slots))

    def poll(self, timeout_s: float = 0.0) -> list[Operation]:
        if self.raising:
            raise StoreClosed("the store is gone")
        updated, self._updated = list(self._updated.values()), {}
        return updated

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        assert not self.open

    def check_idle(self) -> None:
        """Check that every operation is released and every slot is free."""
        assert not self.open
        assert self.slab is not None
        assert sorted(self.free) == list(range(self.slab.slots))
