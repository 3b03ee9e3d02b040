"""The open operations of a client, and the operations that wait for `poll`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvstore.interface import Load, Match, Operation, Save
from kvstore.ipc.protocol import MAX_UNPOLLED, MalformedMessage, check_number
from kvstore.ipc.sidecar_connection import SidecarConnection


class OpenOperation:
    """An open operation and the connection of its request (None: it was not sent)."""

    __slots__ = ("connection", "operation")

    def __init__(self, operation: Operation, connection: SidecarConnection | None) -> None:
        self.operation = operation
        self.connection = connection


class OpenOperations:
    """Operations by id, until they are committed or released; a match until it is done.

    lock: the client's lock. Every method except `poll` and `get` is called under it.
    changed: notified when an operation changes; also used by the client for its own state.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self._entries: dict[int, OpenOperation] = {}
        self._unpolled: dict[int, Operation] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, operation_id: int) -> OpenOperation | None:
        """The open operation of this id."""
        return self._entries.get(operation_id)

    def add(self, operation: Operation, connection: SidecarConnection | None) -> None:
        """Add an operation."""
        self._entries[operation.operation_id] = OpenOperation(operation, connection)

    def pop(self, operation: Operation) -> OpenOperation | None:
        """Remove an operation."""
        self._unpolled.pop(operation.operation_id, None)
        return self._entries.pop(operation.operation_id, None)

    def finish(self, operation: Operation, fault: str) -> None:
        """End an operation that will get no more updates."""
        if isinstance(operation, Save):
            operation.dropped = len(operation.hashes) - len(operation.slot_assignments)
        operation.fault = fault
        operation.done = True
        self._unpolled[operation.operation_id] = operation
        if len(self._unpolled) > MAX_UNPOLLED:
            del self._unpolled[next(iter(self._unpolled))]
        self.changed.notify_all()

    def update(self, message: Sequence[Any], connection: SidecarConnection) -> None:
        """Apply an UPDATE message to its operation. `done` is written last.

        Ignores an operation that has ended or that belongs to another connection.
        Raises MalformedMessage, ValueError, TypeError or IndexError: see `apply_update`.
        """
        entry = self._entries.get(message[1])
        if entry is None or entry.connection is not connection or entry.operation.done:
            return
        operation = entry.operation
        _, operation_id, done, fault, *rest = message
        apply_update(operation, rest, connection)
        operation.fault = fault
        operation.done = bool(done)
        if done and isinstance(operation, Match):
            del self._entries[operation_id]
        self._unpolled[operation_id] = operation
        self.changed.notify_all()

    def is_waiting(self, connection: SidecarConnection) -> bool:
        """Whether an operation waits for this connection."""
        return any(
            entry.connection is connection and not entry.operation.done
            for entry in self._entries.values()
        )

    def fail_all(self, connection: SidecarConnection, fault: str) -> int:
        """End every operation that still waits for this connection. Returns their number."""
        failed = 0
        for operation_id, entry in list(self._entries.items()):
            if entry.connection is connection and not entry.operation.done:
                failed += 1
                self.finish(entry.operation, fault)
                if isinstance(entry.operation, Match):
                    del self._entries[operation_id]
        return failed

    def poll(self, timeout_s: float) -> list[Operation]:
        """Operations that changed since the last poll. Waits up to timeout_s for the first."""
        with self.changed:
            if not self._unpolled and timeout_s > 0:
                self.changed.wait_for(lambda: self._unpolled, timeout_s)
            changed = list(self._unpolled.values())
            self._unpolled.clear()
        return changed

    def clear(self) -> set[SidecarConnection]:
        """Remove all operations. Returns their connections."""
        entries = self._entries.values()
        connections = {entry.connection for entry in entries if entry.connection is not None}
        self._entries.clear()
        self._unpolled.clear()
        return connections


def apply_update(
    operation: Operation, update: Sequence[Any], connection: SidecarConnection
) -> None:
    """Add the fields of an update to its operation, except `fault` and `done`.

    Raises MalformedMessage, ValueError, TypeError or IndexError: the update does not fit the
    operation.
    """
    if isinstance(operation, Match):
        operation.tiers.extend(update[0])
        operation.beyond_gap = update[1]
    elif isinstance(operation, Load):
        tiers, slots = update
        _check_slots(slots, len(tiers), connection)
        operation.tiers.extend(tiers)
        operation.slots.extend(slots)
    elif isinstance(operation, Save):
        flat, dropped = update
        _check_slots(flat[1::2], len(flat) // 2, connection)
        operation.slot_assignments.extend(zip(flat[::2], flat[1::2], strict=True))
        operation.dropped = dropped


def _check_slots(slots: Sequence[Any], expected: int, connection: SidecarConnection) -> None:
    """An update must have one slot of the connection's slab for each block."""
    if len(slots) != expected:
        raise MalformedMessage("the lists of an update differ in length")
    for slot in slots:
        if check_number(slot) >= connection.slab.slots:
            raise MalformedMessage(f"slot {slot} in a slab of {connection.slab.slots} slots")
