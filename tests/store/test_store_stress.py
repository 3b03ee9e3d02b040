"""Many threads use one small store: every loaded block is correct, and no slot is lost."""

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
from kvstore.store.store import Store, StoreLimits
from kvstore.testing.faults import Fault, FaultyTier
from kvstore.tiers import disk
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

THREADS = 4
STEPS = 400
NAMES = hashes(40)
OWNERS = ((SPACE, "red"), (SPACE, "blue"), (OTHER_SPACE, "red"))


class Engine(threading.Thread):
    """Saves, loads, releases early and reconnects at random, and checks every loaded block."""

    def __init__(self, store: Store, seed: int) -> None:
        super().__init__(name=f"engine-{seed}")
        self.store = store
        self.random = random.Random(seed)
        self.session = self.open_session()
        self.loads: list[Load] = []
        self.checked = 0
        self.fault: BaseException | None = None

    def open_session(self) -> Session:
        namespace, tenant = self.random.choice(OWNERS)
        return self.store.session(namespace, tenant)

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                self.random.choices(
                    (
                        self.save,
                        self.load,
                        self.match,
                        self.release_one,
                        self.reconnect,
                        self.clear_l2,
                    ),
                    (6, 8, 3, 4, 1, 0.3),
                )[0]()
            self.session.close()
        except BaseException as error:
            self.fault = error

    def some(self) -> list[bytes]:
        start = self.random.randrange(len(NAMES))
        return NAMES[start : start + self.random.randint(1, 6)]

    def save(self) -> None:
        operation = self.session.save(self.some())
        fill(self.session, operation)
        if self.random.random() < 0.8:
            self.session.commit(operation)
        else:
            self.session.release(operation)

    def load(self) -> None:
        operation = self.session.load(self.some())
        deadline_s = time.monotonic() + WAIT_S
        patient = self.random.random() < 0.7
        while patient and not operation.done:
            assert time.monotonic() < deadline_s, "a load never ended"
            self.session.poll(0.5)
        self.check_load(operation)
        self.loads.append(operation)
        if len(self.loads) > 2:
            self.release_one()

    def check_load(self, operation: Load) -> None:
        check(self.session, operation)
        self.checked += len(operation.slots)

    def match(self) -> None:
        operation = self.session.match(self.some())
        assert len(operation.tiers) <= len(operation.hashes)
        self.session.poll()

    def release_one(self) -> None:
        if self.loads:
            operation = self.loads.pop(0)
            self.check_load(operation)  # unchanged while leased
            self.session.release(operation)

    def reconnect(self) -> None:
        self.session.close()
        self.loads.clear()
        self.session = self.open_session()

    def clear_l2(self) -> None:
        self.store.clear("l2")


def unreliable_tier(seed: int) -> FaultyTier:
    """A fast tier that sometimes fails, in every way except hanging."""
    faults = random.Random(seed)
    lock = threading.Lock()

    def schedule(call: str, keys: object) -> Fault | None:
        with lock:
            if faults.random() > 0.15:
                return None
            return faults.choice([f for f in Fault if f is not Fault.HUNG])

    return FaultyTier(MemoryTier(200_000, name="fast"), schedule, slow_s=0.002)


@pytest.mark.parametrize("write", WRITE_POLICIES)
@pytest.mark.parametrize("reliable", [True, False])
def test_bytes_are_never_wrong_and_slots_never_lost(
    write: str, reliable: bool, tmp_path: Path
) -> None:
    lower = disk.open(disk.Config(directory=str(tmp_path / "disk"), capacity=4 << 20))
    tiers: list[Tier] = [lower] if reliable else [unreliable_tier(1), lower]
    store = make_store(
        *tiers,
        slots=24,
        limits=StoreLimits(queue_blocks=8),
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
    store.manager.check()
    assert store.stats()["l2"]["slots_leased"] <= store.stats()["l2"]["tier_writes_in_flight"]
    assert store.stats()["l2"]["evictions"] > 0
    store.close()  # asserts that free slots are all slots
