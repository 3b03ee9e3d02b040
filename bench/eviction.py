"""Hit rate of each eviction policy on a trace, by cache size, and the gap of `auto` to the best.

    python bench/eviction.py TRACE.jsonl --blocks 512,1024,2048

Prints, for each size, the percent of prompt tokens that hit in the whole trace and in its second
half. "auto - best" is the gap of `auto` to the best fixed policy in points, for the worse of the
two. "optimal" is the hit rate of the offline optimal policy, which knows the future.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvstore.analysis.simulate.formats import read_trace
from kvstore.analysis.simulate.levels import Level
from kvstore.analysis.simulate.optimal import optimal_hit_rates
from kvstore.analysis.simulate.replay import hit_rates

FIXED = ("lru", "lfu", "s3fifo", "gdsf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="file with the trace")
    parser.add_argument(
        "--blocks", default="512,1024,2048,4096,8192,16384,32768", help="cache sizes, in blocks"
    )
    options = parser.parse_args()
    requests = read_trace(options.trace)
    print(f"{options.trace.name}: {len(requests)} requests")
    print(f"| blocks | {' | '.join(FIXED)} | auto | auto - best | optimal |")
    print(f"| ---: |{' ---: |' * (len(FIXED) + 3)}")
    for capacity in map(int, options.blocks.split(",")):
        found = {name: hit_rates(requests, Level(capacity, name)) for name in (*FIXED, "auto")}
        gap = min(found["auto"][part] - max(found[name][part] for name in FIXED) for part in (0, 1))
        cells = " | ".join(f"{whole:.1f} / {half:.1f}" for whole, half in found.values())
        optimal = "{:.1f} / {:.1f}".format(*optimal_hit_rates(requests, capacity))
        print(f"| {capacity:,} | {cells} | {gap:+.2f} | {optimal} |", flush=True)


if __name__ == "__main__":
    main()
