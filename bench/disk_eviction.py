"""Compares the disk tier's eviction policies on a recorded trace of requests.

    python bench/disk_eviction.py TRACE.jsonl [--blocks 16384] [--segments 8,64,512]
                                  [--policies lru,lfu,s3fifo] [--directory /dev/shm]

TRACE has one JSON object per line, with `hash_ids` (a prompt's chain of blocks) and
`input_length`, `block_size` in tokens. A real tier with payloads of 4 KiB replays it: it reads the
longest cached prefix and writes the rest. For comparison, the same number of blocks is evicted one
block at a time, which a segment log cannot do. Hit rates are percent of tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.blocks.frame import padded_bytes
from kvstore.cache.eviction import eviction_policy
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import disk
from kvstore.tiers.disk.files import SECTOR_BYTES
from kvstore.tiers.disk.lockfile import LOCK_BYTES
from kvstore.tiers.disk.volume import OVERHEAD_SECTORS

FRAME_BYTES = 2 * SECTOR_BYTES
ENTRY_BYTES = 150
"""Maximum size of a block's entry in a segment's index."""


class Request(NamedTuple):
    """A prompt: its tokens, its chain of blocks, and the tokens per block."""

    tokens: int
    block_ids: tuple[int, ...]
    block_tokens: int

    def hit(self, blocks: int) -> int:
        """Return the tokens of the first `blocks` blocks."""
        return min(blocks * self.block_tokens, self.tokens)


def read_trace(path: str) -> list[Request]:
    """Return every request of the file, in its order."""
    found = []
    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            one = json.loads(line)
            size = int(one.get("block_size", 512))
            found.append(Request(int(one["input_length"]), tuple(one["hash_ids"]), size))
    return found


def by_block(trace: Sequence[Request], blocks: int, eviction: str) -> float:
    """Return the hit rate with eviction by block."""
    policy = eviction_policy(eviction, blocks)
    resident: set[int] = set()
    hit = 0
    for request in trace:
        policy.on_lookup(request.block_ids)
        missing = (n for n, key in enumerate(request.block_ids) if key not in resident)
        hit += request.hit(next(missing, len(request.block_ids)))
        for key in reversed(request.block_ids):
            if key in resident:
                policy.on_access(key)
            else:
                resident.add(key)
                policy.on_insert(key)
        while len(resident) > blocks:
            victim = next(iter(policy.eviction_order()))
            policy.on_remove(victim)
            resident.discard(victim)
    return 100 * hit / sum(request.tokens for request in trace)


def by_segment(
    trace: Sequence[Request], blocks: int, segments: int, eviction: str, directory: str
) -> tuple[float, int]:
    """Return the hit rate of a real tier, and its maximum number of blocks."""
    in_one = blocks // segments
    segment = (
        in_one * FRAME_BYTES + OVERHEAD_SECTORS * SECTOR_BYTES + padded_bytes(in_one * ENTRY_BYTES)
    )
    place = tempfile.mkdtemp(dir=directory)
    config = disk.Config(
        directory=place,
        capacity=segments * segment + LOCK_BYTES,
        segment=segment,
        eviction=eviction,
    )
    tier = disk.open(config)
    buffer = FrameBuffer(SECTOR_BYTES)
    hit = most = 0
    try:
        _, header, payload = buffer.fill(key_of(0), SECTOR_BYTES)
        for request in trace:
            keys = [key_of(number) for number in request.block_ids]
            there = tier.contains(keys)
            run = there.index(False) if False in there else len(keys)
            for key in keys[:run]:
                tier.read(key, buffer.header, buffer.payload)
            hit += request.hit(run)
            for key in keys[run:]:
                tier.write(key, header, payload)
            most = max(most, int(tier.stats()["blocks"]))
    finally:
        tier.close()
        shutil.rmtree(place)
    return 100 * hit / sum(request.tokens for request in trace), most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", help="file with the trace")
    parser.add_argument("--blocks", type=int, default=16384, help="capacity, in blocks")
    parser.add_argument("--segments", default="8,64,512", help="numbers of segments to compare")
    parser.add_argument(
        "--policies", default="lru,lfu,s3fifo,gdsf,auto", help="eviction policies to compare"
    )
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="parent of the tier's directory"
    )
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    policies = arguments.policies.split(",")
    for name in policies:
        print(f"by block, {name}: {by_block(trace, arguments.blocks, name):.2f} %")
    for segments in map(int, arguments.segments.split(",")):
        for name in policies:
            began = time.perf_counter()
            rate, most = by_segment(trace, arguments.blocks, segments, name, arguments.directory)
            print(
                f"{segments} segments, {name}: {rate:.2f} % with at most {most} blocks "
                f"({time.perf_counter() - began:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
