"""Lookups and transfers of the tier, and the pools that killed engines leave, without vLLM."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from manual_store import ManualClock, ManualStore

from kvstore.blocks import Namespace
from kvstore.connectors.base import GuardedStore
from kvstore.connectors.vllm.host_pool import STALE_S, abandoned, remove_abandoned
from kvstore.connectors.vllm.lookups import KEYS_MAX, SUFFIX_KEYS_MAX, Lookups
from kvstore.connectors.vllm.plans import IDLE_STEP_S, IDLE_WAIT_S, IdleSteps
from kvstore.connectors.vllm.transfers import WINDOW_UNITS, JobEnd, Transfers
from kvstore.verbs import Answer, Load, Match, Save

UNIT = 64
NAMESPACE = Namespace(
    model="units", dtype="int8", layers=1, kv_heads=1, head_dim=UNIT, head_dim_v=0, block_tokens=1
)
DEADLINE_MS = 500.0
HANG_LIMIT_S = 20.0
ALL = ("match", "load", "save")


def keys_of(count: int, tag: int = 0) -> list[bytes]:
    return [bytes([tag, index // 256, index % 256]) * 12 for index in range(count)]


def unit(value: int) -> bytes:
    return bytes([value % 251, value // 251]) * (UNIT // 2)


class Asking:
    """Lookups over a manual store."""

    def __init__(self, *auto: str) -> None:
        self.clock = ManualClock()
        self.store = ManualStore(NAMESPACE, 16, auto)
        self.lookups = Lookups(GuardedStore(self.store), deadline_ms=DEADLINE_MS, clock=self.clock)

    def ask(
        self, keys: Sequence[bytes], name: str = "r", *, backwards: bool = False
    ) -> list[Answer]:
        """One request's lookups in a step, then its end. The answers by key."""
        order = list(enumerate(keys, start=1))
        found = {
            key: self.lookups.lookup(key, name, 0, position)
            for position, key in (reversed(order) if backwards else order)
        }
        self.lookups.send()
        return [found[key] for key in keys]

    def again(self, keys: Sequence[bytes], name: str = "r") -> list[Answer]:
        """The next step."""
        self.lookups.take_in()
        return self.ask(keys, name)


def test_a_step_asks_its_keys_as_one_run_and_answers_in_the_next() -> None:
    rig = Asking("match")
    keys = keys_of(5)
    for key in keys[:3]:
        rig.store.put(key, unit(0))
    assert rig.ask(keys) == [Answer.PENDING] * 5
    assert [ticket.hashes for ticket in rig.store.asked] == [tuple(keys)]
    assert rig.again(keys) == [Answer.HIT] * 3 + [Answer.MISS] * 2
    assert len(rig.store.asked) == 1, "a verdict is kept while its request lives"
    rig.lookups.request_finished("r")
    assert len(rig.lookups) == 0


def test_nobody_is_waited_for_and_no_answer_is_a_miss_in_the_end() -> None:
    rig = Asking()
    keys = keys_of(2)
    rig.ask(keys)
    rig.clock.advance(DEADLINE_MS / 1e3 - 0.01)
    assert rig.again(keys) == [Answer.PENDING] * 2
    rig.clock.advance(0.02)
    assert rig.again(keys) == [Answer.MISS] * 2
    assert rig.lookups.counts["lookups_past_deadline"] == 1


def test_a_window_looked_up_from_its_end_is_found_behind_a_gap() -> None:
    rig = Asking("match")
    keys = keys_of(6)
    for key in keys[4:]:
        rig.store.put(key, unit(0))
    rig.ask(keys, backwards=True)
    assert rig.again(keys) == [Answer.MISS] * 4 + [Answer.HIT] * 2


def test_a_long_window_lookup_is_bounded() -> None:
    rig = Asking("match")
    keys = keys_of(SUFFIX_KEYS_MAX + 10)
    for key in keys:
        rig.store.put(key, unit(0))
    rig.ask(keys, backwards=True)
    assert len(rig.store.asked) == SUFFIX_KEYS_MAX
    assert rig.again(keys) == [Answer.MISS] * 10 + [Answer.HIT] * SUFFIX_KEYS_MAX


def test_a_key_that_could_not_be_loaded_is_a_miss_at_once_and_stays_one() -> None:
    rig = Asking("match")
    keys = keys_of(2)
    for key in keys:
        rig.store.put(key, unit(0))
    rig.ask(keys, "first")
    assert rig.again(keys, "first") == [Answer.HIT] * 2
    rig.lookups.forget([keys[1]])
    for _ in range(3):
        assert rig.again(keys, "first") == [Answer.HIT, Answer.MISS]
    assert rig.again(keys, "second") == [Answer.HIT, Answer.MISS]
    assert len(rig.store.asked) == 1


def test_a_request_that_ends_before_its_question_leaves_it_to_the_others() -> None:
    rig = Asking("match")
    keys = keys_of(2)
    rig.store.put(keys[0], unit(0))
    rig.lookups.lookup(keys[0], "first", 0, 1)
    rig.lookups.lookup(keys[0], "second", 0, 1)
    rig.lookups.lookup(keys[1], "first", 0, 2)
    rig.lookups.request_finished("first")
    assert rig.again([keys[0]], "second") == [Answer.HIT]
    rig.lookups.request_finished("second")
    assert len(rig.lookups) == 0


def test_a_late_answer_to_an_earlier_question_does_not_revive_a_key_that_failed() -> None:
    rig = Asking()
    (key,) = keys = keys_of(1)
    rig.store.put(key, unit(0))
    rig.ask(keys, "first")
    rig.lookups.request_finished("first")
    rig.ask(keys, "second")
    earlier, later = rig.store.asked
    rig.store.answer(later)
    assert rig.again(keys, "second") == [Answer.HIT]
    rig.lookups.forget(keys)
    rig.store.answer(earlier)
    assert rig.again(keys, "second") == [Answer.MISS]


def test_a_store_that_raises_is_a_miss() -> None:
    rig = Asking()
    rig.store.raising = True
    rig.ask(keys_of(2))
    assert rig.again(keys_of(2)) == [Answer.MISS] * 2


def test_known_keys_are_bounded() -> None:
    rig = Asking()
    for number in range(KEYS_MAX):
        rig.lookups.lookup(number.to_bytes(36, "big"), "r", 0, number)
    assert rig.lookups.lookup(bytes(36) + b"x", "r", 0, 1) is Answer.MISS


class Moving:
    """Transfers between rows of a pool and a manual store."""

    def __init__(self, *auto: str, slots: int = 16, units: int = 200) -> None:
        self.clock = ManualClock()
        self.store = ManualStore(NAMESPACE, slots, auto)
        self.rows = np.zeros((units, UNIT), np.uint8)
        self.transfers = Transfers(
            GuardedStore(self.store), self.rows, deadline_ms=DEADLINE_MS, clock=self.clock
        )

    def fill(self, row: int, value: int) -> bytes:
        self.rows[row] = np.frombuffer(unit(value), np.uint8)
        return unit(value)

    def ends(self, count: int = 1) -> list[JobEnd]:
        found: list[JobEnd] = []
        end_s = time.monotonic() + HANG_LIMIT_S
        while len(found) < count:
            found += self.transfers.finished()
            assert time.monotonic() < end_s, "a job that never ends"
        return sorted(found, key=lambda each: each.job_id)

    def close(self) -> None:
        self.transfers.close()
        assert not self.transfers.busy or self.transfers.finished()
        self.store.check_idle()


@pytest.fixture
def moving() -> Iterator[Moving]:
    rig = Moving(*ALL)
    yield rig
    rig.close()


def test_units_go_down_and_come_back_bit_for_bit(moving: Moving) -> None:
    keys = keys_of(5)
    written = [moving.fill(index, index + 1) for index in range(5)]
    moving.transfers.submit(1, keys, range(5), is_load=False)
    (end,) = moving.ends()
    assert (end.job_id, end.ok, set(end.moved)) == (1, True, set(keys))
    moving.transfers.submit(2, keys, range(10, 15), is_load=True)
    (end,) = moving.ends()
    assert (end.ok, end.lost) == (True, ())
    assert [moving.rows[10 + index].tobytes() for index in range(5)] == written
    assert not moving.transfers.busy


def test_units_held_already_are_not_copied_again(moving: Moving) -> None:
    keys = keys_of(3)
    moving.store.put(keys[1], unit(9))
    moving.transfers.submit(1, keys, range(3), is_load=False)
    (end,) = moving.ends()
    assert (end.ok, set(end.moved)) == (True, {keys[0], keys[2]})
    assert moving.store.blocks[keys[1]] == ("l2", unit(9))


def test_a_load_cut_short_tells_which_keys_are_lost(moving: Moving) -> None:
    keys = keys_of(4)
    for key in keys[:2]:
        moving.store.put(key, unit(5))
    moving.transfers.submit(1, keys, range(4), is_load=True)
    (end,) = moving.ends()
    assert (end.ok, end.moved, end.lost) == (False, tuple(keys[:2]), tuple(keys[2:]))
    assert not moving.rows[2:].any(), "nothing lands where nothing came"


def test_a_job_longer_than_the_slab_goes_through_it_window_by_window() -> None:
    rig = Moving(*ALL, slots=8)
    keys = keys_of(WINDOW_UNITS + 20)
    for index in range(len(keys)):
        rig.fill(index, index)
    rig.transfers.submit(1, keys, range(len(keys)), is_load=False)
    (end,) = rig.ends()
    assert end.ok
    rig.rows[:] = 0
    rig.transfers.submit(2, keys, range(len(keys)), is_load=True)
    (end,) = rig.ends()
    assert end.ok
    assert [rig.rows[index].tobytes() for index in range(len(keys))] == [
        unit(index) for index in range(len(keys))
    ]
    rig.close()


def test_loads_go_ahead_of_saves_that_wait() -> None:
    rig = Moving(slots=64)
    for job in range(6):
        rig.transfers.submit(job, keys_of(3, job), range(3), is_load=False)
    asked = len(rig.store.asked)
    rig.transfers.submit(9, keys_of(3, 9), range(3), is_load=True)
    rig.store.answer(rig.store.asked[0])
    end_s = time.monotonic() + HANG_LIMIT_S
    while len(rig.store.asked) == asked and time.monotonic() < end_s:
        rig.transfers.finished()
    assert isinstance(rig.store.asked[asked], Load)
    rig.close()


def test_a_store_that_says_nothing_ends_jobs_at_their_deadline() -> None:
    rig = Moving()
    rig.transfers.submit(1, keys_of(2), range(2), is_load=True)
    rig.transfers.submit(2, keys_of(2, 1), range(2), is_load=False)
    assert rig.transfers.finished() == []
    rig.clock.advance(DEADLINE_MS / 1e3)
    load, save = rig.ends(2)
    assert (load.ok, load.lost) == (False, tuple(keys_of(2)))
    assert (save.ok, save.lost) == (False, ())
    rig.close()


def test_a_full_or_raising_store_fails_saves_and_nothing_else() -> None:
    rig = Moving(*ALL, slots=4)
    held = rig.store.load([])  # so that the whole slab may be asked for in windows of one
    rig.store.release(held)
    rig.store.free = rig.store.free[:1]
    rig.transfers.submit(1, keys_of(1), [0], is_load=False)
    assert rig.ends()[0].ok
    rig.store.free = []
    rig.transfers.submit(2, keys_of(1, 1), [0], is_load=False)
    assert not rig.ends()[0].ok
    rig.store.raising = True
    rig.transfers.submit(3, keys_of(1, 2), [0], is_load=True)
    assert rig.ends()[0].lost == tuple(keys_of(1, 2))
    rig.store.raising = False
    rig.store.free = list(range(4))
    rig.close()


def test_a_drain_ends_every_job_and_no_copy_runs_after_it(moving: Moving) -> None:
    for job in range(8):
        for row in range(8):
            moving.fill(row, job)
        moving.transfers.submit(job, keys_of(8, job), range(8), is_load=False)
    moving.transfers.drain(0.01)
    moving.rows[:] = 0
    for _, data in moving.store.blocks.values():
        assert any(data) or data == unit(0)
    assert {end.job_id for end in moving.transfers.finished()} == set(range(8))


def test_no_view_of_the_pool_is_left_after_close() -> None:
    pool = mmap.mmap(-1, 4 * UNIT)
    rows = np.frombuffer(pool, np.uint8).reshape(4, UNIT)
    store = ManualStore(NAMESPACE, 4, ALL)
    transfers = Transfers(GuardedStore(store), rows, deadline_ms=1.0, clock=time.monotonic)
    transfers.submit(1, keys_of(2), range(2), is_load=False)
    transfers.close()
    del rows
    pool.close()


# Pools of engines that are gone.


def make_pool(folder: Path, name: str, age_s: float) -> Path:
    path = folder / f"vllm_offload_{name}.mmap"
    path.write_bytes(bytes(4096))
    when = time.time() - age_s
    os.utime(path, (when, when))
    return path


def test_an_abandoned_pool_is_removed_and_others_are_not(tmp_path: Path) -> None:
    left = make_pool(tmp_path, "left", 2 * STALE_S)
    used = make_pool(tmp_path, "used", 2 * STALE_S)
    other = tmp_path / "other.mmap"
    other.write_bytes(b"x")
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert abandoned(tmp_path) == [left]
        assert remove_abandoned(tmp_path) == [left]
        assert (used.exists(), other.exists(), left.exists()) == (True, True, False)
    assert abandoned(tmp_path) == [used]


def test_a_pool_that_may_just_be_starting_is_left_alone(tmp_path: Path) -> None:
    make_pool(tmp_path, "young", 0)
    assert abandoned(tmp_path) == []


def test_matches_and_saves_are_what_the_store_was_asked(moving: Moving) -> None:
    moving.transfers.submit(1, keys_of(2), range(2), is_load=False)
    moving.ends()
    assert [type(ticket) for ticket in moving.store.asked] == [Save]
    assert not any(isinstance(ticket, Match) for ticket in moving.store.asked)


def test_only_steps_that_compute_nothing_wait_and_only_for_something() -> None:
    clock = ManualClock()
    steps = IdleSteps(clock)
    assert steps.wait_s(True) == IDLE_WAIT_S
    assert steps.wait_s(False) == 0.0, "nothing to wait for"
    clock.now_s += 1.01 * IDLE_STEP_S
    assert steps.wait_s(True) == 0.0, "as long as a computation takes"
    steps.stepped()
    clock.now_s += 0.9 * IDLE_STEP_S
    assert steps.wait_s(True) == IDLE_WAIT_S
