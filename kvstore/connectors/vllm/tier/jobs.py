"""The jobs of a tier: loads and saves between vLLM's host pool and the store's slots.

A block here is one offloaded block of vLLM: a row of its host pool, with one offload key. A job is
split into windows, so that a long prompt does not lease the whole slab. Each window is one
operation of the store, and a separate thread runs its copy. A job ends exactly once, and only when
none of its copies can still run, because vLLM reuses the rows at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvstore.connectors.common.copy_thread import Copy, CopyThread, Direction
from kvstore.connectors.common.dropped_blocks import RETRY_S, first_dropped
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.interface import Load, Save, SlabView
from kvstore.kernels import FINISHED, Event

WINDOW_BLOCKS: Final = 64
"""Maximum number of blocks in a window."""
WINDOW_FRACTION: Final = 0.25
"""Maximum fraction of the slab's slots that one window leases."""
WINDOWS_MAX: Final = 4
"""Maximum number of windows under way. The others wait in order, loads first."""
SAVE_WINDOWS_MAX: Final = 3
"""Maximum number of save windows among them, so that a load never waits for a save's slots."""


@dataclass(eq=False, slots=True)
class Job:
    """One of vLLM's jobs.

    copied: keys whose bytes were copied. windows_left: windows that have not ended. failed: some
    block was neither copied nor already stored.
    """

    job_id: int
    is_load: bool
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    started_s: float
    copied: list[bytes] = field(default_factory=list)
    windows_left: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The end of a job.

    ok: every block was copied or already stored. copied: keys whose bytes were copied. failed: the
    other keys of a load; empty for a save.
    """

    job_id: int
    is_load: bool
    ok: bool
    copied: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    seconds: float


@dataclass(eq=False, slots=True)
class Window:
    """A part of a job: its blocks from `start`, without those of a save that are saved already.

    ready: indices of the blocks whose copy is queued. retry_at_s: time of the next save of blocks
    that got no slot.
    """

    job: Job
    start: int
    stop: int
    operation: Load | Save | None = None
    started_s: float = 0.0
    copying: bool = False
    ready: tuple[int, ...] = ()
    retry_at_s: float = 0.0


class RowCopier:
    """A `kernels.Copier` between rows of a host pool and slots: a page is a row.

    rows: uint8 `[blocks, block_bytes]`, vLLM's own memory.
    """

    def __init__(self, rows: np.ndarray) -> None:
        assert rows.dtype == np.uint8, f"rows of {rows.dtype}, not of bytes"
        self._rows = rows

    def gather(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        for (row,), slot in zip(pages, slots, strict=True):
            np.frombuffer(slot, np.uint8)[: self._rows.shape[1]] = self._rows[row]
        return FINISHED

    def scatter(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        for (row,), slot in zip(pages, slots, strict=True):
            self._rows[row] = np.frombuffer(slot, np.uint8)[: self._rows.shape[1]]
        return FINISHED

    def scatter_layers(
        self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Sequence[Event]:
        return [self.scatter(pages, slots)]

    def mark(self) -> Event:
        return FINISHED

    def map_slab(self, slab: SlabView) -> None:
        return None

    def close(self) -> None:
        # vLLM cannot unmap its pool while a view of it lives.
        self._rows = np.empty((0, 0), np.uint8)


class OffloadJobs:
    """The jobs of one tier. Only the scheduler's thread calls it. Only `drain` waits, and `advance`
    and `finished` for at most `wait_s`.

    max_wait_ms: longest time from the submission of a load until its last copy is queued, for all
        of its windows together. Also the longest wait of a save window for its slots.
    """

    def __init__(
        self,
        store: GuardedStore,
        rows: np.ndarray,
        *,
        max_wait_ms: float,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._max_wait_ms = max_wait_ms
        self._clock = clock
        self._copies = CopyThread(RowCopier(rows), name="kvstore-tier")
        self._loads: deque[Window] = deque()
        self._saves: deque[Window] = deque()
        self._running: list[Window] = []
        self._jobs: dict[int, Job] = {}
        self._outcomes: list[JobOutcome] = []
        self.counts: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        """True while a job has not ended, or `finished` has not returned its outcome."""
        return bool(self._jobs or self._outcomes)

    def submit(
        self, job_id: int, keys: Sequence[bytes], rows: Sequence[int], *, is_load: bool
    ) -> None:
        """Start a job. `finished` returns its outcome in any case."""
        assert len(keys) == len(rows), "a row for each key"
        job = Job(job_id, is_load, tuple(keys), tuple(rows), self._clock())
        self._jobs[job_id] = job
        self.counts["load_jobs" if is_load else "save_jobs"] += 1
        size = self._window_blocks()
        windows = [
            Window(job, start, min(start + size, len(keys))) for start in range(0, len(keys), size)
        ]
        job.windows_left = len(windows)
        (self._loads if is_load else self._saves).extend(windows)
        if not windows:
            self._end_job(job)
        self.advance()

    def advance(self, wait_s: float = 0.0) -> None:
        """Process ended copies and answers of the store, and start waiting windows.

        wait_s: longest wait for a copy to end or, if none runs, for an answer of the store.
        """
        copying = self._copies.under_way > 0
        self._store.poll(0.0 if copying else wait_s)
        for copy in self._copies.finished(wait_s if copying else 0.0):
            self._complete_copy(copy)
        for window in list(self._running):
            self._advance_window(window)
        self._end_late_loads()
        for waiting, most in ((self._loads, WINDOWS_MAX), (self._saves, SAVE_WINDOWS_MAX)):
            while waiting and len(self._running) < most:
                self._start_window(waiting.popleft())

    def finished(self, wait_s: float = 0.0) -> list[JobOutcome]:
        """Outcomes of the jobs that ended since the last call. wait_s: see `advance`."""
        self.advance(wait_s)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def drain(self, wait_s: float) -> None:
        """Wait until every job has ended. Waiting windows end first. The others end when their
        copies end, or after the maximum wait."""
        self._end_waiting()
        while self._jobs:
            self._store.poll(wait_s)
            self.advance()

    def close(self) -> None:
        """Wait for running copies and release every lease."""
        self._end_waiting()
        for copy in self._copies.close():
            self._complete_copy(copy)
        for window in list(self._running):
            self._end_window(window, (), failed=True)

    def drop_save(self, job_id: int, keys: Sequence[bytes]) -> None:
        """Accept a save and end it without saving any block."""
        job = Job(job_id, False, tuple(keys), (), self._clock(), failed=True)
        self._jobs[job_id] = job
        self.counts["blocks_dropped"] += len(keys)
        self._end_job(job)

    def _end_late_loads(self) -> None:
        """End the waiting windows of loads that are late."""
        waiting, self._loads = self._loads, deque()
        for window in waiting:
            if self._is_late(window.job.started_s):
                self.counts["loads_timed_out"] += 1
                self._end_window(window, (), failed=True)
            else:
                self._loads.append(window)

    def _is_late(self, since_s: float) -> bool:
        return (self._clock() - since_s) * 1e3 >= self._max_wait_ms

    def _end_waiting(self) -> None:
        for waiting in (self._loads, self._saves):
            while waiting:
                self._end_window(waiting.popleft(), (), failed=True)

    def _window_blocks(self) -> int:
        slab = self._store.store.slab
        slots = int(slab.slots * WINDOW_FRACTION) if slab is not None else WINDOW_BLOCKS
        return max(1, min(WINDOW_BLOCKS, slots))

    def _start_window(self, window: Window) -> None:
        job = window.job
        if job.is_load and job.failed:
            # A block of an earlier window is missing: vLLM cannot use the following ones.
            self._end_window(window, (), failed=True)
            return
        keys = job.keys[window.start : window.stop]
        window.started_s = self._clock()
        window.operation = self._store.load(keys) if job.is_load else self._store.save(keys)
        self._running.append(window)
        if window.operation is None:
            self._end_window(window, (), failed=True)
        else:
            self._advance_window(window)

    def _advance_window(self, window: Window) -> None:
        """Queue the copy once no more blocks will arrive, or after the maximum wait."""
        operation = window.operation
        assert operation is not None, "a running window has an operation"
        late = self._is_late(window.job.started_s if window.job.is_load else window.started_s)
        if window.copying or not (operation.done or late):
            return
        kind = "loads" if window.job.is_load else "saves"
        self.counts[f"{kind}_timed_out"] += not operation.done
        if isinstance(operation, Load):
            self._copy_load(window, operation)
        elif operation.fault or not operation.done:
            self._end_window(window, (), failed=True)
        elif operation.slot_assignments or not operation.dropped or late:
            self._copy_save(window, operation)
        elif self._clock() >= window.retry_at_s:
            self._save_again(window, operation)

    def _copy_load(self, window: Window, load: Load) -> None:
        blocks = len(load.slots)
        window.ready = tuple(range(blocks))
        if not blocks or not self._copy(window, Direction.SCATTER, load.slots[:blocks]):
            self._end_window(window, (), failed=True)

    def _copy_save(self, window: Window, save: Save) -> None:
        window.ready = tuple(index for index, _ in save.slot_assignments)
        slots = [slot for _, slot in save.slot_assignments]
        if not slots or not self._copy(window, Direction.GATHER, slots):
            self._count_save(save, save.dropped)
            self._end_window(window, (), failed=bool(slots) or save.dropped > 0)

    def _save_again(self, window: Window, save: Save) -> None:
        """Save the blocks that got no slot. `save` has ended, or is released here."""
        self._count_save(save, 0)
        if window.operation is not None:
            self._store.release(window.operation)
        window.start += first_dropped(save)
        window.copying, window.ready = False, ()
        window.retry_at_s = self._clock() + RETRY_S
        window.operation = self._store.save(window.job.keys[window.start : window.stop])
        if window.operation is None:
            self.counts["blocks_dropped"] += save.dropped
            self._end_window(window, (), failed=True)

    def _count_save(self, save: Save, dropped: int) -> None:
        """Count the blocks of a save that are not copied. dropped: those that got no slot, or 0 if
        they are saved again."""
        done = len(save.hashes) - dropped if dropped or not save.dropped else first_dropped(save)
        self.counts["blocks_already_stored"] += done - len(save.slot_assignments)
        self.counts["blocks_dropped"] += dropped

    def _copy(self, window: Window, direction: Direction, slots: Sequence[int]) -> bool:
        """Queue the copy of a window's ready blocks; False when the queue is full."""
        assert window.operation is not None, "a copy has an operation"
        rows = [[window.job.rows[window.start + index]] for index in window.ready]
        slab = self._store.store.slab_of(window.operation)
        copy = Copy(direction, rows, slab, tuple(slots), FINISHED, window)
        window.copying = self._copies.submit(copy)
        self.counts["copies_dropped"] += not window.copying
        return window.copying

    def _complete_copy(self, copy: Copy) -> None:
        window: Window = copy.owner
        self.counts["copies_failed"] += bool(copy.error)
        operation = window.operation
        if copy.error:
            if isinstance(operation, Save):
                self._count_save(operation, operation.dropped)
            self._end_window(window, (), failed=True)
        elif isinstance(operation, Save):
            window.operation = None  # commit releases it
            committed = self._store.commit(operation)
            self.counts["blocks_saved"] += len(window.ready) if committed else 0
            if committed and operation.dropped and not self._is_late(window.started_s):
                window.job.copied += [window.job.keys[window.start + n] for n in window.ready]
                self._save_again(window, operation)
                return
            self._count_save(operation, operation.dropped)
            failed = not committed or operation.dropped > 0
            self._end_window(window, window.ready if committed else (), failed=failed)
        else:
            self.counts["blocks_loaded"] += len(window.ready)
            failed = len(window.ready) < window.stop - window.start
            self._end_window(window, window.ready, failed=failed)

    def _end_window(self, window: Window, copied: Sequence[int], *, failed: bool) -> None:
        """copied: indices of the copied blocks in the window."""
        job = window.job
        if window in self._running:
            self._running.remove(window)
        if window.operation is not None:
            self._store.release(window.operation)
            window.operation = None
        job.copied += [job.keys[window.start + index] for index in copied]
        job.failed |= failed
        job.windows_left -= 1
        if not job.windows_left:
            self._end_job(job)

    def _end_job(self, job: Job) -> None:
        del self._jobs[job.job_id]
        copied = set(job.copied)
        failed = [key for key in job.keys if key not in copied] if job.is_load else []
        self.counts["blocks_failed"] += len(failed)
        seconds = self._clock() - job.started_s
        self._outcomes.append(
            JobOutcome(
                job.job_id, job.is_load, not job.failed, tuple(job.copied), tuple(failed), seconds
            )
        )

    def __repr__(self) -> str:
        return f"OffloadJobs({len(self._jobs)} jobs, {len(self._running)} windows under way)"


def rows_of(view: Any) -> np.ndarray:
    """vLLM's view of its host pool, `[blocks, block_bytes]`, as bytes without a copy."""
    rows = np.asarray(view)
    assert rows.ndim == 2, f"a host pool of {rows.ndim} axes, not of 2"
    return rows.view(np.uint8)
