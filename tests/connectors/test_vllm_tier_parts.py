"""Transfers of the tier, and the pools that killed engines leave, without vLLM."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from manual_store import ManualClock, ManualStore
from tier_rig import ALL, DEADLINE_MS, HANG_LIMIT_S, NAMESPACE, UNIT, Moving, keys_of, unit

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.vllm.connector.metadata import IDLE_STEP_S, IDLE_WAIT_S, IdleSteps
from kvstore.connectors.vllm.tier.jobs import SAVE_WINDOWS_MAX, WINDOW_UNITS, WINDOWS_MAX, Transfers
from kvstore.connectors.vllm.tier.stale_pools import STALE_S, abandoned, remove_abandoned
from kvstore.interface import Load, Match, Save


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


def test_a_load_never_waits_for_saves_and_goes_ahead_of_those_that_wait() -> None:
    rig = Moving(slots=64)
    for job in range(6):
        rig.transfers.submit(job, keys_of(3, job), range(3), is_load=False)
    assert len(rig.store.asked) == SAVE_WINDOWS_MAX < WINDOWS_MAX
    rig.transfers.submit(8, keys_of(3, 8), range(3), is_load=True)
    assert isinstance(rig.store.asked[-1], Load), "saves leave it room"
    rig.transfers.submit(9, keys_of(3, 9), range(3), is_load=True)
    asked = len(rig.store.asked)
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


def test_the_deadline_is_a_loads_however_many_windows_it_has() -> None:
    """Windows wait for their turn behind one another: each with a deadline of its own would make a
    long prompt wait for the sum."""
    rig = Moving(slots=16)
    windows = 4 * WINDOWS_MAX
    for job in range(2):
        rig.transfers.submit(job, keys_of(4 * windows, job), range(4 * windows), is_load=True)
    assert len(rig.store.asked) == WINDOWS_MAX, "the others wait for their turn"
    rig.clock.advance(DEADLINE_MS / 1e3)
    for end in (ended := rig.transfers.finished()):
        assert (end.ok, end.moved) == (False, ())
    assert [end.job_id for end in ended] == [0, 1]
    assert len(rig.store.asked) == WINDOWS_MAX, "what is late is not asked for"
    assert rig.transfers.counts["loads_past_deadline"] == 2 * windows
    assert rig.transfers.counts["units_lost"] == 2 * 4 * windows
    rig.close()


def test_what_came_before_a_loads_deadline_is_kept_and_a_later_window_has_no_more_time() -> None:
    rig = Moving(slots=16)
    keys = keys_of(4 * (WINDOWS_MAX + 1))
    for key in keys:
        rig.store.put(key, unit(7))
    rig.transfers.submit(1, keys, range(len(keys)), is_load=True)
    first, second = rig.store.asked[:2]
    rig.clock.advance(0.9 * DEADLINE_MS / 1e3)
    rig.store.answer(first)
    end_s = time.monotonic() + HANG_LIMIT_S
    while len(rig.store.asked) == WINDOWS_MAX and time.monotonic() < end_s:
        rig.transfers.advance()
    rig.store.answer(second, blocks=1, done=False)
    rig.clock.advance(0.1 * DEADLINE_MS / 1e3)
    (end,) = rig.ends()
    assert (end.ok, end.moved, end.lost) == (False, tuple(keys[:5]), tuple(keys[5:]))
    rig.close()


def test_a_save_that_is_refused_ends_as_failed_and_asks_for_nothing(moving: Moving) -> None:
    moving.transfers.refuse(5, keys_of(3))
    (end,) = moving.ends()
    assert (end.job_id, end.is_load, end.ok, end.moved) == (5, False, False, ())
    assert not moving.store.asked
    assert moving.transfers.counts["units_refused"] == 3


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
