"""Passes over the media of bench/tiers.py for L2 and disk: through the tier, and bare."""

from __future__ import annotations

import abc
import itertools
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import kvstore
from kvstore.blocks.frame import HEADER_BYTES, aligned_buffer
from kvstore.blocks.key import Namespace
from kvstore.interface import BlockStore, Load, Operation, Save, SlabView
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.processes import Sidecar
from kvstore.tiers import disk
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import Files
from kvstore.tiers.memory import MemoryTier

SIZES: Final = {"64KiB": 64 << 10, "256KiB": 256 << 10, "2MiB": 2 << 20, "32MiB": 32 << 20}
RUN_BYTES: Final = 32 << 20
"""Bytes of the blocks of one save or load."""
SINGLE_CALLS: Final = 200
"""Saves or loads of one block, for the latency; fewer for large blocks."""
SPARE_SLOTS: Final = 8
CONTAINS_BLOCKS: Final = 512
CONTAINS_CALLS: Final = 300
LAYER_BYTES: Final = 64 << 10
"""Bytes of one layer of a block of `space_of`."""
WAIT_S: Final = 60.0


@dataclass(frozen=True)
class Pass:
    """One pass over the bytes: wall and CPU seconds of this process, and the seconds per call."""

    nbytes: int
    wall_s: float
    cpu_s: float
    calls_s: list[float]

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9)

    def percentile_ms(self, percent: int) -> float:
        return percentile(self.calls_s, percent) * 1e3


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def run_pass(
    work: Callable[[int, int], None],
    count: int,
    threads: int,
    nbytes: int,
    finish: Callable[[], None] | None = None,
) -> Pass:
    """Call `work(number, thread)` for each number; threads take the next number when they are free.
    Then call `finish`, within the measured time."""
    numbers = iter(range(count))
    take_lock = threading.Lock()
    calls: list[list[float]] = [[] for _ in range(threads)]

    def turn(thread: int) -> None:
        mine = calls[thread]
        while True:
            with take_lock:
                number = next(numbers, None)
            if number is None:
                return
            began = time.perf_counter()
            work(number, thread)
            mine.append(time.perf_counter() - began)

    cpu, wall = time.process_time(), time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(turn, range(threads)))
    if finish is not None:
        finish()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return Pass(count * nbytes, wall_s, cpu_s, list(itertools.chain.from_iterable(calls)))


class Medium(abc.ABC):
    """One tier at one block size."""

    total_bytes: int = 256 << 20

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.count = max(4, self.total_bytes // nbytes)

    def begin(self, number: int) -> None:  # noqa: B027 - optional
        """Prepare a round, independent of earlier rounds."""

    @abc.abstractmethod
    def measured(self, operation: str) -> Pass: ...

    @abc.abstractmethod
    def limit(self, operation: str) -> Pass: ...

    def end(self) -> None:  # noqa: B027 - optional
        """End a round."""

    def contains(self) -> dict[str, float]:
        """Return the milliseconds of looking up a run, with the tier and with the bare client."""
        return {}

    def close(self) -> None:  # noqa: B027 - optional
        """Release all resources."""


class TierMedium(Medium):
    """A tier's operations, with uncompressed frames and as many threads as its workers."""

    tier: Tier

    def open_tier(self, tier: Tier) -> None:
        self.tier = tier
        self.threads = {"write": tier.workers_write, "read": tier.workers_read}
        most = max(self.threads.values())
        self.buffers = [FrameBuffer(self.nbytes) for _ in range(most)]
        self.frames = [buffer.fill(key_of(0), self.nbytes) for buffer in self.buffers]
        self.mark = bytes(self.frames[0][2][: len("mark") * 1024])
        self.keys = [key_of(0)]

    def begin(self, number: int) -> None:
        self.keys = [key_of(i, namespace=f"{number:032d}") for i in range(self.count)]

    def measured(self, operation: str) -> Pass:
        threads = self.threads[operation]
        if operation == "write":
            return run_pass(self._write, self.count, threads, self.nbytes, self.tier.flush)
        return run_pass(self._read, self.count, threads, self.nbytes)

    def _write(self, number: int, thread: int) -> None:
        _, header, payload = self.frames[thread]
        self.tier.write(self.keys[number], header, payload)

    def _read(self, number: int, thread: int) -> None:
        buffer = self.buffers[thread]
        got = self.tier.read(self.keys[number], buffer.header, buffer.payload)
        assert got == self.nbytes, f"{got} bytes of {self.nbytes}"
        self.check(buffer.payload)

    def check(self, payload: memoryview) -> None:
        """Check the first bytes of a block; all blocks have the same random bytes."""
        assert payload[: len(self.mark)] == self.mark, "unexpected bytes"

    def end(self) -> None:
        self.tier.clear()

    def close(self) -> None:
        self.tier.close()


def space_of(nbytes: int) -> Namespace:
    """Return a namespace with blocks of this size."""
    space = Namespace(model="bench", layers=nbytes // LAYER_BYTES, kv_heads=8, head_dim=128)
    assert space.block_bytes == nbytes
    return space


class L2Medium(Medium):
    """Save, copy in, commit; load, copy out, release. The limit is the copy alone."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        run = max(1, RUN_BYTES // nbytes)
        self.singles = max(8, min(SINGLE_CALLS, self.count // 2))
        # Few slots beyond a round's blocks: each round's saves evict the last round's.
        self.session = self.open_session(self.count + self.singles + run + SPARE_SLOTS)
        self.source = aligned_buffer(self.count * nbytes)
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self.plain = memoryview(mmap.mmap(-1, self.count * nbytes, flags=flags))
        self.source[:] = os.urandom(1 << 20) * (len(self.source) >> 20)
        self.plain[:] = self.source
        self.starts = range(0, self.count, run)
        self.run = run
        self.hashes: list[bytes] = []

    def open_session(self, slots: int) -> BlockStore:
        """Open a session of a store in this process."""
        self.store = Store(Slab.create(slots, self.nbytes))
        return self.store.session(space_of(self.nbytes))

    def begin(self, number: int) -> None:
        salt = number.to_bytes(4, "big")
        blocks = range(self.count + self.singles)
        self.hashes = [key_of(block).hash[:-4] + salt for block in blocks]

    def measured(self, operation: str) -> Pass:
        step = self._save if operation == "write" else self._load
        cpu, wall = time.process_time(), time.perf_counter()
        for start in self.starts:
            step(self.hashes[start : start + self.run], start)
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        calls = []
        for i in range(self.singles):
            began = time.perf_counter()
            step([self.hashes[self.count + i]], i % self.count)
            calls.append(time.perf_counter() - began)
        return Pass(self.count * self.nbytes, wall_s, cpu_s, calls)

    def limit(self, operation: str) -> Pass:
        writing = operation == "write"
        one, other = (self.source, self.plain) if writing else (self.plain, self.source)

        def copy(number: int, thread: int) -> None:
            part = slice(number * self.nbytes, (number + 1) * self.nbytes)
            other[part] = one[part]

        return run_pass(copy, self.count, 1, self.nbytes)

    def _save(self, hashes: list[bytes], first: int) -> None:
        session, nbytes = self.session, self.nbytes
        save = session.save(hashes)
        self._wait(save)
        assert len(save.slot_assignments) == len(hashes), "no slot"
        view = self._slab(save).view
        for index, slot in save.slot_assignments:
            start = (first + index) % self.count * nbytes
            view(slot)[:nbytes] = self.source[start : start + nbytes]
        session.commit(save)

    def _load(self, hashes: list[bytes], first: int) -> None:
        session, nbytes = self.session, self.nbytes
        load = session.load(hashes)
        self._wait(load)
        assert len(load.slots) == len(hashes), "a miss"
        view = self._slab(load).view
        for index, slot in enumerate(load.slots):
            start = (first + index) % self.count * nbytes
            self.plain[start : start + nbytes] = view(slot)[:nbytes]
        session.release(load)

    def _wait(self, operation: Operation) -> None:
        while not operation.done:
            assert self.session.poll(WAIT_S), "no progress"

    def _slab(self, operation: Load | Save) -> SlabView:
        slab = self.session.slab_of(operation)
        assert slab is not None, "the store is closed"
        return slab

    def close(self) -> None:
        assert self.plain == self.source, "copies differ"
        self.session.close()
        self.store.close()


class SidecarMedium(L2Medium):
    """The same through a client of a sidecar, in a separate process."""

    def open_session(self, slots: int) -> BlockStore:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "kv.sock"
        sizes = ("--l2", str(slots * self.nbytes), "--slot-bytes", str(self.nbytes))
        self.sidecar = Sidecar(path, *sizes)
        self.sidecar.wait_ready()
        return kvstore.connect(str(path), space_of(self.nbytes))

    def contains(self) -> dict[str, float]:
        """Measure `match` of a run of the round's blocks; blocks of 64 KiB are enough in number."""
        hashes = self.hashes[:CONTAINS_BLOCKS]
        if len(hashes) < CONTAINS_BLOCKS or self.count < CONTAINS_BLOCKS:
            return {}
        calls = []
        for _ in range(CONTAINS_CALLS):
            began = time.perf_counter()
            match = self.session.match(hashes)
            self._wait(match)
            calls.append(time.perf_counter() - began)
            assert match.tiers == ["l2"] * CONTAINS_BLOCKS
        return {"p50_ms": statistics.median(calls) * 1e3, "p99_ms": percentile(calls, 99) * 1e3}

    def close(self) -> None:
        assert self.plain == self.source, "copies differ"
        self.session.close()
        self.sidecar.stop()
        self.folder.cleanup()


class DiskMedium(TierMedium):
    """The disk tier, and a plain loop over one file of the same bytes."""

    total_bytes = 512 << 20

    def __init__(self, nbytes: int, directory: str) -> None:
        super().__init__(nbytes)
        self.folder = Path(tempfile.mkdtemp(dir=directory))
        frame_bytes = nbytes + HEADER_BYTES
        capacity = 3 * self.count * frame_bytes + (64 << 20)
        self.open_tier(
            disk.open(disk.Config(directory=str(self.folder / "tier"), capacity=capacity))
        )
        self.files = Files()
        self.frame_bytes = frame_bytes
        self.fd = -1

    def begin(self, number: int) -> None:
        super().begin(number)
        self.fd = self.files.create(str(self.folder / "plain"), self.count * self.frame_bytes)

    def limit(self, operation: str) -> Pass:
        def put(number: int, thread: int) -> None:
            _, header, payload = self.frames[thread]
            done = os.pwritev(self.fd, [header, payload], number * self.frame_bytes)
            assert done == self.frame_bytes, done

        def get(number: int, thread: int) -> None:
            buffer = self.buffers[thread]
            views = [buffer.header, buffer.payload]
            assert os.preadv(self.fd, views, number * self.frame_bytes) == self.frame_bytes
            self.check(buffer.payload)

        threads = self.threads[operation]
        if operation == "write":
            return run_pass(put, self.count, threads, self.nbytes, lambda: os.fdatasync(self.fd))
        return run_pass(get, self.count, threads, self.nbytes)

    def end(self) -> None:
        super().end()
        self.files.close(self.fd)
        self.files.unlink(str(self.folder / "plain"))

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder)


class Untouchable(MemoryTier):
    """A tier without a local index that fails on any access."""

    local_index = False

    def __init__(self) -> None:
        super().__init__(1 << 20, name="untouchable")
        self.touched = 0

    def contains(self, keys: Any) -> list[bool]:
        self._raise()
        return []

    def read(self, key: Any, header: memoryview, payload: memoryview) -> int:
        self._raise()
        return 0

    def _raise(self) -> None:
        self.touched += 1
        raise AssertionError("unexpected access to the tier")


def contains_local(tier: str, directory: str) -> dict[str, float]:
    """Return the milliseconds of `match` for a run that is in L2, or only in the disk tier."""
    below = Untouchable()
    space = space_of(LAYER_BYTES)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        config = disk.Config(directory=folder, capacity=4 * CONTAINS_BLOCKS * LAYER_BYTES)
        tiers: list[Tier] = [disk.open(config), below]
        slab = Slab.create(CONTAINS_BLOCKS + 64, LAYER_BYTES)
        with Store(slab, tiers, codecs={"disk": "none"}) as store:
            session = store.session(space)
            hashes = [key_of(number).hash for number in range(CONTAINS_BLOCKS)]
            for start in range(0, CONTAINS_BLOCKS, 64):
                save = session.save(hashes[start : start + 64])
                assert len(save.slot_assignments) == 64
                session.commit(save)
                assert store.flush(WAIT_S)
            if tier == "disk":
                store.clear("l2")
            calls = []
            for _ in range(CONTAINS_CALLS):
                began = time.perf_counter()
                match = session.match(hashes)
                calls.append(time.perf_counter() - began)
                assert match.done
                assert match.tiers == [tier] * CONTAINS_BLOCKS
            session.close()
    assert below.touched == 0, "the tier below was accessed"
    return {"p50_ms": statistics.median(calls) * 1e3, "p99_ms": percentile(calls, 99) * 1e3}
