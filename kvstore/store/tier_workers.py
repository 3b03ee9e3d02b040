"""The threads of one tier, and the bounded queues they serve.

Loads go ahead of saves: a request waits for the one and nobody for the other. `workers_read`
threads look at reads first; `workers_write` threads too, but take a write after `LOADS_IN_A_ROW` of
them, so that saves move on whatever is loaded. Either does the other when its own queue is empty.
A tier that hangs holds its threads and fills its queues, and nothing else.
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
from kvstore.cache.commands import Flight, Landing, Spill
from kvstore.codecs.base import Codec
from kvstore.codecs.chooser import IDENTITY, Chooser
from kvstore.errors import TierError
from kvstore.shm.slab import Slab
from kvstore.store import block_io
from kvstore.store.block_io import Moved, Staging
from kvstore.store.write_queue import Flush, WriteQueue
from kvstore.telemetry.histogram import Histogram
from kvstore.telemetry.usage_counters import Record
from kvstore.tiers.base import Tier

log = logging.getLogger(__name__)

PROBES_MAX: Final = 256
"""Batched existence questions waiting, per tier; more are answered with no."""
LOADS_IN_A_ROW: Final = 4
"""Reads that a thread meant for writes does before it does a write again."""


class Probe:
    """One batched question of which keys a tier holds; `answer` is called from a worker."""

    def __init__(self, keys: Sequence[Key], answer: Callable[[Probe, list[bool]], None]) -> None:
        self.keys = keys
        self.answer = answer


class TierWorkers:
    """Reads, writes and probes of one tier.

    landed, written: called from a worker when a flight or spill ended.
    chooser: gives each block its codec. dtype_of: of a key's namespace; "" where it is not known,
    and the block is kept as it is.
    take_off, begin: whether a flight, a spill is still wanted.
    record: told of every block that was read or written.
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
        take_off: Callable[[Flight], bool],
        begin: Callable[[Spill], bool],
        landed: Callable[[Flight, Moved], None],
        written: Callable[[Spill, Moved], None],
        record: Record | None = None,
    ) -> None:
        self.tier = tier
        self.counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._slab = slab
        self._chooser = chooser
        self._dtype_of = dtype_of
        self._take_off = take_off
        self._begin = begin
        self._landed = landed
        self._written = written
        self._record = record
        self._seconds = {direction: Histogram() for direction in ("read", "write", "probe")}
        self._reads: deque[Flight] = deque()
        self._writes = WriteQueue(queue_blocks, queue_s, max(1, tier.workers_write))
        self._probes: deque[Probe] = deque()
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)
        """There is something to do."""
        self._ended = threading.Condition(self._lock)
        """Something was done."""
        self._busy = {"reads": 0, "writes": 0}
        self._faulty = False
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(number < tier.workers_read, Staging(slab.slot_bytes)),
                name=f"{tier.name}-{number}",
                daemon=True,
            )
            for number in range(tier.workers_read + tier.workers_write)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, flight: Flight) -> bool:
        """Queue a flight; False when the workers are closing.

        The brain has bounded how many there are; those that it cancelled since are let go here,
        or a tier that hangs would collect them without end.
        """
        with self._lock:
            if self._closing:
                return False
            while self._reads and self._reads[0].cancelled:
                self._reads.popleft()
            self._reads.append(flight)
            self._wanted.notify()
            return True

    def write(self, spill: Spill) -> bool:
        """Queue a spill; False when the queue is full or the workers are closing."""
        with self._lock:
            if self._closing:
                return False
            if not self._writes.offer(spill):
                self.counts["dropped_writes"] += 1
                return False
            self._wanted.notify()
            return True

    def probe(self, probe: Probe) -> bool:
        """Queue a question; False when there are too many."""
        with self._lock:
            if self._closing or len(self._probes) >= PROBES_MAX:
                self.counts["dropped_probes"] += 1
                return False
            self._probes.append(probe)
            self._wanted.notify()
            return True

    def bound(self, queue_blocks: int, queue_s: float) -> None:
        """From here on, so many writes may wait, and for so long; what waits already stays."""
        with self._lock:
            self._writes.bound(queue_blocks, queue_s)

    def room(self) -> int:
        """Spills that the write queue would take now."""
        with self._lock:
            return self._writes.room()

    def wait_written(self, deadline_s: float) -> bool:
        """Until what is queued or running now is written and the tier is flushed; False when that
        failed or took longer."""
        with self._lock:
            last = self._writes.last
            left_s = max(0.0, deadline_s - time.monotonic())
            if not self._ended.wait_for(lambda: self._writes.settled(last), left_s):
                return False
            flush = Flush()
            self._writes.flush(flush)
            self._wanted.notify()
        return flush.ended.wait(max(0.0, deadline_s - time.monotonic())) and flush.done

    def stats(self) -> dict[str, Any]:
        """Queue depths, counters, and "seconds" inside the tier by direction (histograms)."""
        with self._lock:
            queues = {
                "queued_reads": len(self._reads),
                "queued_writes": len(self._writes),
                "running_reads": self._busy["reads"],
                "running_writes": self._busy["writes"],
                "write_rate": round(self._writes.bytes_per_s),
            }
        counts = {name: self.counts[name] for name in COUNTERS}
        seconds = {name: histogram.snapshot() for name, histogram in self._seconds.items()}
        workers = {"workers_read": self.tier.workers_read, "workers_write": self.tier.workers_write}
        return {**queues, **counts, **workers, "seconds": seconds, "codec": self._chooser.stats()}

    def close(self, deadline_s: float) -> bool:
        """End the threads; what is queued is not done. False when some still hang in the tier."""
        with self._lock:
            self._closing = True
            reads, writes = list(self._reads), self._writes.drain()
            probes = list(self._probes)
            self._reads.clear()
            self._probes.clear()
            self._wanted.notify_all()
            self._ended.notify_all()
        for flight in reads:
            if self._take_off(flight):
                self._landed(flight, Moved(Landing.UNAVAILABLE, reason="closing"))
        for job in writes:
            if isinstance(job, Spill) and self._begin(job):
                self._written(job, Moved(Landing.UNAVAILABLE, reason="closing"))
        for probe in probes:
            probe.answer(probe, [False] * len(probe.keys))
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _next(self, reads_first: bool) -> Flight | Spill | Probe | Flush | None:
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
                self._wanted.wait()
            return None

    def _work(self, reads_first: bool, staging: Staging) -> None:
        """A worker's life. A mistake of ours in one job must not end the thread."""
        in_a_row = 0
        while (job := self._next(reads_first or in_a_row < LOADS_IN_A_ROW)) is not None:
            in_a_row = in_a_row + 1 if isinstance(job, Flight) else 0
            try:
                if isinstance(job, Flight):
                    self._read(job, staging)
                elif isinstance(job, Spill):
                    self._write(job, staging)
                elif isinstance(job, Probe):
                    self._probe(job)
                else:
                    self._flush(job)
            except Exception:
                log.exception("%s: a worker's job failed", self.tier.name)
            finally:
                self._finished(job)

    def _finished(self, job: Flight | Spill | Probe | Flush) -> None:
        with self._lock:
            if isinstance(job, Flight):
                self._busy["reads"] -= 1
            elif not isinstance(job, Probe):
                self._busy["writes"] -= 1
                self._writes.done(job)
            self._ended.notify_all()

    def _probe(self, probe: Probe) -> None:
        began_s = time.perf_counter()
        found, moved = block_io.asked(self.tier, probe.keys)
        self._count("probe", moved, time.perf_counter() - began_s)
        probe.answer(probe, found)

    def _flush(self, flush: Flush) -> None:
        try:
            self.tier.flush()
            flush.done = True
        except TierError as error:
            with self._counting:
                self.counts["faults"] += 1
            log.warning("%s: flush failed: %s", self.tier.name, error)
        finally:
            flush.ended.set()

    def _read(self, flight: Flight, staging: Staging) -> None:
        if not self._take_off(flight):
            return
        slot = self._slab.view(flight.slot)
        digest, before = flight.key.namespace, self._busy["reads"]
        moved = block_io.read_block(
            self.tier,
            flight.key,
            flight.nbytes,
            slot,
            staging,
            direct=self._chooser.keeps_raw(digest),
        )
        self._count("read", moved, moved.cost.tier_s if moved.cost else None)
        if moved.cost is not None:
            self._chooser.read(digest, moved.cost, (before + self._busy["reads"]) / 2)
        self._landed(flight, moved)

    def _write(self, spill: Spill, staging: Staging) -> None:
        if not self._begin(spill):
            return
        moved = Moved(Landing.UNAVAILABLE, reason="a fault of ours")
        started_s, before = time.monotonic(), self._busy["writes"]
        try:
            moved = block_io.write_block(
                self.tier,
                spill.key,
                spill.nbytes,
                self._slab.view(spill.slot),
                self._codec_of(spill),
                staging,
            )
            self._count("write", moved, moved.cost.tier_s if moved.cost else None)
            if moved.cost is not None:
                sharing = (before + self._busy["writes"]) / 2
                self._chooser.wrote(spill.key.namespace, moved.cost, sharing)
            if moved.stored_bytes:
                with self._lock:
                    self._writes.wrote(spill.nbytes, time.monotonic() - started_s)
        finally:
            self._written(spill, moved)

    def _codec_of(self, spill: Spill) -> Codec:
        dtype = self._dtype_of(spill.key)
        if not dtype:
            return codecs.open(IDENTITY)
        with self._lock:
            crowded = self._writes.crowded
        return self._chooser.next(
            spill.key.namespace, dtype, raw_bytes=spill.nbytes, crowded=crowded
        )

    def _count(self, direction: str, moved: Moved, seconds: float | None) -> None:
        """Count one move; the first fault in a row is a warning, the rest are details.

        seconds: inside the tier; None where nothing was moved.
        """
        if seconds is not None and moved.landing is Landing.ARRIVED:
            self._seconds[direction].observe(seconds)
            if self._record is not None:
                about = {"kvstore.tier": self.tier.name, "kvstore.bytes": moved.stored_bytes}
                self._record(f"tier {direction}", seconds, about)
        with self._counting:
            level = self._counted(direction, moved)
        if level is not None:
            log.log(level, "%s: %s failed: %s", self.tier.name, direction, moved.reason)

    def _counted(self, direction: str, moved: Moved) -> int | None:
        """Under its lock, for many workers end at once; a fault's level in the log, else None."""
        if moved.landing is Landing.ARRIVED:
            self.counts[f"{direction}s"] += direction == "probe" or bool(moved.stored_bytes)
            self.counts[f"{direction}_bytes"] += moved.stored_bytes
            # Only bytes show that it works again: of a tier that is left alone, questions are
            # answered too (with no).
            self._faulty = self._faulty and not moved.stored_bytes
        elif moved.landing is Landing.MISSING:
            self.counts["misses"] += 1
        elif moved.landing is Landing.CORRUPT:
            self.counts["checksum_failures"] += 1
        else:
            self.counts["faults"] += 1
            level = logging.DEBUG if self._faulty else logging.WARNING
            self._faulty = True
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
    "faults",
    "dropped_writes",
    "dropped_probes",
)
