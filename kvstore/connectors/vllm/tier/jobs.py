"""Blocks on their way between vLLM's host pool and the store's slots: the jobs of a tier.

A unit is what vLLM's offloading keeps under one key: a row of its host pool, opaque bytes. A job
is cut into windows, so that one long prompt does not lease the whole slab; each window is one
ticket, and its copy runs on a thread of its own. A job ends exactly once, and only when no copy of
it can run any more: vLLM reuses the rows at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvstore.connectors.common.copy_thread import Copy, CopyThread, Direction
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.interface import Load, Save, SlotBuffer
from kvstore.kernels import FINISHED, Event

WINDOW_UNITS: Final = 64
"""Units of one ticket."""
WINDOW_SHARE: Final = 0.25
"""Share of the slab's slots that one ticket asks for at most."""
WINDOWS_MAX: Final = 4
"""Windows of all jobs under way at once; the rest wait in their order, loads first."""
SAVE_WINDOWS_MAX: Final = 3
"""How many of them may be saves: a load never waits for the slots that saves wait for."""


@dataclass(eq=False, slots=True)
class Job:
    """One of vLLM's jobs. moved: keys whose bytes were copied. left: windows that have not ended.
    failed: some unit neither was moved nor lay there already."""

    job_id: int
    is_load: bool
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    began_s: float
    moved: list[bytes] = field(default_factory=list)
    left: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class JobEnd:
    """moved: keys whose bytes were copied; of a load, `lost` are the others. ok: every unit is
    where it should be."""

    job_id: int
    is_load: bool
    ok: bool
    moved: tuple[bytes, ...]
    lost: tuple[bytes, ...]
    seconds: float


@dataclass(eq=False, slots=True)
class Window:
    """A part of a job. ready: units whose copy is queued."""

    job: Job
    start: int
    stop: int
    ticket: Load | Save | None = None
    began_s: float = 0.0
    copying: bool = False
    ready: tuple[int, ...] = ()


class RowCopier:
    """`kernels.Copier` between rows of a host pool and slots; a page is a row.

    rows: uint8 `[units, unit_bytes]`, vLLM's own memory.
    """

    def __init__(self, rows: np.ndarray) -> None:
        assert rows.dtype == np.uint8, f"rows of bytes, not {rows.dtype}"
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

    def map_slab(self, slab: SlotBuffer) -> None:
        return None

    def close(self) -> None:
        # vLLM cannot unmap its pool while a view of it lives.
        self._rows = np.empty((0, 0), np.uint8)


class Transfers:
    """The jobs of one tier. Every call comes from the scheduler's thread; none waits but `drain`,
    and `advance` and `finished` for as long as they are told.

    deadline_ms: how long a load may take from its submission until its last copy is queued,
    however many windows it has; and how long a window of a save may wait for its slots.
    """

    def __init__(
        self,
        store: GuardedStore,
        rows: np.ndarray,
        *,
        deadline_ms: float,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._unit_bytes = int(rows.shape[1])
        self._deadline_ms = deadline_ms
        self._clock = clock
        self._copies = CopyThread(RowCopier(rows), name="kvstore-tier")
        self._loads: deque[Window] = deque()
        self._saves: deque[Window] = deque()
        self._running: list[Window] = []
        self._jobs: dict[int, Job] = {}
        self._ended: list[JobEnd] = []
        self.counts: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        """Jobs that have not ended, or whose end has not been taken."""
        return bool(self._jobs or self._ended)

    def submit(
        self, job_id: int, keys: Sequence[bytes], rows: Sequence[int], *, is_load: bool
    ) -> None:
        """Take a job. It ends in `finished`, whatever happens."""
        assert len(keys) == len(rows), "a row for each key"
        job = Job(job_id, is_load, tuple(keys), tuple(rows), self._clock())
        self._jobs[job_id] = job
        self.counts["load_jobs" if is_load else "save_jobs"] += 1
        size = self._window_units()
        windows = [
            Window(job, start, min(start + size, len(keys))) for start in range(0, len(keys), size)
        ]
        job.left = len(windows)
        (self._loads if is_load else self._saves).extend(windows)
        if not windows:
            self._end_job(job)
        self.advance()

    def advance(self, wait_s: float = 0.0) -> None:
        """Take in what store and copies did, and start what may start. wait_s: how long to wait
        for the first copy to end, or where none runs, for the store to answer."""
        copying = self._copies.under_way > 0
        self._store.poll(0.0 if copying else wait_s)
        for copy in self._copies.finished(wait_s if copying else 0.0):
            self._end_copy(copy)
        for window in list(self._running):
            self._move(window)
        self._give_up_late_loads()
        for waiting, most in ((self._loads, WINDOWS_MAX), (self._saves, SAVE_WINDOWS_MAX)):
            while waiting and len(self._running) < most:
                self._start(waiting.popleft())

    def finished(self, wait_s: float = 0.0) -> list[JobEnd]:
        """Jobs that ended since the last call. wait_s: see `advance`."""
        self.advance(wait_s)
        ended, self._ended = self._ended, []
        return ended

    def drain(self, wait_s: float) -> None:
        """Wait until every job has ended. What waits for its turn is given up first; the rest ends
        by its deadline, and by its copies."""
        self._give_up_waiting()
        while self._jobs:
            self._store.poll(wait_s)
            self.advance()

    def close(self) -> None:
        """Wait for running copies and hand back every lease."""
        self._give_up_waiting()
        for copy in self._copies.close():
            self._end_copy(copy)
        for window in list(self._running):
            self._end_window(window, (), failed=True)

    def refuse(self, job_id: int, keys: Sequence[bytes]) -> None:
        """Take a save and end it: nothing of it is kept."""
        job = Job(job_id, False, tuple(keys), (), self._clock(), failed=True)
        self._jobs[job_id] = job
        self.counts["units_refused"] += len(keys)
        self._end_job(job)

    def _give_up_late_loads(self) -> None:
        """A load that is late ends at once, whatever of it still waits for its turn."""
        waiting, self._loads = self._loads, deque()
        for window in waiting:
            if self._is_late(window.job.began_s):
                self.counts["loads_past_deadline"] += 1
                self._end_window(window, (), failed=True)
            else:
                self._loads.append(window)

    def _is_late(self, since_s: float) -> bool:
        return (self._clock() - since_s) * 1e3 >= self._deadline_ms

    def _give_up_waiting(self) -> None:
        for waiting in (self._loads, self._saves):
            while waiting:
                self._end_window(waiting.popleft(), (), failed=True)

    def _window_units(self) -> int:
        slab = self._store.store.slab
        slots = int(slab.slots * WINDOW_SHARE) if slab is not None else WINDOW_UNITS
        return max(1, min(WINDOW_UNITS, slots))

    def _start(self, window: Window) -> None:
        job = window.job
        if job.is_load and job.failed:
            # The run ended in an earlier window: vLLM has no use for what follows.
            self._end_window(window, (), failed=True)
            return
        keys = job.keys[window.start : window.stop]
        window.began_s = self._clock()
        window.ticket = self._store.load(keys) if job.is_load else self._store.save(keys)
        self._running.append(window)
        if window.ticket is None:
            self._end_window(window, (), failed=True)
        else:
            self._move(window)

    def _move(self, window: Window) -> None:
        """Queue the copy once all that will come is there, or the time is over."""
        ticket = window.ticket
        assert ticket is not None, "a window that runs has a ticket"
        late = self._is_late(window.job.began_s if window.job.is_load else window.began_s)
        if window.copying or not (ticket.done or late):
            return
        what = "loads" if window.job.is_load else "saves"
        self.counts[f"{what}_past_deadline"] += not ticket.done
        if isinstance(ticket, Load):
            self._move_load(window, ticket)
        elif ticket.fault or not ticket.done:
            self._end_window(window, (), failed=True)
        else:
            self._move_save(window, ticket)

    def _move_load(self, window: Window, ticket: Load) -> None:
        units = len(ticket.slots)
        window.ready = tuple(range(units))
        if not units or not self._copy(window, Direction.SCATTER, ticket.slots[:units]):
            self._end_window(window, (), failed=True)

    def _move_save(self, window: Window, ticket: Save) -> None:
        self.counts["units_held_already"] += (
            len(ticket.hashes) - len(ticket.grants) - ticket.dropped
        )
        self.counts["units_refused"] += ticket.dropped
        window.ready = tuple(index for index, _ in ticket.grants)
        if not ticket.grants:
            self._end_window(window, (), failed=ticket.dropped > 0)
        elif not self._copy(window, Direction.GATHER, [slot for _, slot in ticket.grants]):
            self._end_window(window, (), failed=True)

    def _copy(self, window: Window, direction: Direction, slots: Sequence[int]) -> bool:
        """Queue the copy of a window's ready units; False when there is no room."""
        assert window.ticket is not None, "a copy has a ticket"
        rows = [[window.job.rows[window.start + index]] for index in window.ready]
        slab = self._store.store.slab_of(window.ticket)
        copy = Copy(direction, rows, slab, tuple(slots), FINISHED, window)
        window.copying = self._copies.submit(copy)
        self.counts["copies_dropped"] += not window.copying
        return window.copying

    def _end_copy(self, copy: Copy) -> None:
        window: Window = copy.owner
        self.counts["copies_failed"] += bool(copy.error)
        ticket = window.ticket
        if copy.error:
            self._end_window(window, (), failed=True)
        elif isinstance(ticket, Save):
            window.ticket = None  # commit hands it back
            taken = self._store.commit(ticket)
            self.counts["units_saved"] += len(window.ready) if taken else 0
            failed = not taken or ticket.dropped > 0
            self._end_window(window, window.ready if taken else (), failed=failed)
        else:
            self.counts["units_loaded"] += len(window.ready)
            failed = len(window.ready) < window.stop - window.start
            self._end_window(window, window.ready, failed=failed)

    def _end_window(self, window: Window, moved: Sequence[int], *, failed: bool) -> None:
        """moved: indices of the window's units."""
        job = window.job
        if window in self._running:
            self._running.remove(window)
        if window.ticket is not None:
            self._store.release(window.ticket)
            window.ticket = None
        job.moved += [job.keys[window.start + index] for index in moved]
        job.failed |= failed
        job.left -= 1
        if not job.left:
            self._end_job(job)

    def _end_job(self, job: Job) -> None:
        del self._jobs[job.job_id]
        moved = set(job.moved)
        lost = [key for key in job.keys if key not in moved] if job.is_load else []
        self.counts["units_lost"] += len(lost)
        seconds = self._clock() - job.began_s
        self._ended.append(
            JobEnd(job.job_id, job.is_load, not job.failed, tuple(job.moved), tuple(lost), seconds)
        )

    def __repr__(self) -> str:
        return f"Transfers({len(self._jobs)} jobs, {len(self._running)} windows under way)"


def rows_of(view: Any) -> np.ndarray:
    """vLLM's view of its host pool, `[units, unit_bytes]`, as bytes (no copy)."""
    rows = np.asarray(view)
    assert rows.ndim == 2, f"units of bytes, not {rows.ndim} axes"
    return rows.view(np.uint8)
