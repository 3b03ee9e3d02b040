"""One engine's view of a store: an `interface.BlockStore` bound to a tenant and a namespace.

The embedded engine has one session. The sidecar has one for each connection. One thread at a time
calls the operations. A second thread may block in `poll` meanwhile. The store's workers update
operations from their own threads. All records are kept under the L2 manager's lock, so a lease and
the operation that shows it change together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar

from kvstore.blocks.key import Key, Namespace
from kvstore.cache.commands import MISSING, InFlightLoad, LeaseResult, TierWrite, Waiter
from kvstore.cache.manager import L2Manager
from kvstore.interface import Load, Match, Operation, Save
from kvstore.shm.slab import Slab
from kvstore.store.locator import L2, BlockLocator
from kvstore.telemetry.usage_counters import SessionUsage

OperationT = TypeVar("OperationT", bound=Operation)

CLOSED: Final = "the store is closed"
RELEASED: Final = "the operation was already committed or released"
LEASE_ATTEMPTS: Final = 2
"""Leases tried for one load. The second is for a block evicted between lookup and lease."""
MAX_UNPOLLED: Final = 1 << 16
"""Operations kept for `poll`. If the caller never polls, the oldest are dropped."""


class StoreParts(Protocol):
    """The parts of `store.Store` that a session uses."""

    @property
    def slab(self) -> Slab: ...

    @property
    def manager(self) -> L2Manager: ...

    @property
    def locator(self) -> BlockLocator: ...

    def dispatch(self, loads: Iterable[InFlightLoad], writes: Iterable[TierWrite]) -> None: ...

    def defer_writes_of_down_tiers(self) -> None: ...

    def count_hits(self, tier: str, blocks: int) -> None: ...

    def remove_session(self, client: int) -> None: ...

    def stats(self) -> dict[str, Any]: ...


class Session:
    """The operations of an embedded store. Made by `Store.session`."""

    def __init__(
        self,
        store: StoreParts,
        client: int,
        namespace: Namespace,
        tenant: str,
        usage: SessionUsage | None = None,
    ) -> None:
        self.tenant = tenant
        self.usage = usage
        self.closed = False
        self._store = store
        self._client = client
        self._namespace = namespace
        self._nbytes = namespace.block_bytes
        self._manager = store.manager
        self._last_id = 0
        self._loads: dict[int, LoadProgress] = {}
        self._saves: dict[int, Save] = {}
        self._matches: set[Match] = set()
        self._unpolled: dict[int, Operation] = {}
        self._changed = threading.Condition(self._manager.lock)

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def slab(self) -> Slab | None:
        return None if self.closed else self._store.slab

    def slab_of(self, operation: Load | Save) -> Slab:
        return self._store.slab

    def match(self, hashes: Sequence[bytes]) -> Match:
        match = Match(self._next_id(), hashes)
        if self.closed:
            return self._fail_closed(match)
        keys = self._keys(hashes)
        self._record_lookup(hashes, keys)
        self._answer_match(match, keys, probe=True)
        return match

    def record_lookup(self, hashes: Sequence[bytes]) -> None:
        """Record a lookup that the client answered from the shared index."""
        if not self.closed:
            self._record_lookup(hashes, self._keys(hashes))

    def load(self, hashes: Sequence[bytes]) -> Load:
        """See `interface`. A block in a tier without a local index is found only after a match."""
        load = Load(self._next_id(), hashes)
        if self.closed:
            return self._fail_closed(load)
        keys = self._keys(hashes)
        for attempts_left in reversed(range(LEASE_ATTEMPTS)):
            in_l2 = self._manager.cached_or_loading(keys, self._nbytes)
            tiers = self._store.locator.find_tiers(keys, in_l2)
            with self._manager.lock:
                if self.closed:
                    return self._fail_closed(load)
                progress = LoadProgress(self, load)
                lease = self._manager.lease(self._client, keys, self._nbytes, tiers, progress)
                retry = attempts_left > 0 and lease.reason == MISSING and in_l2[lease.truncated_at]
                if retry:
                    self._cancel_lease(lease)
                else:
                    self._loads[load.operation_id] = progress
                    if self.usage is not None:
                        self.usage.on_load_start(load.hashes)
                    progress.start(lease)
            # Cancelling a lease cancels its new loads too.
            self._store.dispatch(() if retry else lease.new_loads, lease.tier_writes)
            if not retry:
                self._store.count_hits(L2, len(lease.ready))
                break
        return load

    def save(self, hashes: Sequence[bytes]) -> Save:
        save = Save(self._next_id(), hashes)
        self._store.defer_writes_of_down_tiers()
        with self._manager.lock:
            if self.closed:
                return self._fail_closed(save)
            allocation = self._manager.allocate_save(self._client, self._keys(hashes), self._nbytes)
            save.slot_assignments.extend(allocation.slot_assignments)
            save.dropped = allocation.dropped
            self._saves[save.operation_id] = save
            self._complete(save)
        self._store.dispatch((), allocation.tier_writes)
        return save

    def commit(self, save: Save) -> None:
        with self._manager.lock:
            if self.closed:
                return
            assert self._saves.pop(save.operation_id, None) is save, RELEASED
            self._unpolled.pop(save.operation_id, None)
            writes = self._manager.commit(self._client, [slot for _, slot in save.slot_assignments])
            if self.usage is not None:
                self.usage.on_save(len(save.slot_assignments))
        self._store.dispatch((), writes)

    def release(self, operation: Load | Save) -> None:
        with self._manager.lock:
            if self.closed:
                return
            self._unpolled.pop(operation.operation_id, None)
            if isinstance(operation, Save):
                assert self._saves.pop(operation.operation_id, None) is operation, RELEASED
                slots = [slot for _, slot in operation.slot_assignments]
                self._manager.abandon(self._client, slots)
                return
            progress = self._loads.pop(operation.operation_id, None)
            assert progress is not None, RELEASED
            progress.release()

    def poll(self, timeout_s: float = 0.0) -> list[Operation]:
        with self._changed:
            if not self._unpolled and timeout_s > 0 and not self.closed:
                self._changed.wait_for(lambda: self._unpolled or self.closed, timeout_s)
            changed = list(self._unpolled.values())
            self._unpolled.clear()
            return changed

    def stats(self) -> dict[str, Any]:
        return self._store.stats()

    def close(self) -> None:
        """Release every lease, and end open operations with a fault.

        The sidecar calls this when a client's connection has ended. By then the safety rule of
        `protocol` ensures that no copy of that client can still run.
        """
        with self._manager.lock:
            if self.closed:
                return
            self.closed = True
            # `drop_client` releases the leases of open loads too.
            self._manager.drop_client(self._client)
            for progress in self._loads.values():
                self._fail_closed(progress.load)
            for match in list(self._matches):
                self._fail_closed(match)
            self._loads.clear()
            self._saves.clear()
            self._matches.clear()
            self._changed.notify_all()
        self._store.remove_session(self._client)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- for the store and LoadProgress -------------------------------------------------

    def on_change(self, operation: Operation) -> None:
        """Have `poll` return this operation. Under the L2 manager's lock."""
        self._unpolled[operation.operation_id] = operation
        if len(self._unpolled) > MAX_UNPOLLED:
            del self._unpolled[next(iter(self._unpolled))]
        self._changed.notify_all()

    def release_slots(self, slots: Sequence[int]) -> None:
        """Release leases that no operation shows any more. Under the L2 manager's lock."""
        self._manager.release(self._client, slots)

    def cancel_wait(self, waiter: Waiter, in_flight: InFlightLoad) -> None:
        """Stop waiting for an in-flight load. Under the L2 manager's lock."""
        self._manager.cancel_wait(waiter, in_flight)

    def _answer_match(self, match: Match, keys: Sequence[Key], *, probe: bool) -> None:
        """Report the cached prefix and its tiers. probe: query remote tiers for the rest first."""
        tiers, beyond_gap = self._store.locator.locate_prefix(keys, self._nbytes)
        with self._manager.lock:
            if self.closed:
                self._fail_closed(match)
                return
            match.tiers.extend(tiers[len(match.tiers) :])
            if probe and len(tiers) < len(keys):
                self._matches.add(match)
                rest = keys[len(tiers) :]
                if self._store.locator.probe(rest, lambda: self._on_probe_end(match, keys)):
                    return
            self._matches.discard(match)
            match.beyond_gap = [index for index in beyond_gap if index > len(match.tiers)]
            self._complete(match)

    def _on_probe_end(self, match: Match, keys: Sequence[Key]) -> None:
        """Every remote tier has answered. Called from a worker."""
        self._answer_match(match, keys, probe=False)

    def _cancel_lease(self, lease: LeaseResult) -> None:
        """Release the slots of a lease and cancel its loads. Under the L2 manager's lock."""
        for waiter, in_flight in lease.waiting:
            self._manager.cancel_wait(waiter, in_flight)
        self._manager.release(self._client, [slot for _, slot in lease.ready])

    def _record_lookup(self, hashes: Sequence[bytes], keys: Sequence[Key]) -> None:
        """Report a lookup to the eviction policy and to the usage counters."""
        with self._manager.lock:
            self._manager.record_lookup(keys)
            if self.usage is not None:
                self.usage.on_lookup(hashes)

    def _keys(self, hashes: Sequence[bytes]) -> list[Key]:
        tenant, digest = self.tenant, self._namespace.digest
        make = tuple.__new__  # a third of the time of Key(...)
        return [make(Key, (tenant, digest, name)) for name in hashes]

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _complete(self, operation: Operation) -> None:
        operation.done = True
        self.on_change(operation)

    def _fail_closed(self, operation: OperationT) -> OperationT:
        """End an operation because the store is closed."""
        operation.fault = CLOSED
        operation.done = True
        return operation

    def __repr__(self) -> str:
        return f"session {self._client} of {self.tenant}, namespace {self._namespace.digest[:8]}"


class LoadProgress:
    """Progress of one load: blocks that arrived, blocks it waits for, and the end of the prefix.

    The operation shows only a prefix. A block that arrives early is shown when the prefix reaches
    it. All methods run under the L2 manager's lock.
    """

    def __init__(self, session: Session, load: Load) -> None:
        self.load = load
        self._session = session
        self._arrived: dict[int, tuple[int, str]] = {}
        self._waiting: dict[int, tuple[Waiter, InFlightLoad]] = {}
        self._end = len(load.hashes)
        self._started_s = time.monotonic()

    def start(self, lease: LeaseResult) -> None:
        """Take over the leased slots and the in-flight loads."""
        self._end = lease.truncated_at
        self.load.fault = lease.reason
        self._arrived = {index: (slot, L2) for index, slot in lease.ready}
        self._waiting = {waiter.index: (waiter, in_flight) for waiter, in_flight in lease.waiting}
        self._advance()

    def on_loaded(self, index: int, slot: int, tier: str) -> None:
        """A block is in its slot, leased to this session."""
        del self._waiting[index]
        self._arrived[index] = (slot, tier)
        self._advance()

    def truncate(self, index: int, reason: str) -> None:
        """A block failed to load: end the prefix before it, and release the blocks after it.

        A key that occurs twice in the load waits twice. The first failure may already have
        cancelled the second wait; then this call does nothing.
        """
        if self._waiting.pop(index, None) is None:
            return
        if index < self._end:
            self._end = index
            self.load.fault = reason
            after = [i for i in self._arrived if i > index]
            self._session.release_slots([self._arrived.pop(i)[0] for i in after])
            for i in [i for i in self._waiting if i > index]:
                self._session.cancel_wait(*self._waiting.pop(i))
        self._advance()

    def release(self) -> None:
        """Release the leases. The in-flight loads continue for other waiters."""
        for waiter, in_flight in self._waiting.values():
            self._session.cancel_wait(waiter, in_flight)
        self._session.release_slots([*self.load.slots, *(s for s, _ in self._arrived.values())])
        self._waiting.clear()
        self._arrived.clear()

    def _advance(self) -> None:
        """Show the blocks that now belong to the prefix."""
        load = self.load
        usage = self._session.usage
        before = len(load.slots)
        while len(load.slots) in self._arrived:
            slot, tier = self._arrived.pop(len(load.slots))
            load.tiers.append(tier)
            load.slots.append(slot)
        if usage is not None and len(load.slots) > before:
            usage.on_hit(load.tiers[before:])
        if len(load.slots) == self._end and not load.done:
            load.done = True
            if usage is not None:
                usage.on_load_end(time.monotonic() - self._started_s)
            self._session.on_change(load)
        elif len(load.slots) > before:
            self._session.on_change(load)
