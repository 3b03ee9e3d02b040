"""The L2 manager against a simple model: dicts and lists, no eviction policy.

The model also records the content of each slot. Only a filler may change its slot's bytes. Every
other client may only read them under a lease, and must find the complete block of the key. It
counts the writes that the tiers never got.
"""

from __future__ import annotations

import itertools
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
from kvstore.cache.eviction import EVICTION_POLICIES, LRU, eviction_policy
from kvstore.cache.manager import L2Manager
from kvstore.cache.slots import PINS, WORKERS
from kvstore.cache.tier_writes import WRITE_TRIES_MAX
from kvstore.cache.write_policy import WRITE_POLICIES, write_policy

NBYTES = 4096
KEYS = [Key("team", "space", bytes([n]) * 32) for n in range(12)]
CLIENTS = (1, 2, 3)
OLD = 2
"""Epochs after which a block is old."""

ends = (st.integers(0, len(KEYS) - 1), st.integers(1, 6))
runs = st.one_of(
    st.lists(st.sampled_from(range(len(KEYS))), min_size=1, max_size=6, unique=True),
    st.builds(lambda start, count: list(range(start, min(start + count, len(KEYS)))), *ends),
)
"""Any blocks, and a part of one chain."""
picks = st.integers(0, 1 << 16)


class L2ManagerAgainstModel(RuleBasedStateMachine):
    """Clients save, load, cancel and die; loads succeed or fail; writes end with every outcome."""

    @initialize(
        slots=st.integers(2, 7),
        tiers=st.integers(0, 2),
        policy=st.sampled_from(WRITE_POLICIES),
        max_loads=st.integers(1, 4),
        max_pinned=st.integers(0, 3),
    )
    def start(
        self,
        slots: int,
        tiers: int,
        policy: str,
        max_loads: int,
        max_pinned: int,
    ) -> None:
        self.slots, self.tiers, self.max_loads = slots, tiers, max_loads
        self.policy = write_policy(policy)
        self.manager = L2Manager(
            slots,
            LRU(),
            self.policy,
            tiers=tiers,
            max_loads_per_tier=max_loads,
            max_pinned=max_pinned,
        )
        self.max_pinned = max_pinned
        self.epoch = 0
        self.born: dict[Key, int] = {}
        self.clients: set[int] = set()
        self.resident: dict[Key, int] = {}
        self.dirty: set[Key] = set()
        self.unsent: set[Key] = set()  # resident, to be written to the tiers at the next hit
        self.down: set[int] = set()  # tiers that take no writes
        self.deferred: dict[tuple[int, Key], int] = {}  # (tier, key): tries
        self.dropped = 0  # writes that a tier will not get
        self.failed = 0
        self.parents: dict[Key, Key] = {}  # block before a block in its chain
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

    def evictable_if_down(self) -> set[Key]:
        """If all tiers are down: blocks with only leases of writes that are not started."""
        if not self.all_down():
            return set()
        waiting = Counter(write.key for write in self.writes if write not in self.writing)
        leases = Counter(key for _, key in self.leases)
        return {key for key in self.resident if waiting[key] == leases[key]}

    def link(self, before: Key | None, key: Key) -> None:
        if before is not None and before != key:
            self.parents.setdefault(key, before)

    def ancestors(self, key: Key) -> set[Key]:
        found: set[Key] = set()
        while key in self.parents and self.parents[key] not in found:
            key = self.parents[key]
            found.add(key)
        return found

    def before_filled_blocks(self) -> set[Key]:
        """Blocks that are not evicted for those that follow them."""
        return {each for key in self.filling() for each in self.ancestors(key)}

    def hit(self, keys: set[Key]) -> None:
        """Resident blocks were used."""
        if self.tiers and self.policy.on_evict:
            self.dirty |= keys & self.unsent

    def check_evictions(self, filled: dict[Key, int], kept: set[Key], lost: set[Key]) -> None:
        """Remove the blocks that a call evicted to fill slots; each must have been evictable.

        lost: blocks that it may evict although they wait to be written.
        """
        lost = lost - kept
        cancelled = [write for write in self.writes if write.cancelled]
        for write in cancelled:
            assert write not in self.writing, "cancelled under a writer"
            assert write.key in lost, "its write was cancelled for a save"
            self.writes.remove(write)
            self.leases.remove((WORKERS, write.key))
            self.dropped += 1
            assert not self.manager.start_write(write)
        ready = {key for key in KEYS if self.manager.match([key], NBYTES)}
        gone = set(self.resident) - ready
        assert {write.key for write in cancelled} <= gone, "cancelled without need"
        assert gone <= (self.evictable() | lost) - kept
        without_writes = {write.key for write in self.writes + cancelled}
        for key in (gone & self.dirty) - without_writes:
            self.dropped += self.tiers - sum(entry[1] == key for entry in self.deferred)
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
        self.unlink(key)
        for entry in [entry for entry in self.deferred if entry[1] == key]:
            del self.deferred[entry]
            self.dropped += 1

    def unlink(self, key: Key) -> None:
        self.parents.pop(key, None)
        for child in [child for child, before in self.parents.items() if before == key]:
            del self.parents[child]

    def all_down(self) -> bool:
        return 0 < self.tiers == len(self.down)

    def note_deferred(self) -> None:
        """A call may have queued blocks. Tiers that are down get them later."""
        for tier in range(self.tiers):
            now = self.manager.tier_writes.deferred_keys(tier)
            before = {key for where, key in self.deferred if where == tier}
            for key in before - now:
                assert any(write.key == key and write.tier == tier for write in self.writes)
                del self.deferred[tier, key]
            for key in now - before:
                assert tier in self.down, "deferred although the tier takes writes"
                self.deferred[tier, key] = 0
                self.unsent.discard(key)
                if self.all_down():
                    self.dirty.discard(key)

    def add_writes(self, writes: list[TierWrite]) -> None:
        for write in writes:
            if write.cancelled:
                continue  # by the call that returned it
            assert 0 <= write.tier < self.tiers
            assert self.resident[write.key] == write.slot
            self.writes.append(write)
            self.unsent.discard(write.key)
            self.leases.append((WORKERS, write.key))
        self.note_deferred()

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
        for key in [key for key, entry in self.saving.items() if entry[0] == client]:
            del self.saving[key]
            self.unlink(key)
        for waiter, load in list(self.waiting):
            if waiter.client == client:
                self.forget_waiter(waiter, load)

    def forget_waiter(self, waiter: Waiter, load: InFlightLoad) -> None:
        self.waiting.remove((waiter, load))
        others = any(other is load for _, other in self.waiting)
        if not others and load not in self.started:
            del self.loads[load.key]
            self.unlink(load.key)
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
        self.check_evictions(filled, here, self.evictable_if_down())
        for key, slot in filled.items():
            self.saving[key] = (client, slot)
        end = next((i for i in absent if i not in assigned), len(keys))
        for before, key in itertools.pairwise(keys[:end]):
            self.link(before, key)
        if result.dropped:
            assert self.free() == 0
            self.check_no_slot(keys[end - 1] if end else None, here, self.evictable_if_down())
        self.add_writes(result.tier_writes)
        assert result.already_cached == len(keys) - len(absent)
        assert len(ours) + result.dropped >= len(absent)

    def check_no_slot(self, before: Key | None, here: set[Key], lost: set[Key]) -> None:
        """A block that follows `before` got no slot: no block could be evicted for it."""
        kept = self.before_filled_blocks()
        kept |= self.ancestors(before) if before is not None else set()
        assert self.evictable() - kept <= here
        assert lost <= here

    @precondition(lambda self: self.saving)
    @rule(pick=picks, filled=st.booleans())
    def end_save(self, pick: int, filled: bool) -> None:
        key = sorted(self.saving)[pick % len(self.saving)]
        client, slot = self.saving.pop(key)
        if not filled:
            self.manager.abandon(client, [slot])
            self.unlink(key)
            return
        writes = self.manager.commit(client, [slot])
        self.publish(key, slot)
        self.unsent.add(key)
        if self.tiers and self.policy.on_evict:
            self.dirty.add(key)
        assert len(writes) == (self.tiers - len(self.down) if self.policy.on_commit else 0)
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
        self.check_evictions(new, here, self.evictable_unwritten() | self.evictable_if_down())
        for load in result.new_loads:
            self.loads[load.key] = load
            index = keys.index(load.key)
            self.link(keys[index - 1] if index else None, load.key)
        self.waiting += result.waiting
        for index, slot in result.ready:
            assert self.bytes[slot] == keys[index], "leased a block that is not the key's"
            self.leases.append((client, keys[index]))
        if result.truncated_at < len(keys):
            self.explain(keys, sources, result, loading, saving, here)
        self.add_writes(result.tier_writes)

        ready = {index for index, _ in result.ready}
        waited = {waiter.index for waiter, _ in result.waiting}
        assert ready | waited == set(range(result.truncated_at)), "a prefix with a gap"
        assert ready == {index for index in range(result.truncated_at) if keys[index] in here}
        for waiter, load in result.waiting:
            assert load.key == keys[waiter.index]

    def explain(
        self,
        keys: list[Key],
        sources: list[int | None],
        result: LeaseResult,
        loading: set[Key],
        saving: set[Key],
        here: set[Key],
    ) -> None:
        """A load may only be truncated for a reason."""
        end = result.truncated_at
        key, source = keys[end], sources[end]
        assert result.reason
        assert key not in here
        assert key not in loading
        full = Counter(load.tier for load in self.loads.values())
        if key not in saving and source is not None and full[source] < self.max_loads:
            assert self.free() == 0
            lost = self.evictable_unwritten() | self.evictable_if_down()
            # Those here are leased during the call, and maybe released by the truncation.
            self.check_no_slot(keys[end - 1] if end else None, here, lost)

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
            self.unlink(load.key)
            return
        waiters, writes = self.manager.complete_load(load)
        assert waiters == ours
        self.publish(load.key, load.slot)
        self.leases += [(waiter.client, load.key) for waiter in waiters]
        self.add_writes(writes)
        assert all(write.tier < load.tier for write in writes), "written back to its source"

    @precondition(lambda self: len(self.writes) > len(self.writing))
    @rule(pick=picks, refused=st.sampled_from((None, WriteOutcome.NO_ROOM, WriteOutcome.NOT_TRIED)))
    def start_write(self, pick: int, refused: WriteOutcome | None) -> None:
        waiting = [write for write in self.writes if write not in self.writing]
        write = waiting[pick % len(waiting)]
        if refused is None:
            assert self.manager.start_write(write)
            self.writing.append(write)
        else:
            self.complete(write, refused)

    @precondition(lambda self: self.writing)
    @rule(
        pick=picks,
        outcome=st.sampled_from(
            [each for each in WriteOutcome if each is not WriteOutcome.NO_ROOM]
        ),
    )
    def end_write(self, pick: int, outcome: WriteOutcome) -> None:
        write = self.writing.pop(pick % len(self.writing))
        assert self.bytes[write.slot] == write.key, "a slot changed under a writer"
        self.complete(write, outcome)

    def complete(self, write: TierWrite, outcome: WriteOutcome) -> None:
        tries = write.tries + (outcome is WriteOutcome.UNAVAILABLE)
        self.manager.complete_write(write, outcome)
        self.writes.remove(write)
        self.leases.remove((WORKERS, write.key))
        if outcome is WriteOutcome.NO_ROOM and write.key in self.dirty:
            self.unsent.add(write.key)
            return
        self.dirty.discard(write.key)
        if outcome is WriteOutcome.WRITTEN:
            self.down.discard(write.tier)
            self.deferred.pop((write.tier, write.key), None)
        elif outcome is WriteOutcome.FAILED or tries >= WRITE_TRIES_MAX:
            self.failed += 1
            self.unsent.add(write.key)
        else:
            self.deferred[write.tier, write.key] = tries

    @precondition(lambda self: self.tiers)
    @rule(pick=picks, down=st.booleans())
    def set_down(self, pick: int, down: bool) -> None:
        tier = pick % self.tiers
        self.manager.tier_writes.set_down(tier, down)
        if not down:
            self.down.discard(tier)
            return
        self.down.add(tier)
        for write in [write for write in self.writes if write.tier == tier]:
            if write not in self.writing:
                assert write.cancelled, "L2 cannot evict its block"
                self.writes.remove(write)
                self.leases.remove((WORKERS, write.key))
                self.deferred[tier, write.key] = write.tries
                if self.all_down():
                    self.dirty.discard(write.key)

    @precondition(lambda self: self.deferred)
    @rule(pick=picks, limit=st.integers(1, 3))
    def take_deferred(self, pick: int, limit: int) -> None:
        tier = pick % self.tiers
        waiting = [entry for entry in self.deferred if entry[0] == tier]
        writes = self.manager.tier_writes.take_deferred(tier, limit)
        assert len(writes) == min(limit, len(waiting))
        for write in writes:
            assert write.tries == self.deferred.pop((tier, write.key))
        self.add_writes(writes)

    @rule(limit=st.integers(1, 4))
    def flush(self, limit: int) -> None:
        dirty = set(self.dirty)
        writes = self.manager.flush_dirty(limit)
        assert {write.key for write in writes} <= dirty
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
        queued = set(new) & self.dirty & self.unsent if not self.all_down() else set()
        assert {write.key for write in writes} == queued
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
        queued = aged & self.dirty & self.unsent if not self.all_down() else set()
        assert {write.key for write in writes} == queued
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
        assert stats["tier_writes_deferred"] == len(self.deferred)
        assert stats["tier_writes_dropped"] == self.dropped, "lost without a count"
        assert stats["tier_writes_failed"] == self.failed
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


def test_selective_writes_a_block_later_that_found_no_room_in_the_queue() -> None:
    manager = make(4, "selective", tiers=1)
    store(manager, 0)
    lease(manager, 1, 0)
    (write,) = lease(manager, 1, 0).tier_writes
    manager.complete_write(write, WriteOutcome.NO_ROOM)
    assert lease(manager, 1, 0).tier_writes == [], "queued twice"
    (again,) = manager.tier_writes.take_deferred(0, 4)
    assert again.key == KEYS[0]
    assert manager.tier_writes.take_deferred(0, 4) == []


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
    manager.complete_write(write, WriteOutcome.NO_ROOM)
    result = manager.allocate_save(1, [KEYS[2]], NBYTES)
    assert result.dropped == 1
    (again,) = result.tier_writes
    assert again.key == write.key
    manager.complete_write(again, WriteOutcome.FAILED)
    assert len(manager.allocate_save(1, [KEYS[2]], NBYTES).slot_assignments) == 1, (
        "a dead tier blocks L2"
    )


def test_a_save_does_not_take_the_slot_of_a_block_that_is_to_be_written() -> None:
    manager = make(3, tiers=2)
    writes = store(manager, 0, 1, 2)
    assert manager.start_write(writes[0])
    for _ in range(50):
        assert manager.allocate_save(2, [KEYS[3], KEYS[4]], NBYTES).dropped == 2
    assert manager.stats()["no_slot"] == 2, "each block counts once"
    assert resident(manager) == {0, 1, 2}
    manager.complete_write(writes[0], WriteOutcome.WRITTEN)
    assert manager.allocate_save(2, [KEYS[3]], NBYTES).dropped == 1, "one of two tiers has it"
    assert manager.start_write(writes[1])
    manager.complete_write(writes[1], WriteOutcome.WRITTEN)
    result = manager.allocate_save(2, [KEYS[3], KEYS[4]], NBYTES)
    assert [index for index, _ in result.slot_assignments] == [0]
    assert resident(manager) == {1, 2}
    assert manager.stats()["tier_writes_dropped"] == 0


def test_a_load_takes_the_slots_of_the_deepest_unwritten_blocks() -> None:
    manager = make(6, tiers=2)
    writes = store(manager, 0, 1, 2) + store(manager, 3, 4, 5)
    started = [write for write in writes if write.key == KEYS[5]]
    assert all(map(manager.start_write, started))
    result = lease(manager, 2, 6, 7, 8, tier=0)
    assert len(result.new_loads) == 3
    assert resident(manager) == {0, 1, 5}, "not the last ones that no worker writes"
    assert {s.key for s in writes if s.cancelled} == {KEYS[2], KEYS[3], KEYS[4]}
    assert not any(manager.start_write(write) for write in writes if write.cancelled)
    assert manager.stats()["tier_writes_dropped"] == 6


def test_the_queue_has_the_front_of_a_chain_first() -> None:
    manager = make(8, tiers=1)
    assert [write.key for write in store(manager, 0, 1, 2, 3)] == KEYS[:4]
    back = make(8, "write_back", tiers=1)
    store(back, 0, 1, 2, 3)
    assert [write.key for write in back.flush_dirty(2)] == KEYS[:2]


def test_deferred_writes_come_back_in_their_order() -> None:
    manager = make(8, tiers=1)
    writes = store(manager, 0, 1, 2, 3, 4)
    for number, outcome in (
        (3, WriteOutcome.NO_ROOM),
        (1, WriteOutcome.UNAVAILABLE),
        (2, WriteOutcome.NOT_TRIED),
        (0, WriteOutcome.UNAVAILABLE),
    ):
        assert manager.start_write(writes[number])
        manager.complete_write(writes[number], outcome)
    assert manager.stats()["tier_writes_retried"] == 2
    first = manager.tier_writes.take_deferred(0, 1)
    assert [write.key for write in first] == [KEYS[0]]
    manager.complete_write(first[0], WriteOutcome.UNAVAILABLE)
    rest = manager.tier_writes.take_deferred(0, 9)
    assert [write.key for write in rest] == [KEYS[1], KEYS[2], KEYS[3], KEYS[0]], (
        "a block that failed twice stops the others"
    )


def test_a_write_is_tried_so_many_times_and_no_more() -> None:
    manager = make(4, tiers=1)
    (write,) = store(manager, 0)
    for tries in range(WRITE_TRIES_MAX):
        assert write.tries == tries
        manager.complete_write(write, WriteOutcome.NOT_TRIED)
        (write,) = manager.tier_writes.take_deferred(0, 1)
        manager.complete_write(write, WriteOutcome.UNAVAILABLE)
        writes = manager.tier_writes.take_deferred(0, 1)
        write = writes[0] if writes else write
    assert writes == []
    stats = manager.stats()
    assert (stats["tier_writes_failed"], stats["tier_writes_deferred"]) == (1, 0)
    assert stats["tier_writes_retried"] == WRITE_TRIES_MAX - 1


def test_an_evicted_block_that_no_tier_got_is_counted() -> None:
    manager = make(4, tiers=2)
    for write in store(manager, 0, 1):
        manager.complete_write(write, WriteOutcome.NO_ROOM)
    assert manager.stats()["tier_writes_dropped"] == 0
    store(manager, 2, 3)
    assert manager.allocate_save(1, [KEYS[4]], NBYTES).dropped == 0
    assert resident(manager) == {0, 2, 3}
    stats = manager.stats()
    assert (stats["tier_writes_dropped"], stats["tier_writes_deferred"]) == (2, 2)


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
def test_write_back_evicts_unwritten_blocks_while_all_tiers_are_down(sent: bool) -> None:
    manager = make(8, "write_back", tiers=1)
    store(manager, 0, 1, 2, 3, 4, 5, 6, 7)
    (writing,) = lease(manager, 1, 7).tier_writes
    assert writing.key == KEYS[6]
    if sent:
        assert len(manager.flush_dirty(8)) == 7
    assert manager.start_write(writing)
    for _ in range(50):
        assert manager.allocate_save(2, [KEYS[8]], NBYTES).dropped == 1, "evicted unwritten"
    manager.tier_writes.set_down(0, True)
    assert len(manager.allocate_save(2, [KEYS[8]], NBYTES).slot_assignments) == 1, (
        "a tier that hangs blocks L2"
    )
    assert resident(manager) == {0, 1, 2, 3, 4, 6, 7}, "not the first one without leases"
    assert not writing.cancelled
    assert manager.stats()["tier_writes_dropped"] == 1
    manager.complete_write(writing, WriteOutcome.WRITTEN)
    assert manager.tier_writes.down == set(), "a write ended, so the tier is up"
    manager.check()


# --- the end of a chain before its front ---------------------------------------------------


def save_in_parts(manager: L2Manager, keys: list[Key], size: int, *, looked_up: bool) -> int:
    """Save a chain part by part, as engines do that compute a prompt in steps. Returns the number
    of leading blocks that got a slot."""
    if looked_up:
        manager.record_lookup(keys)
    for at in range(0, len(keys), size):
        result = manager.allocate_save(1, keys[at : at + size], NBYTES)
        manager.commit(1, [slot for _, slot in result.slot_assignments])
        if result.dropped:
            return at + len(result.slot_assignments)
    return len(keys)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_front_of_a_chain_outlives_its_end(policy: str) -> None:
    """Without a tier below, a chain of three slabs, and then other chains."""
    chain = [Key("team", "space", b"chain%d" % n) for n in range(96)]
    manager = L2Manager(
        32,
        eviction_policy(policy, 32),
        write_policy("write_through"),
        tiers=0,
        max_loads_per_tier=0,
    )
    manager.add_client(1)
    assert save_in_parts(manager, chain, 8, looked_up=True) == 32, "kept is what was said"
    assert manager.match(chain, NBYTES) == 32
    left = 32
    for number in range(8):
        other = [Key("team", "space", b"other%d/%d" % (number, n)) for n in range(3)]
        assert save_in_parts(manager, other, 3, looked_up=True) == 3
        here = sum(manager.match([key], NBYTES) for key in chain)
        assert manager.match(chain, NBYTES) == here, "a gap in the chain"
        assert here <= left
        left = here
    manager.check()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_branch_goes_before_what_it_shares(policy: str) -> None:
    """Two chains with a common front; the newer one was saved in parts, the older one loaded."""
    front = [Key("team", "space", b"front%d" % n) for n in range(8)]
    chains = [
        front + [Key("team", "space", b"%s%d" % (c, n)) for n in range(8)] for c in (b"a", b"b")
    ]
    manager = L2Manager(
        24,
        eviction_policy(policy, 24),
        write_policy("write_through"),
        tiers=0,
        max_loads_per_tier=0,
    )
    manager.add_client(1)
    for chain in chains:
        assert save_in_parts(manager, chain, 4, looked_up=True) == 16
    for number in range(12):
        other = [Key("team", "space", b"other%d" % number)]
        assert save_in_parts(manager, other, 1, looked_up=True) == 1
        for chain in chains:
            here = sum(manager.match([key], NBYTES) for key in chain)
            assert manager.match(chain, NBYTES) == here, "a gap in a chain"
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
