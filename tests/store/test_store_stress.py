"""Many threads at one small store: every block served is the key's, and every slot comes back."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from store_rig import OTHER_SPACE, SPACE, WAIT_S, check, fill, hashes, make_store

from kvstore.cache.write_policy import WRITE_POLICIES, write_policy
from kvstore.interface import Load
from kvstore.store.session import Session
from kvstore.store.store import Budgets, Store
from kvstore.testing.faults import Fault, FaultyTier
from kvstore.tiers import disk
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

THREADS = 4
STEPS = 400
NAMES = hashes(40)
PARTIES = ((SPACE, "red"), (SPACE, "blue"), (OTHER_SPACE, "red"))


class Engine(threading.Thread):
    """Saves, loads, gives up and dies at random, and checks what it is given."""

    def __init__(self, store: Store, seed: int) -> None:
        super().__init__(name=f"engine-{seed}")
        self.store = store
        self.random = random.Random(seed)
        self.session = self.join_store()
        self.held: list[Load] = []
        self.checked = 0
        self.fault: BaseException | None = None

    def join_store(self) -> Session:
        namespace, tenant = self.random.choice(PARTIES)
        return self.store.session(namespace, tenant)

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                self.random.choices(
                    (self.save, self.load, self.match, self.let_go, self.die, self.empty),
                    (6, 8, 3, 4, 1, 0.3),
                )[0]()
            self.session.close()
        except BaseException as error:
            self.fault = error

    def some(self) -> list[bytes]:
        start = self.random.randrange(len(NAMES))
        return NAMES[start : start + self.random.randint(1, 6)]

    def save(self) -> None:
        ticket = self.session.save(self.some())
        fill(self.session, ticket)
        if self.random.random() < 0.8:
            self.session.commit(ticket)
        else:
            self.session.release(ticket)

    def load(self) -> None:
        ticket = self.session.load(self.some())
        deadline_s = time.monotonic() + WAIT_S
        patient = self.random.random() < 0.7
        while patient and not ticket.done:
            assert time.monotonic() < deadline_s, "a load never ended"
            self.session.poll(0.5)
        self.look(ticket)
        self.held.append(ticket)
        if len(self.held) > 2:
            self.let_go()

    def look(self, ticket: Load) -> None:
        check(self.session, ticket)
        self.checked += len(ticket.slots)

    def match(self) -> None:
        ticket = self.session.match(self.some())
        assert len(ticket.tiers) <= len(ticket.hashes)
        self.session.poll()

    def let_go(self) -> None:
        if self.held:
            ticket = self.held.pop(0)
            self.look(ticket)  # still what it was, however long it was held
            self.session.release(ticket)

    def die(self) -> None:
        self.session.drop()
        self.held.clear()
        self.session = self.join_store()

    def empty(self) -> None:
        self.store.clear("l2")


def trouble(seed: int) -> FaultyTier:
    """A fast tier that fails in every way, now and then."""
    faults = random.Random(seed)
    lock = threading.Lock()

    def schedule(verb: str, keys: object) -> Fault | None:
        with lock:
            if faults.random() > 0.15:
                return None
            return faults.choice([f for f in Fault if f is not Fault.HUNG])

    return FaultyTier(MemoryTier(200_000, name="fast"), schedule, slow_s=0.002)


@pytest.mark.parametrize("write", WRITE_POLICIES)
@pytest.mark.parametrize("trusty", [True, False])
def test_bytes_are_never_wrong_and_slots_never_lost(
    write: str, trusty: bool, tmp_path: Path
) -> None:
    lower = disk.open(disk.Config(directory=str(tmp_path / "disk"), capacity=4 << 20))
    tiers: list[Tier] = [lower] if trusty else [trouble(1), lower]
    store = make_store(
        *tiers,
        slots=24,
        budgets=Budgets(queue_blocks=8),
        write_policy=write_policy(write, selective_hits=1),
    )
    engines = [Engine(store, seed) for seed in range(THREADS)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join(4 * WAIT_S)
        assert not engine.is_alive(), "hangs"
    for engine in engines:
        if engine.fault is not None:
            raise engine.fault
    assert sum(engine.checked for engine in engines) > 100
    store.brain.check()
    assert store.stats()["l2"]["slots_leased"] <= store.stats()["l2"]["spilling"]
    assert store.stats()["l2"]["evictions"] > 0
    store.close()  # asserts that free slots are all slots
