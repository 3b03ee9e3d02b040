"""The brain against a plain model of it: dicts and lists, no order of eviction, obviously right.

The model also keeps what lies in each slot. A filler owns its slot's bytes; everybody else may only
read them under a lease, and must find the block of their key, whole.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.blocks.key import Key
from kvstore.cache.commands import Admission, Flight, LoadPlan, Spill, Spilled, Waiter
from kvstore.cache.eviction import LRU
from kvstore.cache.manager import L2Manager
from kvstore.cache.pending_writes import STALL_OFFERS
from kvstore.cache.slots import PINS, WORKERS
from kvstore.cache.write_policy import WRITE_POLICIES, write_policy

NBYTES = 4096
KEYS = [Key("team", "space", bytes([n]) * 32) for n in range(12)]
CLIENTS = (1, 2, 3)
OLD = 2
"""Epochs after which a block is old."""

runs = st.lists(st.sampled_from(range(len(KEYS))), min_size=1, max_size=6, unique=True)
picks = st.integers(0, 1 << 16)


class BrainAgainstModel(RuleBasedStateMachine):
    """Several clients save, load, give up and die; flights land or fail; spills end any way."""

    @initialize(
        slots=st.integers(2, 7),
        tiers=st.integers(0, 2),
        write=st.sampled_from(WRITE_POLICIES),
        flights_max=st.integers(1, 4),
        stall_offers=st.integers(0, 3),
        pins_max=st.integers(0, 3),
    )
    def start(
        self,
        slots: int,
        tiers: int,
        write: str,
        flights_max: int,
        stall_offers: int,
        pins_max: int,
    ) -> None:
        self.slots, self.tiers, self.flights_max = slots, tiers, flights_max
        self.stall_offers = stall_offers
        self.write = write_policy(write)
        self.brain = L2Manager(
            slots,
            LRU(),
            self.write,
            tiers=tiers,
            flights_max=flights_max,
            stall_offers=stall_offers,
            pins_max=pins_max,
        )
        self.pins_max = pins_max
        self.epoch = 0
        self.born: dict[Key, int] = {}
        self.clients: set[int] = set()
        self.resident: dict[Key, int] = {}
        self.dirty: set[Key] = set()
        self.unsent: set[Key] = set()  # resident, and to be sent below when next hit
        self.refused = 0  # takers that got no slot since a worker ended a spill
        self.leases: list[tuple[int, Key]] = []  # (client, key), one entry for each lease
        self.saving: dict[Key, tuple[int, int]] = {}  # key: (client, slot)
        self.flights: dict[Key, Flight] = {}
        self.begun: list[Flight] = []
        self.waiting: list[tuple[Waiter, Flight]] = []
        self.spills: list[Spill] = []
        self.writing: list[Spill] = []  # those of them that a worker has begun
        self.bytes: dict[int, Key | None] = {}  # what lies in a slot; None: half-written

    # --- what the model says ------------------------------------------------------------

    def filling(self) -> dict[Key, int]:
        slots = {key: slot for key, (_, slot) in self.saving.items()}
        slots.update({key: flight.slot for key, flight in self.flights.items()})
        return slots

    def free(self) -> int:
        return self.slots - len(self.resident) - len(self.filling())

    def leased(self, key: Key) -> bool:
        return any(held == key for _, held in self.leases)

    def may_go(self) -> set[Key]:
        return {key for key in self.resident if not self.leased(key)} - self.dirty

    def may_go_unwritten(self) -> set[Key]:
        """Held by nothing but spills that no worker has begun."""
        waiting = Counter(spill.key for spill in self.spills if spill not in self.writing)
        leases = Counter(key for _, key in self.leases)
        return {key for key in waiting if waiting[key] == leases[key]} - self.dirty

    def may_be_given_up(self) -> set[Key]:
        """Dirty, and held by nothing but spills that no worker has begun; the tiers are stuck."""
        if self.refused < self.stall_offers:
            return set()
        waiting = Counter(spill.key for spill in self.spills if spill not in self.writing)
        leases = Counter(key for _, key in self.leases)
        return {key for key in self.dirty if waiting[key] == leases[key]}

    def refuse(self) -> None:
        """Somebody got no slot."""
        self.refused += bool(self.spills)

    def hit(self, keys: set[Key]) -> None:
        """Resident blocks were used."""
        if self.tiers and self.write.on_evict:
            self.dirty |= keys & self.unsent

    def settle_evictions(self, filled: dict[Key, int], kept: set[Key]) -> None:
        """Forget what a verb evicted to fill slots; all of it must have been free to go."""
        lost = self.may_be_given_up() - kept
        cancelled = [spill for spill in self.spills if spill.cancelled]
        for spill in cancelled:
            assert spill not in self.writing, "cancelled under a writer"
            assert spill.key not in self.dirty or spill.key in lost, "a dirty block was given up"
            self.spills.remove(spill)
            self.leases.remove((WORKERS, spill.key))
            assert not self.brain.begin(spill)
        ready = {key for key in KEYS if self.brain.match([key], NBYTES)}
        gone = set(self.resident) - ready
        assert {spill.key for spill in cancelled} <= gone, "cancelled without need"
        assert gone <= (self.may_go() | lost) - kept
        if gone & lost:
            assert not (self.may_go() | self.may_go_unwritten()) - kept - gone, "lost without need"
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

    def take_spills(self, spills: list[Spill]) -> None:
        for spill in spills:
            if spill.cancelled:
                continue  # by the very verb that asked for it
            assert 0 <= spill.tier < self.tiers
            assert self.resident[spill.key] == spill.slot
            self.spills.append(spill)
            self.unsent.discard(spill.key)
            self.leases.append((WORKERS, spill.key))

    def publish(self, key: Key, slot: int) -> None:
        assert key not in self.resident, "a key twice"
        self.bytes[slot] = key
        self.resident[key] = slot
        self.born[key] = self.epoch

    # --- clients ------------------------------------------------------------------------

    @rule(client=st.sampled_from(CLIENTS))
    def come(self, client: int) -> None:
        if client not in self.clients:
            self.brain.add_client(client)
            self.clients.add(client)

    @rule(client=st.sampled_from(CLIENTS))
    def die(self, client: int) -> None:
        if client not in self.clients:
            return
        self.brain.drop_client(client)
        self.clients.remove(client)
        self.leases = [lease for lease in self.leases if lease[0] != client]
        self.saving = {key: held for key, held in self.saving.items() if held[0] != client}
        for waiter, flight in list(self.waiting):
            if waiter.client == client:
                self.forget_waiter(waiter, flight)

    def forget_waiter(self, waiter: Waiter, flight: Flight) -> None:
        self.waiting.remove((waiter, flight))
        others = any(other is flight for _, other in self.waiting)
        if not others and flight not in self.begun:
            del self.flights[flight.key]
            assert not self.brain.take_off(flight), "a cancelled flight took off"

    # --- saves --------------------------------------------------------------------------

    @precondition(lambda self: self.clients)
    @rule(pick=picks, run=runs)
    def save(self, pick: int, run: list[int]) -> None:
        client = sorted(self.clients)[pick % len(self.clients)]
        keys = [KEYS[n] for n in run]
        known = set(self.resident) | set(self.filling())
        answer = self.brain.admit(client, keys, NBYTES)
        assert isinstance(answer, Admission)
        lacking = [index for index, key in enumerate(keys) if key not in known]
        granted = [index for index, _ in answer.grants]
        assert granted == sorted(granted)
        ours = [index for index in granted if index in lacking]
        assert ours == lacking[: len(ours)], "the tail of a run is dropped, not its middle"
        filled = {keys[index]: slot for index, slot in answer.grants}
        here = {key for key in keys if key in self.resident}
        self.hit(here)
        self.settle_evictions(filled, here)
        for key, slot in filled.items():
            self.saving[key] = (client, slot)
        if answer.dropped:
            assert self.free() == 0
            assert self.may_go() | self.may_go_unwritten() | self.may_be_given_up() <= here
            self.refuse()
        self.take_spills(answer.spills)
        assert answer.rejected == len(keys) - len(lacking)
        assert len(ours) + answer.dropped >= len(lacking)

    @precondition(lambda self: self.saving)
    @rule(pick=picks, filled=st.booleans())
    def end_save(self, pick: int, filled: bool) -> None:
        key = sorted(self.saving)[pick % len(self.saving)]
        client, slot = self.saving.pop(key)
        if not filled:
            self.brain.abandon(client, [slot])
            return
        spills = self.brain.commit(client, [slot])
        self.publish(key, slot)
        self.unsent.add(key)
        if self.tiers and self.write.on_evict:
            self.dirty.add(key)
        assert len(spills) == (self.tiers if self.write.on_commit else 0)
        self.take_spills(spills)
        assert self.brain.match([key], NBYTES) == 1, "acknowledged, and not seen"

    # --- loads --------------------------------------------------------------------------

    @precondition(lambda self: self.clients)
    @rule(pick=picks, run=runs, places=st.lists(st.integers(-1, 1), min_size=6, max_size=6))
    def load(self, pick: int, run: list[int], places: list[int]) -> None:
        client = sorted(self.clients)[pick % len(self.clients)]
        keys = [KEYS[n] for n in run]
        sources = [place if 0 <= place < self.tiers else None for place in places[: len(keys)]]
        here = {key for key in keys if key in self.resident}
        flying, saving = set(self.flights), set(self.saving)
        plan = self.brain.lease(client, keys, NBYTES, sources, "ticket")
        assert isinstance(plan, LoadPlan)
        self.hit(here)
        new = {flight.key: flight.slot for flight in plan.flights}
        self.settle_evictions(new, here)
        for flight in plan.flights:
            self.flights[flight.key] = flight
        self.waiting += plan.waiting
        for index, slot in plan.ready:
            assert self.bytes[slot] == keys[index], "leased a block that is not the key's"
            self.leases.append((client, keys[index]))
        if plan.cut_at < len(keys):
            self.explain(keys[plan.cut_at], sources[plan.cut_at], plan, flying, saving, here)
        self.take_spills(plan.spills)

        ready = {index for index, _ in plan.ready}
        waited = {waiter.index for waiter, _ in plan.waiting}
        assert ready | waited == set(range(plan.cut_at)), "a run with a gap"
        assert ready == {index for index in range(plan.cut_at) if keys[index] in here}
        for waiter, flight in plan.waiting:
            assert flight.key == keys[waiter.index]

    def explain(
        self,
        key: Key,
        source: int | None,
        plan: LoadPlan,
        flying: set[Key],
        saving: set[Key],
        here: set[Key],
    ) -> None:
        """A run may only be cut for a reason."""
        assert plan.reason
        assert key not in here
        assert key not in flying
        full = Counter(flight.tier for flight in self.flights.values())
        if key not in saving and source is not None:
            kept = set(here)  # leased while the run was planned, and maybe given back by the cut
            may_go = self.may_go() | self.may_go_unwritten() | self.may_be_given_up()
            if full[source] < self.flights_max:
                assert self.free() == 0
                assert may_go <= kept
                self.refuse()

    @precondition(lambda self: self.waiting)
    @rule(pick=picks)
    def give_up(self, pick: int) -> None:
        waiter, flight = self.waiting[pick % len(self.waiting)]
        self.brain.leave(waiter, flight)
        self.forget_waiter(waiter, flight)

    @precondition(lambda self: any(client in CLIENTS for client, _ in self.leases))
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        mine = [lease for lease in self.leases if lease[0] in CLIENTS]
        client, key = lease = mine[pick % len(mine)]
        self.brain.release(client, [self.resident[key]])
        self.leases.remove(lease)

    # --- flights and spills ---------------------------------------------------------------

    @precondition(lambda self: len(self.flights) > len(self.begun))
    @rule(pick=picks)
    def take_off(self, pick: int) -> None:
        grounded = [f for f in self.flights.values() if f not in self.begun]
        flight = grounded[pick % len(grounded)]
        assert self.brain.take_off(flight)
        self.begun.append(flight)

    @precondition(lambda self: self.begun and self.tiers == 2)
    @rule(pick=picks)
    def redirect(self, pick: int) -> None:
        flight = self.begun[pick % len(self.begun)]
        target = 1 - flight.tier
        there = sum(other.tier == target for other in self.flights.values())
        waited = any(other is flight for _, other in self.waiting)
        goes_on = self.brain.redirect(flight, target)
        assert goes_on == (waited and there < self.flights_max)
        if goes_on:
            self.begun.remove(flight)

    @precondition(lambda self: self.begun)
    @rule(pick=picks, arrived=st.booleans())
    def land(self, pick: int, arrived: bool) -> None:
        flight = self.begun.pop(pick % len(self.begun))
        del self.flights[flight.key]
        ours = [waiter for waiter, other in self.waiting if other is flight]
        self.waiting = [entry for entry in self.waiting if entry[1] is not flight]
        if not arrived:
            assert self.brain.fail(flight) == ours
            return
        waiters, spills = self.brain.land(flight)
        assert waiters == ours
        self.publish(flight.key, flight.slot)
        self.leases += [(waiter.client, flight.key) for waiter in waiters]
        self.take_spills(spills)
        assert all(spill.tier < flight.tier for spill in spills), "written back to its source"

    @precondition(lambda self: len(self.spills) > len(self.writing))
    @rule(pick=picks, queued=st.booleans())
    def begin_spill(self, pick: int, queued: bool) -> None:
        waiting = [spill for spill in self.spills if spill not in self.writing]
        spill = waiting[pick % len(waiting)]
        if queued:
            assert self.brain.begin(spill)
            self.writing.append(spill)
        else:
            self.brain.spilled(spill, Spilled.DROPPED)
            self.unsent.add(spill.key)
            self.spills.remove(spill)
            self.leases.remove((WORKERS, spill.key))

    @precondition(lambda self: self.writing)
    @rule(pick=picks, outcome=st.sampled_from((Spilled.WRITTEN, Spilled.FAILED)))
    def end_spill(self, pick: int, outcome: Spilled) -> None:
        spill = self.writing.pop(pick % len(self.writing))
        self.spills.remove(spill)
        assert self.bytes[spill.slot] == spill.key, "a slot changed under a writer"
        self.brain.spilled(spill, outcome)
        self.leases.remove((WORKERS, spill.key))
        self.dirty.discard(spill.key)
        self.refused = 0
        if outcome is Spilled.FAILED:
            self.unsent.add(spill.key)

    @rule(limit=st.integers(1, 4))
    def flush(self, limit: int) -> None:
        spills = self.brain.spill_dirty(limit)
        assert {spill.key for spill in spills} <= self.dirty
        assert len({spill.key for spill in spills}) <= limit
        self.take_spills(spills)

    @rule()
    def clear(self) -> None:
        idle = {key for key in self.resident if not self.leased(key)}
        assert self.brain.clear() == len(idle)
        for key in idle:
            self.forget(key)

    # --- care ---------------------------------------------------------------------------

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
                if len(before) + len(new) >= self.pins_max:
                    break
                new.append(key)
            expected += 1
        count, spills = self.brain.pin([KEYS[n] for n in run], NBYTES)
        assert count == expected
        self.leases += [(PINS, key) for key in new]
        assert {spill.key for spill in spills} == set(new) & self.dirty & self.unsent
        self.take_spills(spills)

    @rule(run=runs)
    def unpin(self, run: list[int]) -> None:
        keys = {KEYS[n] for n in run} & self.pinned()
        assert self.brain.unpin([KEYS[n] for n in run]) == len(keys)
        for key in keys:
            self.leases.remove((PINS, key))

    @rule()
    def age(self) -> None:
        self.epoch += 1
        aged = {key for key in self.resident if self.born[key] <= self.epoch - OLD}
        old = {key for key in aged if not self.leased(key)} - self.dirty
        evicted, spills = self.brain.age(OLD)
        assert evicted == len(old)
        assert {spill.key for spill in spills} == aged & self.dirty & self.unsent
        for key in old:
            self.forget(key)
        self.take_spills(spills)

    @rule(number=st.integers(0, len(KEYS) - 1), spare=st.integers(0, 2), arrived=st.booleans())
    def adopt(self, number: int, spare: int, arrived: bool) -> None:
        key = KEYS[number]
        known = key in self.resident or key in self.filling()
        slot = self.brain.adopt(key, NBYTES, spare)
        assert (slot is not None) == (not known and self.free() > spare)
        if slot is None:
            return
        if arrived:
            self.brain.adopted(slot)
            self.publish(key, slot)
        else:
            self.brain.abandon(WORKERS, [slot])

    # --- always -----------------------------------------------------------------------------

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "brain"):
            return
        self.brain.check()
        stats = self.brain.stats()
        assert stats["slots_free"] == self.free()
        assert stats["slots_filling"] == len(self.filling())
        assert stats["slots_ready"] == len(self.resident)
        assert stats["slots_leased"] == len({key for who, key in self.leases if who != PINS})
        assert stats["slots_pinned"] == len(self.pinned()) <= self.pins_max
        assert stats["slots_dirty"] == len(self.dirty)
        assert stats["flights"] == len(self.flights)
        total = stats["slots_free"] + stats["slots_filling"] + stats["slots_ready"]
        assert total == stats["slots"] == self.slots

    @invariant()
    def what_is_resident_is_seen_and_whole(self) -> None:
        if not hasattr(self, "brain"):
            return
        for key in KEYS:
            assert bool(self.brain.match([key], NBYTES)) == (key in self.resident)
        for key, slot in self.resident.items():
            assert self.bytes[slot] == key

    def teardown(self) -> None:
        """Everybody goes: every slot comes back."""
        if not hasattr(self, "brain"):
            return
        for client in list(self.clients):
            self.die(client)
        for flight in list(self.flights.values()):
            self.brain.fail(flight)
        for spill in self.spills:
            self.brain.spilled(spill, Spilled.FAILED)
        assert self.brain.unpin() == len(self.pinned())
        self.brain.clear()
        assert self.brain.stats()["slots_free"] == self.slots


TestBrainAgainstModel = BrainAgainstModel.TestCase
TestBrainAgainstModel.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# --- single rules, each told by an example ------------------------------------------------------


def make(slots: int, write: str = "write_through", tiers: int = 0, flights_max: int = 8) -> L2Manager:
    brain = L2Manager(slots, LRU(), write_policy(write), tiers=tiers, flights_max=flights_max)
    brain.add_client(1)
    brain.add_client(2)
    return brain


def store(brain: L2Manager, *numbers: int, client: int = 1) -> list[Spill]:
    answer = brain.admit(client, [KEYS[n] for n in numbers], NBYTES)
    assert len(answer.grants) == len(numbers)
    return answer.spills + brain.commit(client, [slot for _, slot in answer.grants])


def resident(brain: L2Manager) -> set[int]:
    return {n for n, key in enumerate(KEYS) if brain.match([key], NBYTES)}


def lease(brain: L2Manager, client: int, *numbers: int, tier: int | None = None) -> LoadPlan:
    keys = [KEYS[n] for n in numbers]
    return brain.lease(client, keys, NBYTES, [tier] * len(keys), "ticket")


def test_release_past_zero_raises() -> None:
    brain = make(2)
    store(brain, 0)
    ((_, slot),) = lease(brain, 1, 0).ready
    brain.release(1, [slot])
    with pytest.raises(AssertionError):
        brain.release(1, [slot])


def test_nobody_gives_back_what_another_holds() -> None:
    brain = make(2)
    store(brain, 0)
    ((_, slot),) = lease(brain, 1, 0).ready
    with pytest.raises(AssertionError):
        brain.release(2, [slot])
    ((_, grant),) = brain.admit(1, [KEYS[1]], NBYTES).grants
    for call in (brain.commit, brain.abandon):
        with pytest.raises(AssertionError):
            call(2, [grant])


def test_a_slot_is_published_once() -> None:
    brain = make(2)
    ((_, slot),) = brain.admit(1, [KEYS[0]], NBYTES).grants
    brain.commit(1, [slot])
    with pytest.raises(AssertionError):
        brain.commit(1, [slot])


def test_first_writer_wins() -> None:
    brain = make(4)
    first = brain.admit(1, [KEYS[0]], NBYTES)
    second = brain.admit(2, [KEYS[0]], NBYTES)
    assert len(first.grants) == 1
    assert not second.grants
    assert second.rejected == 1
    assert not brain.match([KEYS[0]], NBYTES)
    brain.commit(1, [first.grants[0][1]])
    assert brain.match([KEYS[0]], NBYTES) == 1


def test_the_coldest_goes_first_and_a_prefix_last() -> None:
    brain = make(4)
    store(brain, 0, 1, 2, 3)
    store(brain, 4)
    assert resident(brain) == {0, 1, 2, 4}
    for _, slot in lease(brain, 1, 0, 1, 2).ready:
        brain.release(1, [slot])
    store(brain, 5)
    assert resident(brain) == {0, 1, 2, 5}
    store(brain, 6)
    assert resident(brain) == {0, 1, 5, 6}


def test_loading_a_run_does_not_evict_its_own_blocks() -> None:
    brain = make(3, tiers=1)
    for spill in store(brain, 1, 2):
        brain.spilled(spill, Spilled.WRITTEN)
    for spill in store(brain, 3):
        brain.spilled(spill, Spilled.WRITTEN)
    plan = lease(brain, 1, 0, 1, 2, tier=0)
    assert plan.cut_at == 3
    assert [index for index, _ in plan.ready] == [1, 2]
    assert resident(brain) == {1, 2}


def test_one_flight_for_all_who_wait() -> None:
    brain = make(4, "selective", tiers=1)
    first = lease(brain, 1, 0, tier=0)
    second = lease(brain, 2, 0, tier=0)
    (flight,) = first.flights
    assert not second.flights
    assert brain.take_off(flight)
    waiters, _ = brain.land(flight)
    assert [waiter.client for waiter in waiters] == [1, 2]
    brain.release(1, [flight.slot])
    store(brain, 1, 2, 3)
    assert brain.admit(1, [KEYS[4]], NBYTES).dropped == 0
    assert 0 in resident(brain), "evicted under the second lease"


def test_loads_in_progress_are_bounded() -> None:
    brain = make(8, tiers=2, flights_max=2)
    plan = lease(brain, 1, 0, 1, 2, tier=0)
    assert plan.cut_at == 2
    assert "too many" in plan.reason
    assert lease(brain, 2, 3, tier=1).cut_at == 1


def test_a_dead_clients_flight_lands_for_the_next_reader() -> None:
    brain = make(2, tiers=1)
    (flight,) = lease(brain, 1, 0, tier=0).flights
    assert brain.take_off(flight)
    brain.drop_client(1)
    assert brain.stats()["slots_free"] == 1, "its slot was given away under the worker"
    assert brain.land(flight)[0] == []
    assert resident(brain) == {0}


def test_a_dead_clients_grants_come_back_at_once() -> None:
    brain = make(3)
    brain.admit(1, [KEYS[0], KEYS[1]], NBYTES)
    store(brain, 2, client=2)
    lease(brain, 1, 2)
    brain.drop_client(1)
    stats = brain.stats()
    assert (stats["slots_free"], stats["slots_filling"], stats["slots_leased"]) == (2, 0, 0)


def test_selective_writes_at_the_second_hit() -> None:
    brain = make(4, "selective", tiers=1)
    assert store(brain, 0) == []
    assert lease(brain, 1, 0).spills == []
    (spill,) = lease(brain, 2, 0).spills
    assert spill.key == KEYS[0]
    assert lease(brain, 2, 0).spills == []
    brain.spilled(spill, Spilled.WRITTEN)
    assert lease(brain, 2, 0).spills == []


def test_selective_tries_again_what_was_dropped() -> None:
    brain = make(4, "selective", tiers=1)
    store(brain, 0)
    lease(brain, 1, 0)
    (spill,) = lease(brain, 1, 0).spills
    brain.spilled(spill, Spilled.DROPPED)
    assert len(lease(brain, 1, 0).spills) == 1


def test_write_back_evicts_nothing_unwritten_and_writes_ahead() -> None:
    brain = make(8, "write_back", tiers=1)
    assert store(brain, 0, 1, 2, 3, 4, 5) == []
    answer = brain.admit(1, [KEYS[6], KEYS[7], KEYS[8]], NBYTES)
    assert answer.dropped == 1, "an unwritten block was evicted"
    (spill,) = answer.spills
    assert spill.key == KEYS[5], "not the coldest"
    brain.commit(1, [slot for _, slot in answer.grants])
    assert brain.admit(1, [KEYS[8]], NBYTES).dropped == 1, "evicted before it was written"
    assert brain.begin(spill)
    brain.spilled(spill, Spilled.WRITTEN)
    assert len(brain.admit(1, [KEYS[8]], NBYTES).grants) == 1
    assert 5 not in resident(brain)
    assert {0, 1, 2, 3, 4} <= resident(brain)


def test_write_back_keeps_what_found_no_queue() -> None:
    brain = make(2, "write_back", tiers=1)
    store(brain, 0)
    (spill,) = store(brain, 1) or brain.admit(1, [KEYS[2]], NBYTES).spills
    brain.spilled(spill, Spilled.DROPPED)
    answer = brain.admit(1, [KEYS[2]], NBYTES)
    assert answer.dropped == 1
    (again,) = answer.spills
    assert again.key == spill.key
    brain.spilled(again, Spilled.FAILED)
    assert len(brain.admit(1, [KEYS[2]], NBYTES).grants) == 1, "a dead tier blocks L2"


def test_a_full_queue_does_not_hold_slots_that_others_need() -> None:
    brain = make(3, tiers=2)
    spills = store(brain, 0, 1, 2)
    begun = next(spill for spill in spills if spill.key == KEYS[2])
    assert brain.begin(begun)
    answer = brain.admit(2, [KEYS[3], KEYS[4], KEYS[5]], NBYTES)
    assert len(answer.grants) == 2
    assert answer.dropped == 1, "a slot was taken from a writer"
    assert resident(brain) == {2}
    assert {s.key for s in spills if s.cancelled} == {KEYS[0], KEYS[1]}
    assert not any(brain.begin(spill) for spill in spills if spill.cancelled)
    assert brain.stats()["spills_dropped"] == 4


def test_an_offer_keeps_the_prefix_it_belongs_to() -> None:
    brain = make(4)
    store(brain, 0, 1)
    store(brain, 2, 3)
    answer = brain.admit(1, [KEYS[0], KEYS[1], KEYS[4], KEYS[5]], NBYTES)
    assert [index for index, _ in answer.grants] == [2, 3]
    assert resident(brain) == {0, 1}


def test_a_block_of_another_size_is_not_handed_out() -> None:
    brain = make(4)
    store(brain, 0)
    assert brain.match([KEYS[0]], NBYTES * 2) == 0
    assert brain.lease(1, [KEYS[0]], NBYTES * 2, [None], "ticket").cut_at == 0


def test_clear_leaves_leased_blocks_alone() -> None:
    brain = make(4)
    store(brain, 0, 1)
    lease(brain, 1, 0)
    assert brain.clear() == 1
    assert resident(brain) == {0}


@pytest.mark.parametrize("sent", [True, False])
def test_write_back_gives_up_the_coldest_once_the_tiers_are_stuck(sent: bool) -> None:
    brain = make(8, "write_back", tiers=1)
    store(brain, 0, 1, 2, 3, 4, 5, 6, 7)
    (writing,) = lease(brain, 1, 7).spills
    assert writing.key == KEYS[6]
    if sent:
        assert len(brain.spill_dirty(8)) == 7
    assert brain.begin(writing)
    for _ in range(STALL_OFFERS):
        assert brain.admit(2, [KEYS[8]], NBYTES).dropped == 1, "the tiers were given no time"
    assert len(brain.admit(2, [KEYS[8]], NBYTES).grants) == 1, "a tier that hangs blocks L2"
    assert resident(brain) == {0, 1, 2, 3, 4, 6, 7}, "not the coldest that nobody uses"
    assert not writing.cancelled
    assert brain.stats()["spills_dropped"] == 1
    brain.spilled(writing, Spilled.WRITTEN)
    assert len(brain.admit(2, [KEYS[9]], NBYTES).grants) == 1
    assert brain.admit(2, [KEYS[10]], NBYTES).dropped == 1, "the tiers move, and are not waited for"
    brain.check()


def test_write_back_tries_again_what_a_tier_refused_once_it_is_hit() -> None:
    brain = make(4, "write_back", tiers=1)
    store(brain, 0, 1)
    for spill in brain.spill_dirty(4):
        assert brain.begin(spill)
        brain.spilled(spill, Spilled.FAILED)
    assert brain.spill_dirty(4) == [], "a flush over a dead tier would never end"
    lease(brain, 1, 0)
    assert [spill.key for spill in brain.spill_dirty(4)] == [KEYS[0]]


def test_nothing_is_filled_once_frozen_but_what_is_filled_is_kept() -> None:
    brain = make(6, "write_back", tiers=1)
    ((_, begun),) = brain.admit(2, [KEYS[0]], NBYTES).grants
    store(brain, 1, 2)
    lease(brain, 1, 1)
    (flight,) = lease(brain, 2, 3, tier=0).flights
    brain.freeze()
    brain.drop_client(1)
    answer = brain.admit(2, [KEYS[4], KEYS[5]], NBYTES)
    assert not answer.grants
    assert answer.dropped == 2
    plan = lease(brain, 2, 1, 6, tier=0)
    assert (plan.cut_at, plan.reason, plan.flights) == (1, "no free slot", [])
    brain.commit(2, [begun])
    assert brain.take_off(flight)
    brain.land(flight)
    assert resident(brain) == {0, 1, 2, 3}
    assert {spill.key for spill in brain.spill_dirty(9)} == {KEYS[0], KEYS[1], KEYS[2]}


def test_an_offer_leaves_no_hole_in_its_own_run() -> None:
    brain = make(3)
    store(brain, 0, 1, 2)
    answer = brain.admit(2, [KEYS[0], KEYS[1], KEYS[2], KEYS[3]], NBYTES)
    assert not answer.grants
    assert answer.dropped == 1
    assert resident(brain) == {0, 1, 2}
    assert brain.stats()["slots_leased"] == 0


def test_a_redirected_flight_waits_like_a_new_one() -> None:
    brain = make(8, tiers=2)
    plan = lease(brain, 1, 0, tier=0)
    (flight,) = plan.flights
    assert brain.take_off(flight)
    assert brain.redirect(flight, 1)
    ((waiter, _),) = plan.waiting
    brain.leave(waiter, flight)
    assert not brain.take_off(flight), "nobody waits for it, and no worker had begun"
    assert brain.stats()["slots_free"] == 8


def test_a_redirected_flight_counts_in_its_new_tier() -> None:
    brain = make(8, tiers=2, flights_max=1)
    (flight,) = lease(brain, 1, 0, tier=0).flights
    (other,) = lease(brain, 1, 1, tier=1).flights
    assert brain.take_off(flight)
    assert not brain.redirect(flight, 1), "more loads than the tier may have"
    assert len(brain.fail(flight)) == 1
    brain.fail(other)
    lonely = lease(brain, 2, 2, tier=0).flights[0]
    assert brain.take_off(lonely)
    brain.drop_client(2)
    assert not brain.redirect(lonely, 1), "nobody waits for it"


@pytest.mark.parametrize("write", WRITE_POLICIES)
def test_a_block_of_another_size_makes_room_when_nobody_uses_it(write: str) -> None:
    brain = make(4, write, tiers=1)
    spills = store(brain, 0, 1)
    if write == "write_through":
        assert brain.begin(spills[0])
        assert brain.admit(2, [KEYS[0]], NBYTES // 2).grants == [], "taken from a writer"
        brain.spilled(spills[0], Spilled.WRITTEN)
    assert len(brain.admit(2, [KEYS[0]], NBYTES // 2).grants) == 1
    keys = [KEYS[1]]
    held = brain.lease(1, keys, NBYTES, [None], "ticket")
    assert brain.lease(2, keys, NBYTES // 2, [0], "ticket").cut_at == 0, "taken from a reader"
    brain.release(1, [slot for _, slot in held.ready])
    assert len(brain.lease(2, keys, NBYTES // 2, [0], "ticket").flights) == 1
    brain.check()
