"""The queue of writes to one tier: bounded in blocks, and in seconds at the measured write rate.

Each queued write leases a slot, which no save gets before the block is written. So the bound
follows the tier's measured rate: a slow tier gets a short queue. Writes that do not fit are
deferred (`cache/deferred_writes.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from kvstore.cache.commands import TierWrite

SMOOTHING: Final = 0.2
"""Weight of the newest write in the measured rate."""
BACKLOG_BLOCKS: Final = 192
"""Number of queued writes, and ..."""
BACKLOG_S: Final = 3.75
"""... time to write them at the measured rate, above which the queue counts as backlogged; at most
BACKLOG_FRACTION of the bounds."""
BACKLOG_FRACTION: Final = 0.75


class Flush:
    """A request to make earlier writes durable. succeeded: valid once `ended` is set."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.succeeded = False


class Refill:
    """Queue up to `limit` deferred writes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit


class WriteQueue:
    """Every method is called under the workers' lock.

    max_blocks: maximum number of queued writes. max_seconds: maximum time to write them all; 0:
    no limit. workers: number of threads that write concurrently.
    """

    def __init__(self, max_blocks: int, max_seconds: float, workers: int) -> None:
        self._max_blocks = max_blocks
        self._max_seconds = max_seconds
        self.workers = workers
        """Number of threads that write concurrently. May change."""
        self._jobs: deque[tuple[int, TierWrite | Flush]] = deque()
        self._running: dict[int, int] = {}
        self.last_number = 0
        """Number of the newest job. Jobs are numbered in queue order."""
        self._bytes = 0
        self._largest = 1
        self._rate = 0.0

    def set_limits(self, max_blocks: int, max_seconds: float) -> None:
        """Set the bounds. Jobs already queued stay."""
        self._max_blocks = max_blocks
        self._max_seconds = max_seconds

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def starts_with_flush(self) -> bool:
        """Whether the oldest job is a flush."""
        return bool(self._jobs) and isinstance(self._jobs[0][1], Flush)

    @property
    def is_half_empty(self) -> bool:
        """Whether at least as many writes would fit as are queued, and one at least."""
        return self.free_blocks() >= max(1, len(self._jobs))

    @property
    def bytes_per_s(self) -> float:
        """Measured write rate in raw block bytes; 0 before the first write."""
        return self._rate * self.workers

    def add(self, write: TierWrite) -> bool:
        """Queue a write. False when the queue is full."""
        if not self._fits(write.nbytes):
            self._drop_cancelled()
            if not self._fits(write.nbytes):
                return False
        self._largest = max(self._largest, write.nbytes)
        self._append(write)
        return True

    def add_flush(self, flush: Flush) -> None:
        """Queue a flush, also when the queue is full."""
        self._append(flush)

    def pop(self) -> TierWrite | Flush:
        """Take the oldest job. The caller must call `on_job_end` with it."""
        number, job = self._jobs.popleft()
        self._bytes -= _bytes_of(job)
        self._running[id(job)] = number
        return job

    def on_job_end(self, job: TierWrite | Flush) -> None:
        """Record that a popped job has ended."""
        del self._running[id(job)]

    def is_done(self, number: int) -> bool:
        """Whether no job up to this number is queued or running."""
        first = self._jobs[0][0] if self._jobs else number + 1
        return number < min(first, *self._running.values(), number + 1)

    def drain(self) -> list[TierWrite | Flush]:
        """Remove and return all jobs."""
        jobs = [job for _, job in self._jobs]
        self._jobs.clear()
        self._bytes = 0
        return jobs

    def drain_writes(self) -> list[TierWrite]:
        """Remove and return all writes; flushes stay."""
        writes = [job for _, job in self._jobs if isinstance(job, TierWrite)]
        self._jobs = deque(entry for entry in self._jobs if isinstance(entry[1], Flush))
        self._bytes = 0
        return writes

    @property
    def is_backlogged(self) -> bool:
        """Whether the tier cannot keep up with the saves."""
        max_bytes = self._max_bytes()
        if max_bytes is not None:
            max_bytes = min(BACKLOG_FRACTION * max_bytes, BACKLOG_S * self.bytes_per_s)
            if self._bytes > max_bytes:
                return True
        return len(self._jobs) > min(BACKLOG_FRACTION * self._max_blocks, BACKLOG_BLOCKS)

    def free_blocks(self) -> int:
        """Number of writes that would fit now, each as large as the largest block seen."""
        left = self._max_blocks - len(self._jobs)
        max_bytes = self._max_bytes()
        if max_bytes is not None:
            left = min(left, max(int(max_bytes - self._bytes) // self._largest, not self._jobs))
        return max(0, left)

    def record_write(self, nbytes: int, elapsed_s: float) -> None:
        """Update the measured rate after one worker has written a block."""
        rate = nbytes / max(elapsed_s, 1e-9)
        self._rate += (rate - self._rate) * (SMOOTHING if self._rate else 1.0)

    def _fits(self, nbytes: int) -> bool:
        if len(self._jobs) >= self._max_blocks:
            return False
        max_bytes = self._max_bytes()
        # An empty queue accepts any block, however slow the tier: its rate must be measured again.
        return max_bytes is None or not self._jobs or self._bytes + nbytes <= max_bytes

    def _max_bytes(self) -> float | None:
        """Maximum queued bytes; None when only the number of blocks is bounded."""
        if not self._max_seconds or not self._rate:
            return None
        return self._max_seconds * self.bytes_per_s

    def _append(self, job: TierWrite | Flush) -> None:
        self.last_number += 1
        self._jobs.append((self.last_number, job))
        self._bytes += _bytes_of(job)

    def _drop_cancelled(self) -> None:
        """Remove cancelled writes: the L2 manager has reused their slots."""
        remaining = [
            (number, job)
            for number, job in self._jobs
            if not (isinstance(job, TierWrite) and job.cancelled)
        ]
        if len(remaining) < len(self._jobs):
            self._jobs = deque(remaining)
            self._bytes = sum(_bytes_of(job) for _, job in remaining)


def _bytes_of(job: TierWrite | Flush) -> int:
    return job.nbytes if isinstance(job, TierWrite) else 0
