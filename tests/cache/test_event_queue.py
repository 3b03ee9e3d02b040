"""The queue of L2 events."""

from __future__ import annotations

import random

import pytest

from kvstore.blocks.key import Key
from kvstore.cache import event_queue
from kvstore.cache.eviction import LRU
from kvstore.cache.manager import L2Manager
from kvstore.cache.write_policy import WritePolicy

NBYTES = 4096
CLIENT = 1


def key(number: int) -> Key:
    return Key("team", "space", number.to_bytes(32, "big"))


def manager_of(slots: int) -> L2Manager:
    manager = L2Manager(slots, LRU(), WritePolicy(), tiers=0, max_loads_per_tier=1)
    manager.add_client(CLIENT)
    return manager


def save(manager: L2Manager, *numbers: int, commit: bool = True) -> None:
    keys = [key(number) for number in numbers]
    slots = [slot for _, slot in manager.allocate_save(CLIENT, keys, NBYTES).slot_assignments]
    manager.commit(CLIENT, slots) if commit else manager.abandon(CLIENT, slots)


def test_the_first_batch_is_a_snapshot_and_later_ones_are_changes() -> None:
    manager = manager_of(3)
    save(manager, 1, 2)
    assert manager.events.drain() == event_queue.L2EventBatch([], is_snapshot=False)
    manager.events.start()
    batch = manager.events.drain()
    assert batch.is_snapshot
    assert {each for each, cached in batch.events if cached} == {key(1), key(2)}
    save(manager, 3)
    save(manager, 4, commit=False)
    save(manager, 5)
    batch = manager.events.drain()
    assert not batch.is_snapshot
    assert batch.events[0] == (key(3), True)
    assert batch.events[-1] == (key(5), True)
    # The save of 4 evicted one block; its slot was free for 5.
    assert [cached for _, cached in batch.events] == [True, False, True]
    manager.clear()
    assert len(manager.events.drain().events) == 3


@pytest.mark.parametrize("slots", [1, 5, 40])
def test_events_add_up_to_the_cached_keys(slots: int) -> None:
    """Also if more events than are kept occur between two calls of drain."""
    rng = random.Random(slots)
    manager = manager_of(slots)
    manager.events.start()
    known: set[Key] = set()
    for _ in range(60):
        for _ in range(rng.randrange(3 * slots)):
            start = rng.randrange(100)
            save(manager, *range(start, start + 1 + rng.randrange(4)), commit=rng.random() < 0.8)
        batch = manager.events.drain()
        known = set() if batch.is_snapshot else known
        for each, cached in batch.events:
            assert (each in known) != cached, "reported twice"
            known = known | {each} if cached else known - {each}
        assert known == {key(n) for n in range(104) if not manager.is_absent(key(n))}


def test_more_events_than_are_kept_give_a_snapshot() -> None:
    manager = manager_of(2)
    manager.events.start()
    manager.events.drain()
    for number in range(event_queue.EVENTS_MAX):
        save(manager, number)
    batch = manager.events.drain()
    assert batch.is_snapshot
    last = event_queue.EVENTS_MAX - 1
    assert sorted(batch.events, key=lambda each: each[0].hash) == [
        (key(last - 1), True),
        (key(last), True),
    ]
