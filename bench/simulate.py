"""Measures the speed and memory of replaying a long trace.

    python bench/simulate.py --requests 250000,1000000 --scratch /var/tmp

Writes traces of synthetic conversations (kvstore/analysis/simulate/traffic.py) in Mooncake's
format, and runs `kvstore simulate` over each in a separate process: an L2 with LRU, then L1, L2
and L3. Prints wall and CPU seconds, requests per CPU second, and the process's peak resident size,
also in bytes per requested block.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from kvstore.analysis.simulate.traffic import Traffic, generate

BLOCK_TOKENS = 256
TRAFFIC = Traffic(rate=50, prefix=2048, prefixes=2000, turns=6, turn=400, output=300, gap=120)
SHAPES = {
    "L2 of 65,536 blocks, lru": ["--l2-blocks", "65536"],
    "the same, with offline optimal": ["--l2-blocks", "65536", "--offline-optimal"],
    "L1 of 4,096, L2 of 65,536, L3 of 524,288, lfu, timeout": [
        *("--l1-blocks", "4096", "--l2-blocks", "65536", "--l3-blocks", "524288"),
        *("--eviction", "lfu", "--load-policy", "timeout"),
    ],
}


def write_trace(path: Path, requests: int) -> tuple[int, int]:
    """Write a trace; return its number of requested blocks and of distinct blocks."""
    requested = distinct = 0
    with path.open("w") as file:
        for request in generate(TRAFFIC, requests, BLOCK_TOKENS):
            requested += len(request.block_ids)
            distinct = max(distinct, request.block_ids[-1] + 1)
            row = {
                "timestamp": round(request.time_s * 1e3),
                "input_length": request.tokens,
                "output_length": request.output_tokens,
                "block_size": BLOCK_TOKENS,
                "hash_ids": request.block_ids,
            }
            file.write(json.dumps(row) + "\n")
    return requested, distinct


def replay(path: Path, arguments: list[str]) -> tuple[float, float, int, dict[str, float]]:
    """Return wall seconds, CPU seconds, peak resident bytes and the JSON output."""
    optimal = [] if "--offline-optimal" in arguments else ["--no-offline-optimal"]
    reader, writer = os.pipe()
    start_s = time.monotonic()
    child = os.fork()
    if not child:
        os.dup2(writer, 1)
        command = [sys.executable, "-m", "kvstore", "simulate", str(path), "--json"]
        os.execv(sys.executable, [*command, *arguments, *optimal])
    os.close(writer)
    with os.fdopen(reader) as output:
        text = output.read()
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"kvstore simulate ended with status {status}")
    cpu_s = used.ru_utime + used.ru_stime
    return time.monotonic() - start_s, cpu_s, used.ru_maxrss * 1024, json.loads(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--requests", default="250000,1000000", help="lengths of the traces, in requests"
    )
    parser.add_argument(
        "--scratch", type=Path, default=Path("/var/tmp"), help="directory for the traces"
    )
    options = parser.parse_args()
    print(
        "| replay | requests | requested blocks | s | CPU s | requests/s | MiB | bytes per block |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for requests in map(int, options.requests.split(",")):
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            path = Path(folder) / "trace.jsonl"
            requested, distinct = write_trace(path, requests)
            size = path.stat().st_size >> 20
            print(f"{size} MiB, {distinct:,} distinct blocks", file=sys.stderr)
            for name, arguments in SHAPES.items():
                took_s, cpu_s, resident, figures = replay(path, arguments)
                rate, each = f"{requests / cpu_s:,.0f}", f"{resident / requested:.1f}"
                print(
                    f"| {name} | {requests:,} | {requested:,} | {took_s:.1f} | {cpu_s:.1f} "
                    f"| {rate} | {resident >> 20:,} | {each} |",
                    flush=True,
                )
                print(f"hit rate {figures['token_hit_rate']:.2f}%", file=sys.stderr)


if __name__ == "__main__":
    main()
