"""Compares two disk layouts: one file per block, and a log of segments.

Writes and reads the same frames in both layouts at four block sizes, and prints a table (or JSON,
with `--json`). Uses less than 2 GiB of disk and removes it. Figures: best of `--repeats`.

    python bench/disk_layout.py --directory /var/tmp
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.blocks.frame import HEADER_BYTES
from kvstore.blocks.key import Key
from kvstore.errors import TierError
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import disk
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import Files

SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "2 MiB": 2 << 20, "32 MiB": 32 << 20}
WRITTEN_BYTES = 768 << 20
"""Bytes of blocks per size and layout."""
MAX_BLOCKS = 2000
CAPACITY_BYTES = 1536 << 20


class FilePerBlock:
    """The alternative layout, with no more than the comparison needs.

    256 directories with a separate file for each frame, written under a temporary name and then
    renamed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = Files()
        for number in range(256):
            (directory / f"{number:02x}").mkdir(parents=True)

    def _path(self, key: Key) -> str:
        name = key.hash.hex()
        return str(self._directory / name[:2] / name)

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        path = self._path(key)
        fd = self._files.create(f"{path}.part", HEADER_BYTES + len(payload))
        try:
            self._files.write_at(fd, [header, payload], 0)
        finally:
            self._files.close(fd)
        os.rename(f"{path}.part", path)

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        fd = self._files.open(self._path(key), writable=False)
        try:
            return self._files.read_at(fd, [header, payload], 0) - HEADER_BYTES
        finally:
            self._files.close(fd)

    def flush(self) -> None:
        for path in self._directory.glob("*/*"):
            fd = self._files.open(str(path))
            try:
                self._files.sync(fd)
            finally:
                self._files.close(fd)

    def close(self) -> None:
        return None


def timed(work: Callable[[int], None], count: int, threads: int) -> tuple[float, float]:
    """Return the wall and CPU seconds of `count` calls of `work` in `threads` threads."""
    cpu, wall = time.process_time(), time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(count)))
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(tier: Tier | FilePerBlock, nbytes: int, threads: int) -> dict[str, float]:
    """Write all blocks, flush, read all; return GB/s and CPU seconds per GB."""
    count = min(MAX_BLOCKS, WRITTEN_BYTES // nbytes)
    buffers = [FrameBuffer(nbytes) for _ in range(threads)]
    frames = [buffer.fill(key_of(0), nbytes) for buffer in buffers]

    def write(number: int) -> None:
        _, header, payload = frames[number % threads]
        tier.write(key_of(number), header, payload)

    def read(number: int) -> None:
        buffer = buffers[number % threads]
        if tier.read(key_of(number), buffer.header, buffer.payload) != nbytes:
            raise TierError("a block is missing")

    total = count * nbytes / 1e9
    write_s, write_cpu_s = timed(write, count, threads)
    flush_began = time.perf_counter()
    tier.flush()
    flush_s = time.perf_counter() - flush_began
    read_s, read_cpu_s = timed(read, count, threads)
    return {
        "write_gb_s": total / write_s,
        "write_flushed_gb_s": total / (write_s + flush_s),
        "write_cpu_s_per_gb": write_cpu_s / total,
        "read_gb_s": total / read_s,
        "read_cpu_s_per_gb": read_cpu_s / total,
    }


def rows(directory: str, threads: int, repeats: int) -> list[dict[str, float | str]]:
    """Return one row per size and layout."""
    found: list[dict[str, float | str]] = []
    for size, nbytes in SIZES.items():
        for layout in ("file per block", "segment log"):
            best: dict[str, float] = {}
            for _ in range(repeats):
                place = Path(tempfile.mkdtemp(dir=directory))
                try:
                    config = disk.Config(directory=str(place / "log"), capacity=CAPACITY_BYTES)
                    tier = FilePerBlock(place) if layout[0] == "f" else disk.open(config)
                    one = measure(tier, nbytes, threads)
                    tier.close()
                finally:
                    shutil.rmtree(place)
                for name, value in one.items():
                    pick = min if "cpu" in name else max
                    best[name] = pick(best.get(name, value), value)
            found.append({"block": size, "layout": layout, **best})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="parent of the test directory"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads that write and read")
    parser.add_argument("--repeats", type=int, default=3, help="repeats per size and layout")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found = rows(arguments.directory, arguments.threads, arguments.repeats)
    if arguments.json:
        print(json.dumps({"rows": found}))
        return
    print("block    layout          write  +flush  CPU s/GB   read  CPU s/GB   (GB/s)")
    for row in found:
        print(
            f"{row['block']:8} {row['layout']:15} {row['write_gb_s']:5.2f} "
            f"{row['write_flushed_gb_s']:7.2f} {row['write_cpu_s_per_gb']:9.2f} "
            f"{row['read_gb_s']:6.2f} {row['read_cpu_s_per_gb']:9.2f}"
        )


if __name__ == "__main__":
    main()
