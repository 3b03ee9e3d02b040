"""The jobs of the tier, and the host pools of killed engines, without vLLM."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from manual_store import ManualClock, ManualStore
from tier_rig import (
    ALL,
    BLOCK_BYTES,
    HANG_LIMIT_S,
    MAX_WAIT_MS,
    NAMESPACE,
    JobRig,
    block_of,
    keys_of,
)

from kvstore.connectors.common.dropped_blocks import RETRY_S
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.vllm.common.idle_steps import IDLE_STEP_S, IDLE_WAIT_S, IdleSteps
from kvstore.connectors.vllm.tier.jobs import (
    SAVE_WINDOWS_MAX,
    WINDOW_BLOCKS,
    WINDOWS_MAX,
    JobOutcome,
    OffloadJobs,
)
from kvstore.connectors.vllm.tier.stale_pools import STALE_S, find_stale_pools, remove_stale_pools
from kvstore.interface import Load, Match, Save


@pytest.fixture
def moving() -> Iterator[JobRig]:
    rig = JobRig(*ALL)
    yield rig
    rig.close()


def test_blocks_are_saved_and_loaded_bit_for_bit(moving: JobRig) -> None:
    keys = keys_of(5)
    written = [moving.fill(index, index + 1) for index in range(5)]
    moving.jobs.submit(1, keys, range(5), is_load=False)
    (end,) = moving.outcomes()
    assert (end.job_id, end.ok, set(end.copied)) == (1, True, set(keys))
    moving.jobs.submit(2, keys, range(10, 15), is_load=True)
    (end,) = moving.outcomes()
    assert (end.ok, end.failed) == (True, ())
    assert [moving.rows[10 + index].tobytes() for index in range(5)] == written
    assert not moving.jobs.busy


def test_stored_blocks_are_not_copied_again(moving: JobRig) -> None:
    keys = keys_of(3)
    moving.store.put(keys[1], block_of(9))
    moving.jobs.submit(1, keys, range(3), is_load=False)
    (end,) = moving.outcomes()
    assert (end.ok, set(end.copied)) == (True, {keys[0], keys[2]})
    assert moving.store.blocks[keys[1]] == ("l2", block_of(9))


def test_a_truncated_load_reports_the_failed_keys(moving: JobRig) -> None:
    keys = keys_of(4)
    for key in keys[:2]:
        moving.store.put(key, block_of(5))
    moving.jobs.submit(1, keys, range(4), is_load=True)
    (end,) = moving.outcomes()
    assert (end.ok, end.copied, end.failed) == (False, tuple(keys[:2]), tuple(keys[2:]))
    assert not moving.rows[2:].any(), "no bytes are copied for missing blocks"


def test_a_job_larger_than_the_slab_runs_window_by_window() -> None:
    rig = JobRig(*ALL, slots=8)
    keys = keys_of(WINDOW_BLOCKS + 20)
    for index in range(len(keys)):
        rig.fill(index, index)
    rig.jobs.submit(1, keys, range(len(keys)), is_load=False)
    (end,) = rig.outcomes()
    assert end.ok
    rig.rows[:] = 0
    rig.jobs.submit(2, keys, range(len(keys)), is_load=True)
    (end,) = rig.outcomes()
    assert end.ok
    assert [rig.rows[index].tobytes() for index in range(len(keys))] == [
        block_of(index) for index in range(len(keys))
    ]
    rig.close()


def test_a_load_never_waits_for_saves_and_overtakes_waiting_ones() -> None:
    rig = JobRig(slots=64)
    for job in range(6):
        rig.jobs.submit(job, keys_of(3, job), range(3), is_load=False)
    assert len(rig.store.operations) == SAVE_WINDOWS_MAX < WINDOWS_MAX
    rig.jobs.submit(8, keys_of(3, 8), range(3), is_load=True)
    assert isinstance(rig.store.operations[-1], Load), "saves leave room for it"
    rig.jobs.submit(9, keys_of(3, 9), range(3), is_load=True)
    asked = len(rig.store.operations)
    rig.store.answer(rig.store.operations[0])
    end_s = time.monotonic() + HANG_LIMIT_S
    while len(rig.store.operations) == asked and time.monotonic() < end_s:
        rig.jobs.finished()
    assert isinstance(rig.store.operations[asked], Load)
    rig.close()


def test_a_silent_store_ends_jobs_after_the_maximum_wait() -> None:
    rig = JobRig()
    rig.jobs.submit(1, keys_of(2), range(2), is_load=True)
    rig.jobs.submit(2, keys_of(2, 1), range(2), is_load=False)
    assert rig.jobs.finished() == []
    rig.clock.advance(MAX_WAIT_MS / 1e3)
    load, save = rig.outcomes(2)
    assert (load.ok, load.failed) == (False, tuple(keys_of(2)))
    assert (save.ok, save.failed) == (False, ())
    rig.close()


def test_the_maximum_wait_is_for_all_windows_of_a_load() -> None:
    """Windows wait for one another. If each had a separate maximum wait, a long prompt would wait
    for the sum."""
    rig = JobRig(slots=16)
    windows = 4 * WINDOWS_MAX
    for job in range(2):
        rig.jobs.submit(job, keys_of(4 * windows, job), range(4 * windows), is_load=True)
    assert len(rig.store.operations) == WINDOWS_MAX, "the others wait"
    rig.clock.advance(MAX_WAIT_MS / 1e3)
    for end in (ended := rig.jobs.finished()):
        assert (end.ok, end.copied) == (False, ())
    assert [end.job_id for end in ended] == [0, 1]
    assert len(rig.store.operations) == WINDOWS_MAX, "late windows are not sent"
    assert rig.jobs.counts["loads_timed_out"] == 2 * windows
    assert rig.jobs.counts["blocks_failed"] == 2 * 4 * windows
    rig.close()


def test_blocks_that_arrived_in_time_are_kept_and_later_windows_are_not_sent() -> None:
    rig = JobRig(slots=16)
    keys = keys_of(4 * (WINDOWS_MAX + 1))
    for key in keys:
        rig.store.put(key, block_of(7))
    rig.jobs.submit(1, keys, range(len(keys)), is_load=True)
    first, second = rig.store.operations[:2]
    rig.clock.advance(0.9 * MAX_WAIT_MS / 1e3)
    rig.store.answer(first)
    end_s = time.monotonic() + HANG_LIMIT_S
    while len(rig.store.operations) == WINDOWS_MAX and time.monotonic() < end_s:
        rig.jobs.advance()
    rig.store.answer(second, blocks=1, done=False)
    rig.clock.advance(0.1 * MAX_WAIT_MS / 1e3)
    (end,) = rig.outcomes()
    assert (end.ok, end.copied, end.failed) == (False, tuple(keys[:5]), tuple(keys[5:]))
    rig.close()


def test_a_dropped_save_ends_as_failed_without_an_operation(moving: JobRig) -> None:
    moving.jobs.drop_save(5, keys_of(3))
    (end,) = moving.outcomes()
    assert (end.job_id, end.is_load, end.ok, end.copied) == (5, False, False, ())
    assert not moving.store.operations
    assert moving.jobs.counts["blocks_dropped"] == 3


def test_a_full_or_raising_store_fails_saves_and_nothing_else() -> None:
    rig = JobRig(*ALL, slots=4)
    held = rig.store.load([])  # so that windows of one block can lease the whole slab
    rig.store.release(held)
    rig.store.free = rig.store.free[:1]
    rig.jobs.submit(1, keys_of(1), [0], is_load=False)
    assert rig.outcomes()[0].ok
    rig.store.free = []
    rig.jobs.submit(2, keys_of(1, 1), [0], is_load=False)
    assert rig.jobs.finished() == [], "a slot may become free"
    rig.clock.advance(MAX_WAIT_MS / 1e3)
    assert not rig.outcomes()[0].ok
    assert rig.jobs.counts["blocks_dropped"] == 1
    rig.store.raising = True
    rig.jobs.submit(3, keys_of(1, 2), [0], is_load=True)
    assert rig.outcomes()[0].failed == tuple(keys_of(1, 2))
    rig.store.raising = False
    rig.store.free = list(range(4))
    rig.close()


def test_blocks_without_a_slot_are_saved_as_soon_as_there_is_one() -> None:
    rig = JobRig(*ALL, slots=8)
    keys = keys_of(6)
    written = [rig.fill(index, index + 1) for index in range(6)]
    rig.store.put(keys[2], block_of(3))
    rig.store.free, rest = rig.store.free[:1], rig.store.free[1:]
    rig.jobs.submit(1, keys, range(6), is_load=False)
    ended: list[JobOutcome] = []
    while not ended:
        rig.clock.advance(RETRY_S)
        ended = rig.jobs.finished(0.01)
    assert ended[0].ok
    assert set(ended[0].copied) == {key for key in keys if key != keys[2]}
    counts = rig.jobs.counts
    assert (counts["blocks_saved"], counts["blocks_already_stored"]) == (5, 1)
    assert counts["blocks_dropped"] == 0
    assert [rig.store.blocks[key][1] for key in keys] == written
    rig.store.free += rest
    rig.close()


def test_a_drain_ends_every_job_and_no_copy_runs_after_it(moving: JobRig) -> None:
    for job in range(8):
        for row in range(8):
            moving.fill(row, job)
        moving.jobs.submit(job, keys_of(8, job), range(8), is_load=False)
    moving.jobs.drain(0.01)
    moving.rows[:] = 0
    for _, data in moving.store.blocks.values():
        assert any(data) or data == block_of(0)
    assert {end.job_id for end in moving.jobs.finished()} == set(range(8))


def test_no_view_of_the_pool_is_left_after_close() -> None:
    pool = mmap.mmap(-1, 4 * BLOCK_BYTES)
    rows = np.frombuffer(pool, np.uint8).reshape(4, BLOCK_BYTES)
    store = ManualStore(NAMESPACE, 4, ALL)
    transfers = OffloadJobs(GuardedStore(store), rows, max_wait_ms=1.0, clock=time.monotonic)
    transfers.submit(1, keys_of(2), range(2), is_load=False)
    transfers.close()
    del rows
    pool.close()


# Stale pools.


def make_pool(folder: Path, name: str, age_s: float) -> Path:
    path = folder / f"vllm_offload_{name}.mmap"
    path.write_bytes(bytes(4096))
    when = time.time() - age_s
    os.utime(path, (when, when))
    return path


def test_a_stale_pool_is_removed_and_others_are_not(tmp_path: Path) -> None:
    left = make_pool(tmp_path, "left", 2 * STALE_S)
    used = make_pool(tmp_path, "used", 2 * STALE_S)
    other = tmp_path / "other.mmap"
    other.write_bytes(b"x")
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert find_stale_pools(tmp_path) == [left]
        assert remove_stale_pools(tmp_path) == [left]
        assert (used.exists(), other.exists(), left.exists()) == (True, True, False)
    assert find_stale_pools(tmp_path) == [used]


def test_a_pool_of_a_starting_engine_is_not_removed(tmp_path: Path) -> None:
    make_pool(tmp_path, "young", 0)
    assert find_stale_pools(tmp_path) == []


def test_a_save_sends_no_match(moving: JobRig) -> None:
    moving.jobs.submit(1, keys_of(2), range(2), is_load=False)
    moving.outcomes()
    assert [type(operation) for operation in moving.store.operations] == [Save]
    assert not any(isinstance(operation, Match) for operation in moving.store.operations)


def test_only_steps_that_compute_nothing_wait_and_only_for_something() -> None:
    clock = ManualClock()
    steps = IdleSteps(clock)
    assert steps.wait_s(True) == IDLE_WAIT_S
    assert steps.wait_s(False) == 0.0, "nothing to wait for"
    clock.now_s += 1.01 * IDLE_STEP_S
    assert steps.wait_s(True) == 0.0, "as long as a computation takes"
    steps.end_step()
    clock.now_s += 0.9 * IDLE_STEP_S
    assert steps.wait_s(True) == IDLE_WAIT_S
