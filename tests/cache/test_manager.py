"""The L2 manager against a simple model: dicts and lists, no eviction policy.

The model also records the content of each slot. Only a filler may change its slot's bytes. Every
other client may only read them under a lease, and must find the complete block of the key.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.blocks.key import Key
from kvstore.cache.commands import (
    InFlightLoad,
    LeaseResult,
    SaveAllocation,
    TierWrite,
    Waiter,
    WriteOutcome,
)
from kvstore.cache.eviction import LRU
from kvstore.cache.manager import L2Manager
from kvstore.cache.slots import PINS, WORKERS
from kvstore.cache.tier_writes import STALL_LIMIT
from kvstore.cache.write_policy import WRITE_POLICIES, write_policy

NBYTES = 4096
KEYS = [Key("team", "space", bytes([n]) * 32) for n in range(12)]
CLIENTS = (1, 2, 3)
OLD = 2
"""Epochs after which a block is old."""

runs = st.lists(st.sampled_from(range(len(KEYS))), min_size=1, max_size=6, unique=True)
picks = st.integers(0, 1 << 16)


class L2ManagerAgainstModel(RuleBasedStateMachine):
    """Clients save, load, cancel and die; loads succeed or fail; writes end with every outcome."""

    @initialize(
        slots=st.integers(2, 7),
        tiers=st.integers(0, 2),
        policy=st.sampled_from(WRITE_POLICIES),
        max_loads=st.integers(1, 4),
        stall_limit=st.integers(0, 3),
        max_pinned=st.integers(0, 3),
    )
    def start(
        self,
        slots: int,
        tiers: int,
        policy: str,
        max_loads: int,
        stall_limit: int,
        max_pinned: int,
    ) -> None:
        self.slots, self.tiers, self.max_loads = slots, tiers, max_loads
        self.stall_limit = stall_limit
        self.policy = write_policy(policy)
        self.manager = L2Manager(
            slots,
            LRU(),
            self.policy,
            tiers=tiers,
            max_loads_per_tier=max_loads,
            stall_limit=stall_limit,
            max_pinned=max_pinned,
        )
        self.max_pinned = max_pinned
        self.epoch = 0
        self.born: dict[Key, int] = {}
        self.clients: set[int] = set()
        self.resident: dict[Key, int] = {}
        self.dirty: set[Key] = set()
        self.unsent: set[Key] = set()  # resident, to be written to the tiers at the next hit
        self.no_slot_count = 0  # requests without a slot since a worker ended a write
        self.leases: list[tuple[int, Key]] = []  # (client, key), one entry for each lease
        self.saving: dict[Key, tuple[int, int]] = {}  # key: (client, slot)
        self.loads: dict[Key, InFlightLoad] = {}
        self.started: list[InFlightLoad] = []
        self.waiting: list[tuple[Waiter, InFlightLoad]] = []
        self.writes: list[TierWrite] = []
        self.writing: list[TierWrite] = []  # those that a worker has started
        self.bytes: dict[int, Key | None] = {}  # content of each slot; None: half-written

    # --- expectations of the model -------------------------------------------------------

    def filling(self) -> dict[Key, int]:
        slots = {key: slot for key, (_, slot) in self.saving.items()}
        slots.update({key: load.slot for key, load in self.loads.items()})
        return slots

    def free(self) -> int:
        return self.slots - len(self.resident) - len(self.filling())

    def leased(self, key: Key) -> bool:
        return any(leased == key for _, leased in self.leases)

    def evictable(self) -> set[Key]:
        return {key for key in self.resident if not self.leased(key)} - self.dirty

    def evictable_unwritten(self) -> set[Key]:
        """All leases are those of writes that no worker has started."""
        waiting = Counter(write.key for write in self.writes if write not in self.writing)
        leases = Counter(key for _, key in self.leases)
        return {key for key in waiting if waiting[key] == leases[key]} - self.dirty

    def evictable_if_stuck(self) -> set[Key]:
        """If the tiers are stuck: dirty blocks with only leases of writes that are not started."""
        if self.no_slot_count < self.stall_limit:
            return set()
        waiting = Counter(write.key for write in self.writes if write not in self.writing)
        leases = Counter(key for _, key in self.leases)
        return {key for key in self.dirty if waiting[key] == leases[key]}

    def count_no_slot(self) -> None:
        """A request got no slot."""
        self.no_slot_count += bool(self.writes)

    def hit(self, keys: set[Key]) -> None:
        """Resident blocks were used."""
        if self.tiers and self.policy.on_evict:
            self.dirty |= keys & self.unsent

    def check_evictions(self, filled: dict[Key, int], kept: set[Key]) -> None:
        """Remove the blocks that a call evicted to fill slots; each must have been evictable."""
        lost = self.evictable_if_stuck() - kept
        cancelled = [write for write in self.writes if write.cancelled]
        for write in cancelled:
            assert write not in self.writing, "cancelled under a writer"
            assert write.key not in self.dirty or write.key in lost, "a dirty block was evicted"
            self.writes.remove(write)
            self.leases.remove((WORKERS, write.key))
            assert not self.manager.start_write(write)
        ready = {key for key in KEYS if self.manager.match([key], NBYTES)}
        gone = set(self.resident) - ready
        assert {write.key for write in cancelled} <= gone, "cancelled without need"
        assert gone <= (self.evictable() | lost) - kept
        if gone & lost:
            assert not (self.evictable() | self.evictable_unwritten()) - kept - gone, (
                "lost without need"
            )
        assert len(gone) == max(0, len(filled) - self.free())
        for key in gone:
            self.forget(key)
        taken = set(self.resident.values()) | set(self.filling().values())
        for slot in filled.values():
            assert slot not in taken, "a slot was given twice"
            taken.add(slot)
            self.bytes[slot] = None

    def forget(self, key: Key) -> None:
        del self.resident[key]
        self.dirty.discard(key)
        self.unsent.discard(key)

    def add_writes(self, writes: list[TierWrite]) -> None:
        for write in writes:
            if write.cancelled:
                continue  # by the call that returned it
            assert 0 <= write.tier < self.tiers
            assert self.resident[write.key] == write.slot
            self.writes.append(write)
            self.unsent.discard(write.key)
            self.leases.append((WORKERS, write.key))

    def publish(self, key: Key, slot: int) -> None:
        assert key not in self.resident, "a key twice"
        self.bytes[slot] = key
        self.resident[key] = slot
        self.born[key] = self.epoch

    # --- clients ------------------------------------------------------------------------

    @rule(client=st.sampled_from(CLIENTS))
    def connect(self, client: int) -> None:
        if client not in self.clients:
            self.manager.add_client(client)
            self.clients.add(client)

    @rule(client=st.sampled_from(CLIENTS))
    def die(self, client: int) -> None:
        if client not in self.clients:
            return
        self.manager.drop_client(client)
        self.clients.remove(client)
        self.leases = [lease for lease in self.leases if lease[0] != client]
        self.saving = {key: entry for key, entry in self.saving.items() if entry[0] != client}
        for waiter, load in list(self.waiting):
            if waiter.client == client:
                self.forget_waiter(waiter, load)

    def forget_waiter(self, waiter: Waiter, load: InFlightLoad) -> None:
        self.waiting.remove((waiter, load))
        others = any(other is load for _, other in self.waiting)
        if not others and load not in self.started:
            del self.loads[load.key]
            assert not self.manager.start_load(load), "a cancelled load was started"

    # --- saves --------------------------------------------------------------------------

    @precondition(lambda self: self.clients)
    @rule(pick=picks, run=runs)
    def save(self, pick: int, run: list[int]) -> None:
        client = sorted(self.clients)[pick % len(self.clients)]
        keys = [KEYS[n] for n in run]
        known = set(self.resident) | set(self.filling())
        result = self.manager.allocate_save(client, keys, NBYTES)
        assert isinstance(result, SaveAllocation)
        absent = [index for index, key in enumerate(keys) if key not in known]
        assigned = [index for index, _ in result.slot_assignments]
        assert assigned == sorted(assigned)
        ours = [index for index in assigned if index in absent]
        assert ours == absent[: len(ours)], "blocks are dropped from the end, not from the middle"
        filled = {keys[index]: slot for index, slot in result.slot_assignments}
        here = {key for key in keys if key in self.resident}
        self.hit(here)
        self.check_evictions(filled, here)
        for key, slot in filled.items():
            self.saving[key] = (client, slot)
        if result.dropped:
            assert self.free() == 0
            assert self.evictable() | self.evictable_unwritten() | self.evictable_if_stuck() <= here
            self.count_no_slot()
        self.add_writes(result.tier_writes)
        assert result.already_cached == len(keys) - len(absent)
        assert len(ours) + result.dropped >= len(absent)

    @precondition(lambda self: self.saving)
    @rule(pick=picks, filled=st.booleans())
    def end_save(self, pick: int, filled: bool) -> None:
        key = sorted(self.saving)[pick % len(self.saving)]
        client, slot = self.saving.pop(key)
        if not filled:
            self.manager.abandon(client, [slot])
            return
        writes = self.manager.commit(client, [slot])
        self.publish(key, slot)
        self.unsent.add(key)
        if self.tiers and self.policy.on_evict:
            self.dirty.add(key)
        assert len(writes) == (self.tiers if self.policy.on_commit else 0)
        self.add_writes(writes)
        assert self.manager.match([key], NBYTES) == 1, "a committed block is not found"

    # --- loads --------------------------------------------------------------------------

    @precondition(lambda self: self.clients)
    @rule(pick=picks, run=runs, places=st.lists(st.integers(-1, 1), min_size=6, max_size=6))
    def load(self, pick: int, run: list[int], places: list[int]) -> None:
        client = sorted(self.clients)[pick % len(self.clients)]
        keys = [KEYS[n] for n in run]
        sources = [place if 0 <= place < self.tiers else None for place in places[: len(keys)]]
        here = {key for key in keys if key in self.resident}
        loading, saving = set(self.loads), set(self.saving)
        result = self.manager.lease(client, keys, NBYTES, sources, "owner")
        assert isinstance(result, LeaseResult)
        self.hit(here)
        new = {load.key: load.slot for load in result.new_loads}
        self.check_evictions(new, here)
        for load in result.new_loads:
            self.loads[load.key] = load
        self.waiting += result.waiting
        for index, slot in result.ready:
            assert self.bytes[slot] == keys[index], "leased a block that is not the key's"
            self.leases.append((client, keys[index]))
        if result.truncated_at < len(keys):
            self.explain(
                keys[result.truncated_at],
                sources[result.truncated_at],
                result,
                loading,
                saving,
                here,
            )
        self.add_writes(result.tier_writes)

        ready = {index for index, _ in result.ready}
        waited = {waiter.index for waiter, _ in result.waiting}
        assert ready | waited == set(range(result.truncated_at)), "a prefix with a gap"
        assert ready == {index for index in range(result.truncated_at) if keys[index] in here}
        for waiter, load in result.waiting:
            assert load.key == keys[waiter.index]

    def explain(
        self,
        key: Key,
        source: int | None,
        result: LeaseResult,
        loading: set[Key],
        saving: set[Key],
        here: set[Key],
    ) -> None:
        """A load may only be truncated for a reason."""
        assert result.reason
        assert key not in here
        assert key not in loading
        full = Counter(load.tier for load in self.loads.values())
        if key not in saving and source is not None:
            kept = set(here)  # leased during the call, and maybe released by the truncation
            evictable = self.evictable() | self.evictable_unwritten() | self.evictable_if_stuck()
            if full[source] < self.max_loads:
                assert self.free() == 0
                assert evictable <= kept
                self.count_no_slot()

    @precondition(lambda self: self.waiting)
    @rule(pick=picks)
    def cancel_wait(self, pick: int) -> None:
        waiter, load = self.waiting[pick % len(self.waiting)]
        self.manager.cancel_wait(waiter, load)
        self.forget_waiter(waiter, load)

    @precondition(lambda self: any(client in CLIENTS for client, _ in self.leases))
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        mine = [lease for lease in self.leases if lease[0] in CLIENTS]
        client, key = lease = mine[pick % len(mine)]
        self.manager.release(client, [self.resident[key]])
        self.leases.remove(lease)

    # --- workers ------------------------------------------------------------------------

    @precondition(lambda self: len(self.loads) > len(self.started))
    @rule(pick=picks)
    def start_load(self, pick: int) -> None:
        waiting = [f for f in self.loads.values() if f not in self.started]
        load = waiting[pick % len(waiting)]
        assert self.manager.start_load(load)
        self.started.append(load)

    @precondition(lambda self: self.started and self.tiers == 2)
    @rule(pick=picks)
    def redirect(self, pick: int) -> None:
        load = self.started[pick % len(self.started)]
        target = 1 - load.tier
        there = sum(other.tier == target for other in self.loads.values())
        waited = any(other is load for _, other in self.waiting)
        goes_on = self.manager.redirect_load(load, target)
        assert goes_on == (waited and there < self.max_loads)
        if goes_on:
            self.started.remove(load)

    @precondition(lambda self: self.started)
    @rule(pick=picks, arrived=st.booleans())
    def end_load(self, pick: int, arrived: bool) -> None:
        load = self.started.pop(pick % len(self.started))
        del self.loads[load.key]
        ours = [waiter for waiter, other in self.waiting if other is load]
        self.waiting = [entry for entry in self.waiting if entry[1] is not load]
        if not arrived:
            assert self.manager.fail_load(load) == ours
            return
        waiters, writes = self.manager.complete_load(load)
        assert waiters == ours
        self.publish(load.key, load.slot)
        self.leases += [(waiter.client, load.key) for waiter in waiters]
        self.add_writes(writes)
        assert all(write.tier < load.tier for write in writes), "written back to its source"

    @precondition(lambda self: len(self.writes) > len(self.writing))
    @rule(pick=picks, queued=st.booleans())
    def start_write(self, pick: int, queued: bool) -> None:
        waiting = [write for write in self.writes if write not in self.writing]
        write = waiting[pick % len(waiting)]
        if queued:
            assert self.manager.start_write(write)
            self.writing.append(write)
        else:
            self.manager.complete_write(write, WriteOutcome.DROPPED)
            self.unsent.add(write.key)
            self.writes.remove(write)
            self.leases.remove((WORKERS, write.key))

    @precondition(lambda self: self.writing)
    @rule(pick=picks, outcome=st.sampled_from((WriteOutcome.WRITTEN, WriteOutcome.FAILED)))
    def end_write(self, pick: int, outcome: WriteOutcome) -> None:
        write = self.writing.pop(pick % len(self.writing))
        self.writes.remove(write)
        assert self.bytes[write.slot] == write.key, "a slot changed under a writer"
        self.manager.complete_write(write, outcome)
        self.leases.remove((WORKERS, write.key))
        self.dirty.discard(write.key)
        self.no_slot_count = 0
        if outcome is WriteOutcome.FAILED:
            self.unsent.add(write.key)

    @rule(limit=st.integers(1, 4))
    def flush(self, limit: int) -> None:
        writes = self.manager.flush_dirty(limit)
        assert {write.key for write in writes} <= self.dirty
        assert len({write.key for write in writes}) <= limit
        self.add_writes(writes)

    @rule()
    def clear(self) -> None:
        idle = {key for key in self.resident if not self.leased(key)}
        assert self.manager.clear() == len(idle)
        for key in idle:
            self.forget(key)

    # --- maintenance ---------------------------------------------------------------------------

    def pinned(self) -> set[Key]:
        return {key for client, key in self.leases if client == PINS}

    @rule(run=runs)
    def pin(self, run: list[int]) -> None:
        before = self.pinned()
        new: list[Key] = []
        expected = 0
        for key in (KEYS[n] for n in run):
            if key not in self.resident:
                break
            if key not in before:
                if len(before) + len(new) >= self.max_pinned:
                    break
                new.append(key)
            expected += 1
        count, writes = self.manager.pins.pin([KEYS[n] for n in run], NBYTES)
        assert count == expected
        self.leases += [(PINS, key) for key in new]
        assert {write.key for write in writes} == set(new) & self.dirty & self.unsent
        self.add_writes(writes)

    @rule(run=runs)
    def unpin(self, run: list[int]) -> None:
        keys = {KEYS[n] for n in run} & self.pinned()
        assert self.manager.pins.unpin([KEYS[n] for n in run]) == len(keys)
        for key in keys:
            self.leases.remove((PINS, key))

    @rule()
    def expire(self) -> None:
        self.epoch += 1
        aged = {key for key in self.resident if self.born[key] <= self.epoch - OLD}
        old = {key for key in aged if not self.leased(key)} - self.dirty
        evicted, writes = self.manager.evict_expired(OLD)
        assert evicted == len(old)
        assert {write.key for write in writes} == aged & self.dirty & self.unsent
        for key in old:
            self.forget(key)
        self.add_writes(writes)

    @rule(number=st.integers(0, len(KEYS) - 1), spare=st.integers(0, 2), arrived=st.booleans())
    def warm(self, number: int, spare: int, arrived: bool) -> None:
        key = KEYS[number]
        known = key in self.resident or key in self.filling()
        slot = self.manager.reserve_for_warm(key, NBYTES, spare)
        assert (slot is not None) == (not known and self.free() > spare)
        if slot is None:
            return
        if arrived:
            self.manager.publish_warmed(slot)
            self.publish(key, slot)
        else:
            self.manager.abandon(WORKERS, [slot])

    # --- always -----------------------------------------------------------------------------

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        stats = self.manager.stats()
        assert stats["slots_free"] == self.free()
        assert stats["slots_filling"] == len(self.filling())
        assert stats["slots_ready"] == len(self.resident)
        assert stats["slots_leased"] == len({key for who, key in self.leases if who != PINS})
        assert stats["slots_pinned"] == len(self.pinned()) <= self.max_pinned
        assert stats["slots_dirty"] == len(self.dirty)
        assert stats["loads_in_flight"] == len(self.loads)
        total = stats["slots_free"] + stats["slots_filling"] + stats["slots_ready"]
        assert total == stats["slots"] == self.slots

    @invariant()
    def resident_blocks_are_found_complete(self) -> None:
        if not hasattr(self, "manager"):
            return
        for key in KEYS:
            assert bool(self.manager.match([key], NBYTES)) == (key in self.resident)
        for key, slot in self.resident.items():
            assert self.bytes[slot] == key

    def teardown(self) -> None:
        """Every client leaves and every load and write ends: all slots are free."""
        if not hasattr(self, "manager"):
            return
        for client in list(self.clients):
            self.die(client)
        for load in list(self.loads.values()):
            self.manager.fail_load(load)
        for write in self.writes:
            self.manager.complete_write(write, WriteOutcome.FAILED)
        assert self.manager.pins.unpin() == len(self.pinned())
        self.manager.clear()
        assert self.manager.stats()["slots_free"] == self.slots


TestL2ManagerAgainstModel = L2ManagerAgainstModel.TestCase
TestL2ManagerAgainstModel.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# --- single rules, each with an example ------------------------------------------------------


def make(
    slots: int, policy: str = "write_through", tiers: int = 0, max_loads: int = 8
) -> L2Manager:
    manager = L2Manager(
        slots, LRU(), write_policy(policy), tiers=tiers, max_loads_per_tier=max_loads
    )
    manager.add_client(1)
    manager.add_client(2)
    return manager


def store(manager: L2Manager, *numbers: int, client: int = 1) -> list[TierWrite]:
    result = manager.allocate_save(client, [KEYS[n] for n in numbers], NBYTES)
    assert len(result.slot_assignments) == len(numbers)
    return result.tier_writes + manager.commit(
        client, [slot for _, slot in result.slot_assignments]
    )


def resident(manager: L2Manager) -> set[int]:
    return {n for n, key in enumerate(KEYS) if manager.match([key], NBYTES)}


def lease(manager: L2Manager, client: int, *numbers: int, tier: int | None = None) -> LeaseResult:
    keys = [KEYS[n] for n in numbers]
    return manager.lease(client, keys, NBYTES, [tier] * len(keys), "owner")


def test_release_past_zero_raises() -> None:
    manager = make(2)
    store(manager, 0)
    ((_, slot),) = lease(manager, 1, 0).ready
    manager.release(1, [slot])
    with pytest.raises(AssertionError):
        manager.release(1, [slot])


def test_a_client_cannot_release_the_slot_of_another() -> None:
    manager = make(2)
    store(manager, 0)
    ((_, slot),) = lease(manager, 1, 0).ready
    with pytest.raises(AssertionError):
        manager.release(2, [slot])
    ((_, assigned),) = manager.allocate_save(1, [KEYS[1]], NBYTES).slot_assignments
    for call in (manager.commit, manager.abandon):
        with pytest.raises(AssertionError):
            call(2, [assigned])


def test_a_slot_is_published_once() -> None:
    manager = make(2)
    ((_, slot),) = manager.allocate_save(1, [KEYS[0]], NBYTES).slot_assignments
    manager.commit(1, [slot])
    with pytest.raises(AssertionError):
        manager.commit(1, [slot])


def test_first_writer_wins() -> None:
    manager = make(4)
    first = manager.allocate_save(1, [KEYS[0]], NBYTES)
    second = manager.allocate_save(2, [KEYS[0]], NBYTES)
    assert len(first.slot_assignments) == 1
    assert not second.slot_assignments
    assert second.already_cached == 1
    assert not manager.match([KEYS[0]], NBYTES)
    manager.commit(1, [first.slot_assignments[0][1]])
    assert manager.match([KEYS[0]], NBYTES) == 1


def test_the_least_recently_used_block_is_evicted_first_and_a_prefix_last() -> None:
    manager = make(4)
    store(manager, 0, 1, 2, 3)
    store(manager, 4)
    assert resident(manager) == {0, 1, 2, 4}
    for _, slot in lease(manager, 1, 0, 1, 2).ready:
        manager.release(1, [slot])
    store(manager, 5)
    assert resident(manager) == {0, 1, 2, 5}
    store(manager, 6)
    assert resident(manager) == {0, 1, 5, 6}


def test_a_load_does_not_evict_its_own_blocks() -> None:
    manager = make(3, tiers=1)
    for write in store(manager, 1, 2):
        manager.complete_write(write, WriteOutcome.WRITTEN)
    for write in store(manager, 3):
        manager.complete_write(write, WriteOutcome.WRITTEN)
    result = lease(manager, 1, 0, 1, 2, tier=0)
    assert result.truncated_at == 3
    assert [index for index, _ in result.ready] == [1, 2]
    assert resident(manager) == {1, 2}


def test_all_waiters_share_one_load() -> None:
    manager = make(4, "selective", tiers=1)
    first = lease(manager, 1, 0, tier=0)
    second = lease(manager, 2, 0, tier=0)
    (load,) = first.new_loads
    assert not second.new_loads
    assert manager.start_load(load)
    waiters, _ = manager.complete_load(load)
    assert [waiter.client for waiter in waiters] == [1, 2]
    manager.release(1, [load.slot])
    store(manager, 1, 2, 3)
    assert manager.allocate_save(1, [KEYS[4]], NBYTES).dropped == 0
    assert 0 in resident(manager), "evicted under the second lease"


def test_loads_in_flight_are_bounded() -> None:
    manager = make(8, tiers=2, max_loads=2)
    result = lease(manager, 1, 0, 1, 2, tier=0)
    assert result.truncated_at == 2
    assert "too many" in result.reason
    assert lease(manager, 2, 3, tier=1).truncated_at == 1


def test_a_started_load_of_a_dead_client_completes_for_the_next_reader() -> None:
    manager = make(2, tiers=1)
    (load,) = lease(manager, 1, 0, tier=0).new_loads
    assert manager.start_load(load)
    manager.drop_client(1)
    assert manager.stats()["slots_free"] == 1, "its slot was freed under the worker"
    assert manager.complete_load(load)[0] == []
    assert resident(manager) == {0}


def test_assigned_slots_of_a_dead_client_are_freed_at_once() -> None:
    manager = make(3)
    manager.allocate_save(1, [KEYS[0], KEYS[1]], NBYTES)
    store(manager, 2, client=2)
    lease(manager, 1, 2)
    manager.drop_client(1)
    stats = manager.stats()
    assert (stats["slots_free"], stats["slots_filling"], stats["slots_leased"]) == (2, 0, 0)


def test_selective_writes_at_the_second_hit() -> None:
    manager = make(4, "selective", tiers=1)
    assert store(manager, 0) == []
    assert lease(manager, 1, 0).tier_writes == []
    (write,) = lease(manager, 2, 0).tier_writes
    assert write.key == KEYS[0]
    assert lease(manager, 2, 0).tier_writes == []
    manager.complete_write(write, WriteOutcome.WRITTEN)
    assert lease(manager, 2, 0).tier_writes == []


def test_selective_writes_a_dropped_block_again() -> None:
    manager = make(4, "selective", tiers=1)
    store(manager, 0)
    lease(manager, 1, 0)
    (write,) = lease(manager, 1, 0).tier_writes
    manager.complete_write(write, WriteOutcome.DROPPED)
    assert len(lease(manager, 1, 0).tier_writes) == 1


def test_write_back_evicts_no_unwritten_block_and_precleans() -> None:
    manager = make(8, "write_back", tiers=1)
    assert store(manager, 0, 1, 2, 3, 4, 5) == []
    result = manager.allocate_save(1, [KEYS[6], KEYS[7], KEYS[8]], NBYTES)
    assert result.dropped == 1, "an unwritten block was evicted"
    (write,) = result.tier_writes
    assert write.key == KEYS[5], "not the first in eviction order"
    manager.commit(1, [slot for _, slot in result.slot_assignments])
    assert manager.allocate_save(1, [KEYS[8]], NBYTES).dropped == 1, "evicted before it was written"
    assert manager.start_write(write)
    manager.complete_write(write, WriteOutcome.WRITTEN)
    assert len(manager.allocate_save(1, [KEYS[8]], NBYTES).slot_assignments) == 1
    assert 5 not in resident(manager)
    assert {0, 1, 2, 3, 4} <= resident(manager)


def test_write_back_keeps_a_block_whose_write_was_dropped() -> None:
    manager = make(2, "write_back", tiers=1)
    store(manager, 0)
    (write,) = store(manager, 1) or manager.allocate_save(1, [KEYS[2]], NBYTES).tier_writes
    manager.complete_write(write, WriteOutcome.DROPPED)
    result = manager.allocate_save(1, [KEYS[2]], NBYTES)
    assert result.dropped == 1
    (again,) = result.tier_writes
    assert again.key == write.key
    manager.complete_write(again, WriteOutcome.FAILED)
    assert len(manager.allocate_save(1, [KEYS[2]], NBYTES).slot_assignments) == 1, (
        "a dead tier blocks L2"
    )


def test_a_full_queue_does_not_block_slots_that_others_need() -> None:
    manager = make(3, tiers=2)
    writes = store(manager, 0, 1, 2)
    started = next(write for write in writes if write.key == KEYS[2])
    assert manager.start_write(started)
    result = manager.allocate_save(2, [KEYS[3], KEYS[4], KEYS[5]], NBYTES)
    assert len(result.slot_assignments) == 2
    assert result.dropped == 1, "a slot was taken from a writer"
    assert resident(manager) == {2}
    assert {s.key for s in writes if s.cancelled} == {KEYS[0], KEYS[1]}
    assert not any(manager.start_write(write) for write in writes if write.cancelled)
    assert manager.stats()["tier_writes_dropped"] == 4


def test_a_save_keeps_the_prefix_it_extends() -> None:
    manager = make(4)
    store(manager, 0, 1)
    store(manager, 2, 3)
    result = manager.allocate_save(1, [KEYS[0], KEYS[1], KEYS[4], KEYS[5]], NBYTES)
    assert [index for index, _ in result.slot_assignments] == [2, 3]
    assert resident(manager) == {0, 1}


def test_a_block_of_another_size_is_not_leased() -> None:
    manager = make(4)
    store(manager, 0)
    assert manager.match([KEYS[0]], NBYTES * 2) == 0
    assert manager.lease(1, [KEYS[0]], NBYTES * 2, [None], "owner").truncated_at == 0


def test_clear_leaves_leased_blocks_alone() -> None:
    manager = make(4)
    store(manager, 0, 1)
    lease(manager, 1, 0)
    assert manager.clear() == 1
    assert resident(manager) == {0}


@pytest.mark.parametrize("sent", [True, False])
def test_write_back_evicts_unwritten_blocks_once_the_tiers_are_stuck(sent: bool) -> None:
    manager = make(8, "write_back", tiers=1)
    store(manager, 0, 1, 2, 3, 4, 5, 6, 7)
    (writing,) = lease(manager, 1, 7).tier_writes
    assert writing.key == KEYS[6]
    if sent:
        assert len(manager.flush_dirty(8)) == 7
    assert manager.start_write(writing)
    for _ in range(STALL_LIMIT):
        assert manager.allocate_save(2, [KEYS[8]], NBYTES).dropped == 1, (
            "evicted before the stall limit"
        )
    assert len(manager.allocate_save(2, [KEYS[8]], NBYTES).slot_assignments) == 1, (
        "a tier that hangs blocks L2"
    )
    assert resident(manager) == {0, 1, 2, 3, 4, 6, 7}, "not the first one without leases"
    assert not writing.cancelled
    assert manager.stats()["tier_writes_dropped"] == 1
    manager.complete_write(writing, WriteOutcome.WRITTEN)
    assert len(manager.allocate_save(2, [KEYS[9]], NBYTES).slot_assignments) == 1
    assert manager.allocate_save(2, [KEYS[10]], NBYTES).dropped == 1, (
        "a write ended, so the tiers are not stuck"
    )
    manager.check()


def test_write_back_writes_a_failed_block_again_at_its_next_hit() -> None:
    manager = make(4, "write_back", tiers=1)
    store(manager, 0, 1)
    for write in manager.flush_dirty(4):
        assert manager.start_write(write)
        manager.complete_write(write, WriteOutcome.FAILED)
    assert manager.flush_dirty(4) == [], "a flush over a dead tier would never end"
    lease(manager, 1, 0)
    assert [write.key for write in manager.flush_dirty(4)] == [KEYS[0]]


def test_a_frozen_manager_assigns_no_slots_and_keeps_filled_ones() -> None:
    manager = make(6, "write_back", tiers=1)
    ((_, filling),) = manager.allocate_save(2, [KEYS[0]], NBYTES).slot_assignments
    store(manager, 1, 2)
    lease(manager, 1, 1)
    (load,) = lease(manager, 2, 3, tier=0).new_loads
    manager.freeze()
    manager.drop_client(1)
    result = manager.allocate_save(2, [KEYS[4], KEYS[5]], NBYTES)
    assert not result.slot_assignments
    assert result.dropped == 2
    leased = lease(manager, 2, 1, 6, tier=0)
    assert (leased.truncated_at, leased.reason, leased.new_loads) == (1, "no free slot", [])
    manager.commit(2, [filling])
    assert manager.start_load(load)
    manager.complete_load(load)
    assert resident(manager) == {0, 1, 2, 3}
    assert {write.key for write in manager.flush_dirty(9)} == {KEYS[0], KEYS[1], KEYS[2]}


def test_a_save_leaves_no_gap_in_its_own_prefix() -> None:
    manager = make(3)
    store(manager, 0, 1, 2)
    result = manager.allocate_save(2, [KEYS[0], KEYS[1], KEYS[2], KEYS[3]], NBYTES)
    assert not result.slot_assignments
    assert result.dropped == 1
    assert resident(manager) == {0, 1, 2}
    assert manager.stats()["slots_leased"] == 0


def test_a_redirected_load_waits_like_a_new_one() -> None:
    manager = make(8, tiers=2)
    result = lease(manager, 1, 0, tier=0)
    (load,) = result.new_loads
    assert manager.start_load(load)
    assert manager.redirect_load(load, 1)
    ((waiter, _),) = result.waiting
    manager.cancel_wait(waiter, load)
    assert not manager.start_load(load), "it has no waiter, and no worker had started it"
    assert manager.stats()["slots_free"] == 8


def test_a_redirected_load_counts_in_its_new_tier() -> None:
    manager = make(8, tiers=2, max_loads=1)
    (load,) = lease(manager, 1, 0, tier=0).new_loads
    (other,) = lease(manager, 1, 1, tier=1).new_loads
    assert manager.start_load(load)
    assert not manager.redirect_load(load, 1), "more loads than the tier allows"
    assert len(manager.fail_load(load)) == 1
    manager.fail_load(other)
    lonely = lease(manager, 2, 2, tier=0).new_loads[0]
    assert manager.start_load(lonely)
    manager.drop_client(2)
    assert not manager.redirect_load(lonely, 1), "it has no waiter"


@pytest.mark.parametrize("write", WRITE_POLICIES)
def test_a_block_of_another_size_makes_room_when_nobody_uses_it(write: str) -> None:
    manager = make(4, write, tiers=1)
    writes = store(manager, 0, 1)
    if write == "write_through":
        assert manager.start_write(writes[0])
        assert manager.allocate_save(2, [KEYS[0]], NBYTES // 2).slot_assignments == [], (
            "taken from a writer"
        )
        manager.complete_write(writes[0], WriteOutcome.WRITTEN)
    assert len(manager.allocate_save(2, [KEYS[0]], NBYTES // 2).slot_assignments) == 1
    keys = [KEYS[1]]
    held = manager.lease(1, keys, NBYTES, [None], "owner")
    assert manager.lease(2, keys, NBYTES // 2, [0], "owner").truncated_at == 0, (
        "taken from a reader"
    )
    manager.release(1, [slot for _, slot in held.ready])
    assert len(manager.lease(2, keys, NBYTES // 2, [0], "owner").new_loads) == 1
    manager.check()
