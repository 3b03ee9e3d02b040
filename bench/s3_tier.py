"""Compares writes and reads of the S3 tier with bare loops of the same requests.

The bare loops use the tier's own client, with the same number of concurrent requests and the same
sizes: range requests of one frame for reads, puts of one segment for writes. A loop over boto3's
`get_object` shows the cost of its transport. Figures: best of `--repeats`, in turns.

    python bench/s3_tier.py                      starts its own SeaweedFS
    python bench/s3_tier.py --endpoint URL --bucket B    any service, credentials by boto3
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config as BotoConfig

from kvstore.blocks.key import Key
from kvstore.errors import TierError
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import s3
from kvstore.tiers.base import IO_ALIGNMENT
from kvstore.tiers.s3.tier import S3Tier

SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "2 MiB": 2 << 20, "32 MiB": 32 << 20}
WRITTEN_BYTES = 256 << 20
MAX_BLOCKS = 1024
MIB = 1 << 20


class Meter:
    """Wall and CPU seconds, and the median of single calls."""

    def __init__(self, work: Callable[[int], None], count: int, threads: int) -> None:
        calls = [0.0] * count

        def one(number: int) -> None:
            began = time.perf_counter()
            work(number)
            calls[number] = time.perf_counter() - began

        cpu, wall = time.process_time(), time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, range(count)))
        self.wall_s = time.perf_counter() - wall
        self.cpu_s = time.process_time() - cpu
        self.median_ms = statistics.median(calls) * 1e3


def figures(name: str, meter: Meter, nbytes: int) -> dict[str, float]:
    """Return MiB/s, CPU seconds per GiB and the milliseconds of one call."""
    return {
        f"{name}_mib_s": nbytes / MIB / meter.wall_s,
        f"{name}_cpu_s_per_gib": meter.cpu_s / (nbytes / 1024 / MIB),
        f"{name}_ms": meter.median_ms,
    }


class Bench:
    """Measures one block size against one bucket."""

    def __init__(self, config: s3.Config, boto: Any, nbytes: int, threads: int) -> None:
        self.config = config
        self.boto = boto
        self.nbytes = nbytes
        self.threads = threads
        self.count = max(threads, min(MAX_BLOCKS, WRITTEN_BYTES // nbytes))
        self.total = self.count * (nbytes + IO_ALIGNMENT)
        self.buffers = [FrameBuffer(nbytes) for _ in range(threads)]
        self.frames = [buffer.fill(key_of(0), nbytes) for buffer in self.buffers]
        self.free = list(range(threads))

    def with_buffer(self, work: Callable[[int, int], None]) -> Callable[[int], None]:
        """Return `work` with a buffer that no other thread uses."""

        def one(number: int) -> None:
            mine = self.free.pop()
            try:
                work(number, mine)
            finally:
                self.free.append(mine)

        return one

    def run(self, turn: int) -> dict[str, float]:
        """Write with the tier and with bare puts, then read with three clients."""
        tier = s3.open(self.config)
        assert isinstance(tier, S3Tier)
        keys = [key_of(number, namespace=f"{turn:032d}") for number in range(self.count)]
        found = figures(
            "write", self._meter(lambda n, b: self._write(tier, keys[n], b)), self.total
        )
        found |= self._bare_put(tier)
        read = self._meter(lambda n, b: self._read(tier, keys[n], b))
        bare = self._bare_get(tier, keys)
        again = self._meter(lambda n, b: self._read(tier, keys[n], b))
        best = read if read.wall_s < again.wall_s else again
        found |= figures("read", best, self.total) | bare | self._boto_get(tier, keys)
        began = time.perf_counter()
        assert all(tier.contains(keys[:512]))
        found["contains_512_ms"] = (time.perf_counter() - began) * 1e3
        tier.clear()
        tier.close()
        return found

    def _meter(self, work: Callable[[int, int], None]) -> Meter:
        return Meter(self.with_buffer(work), self.count, self.threads)

    def _write(self, tier: S3Tier, key: Key, mine: int) -> None:
        _, header, payload = self.frames[mine]
        tier.write(key, header, payload)

    def _read(self, tier: S3Tier, key: Key, mine: int) -> None:
        buffer = self.buffers[mine]
        if tier.read(key, buffer.header, buffer.payload) != self.nbytes:
            raise TierError("a block is missing")

    def _bare_put(self, tier: S3Tier) -> dict[str, float]:
        """Put as many objects, with as many bytes, as the tier did."""
        segments = list(tier._index.segments.values())
        _, header, payload = self.frames[0]

        def put(number: int) -> None:
            frames = len(segments[number].entries)
            name = f"{self.config.prefix}bare/{number}"
            tier._client.put(name, [header, payload] * frames, if_absent=True)

        meter = Meter(put, len(segments), self.config.uploads)
        for number in range(len(segments)):
            tier._client.delete(f"{self.config.prefix}bare/{number}")
        return figures("bare_put", meter, self.total) | {"segments": len(segments)}

    def _locations(self, tier: S3Tier, keys: list[Key]) -> list[tuple[str, int]]:
        locations = []
        for key in keys:
            found = tier._index.find(key)
            assert found is not None
            locations.append((found[0].name, found[1] * IO_ALIGNMENT))
        return locations

    def _bare_get(self, tier: S3Tier, keys: list[Key]) -> dict[str, float]:
        locations = self._locations(tier, keys)

        def get(number: int, mine: int) -> None:
            name, first = locations[number]
            views = self.frames[mine][1:]
            tier._client.get(name, first, first + self.nbytes + IO_ALIGNMENT - 1, views)

        runs = [self._meter(get), self._meter(get)]
        return figures("bare_get", min(runs, key=lambda run: run.wall_s), self.total)

    def _boto_get(self, tier: S3Tier, keys: list[Key]) -> dict[str, float]:
        locations = self._locations(tier, keys)

        def get(number: int, mine: int) -> None:
            name, first = locations[number]
            byte_range = f"bytes={first}-{first + self.nbytes + IO_ALIGNMENT - 1}"
            reply = self.boto.get_object(Bucket=self.config.bucket, Key=name, Range=byte_range)
            body = reply["Body"].read()
            self.buffers[mine].payload[:] = memoryview(body)[IO_ALIGNMENT:]

        return figures("boto3_get", self._meter(get), self.total)


def measure(
    config: s3.Config, boto: Any, sizes: list[str], threads: int, repeats: int
) -> list[Any]:
    """Return one row per size: the best of each figure, and the ratios of the best."""
    rows = []
    for size in sizes:
        best: dict[str, Any] = {}
        for turn in range(repeats):
            for name, value in Bench(config, boto, SIZES[size], threads).run(turn).items():
                pick = max if name.endswith("mib_s") else min
                best[name] = pick(best.get(name, value), value)
        best["read_ratio"] = best["read_mib_s"] / best["bare_get_mib_s"]
        best["write_ratio"] = best["write_mib_s"] / best["bare_put_mib_s"]
        rows.append({"block": size, **best})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="", help="URL of the service; empty: AWS")
    parser.add_argument("--bucket", default="", help="bucket to use; empty: start a SeaweedFS")
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="block sizes"
    )
    parser.add_argument("--threads", type=int, default=8, help="concurrent requests")
    parser.add_argument("--repeats", type=int, default=3, help="repeats per size")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    options = {"writer_threads": arguments.threads, "prefix": "bench/", "linger": 20}
    with ExitStack() as stack:
        if arguments.bucket:
            values = {"bucket": arguments.bucket, "endpoint": arguments.endpoint, **options}
            config = s3.Config.model_validate(values)
        else:
            sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
            from s3_rig import running_server

            server = stack.enter_context(running_server())
            config = server.config(server.new_bucket(), **options)
        path = {"addressing_style": "path" if config.endpoint else "auto"}
        boto = boto3.client(
            "s3",
            endpoint_url=config.endpoint or None,
            region_name=config.region or None,
            aws_access_key_id=config.access_key.get_secret_value() or None,
            aws_secret_access_key=config.secret_key.get_secret_value() or None,
            config=BotoConfig(s3=path, max_pool_connections=arguments.threads),
        )
        rows = measure(config, boto, arguments.sizes, arguments.threads, arguments.repeats)
    if arguments.json:
        print(json.dumps({"threads": arguments.threads, "rows": rows}))
        return
    print(f"{arguments.threads} concurrent requests; MiB/s (CPU s/GiB)")
    print(
        "block     write          bare put       ratio  read           bare range     ratio  boto3"
    )
    for row in rows:
        cells = [
            f"{row[f'{name}_mib_s']:6.0f} ({row[f'{name}_cpu_s_per_gib']:5.2f})"
            for name in ("write", "bare_put", "read", "bare_get", "boto3_get")
        ]
        print(
            f"{row['block']:8} {cells[0]} {cells[1]}  {row['write_ratio']:5.2f} "
            f"{cells[2]} {cells[3]}  {row['read_ratio']:5.2f} {cells[4]}"
        )


if __name__ == "__main__":
    main()
