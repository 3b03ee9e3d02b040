"""Runs a whole store under random load for half an hour and checks that no resource grows.

    python bench/soak.py [--minutes 30] [--interval 30] [--directory /var/tmp]
                         [--tier '{"kind": "redis", "host": "localhost"}' ...] [--json]

An embedded store: a small L2, a disk tier over two directories, and the tiers of `--tier`; a tier
that cannot be opened is skipped with a message. Engines open and close sessions. Each session
matches, loads and checks blocks, or saves missing ones, of prompts that repeat at different rates.
Blocks are pinned and unpinned, tiers are cleared. Every block's bytes are derived from its hash,
so that each loaded block is checked.

At each interval it records resident memory, file descriptors, threads, and the bytes of the disk
tier's files. Exit code 1 if one of them keeps growing after the first third: its maximum in the
last third exceeds its maximum in the second third by more than `NOISE`, or the disk tier's files
exceed its capacity. Also 1 if a block was wrong, a slot is missing at the end, or no block was
loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import kvstore
from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError, TierError
from kvstore.interface import Load
from kvstore.store.session import Session
from kvstore.store.store import Store

# 64 KiB per block.
SPACES: Final = tuple(
    Namespace(
        model="soak",
        revision=str(number),
        layers=4,
        kv_heads=4,
        head_dim=64,
        dtype="bfloat16",
        block_tokens=16,
    )
    for number in range(2)
)
L2_BYTES: Final = 64 << 20
DISK_BYTES: Final = 512 << 20
RUNS: Final = 4000
"""Distinct prompts per namespace: several times the capacity of the disk tier."""
MAX_BLOCKS: Final = 24
ENGINES: Final = 3
WAIT_S: Final = 60.0
NOISE: Final = {"rss_mib": 24.0, "descriptors": 6, "threads": 2, "disk_mib": 0.0}
"""Allowed growth of the maximum from one third to the next: allocators and the creation and
removal of segments stay within it."""


def content(name: bytes, nbytes: int) -> np.ndarray:
    """Return the block of a hash: random low bytes and small high bytes, as in real KV."""
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(name[:8], "little")))
    block = generator.integers(0, 256, nbytes, dtype=np.uint8)
    block[1::2] &= 0x07
    return block


class Engine(threading.Thread):
    """One engine with random operations until `stop` is set."""

    def __init__(self, store: Store, seed: int, stop: threading.Event) -> None:
        super().__init__(name=f"engine-{seed}")
        self.counts: Counter[str] = Counter()
        self.fault = ""
        self._store = store
        self._stop_event = stop
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            while not self._stop_event.is_set():
                space = self._random.choice(SPACES)
                with self._store.session(space, self._random.choice(["red", "blue"])) as session:
                    for _ in range(self._random.randrange(1, 60)):
                        if not self._stop_event.is_set():
                            self._request(session)
                try:
                    self._administer(space)
                except TierError:
                    # A tier that is down raises for the administrator.
                    self.counts["failed"] += 1
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            self._stop_event.set()

    def _request(self, session: Session) -> None:
        """Serve a prompt: load and check its cached blocks, save the rest."""
        which = int(RUNS * self._random.random() ** 3)
        hashes = [
            hashlib.sha256(b"%d/%d" % (which, n)).digest() for n in range(1 + which % MAX_BLOCKS)
        ]
        match = self._wait(session, session.match(hashes))
        loaded = self._wait(session, session.load(hashes[: len(match.tiers)]))
        assert isinstance(loaded, Load)
        for name, slot in zip(hashes, loaded.slots, strict=False):
            block = np.frombuffer(session.slab_of(loaded).view(slot), np.uint8)
            expected = content(name, session.namespace.block_bytes)
            assert np.array_equal(block[: len(expected)], expected), "a wrong block was loaded"
        self.counts.update(loaded.tiers)
        session.release(loaded)
        save = session.save(hashes)
        for index, slot in save.slot_assignments:
            block = np.frombuffer(session.slab_of(save).view(slot), np.uint8)
            block[: session.namespace.block_bytes] = content(
                hashes[index], session.namespace.block_bytes
            )
        self.counts["saved"] += len(save.slot_assignments)
        if self._random.random() < 0.02:
            session.release(save)
        else:
            session.commit(save)

    def _wait(self, session: Session, operation: Any) -> Any:
        """Wait until the operation is done; return it."""
        deadline_s = time.monotonic() + WAIT_S
        while not operation.done:
            session.poll(0.05)
            assert time.monotonic() < deadline_s, "an operation did not finish"
        return operation

    def _administer(self, space: Namespace) -> None:
        """Run one random administrative operation, or none."""
        dice = self._random.random()
        hashes = [hashlib.sha256(b"%d/%d" % (17, n)).digest() for n in range(8)]
        if dice < 0.2:
            self._store.pin(space.digest, hashes, "red", timeout_s=5)
        elif dice < 0.4:
            self._store.unpin(space.digest, hashes, "red")
        elif dice < 0.45:
            self._store.clear("l2")
        elif dice < 0.46:
            self._store.clear("disk")
        elif dice < 0.55:
            self._store.flush(30)


class Watch:
    """Samples the resources of the process and its disk tier."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.rows: list[dict[str, float]] = []
        self._directories = directories
        self._began_s = time.monotonic()

    def sample(self) -> dict[str, float]:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        rss_kib = int(status.split("VmRSS:")[1].split()[0])
        files = [file for folder in self._directories for file in folder.iterdir()]
        row = {
            "minutes": (time.monotonic() - self._began_s) / 60,
            "rss_mib": rss_kib / 1024,
            "descriptors": float(len(os.listdir("/proc/self/fd"))),
            "threads": float(threading.active_count()),
            "disk_mib": sum(_length(file) for file in files) / (1 << 20),
        }
        self.rows.append(row)
        return row

    def faults(self) -> list[str]:
        """Return the resources that keep growing after the first third or exceed their limit."""
        found = []
        third = len(self.rows) // 3
        middle, last = self.rows[third : 2 * third], self.rows[2 * third :]
        for name, noise in NOISE.items():
            before, after = (max((row[name] for row in part), default=0) for part in (middle, last))
            if name == "disk_mib":
                before = max(before, DISK_BYTES / (1 << 20))
            if after > before + noise:
                found.append(f"{name} grew from {before:.1f} to {after:.1f}")
        return found


def _length(file: Path) -> int:
    """Return the bytes of a file; 0 if it was just removed."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def open_store(directories: Sequence[Path], tiers: Sequence[dict[str, Any]]) -> Store:
    """Open the store with those of the tiers that can be opened."""
    disk = {
        "kind": "disk",
        "directory": [str(directory) for directory in directories],
        "capacity": DISK_BYTES,
    }
    opened: list[dict[str, Any]] = [disk]
    for table in tiers:
        try:
            kvstore.open(l2="1MiB", slot_bytes="64KiB", tiers=(table,)).close()
            opened.append(table)
        except ConfigError as error:
            print(f"tier skipped: {error}", file=sys.stderr)
    return kvstore.open(l2=L2_BYTES, slot_bytes="64KiB", tiers=tuple(opened))


def soak(
    minutes: float,
    interval_s: float,
    root: Path,
    tiers: Sequence[dict[str, Any]],
    report: Callable[[dict[str, float]], None],
) -> dict[str, Any]:
    """Run the load; return the samples, the block counts and the faults."""
    directories = [root / "a", root / "b"]
    stop = threading.Event()
    with open_store(directories, tiers) as store:
        engines = [Engine(store, seed, stop) for seed in range(ENGINES)]
        for engine in engines:
            engine.start()
        watch = Watch(directories)
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s and not stop.wait(
            max(0.0, min(interval_s, end_s - time.monotonic()))
        ):
            report(watch.sample())
        stop.set()
        for engine in engines:
            engine.join(2 * WAIT_S)
        hung = [engine.name for engine in engines if engine.is_alive()]
        evictions = int(store.stats()["tiers"]["disk"]["evictions"])
    counts = sum((engine.counts for engine in engines), Counter[str]())
    faults = watch.faults() + [engine.fault for engine in engines if engine.fault]
    faults += [f"{name} did not stop" for name in hung]
    faults += [f"no block was loaded from {name}" for name in ("l2", "disk") if not counts[name]]
    return {
        "samples": watch.rows,
        "blocks": dict(counts),
        "disk_evictions": evictions,
        "faults": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="duration, in minutes")
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between samples")
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="parent of the disk tier's directories"
    )
    parser.add_argument(
        "--tier", action="append", default=[], help="JSON table of an additional tier (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=arguments.directory))

    def report(row: dict[str, float]) -> None:
        if not arguments.json:
            print("  ".join(f"{name} {value:8.1f}" for name, value in row.items()), flush=True)

    try:
        tiers = [json.loads(table) for table in arguments.tier]
        found = soak(arguments.minutes, arguments.interval, root, tiers, report)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if arguments.json:
        print(json.dumps(found))
    else:
        print(f"blocks: {found['blocks']}; {found['disk_evictions']} evicted from disk")
        for fault in found["faults"]:
            print(f"FAIL: {fault}")
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
