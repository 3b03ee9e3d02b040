"""The threads of one tier, and their bounded queues.

Loads go ahead of writes, because a request waits for a load. The `workers_read` threads always
take a load first. The `workers_write` threads do too, but take a write after
`MAX_CONSECUTIVE_LOADS` loads, so writes never starve. A thread whose own queue is empty serves the
other. A tier that hangs blocks only its own threads and queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore import codecs
from kvstore.blocks.key import Key
from kvstore.cache.commands import InFlightLoad, LoadOutcome, TierWrite
from kvstore.codecs.base import UNCOMPRESSED_ID, Codec
from kvstore.codecs.chooser import Chooser
from kvstore.errors import TierError
from kvstore.shm.slab import Slab
from kvstore.store import block_io
from kvstore.store.block_io import StagingBuffers, TransferResult
from kvstore.store.write_queue import Flush, WriteQueue
from kvstore.telemetry.histogram import Histogram
from kvstore.telemetry.usage_counters import Record
from kvstore.tiers.base import Tier

log = logging.getLogger(__name__)

MAX_QUEUED_PROBES: Final = 256
"""Maximum number of queued probes per tier. A further probe finds nothing."""
MAX_CONSECUTIVE_LOADS: Final = 4
"""Loads that a write thread runs before its next write."""


class Probe:
    """One batched query of which keys a tier contains. A worker calls `on_answer`."""

    def __init__(self, keys: Sequence[Key], on_answer: Callable[[Probe, list[bool]], None]) -> None:
        self.keys = keys
        self.on_answer = on_answer


class TierWorkers:
    """Runs the reads, writes and probes of one tier.

    on_load_end, on_write_end: called from a worker when a load or write ended.
    chooser: chooses the codec of each block. dtype_of: the dtype of a key's namespace. If it is
    unknown (""), the block is stored without compression.
    start_load, start_write: mark a load or write as started; False if it was cancelled.
    record: called for every block that was read or written.
    """

    def __init__(
        self,
        tier: Tier,
        slab: Slab,
        *,
        queue_blocks: int,
        queue_s: float = 0.0,
        chooser: Chooser,
        dtype_of: Callable[[Key], str],
        start_load: Callable[[InFlightLoad], bool],
        start_write: Callable[[TierWrite], bool],
        on_load_end: Callable[[InFlightLoad, TransferResult], None],
        on_write_end: Callable[[TierWrite, TransferResult], None],
        record: Record | None = None,
    ) -> None:
        self.tier = tier
        self.counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._slab = slab
        self._chooser = chooser
        self._dtype_of = dtype_of
        self._start_load = start_load
        self._start_write = start_write
        self._on_load_end = on_load_end
        self._on_write_end = on_write_end
        self._record = record
        self._seconds = {direction: Histogram() for direction in ("read", "write", "probe")}
        self._reads: deque[InFlightLoad] = deque()
        self._writes = WriteQueue(queue_blocks, queue_s, max(1, tier.workers_write))
        self._probes: deque[Probe] = deque()
        self._lock = threading.Lock()
        self._work_ready = threading.Condition(self._lock)
        """A job was queued."""
        self._work_done = threading.Condition(self._lock)
        """A job has ended."""
        self._busy = {"reads": 0, "writes": 0}
        self._last_failed = False
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._run_jobs,
                args=(number < tier.workers_read, StagingBuffers(slab.slot_bytes)),
                name=f"{tier.name}-{number}",
                daemon=True,
            )
            for number in range(tier.workers_read + tier.workers_write)
        ]
        for thread in self._threads:
            thread.start()

    def submit_load(self, load: InFlightLoad) -> bool:
        """Queue a load. False when the workers are closing.

        The L2 manager bounds the number of in-flight loads. This method removes cancelled loads
        from the front, so the queue of a hung tier does not grow without bound.
        """
        with self._lock:
            if self._closing:
                return False
            while self._reads and self._reads[0].cancelled:
                self._reads.popleft()
            self._reads.append(load)
            self._work_ready.notify()
            return True

    def submit_write(self, write: TierWrite) -> bool:
        """Queue a write. False when the queue is full or the workers are closing."""
        with self._lock:
            if self._closing:
                return False
            if not self._writes.add(write):
                self.counts["dropped_writes"] += 1
                return False
            self._work_ready.notify()
            return True

    def submit_probe(self, probe: Probe) -> bool:
        """Queue a probe. False when the queue is full or the workers are closing."""
        with self._lock:
            if self._closing or len(self._probes) >= MAX_QUEUED_PROBES:
                self.counts["dropped_probes"] += 1
                return False
            self._probes.append(probe)
            self._work_ready.notify()
            return True

    def set_limits(self, queue_blocks: int, queue_s: float) -> None:
        """Set the bounds of the write queue. Writes already queued stay."""
        with self._lock:
            self._writes.set_limits(queue_blocks, queue_s)

    def free_blocks(self) -> int:
        """Number of writes that the queue would accept now."""
        with self._lock:
            return self._writes.free_blocks()

    def wait_written(self, deadline_s: float) -> bool:
        """Wait until all current writes have ended and the tier is flushed. False when the flush
        failed or the deadline passed."""
        with self._lock:
            last = self._writes.last_number
            left_s = max(0.0, deadline_s - time.monotonic())
            if not self._work_done.wait_for(lambda: self._writes.is_done(last), left_s):
                return False
            flush = Flush()
            self._writes.add_flush(flush)
            self._work_ready.notify()
        return flush.ended.wait(max(0.0, deadline_s - time.monotonic())) and flush.succeeded

    def stats(self) -> dict[str, Any]:
        """Queue depths, counters, and "seconds" (histograms of the time inside the tier, by
        operation)."""
        with self._lock:
            queues = {
                "queued_reads": len(self._reads),
                "queued_writes": len(self._writes),
                "workers_busy_read": self._busy["reads"],
                "workers_busy_write": self._busy["writes"],
                "write_rate": round(self._writes.bytes_per_s),
            }
        counts = {name: self.counts[name] for name in COUNTERS}
        seconds = {name: histogram.snapshot() for name, histogram in self._seconds.items()}
        workers = {"workers_read": self.tier.workers_read, "workers_write": self.tier.workers_write}
        return {**queues, **counts, **workers, "seconds": seconds, "codec": self._chooser.stats()}

    def close(self, deadline_s: float) -> bool:
        """Drop queued jobs and end the threads. False when a thread still hangs in the tier."""
        with self._lock:
            self._closing = True
            reads, writes = list(self._reads), self._writes.drain()
            probes = list(self._probes)
            self._reads.clear()
            self._probes.clear()
            self._work_ready.notify_all()
            self._work_done.notify_all()
        for load in reads:
            if self._start_load(load):
                self._on_load_end(load, TransferResult(LoadOutcome.UNAVAILABLE, reason="closing"))
        for job in writes:
            if isinstance(job, TierWrite) and self._start_write(job):
                self._on_write_end(job, TransferResult(LoadOutcome.UNAVAILABLE, reason="closing"))
        for probe in probes:
            probe.on_answer(probe, [False] * len(probe.keys))
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _next_job(self, reads_first: bool) -> InFlightLoad | TierWrite | Probe | Flush | None:
        """Wait for a job; None when closing."""
        with self._lock:
            while not self._closing:
                if self._probes:
                    return self._probes.popleft()
                if self._reads and (reads_first or not self._writes):
                    self._busy["reads"] += 1
                    return self._reads.popleft()
                if self._writes:
                    self._busy["writes"] += 1
                    return self._writes.pop()
                self._work_ready.wait()
            return None

    def _run_jobs(self, reads_first: bool, staging: StagingBuffers) -> None:
        """Run jobs until closing. An internal error in one job must not end the thread."""
        loads = 0
        while (job := self._next_job(reads_first or loads < MAX_CONSECUTIVE_LOADS)) is not None:
            loads = loads + 1 if isinstance(job, InFlightLoad) else 0
            try:
                if isinstance(job, InFlightLoad):
                    self._run_load(job, staging)
                elif isinstance(job, TierWrite):
                    self._run_write(job, staging)
                elif isinstance(job, Probe):
                    self._run_probe(job)
                else:
                    self._run_flush(job)
            except Exception:
                log.exception("tier %s: internal error in a worker job", self.tier.name)
            finally:
                self._on_job_end(job)

    def _on_job_end(self, job: InFlightLoad | TierWrite | Probe | Flush) -> None:
        with self._lock:
            if isinstance(job, InFlightLoad):
                self._busy["reads"] -= 1
            elif not isinstance(job, Probe):
                self._busy["writes"] -= 1
                self._writes.on_job_end(job)
            self._work_done.notify_all()

    def _run_probe(self, probe: Probe) -> None:
        started_s = time.perf_counter()
        found, result = block_io.tier_contains(self.tier, probe.keys)
        self._count("probe", result, time.perf_counter() - started_s)
        probe.on_answer(probe, found)

    def _run_flush(self, flush: Flush) -> None:
        try:
            self.tier.flush()
            flush.succeeded = True
        except TierError as error:
            with self._counts_lock:
                self.counts["errors"] += 1
            log.warning("tier %s: flush failed: %s", self.tier.name, error)
        finally:
            flush.ended.set()

    def _run_load(self, load: InFlightLoad, staging: StagingBuffers) -> None:
        if not self._start_load(load):
            return
        slot = self._slab.view(load.slot)
        digest, before = load.key.namespace, self._busy["reads"]
        result = block_io.read_block(
            self.tier,
            load.key,
            load.nbytes,
            slot,
            staging,
            direct=self._chooser.prefers_uncompressed(digest),
        )
        self._count("read", result, result.cost.tier_s if result.cost else None)
        if result.cost is not None:
            self._chooser.record_read(digest, result.cost, (before + self._busy["reads"]) / 2)
        self._on_load_end(load, result)

    def _run_write(self, write: TierWrite, staging: StagingBuffers) -> None:
        if not self._start_write(write):
            return
        result = TransferResult(LoadOutcome.UNAVAILABLE, reason="internal error")
        started_s, before = time.monotonic(), self._busy["writes"]
        try:
            result = block_io.write_block(
                self.tier,
                write.key,
                write.nbytes,
                self._slab.view(write.slot),
                self._choose_codec(write),
                staging,
            )
            self._count("write", result, result.cost.tier_s if result.cost else None)
            if result.cost is not None:
                sharing = (before + self._busy["writes"]) / 2
                self._chooser.record_write(write.key.namespace, result.cost, sharing)
            if result.stored_bytes:
                with self._lock:
                    self._writes.record_write(write.nbytes, time.monotonic() - started_s)
        finally:
            self._on_write_end(write, result)

    def _choose_codec(self, write: TierWrite) -> Codec:
        dtype = self._dtype_of(write.key)
        if not dtype:
            return codecs.codec_by_frame_id(UNCOMPRESSED_ID)
        with self._lock:
            crowded = self._writes.is_backlogged
        return self._chooser.choose(
            write.key.namespace, dtype, raw_bytes=write.nbytes, backlogged=crowded
        )

    def _count(self, direction: str, result: TransferResult, seconds: float | None) -> None:
        """Count one tier operation. The first of several consecutive errors is logged as a
        warning, the others at debug level.

        seconds: time inside the tier; None if no block was transferred.
        """
        if seconds is not None and result.outcome is LoadOutcome.LOADED:
            self._seconds[direction].observe(seconds)
            if self._record is not None:
                about = {"kvstore.tier": self.tier.name, "kvstore.bytes": result.stored_bytes}
                self._record(f"tier {direction}", seconds, about)
        with self._counts_lock:
            level = self._update_counts(direction, result)
        if level is not None:
            log.log(level, "tier %s: %s failed: %s", self.tier.name, direction, result.reason)

    def _update_counts(self, direction: str, result: TransferResult) -> int | None:
        """Update the counters; the log level of an error, else None. Under the counters' lock,
        because many workers end at once."""
        if result.outcome is LoadOutcome.LOADED:
            self.counts[f"{direction}s"] += direction == "probe" or bool(result.stored_bytes)
            self.counts[f"{direction}_bytes"] += result.stored_bytes
            # Only a transfer shows that the tier works again. While the circuit breaker is open,
            # a probe succeeds too (and finds nothing).
            self._last_failed = self._last_failed and not result.stored_bytes
        elif result.outcome is LoadOutcome.MISSING:
            self.counts["misses"] += 1
        elif result.outcome is LoadOutcome.CORRUPT:
            self.counts["checksum_failures"] += 1
        elif result.outcome is LoadOutcome.UNSUPPORTED:
            pass  # `UnsupportedFrames` counts and logs it
        else:
            self.counts["errors"] += 1
            level = logging.DEBUG if self._last_failed else logging.WARNING
            self._last_failed = True
            return level
        return None


COUNTERS: Final = (
    "reads",
    "read_bytes",
    "writes",
    "write_bytes",
    "probes",
    "misses",
    "checksum_failures",
    "errors",
    "dropped_writes",
    "dropped_probes",
)
