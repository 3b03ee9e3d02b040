"""What L2 takes and drops, told to whoever listens."""

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


def brain_of(slots: int) -> L2Manager:
    brain = L2Manager(slots, LRU(), WritePolicy(), tiers=0, flights_max=1)
    brain.add_client(CLIENT)
    return brain


def save(brain: L2Manager, *numbers: int, commit: bool = True) -> None:
    grants = brain.admit(CLIENT, [key(number) for number in numbers], NBYTES).grants
    slots = [slot for _, slot in grants]
    brain.commit(CLIENT, slots) if commit else brain.abandon(CLIENT, slots)


def test_nobody_who_listens_is_told_all_at_first_then_what_changed() -> None:
    brain = brain_of(3)
    save(brain, 1, 2)
    assert brain.changes.take() == event_queue.Told([], whole=False)
    brain.changes.listen()
    told = brain.changes.take()
    assert told.whole
    assert {each for each, there in told.changes if there} == {key(1), key(2)}
    save(brain, 3)
    save(brain, 4, commit=False)
    save(brain, 5)
    told = brain.changes.take()
    assert not told.whole
    assert told.changes[0] == (key(3), True)
    assert told.changes[-1] == (key(5), True)
    # The slot of 4 was taken from one, and lay free for 5.
    assert [there for _, there in told.changes] == [True, False, True]
    brain.clear()
    assert len(brain.changes.take().changes) == 3


@pytest.mark.parametrize("slots", [1, 5, 40])
def test_what_is_told_adds_up_to_what_is_there(slots: int) -> None:
    """Also when more changes than are kept come between two looks."""
    made = random.Random(slots)
    brain = brain_of(slots)
    brain.changes.listen()
    known: set[Key] = set()
    for _ in range(60):
        for _ in range(made.randrange(3 * slots)):
            start = made.randrange(100)
            save(brain, *range(start, start + 1 + made.randrange(4)), commit=made.random() < 0.8)
        told = brain.changes.take()
        known = set() if told.whole else known
        for each, there in told.changes:
            assert (each in known) != there, "told twice"
            known = known | {each} if there else known - {each}
        assert known == {key(n) for n in range(104) if not brain.lacks(key(n))}


def test_more_changes_than_are_kept_are_told_as_a_whole() -> None:
    brain = brain_of(2)
    brain.changes.listen()
    brain.changes.take()
    for number in range(event_queue.CHANGES_MAX):
        save(brain, number)
    told = brain.changes.take()
    assert told.whole
    last = event_queue.CHANGES_MAX - 1
    assert sorted(told.changes, key=lambda each: each[0].hash) == [
        (key(last - 1), True),
        (key(last), True),
    ]
