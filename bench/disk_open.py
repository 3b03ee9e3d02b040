"""Measures the time to open a disk tier with many blocks.

    python bench/disk_open.py --blocks 1000000 --directory /var/tmp

Makes sealed segments whose footers list that many blocks, without the blocks: opening reads no
frame of a sealed segment, and the files are sparse. Then opens the tier several times.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from kvstore.blocks.key import Key
from kvstore.tiers import disk
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.index import Entries
from kvstore.tiers.disk.segment import Segment

SEGMENT_BYTES = 256 << 20
FRAME_PAGES = 9
BLOCKS_A_SEGMENT = 4096
NAMESPACE = "ab" * 16


class Sparse(Files):
    """Makes sparse files of the correct length."""

    def _allocate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000, help="number of blocks")
    parser.add_argument("--directory", default=None, help="parent of the tier's directory")
    parser.add_argument("--rounds", type=int, default=4, help="number of opens")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="disk-open-", dir=options.directory))
    try:
        segments = make(folder, options.blocks)
        config = disk.Config(
            directory=str(folder), capacity=(segments + 2) * SEGMENT_BYTES, segment=SEGMENT_BYTES
        )
        for _ in range(options.rounds):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            tier = disk.open(config)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            blocks = tier.stats()["blocks"]
            tier.close()
            print(f"{blocks:,} blocks in {segments} segments: {wall_s:.2f} s, {cpu_s:.2f} s of CPU")
    finally:
        shutil.rmtree(folder)


def make(folder: Path, blocks: int) -> int:
    """Make sealed segments whose footers list `blocks` blocks; return the number of segments."""
    (folder / "kvstore.lock").touch()
    files = Sparse()
    numbers = iter(range(blocks))
    segments = -(-blocks // BLOCKS_A_SEGMENT)
    for number in range(1, segments + 1):
        made_ms = int(time.time() * 1000)
        segment = Segment.create(files, str(folder), number, SEGMENT_BYTES, made_ms)
        entries, page = Entries(), 1
        for _, block in zip(range(BLOCKS_A_SEGMENT), numbers, strict=False):
            name = hashlib.sha256(b"%d" % block).digest()
            entries.add(Key("tenant", NAMESPACE, name), page, FRAME_PAGES)
            page += FRAME_PAGES
        segment.restore_entries(entries, page)
        segment.seal(files)
        files.close(segment.fd)
    return segments


if __name__ == "__main__":
    main()
