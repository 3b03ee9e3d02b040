"""The queue of writes to one tier: bounded in blocks, and in seconds of what the tier can do.

A tier that slows down must not collect leases on slots that engines need, so what it may have
waiting follows its measured rate. What finds no place is dropped and counted by the store.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from kvstore.cache.commands import Spill

SMOOTHING: Final = 0.2
"""Weight of the newest write in the measured rate."""
CROWDED: Final = 0.75
"""Part of a bound from which on writes do not keep up."""


class Flush:
    """A wish that what was written be durable. done: whether it came true, once it has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.done = False


class WriteQueue:
    """Called under the workers' lock.

    blocks: most spills waiting. seconds: most time that they may take; 0: no such bound. workers:
    threads that write at once.
    """

    def __init__(self, blocks: int, seconds: float, workers: int) -> None:
        self._blocks = blocks
        self._seconds = seconds
        self._workers = workers
        self._jobs: deque[tuple[int, Spill | Flush]] = deque()
        self._running: dict[int, int] = {}
        self.last = 0
        """Number of the job that was added last; jobs are numbered in their order."""
        self._bytes = 0
        self._largest = 1
        self._rate = 0.0

    def bound(self, blocks: int, seconds: float) -> None:
        """From here on, these bounds; what waits already stays."""
        self._blocks = blocks
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def bytes_per_s(self) -> float:
        """Raw bytes of blocks that the tier takes a second; 0 before the first write."""
        return self._rate * self._workers

    def offer(self, spill: Spill) -> bool:
        """Take a spill; False when there are too many."""
        if not self._fits(spill.nbytes):
            self._let_go_cancelled()
            if not self._fits(spill.nbytes):
                return False
        self._largest = max(self._largest, spill.nbytes)
        self._add(spill)
        return True

    def flush(self, flush: Flush) -> None:
        """Take a flush, whatever waits."""
        self._add(flush)

    def pop(self) -> Spill | Flush:
        """The job that waited longest; to be handed to `done`."""
        number, job = self._jobs.popleft()
        self._bytes -= _bytes_of(job)
        self._running[id(job)] = number
        return job

    def done(self, job: Spill | Flush) -> None:
        """A job that was popped has ended."""
        del self._running[id(job)]

    def settled(self, number: int) -> bool:
        """No job up to this number waits or runs."""
        first = self._jobs[0][0] if self._jobs else number + 1
        return number < min(first, *self._running.values(), number + 1)

    def drain(self) -> list[Spill | Flush]:
        """Every job; none waits any more."""
        jobs = [job for _, job in self._jobs]
        self._jobs.clear()
        self._bytes = 0
        return jobs

    @property
    def crowded(self) -> bool:
        """Whether writes do not keep up: more will soon be dropped."""
        most = self._bytes_most()
        full = most is not None and self._bytes > CROWDED * most
        return full or len(self._jobs) > CROWDED * self._blocks

    def room(self) -> int:
        """Spills that it would take now, were they of the largest block seen."""
        left = self._blocks - len(self._jobs)
        most = self._bytes_most()
        if most is not None:
            left = min(left, max(int(most - self._bytes) // self._largest, not self._jobs))
        return max(0, left)

    def wrote(self, nbytes: int, elapsed_s: float) -> None:
        """One worker has written a block of so many bytes in this time."""
        rate = nbytes / max(elapsed_s, 1e-9)
        self._rate += (rate - self._rate) * (SMOOTHING if self._rate else 1.0)

    def _fits(self, nbytes: int) -> bool:
        if len(self._jobs) >= self._blocks:
            return False
        most = self._bytes_most()
        # A block finds place in an empty queue, however slow the tier: else it were never measured
        # again.
        return most is None or not self._jobs or self._bytes + nbytes <= most

    def _bytes_most(self) -> float | None:
        """Bytes that may wait; None when only their number is bounded."""
        if not self._seconds or not self._rate:
            return None
        return self._seconds * self.bytes_per_s

    def _add(self, job: Spill | Flush) -> None:
        self.last += 1
        self._jobs.append((self.last, job))
        self._bytes += _bytes_of(job)

    def _let_go_cancelled(self) -> None:
        """Spills whose slots were needed will not be written."""
        kept = [
            (number, job)
            for number, job in self._jobs
            if not (isinstance(job, Spill) and job.cancelled)
        ]
        if len(kept) < len(self._jobs):
            self._jobs = deque(kept)
            self._bytes = sum(_bytes_of(job) for _, job in kept)


def _bytes_of(job: Spill | Flush) -> int:
    return job.nbytes if isinstance(job, Spill) else 0
