"""Compares the throughput of each tier with the limit of its medium.

    python bench/tiers.py [--tiers l2,sidecar,disk,redis,s3] [--sizes 64KiB,256KiB,2MiB,32MiB]
                          [--rounds 3] [--directory /var/tmp] [--json]

The tiers: L2 through save, commit, load and release of a session, with the engine's copy, once with
a store in this process and once with a sidecar, in a separate process. The other tiers through
their operations, with the codec `none` and as many concurrent calls as the tier has workers.
The limits, in turns with the tiers, over the same bytes with as many threads:

    l2, sidecar
           memcpy between private memory, as in an engine, and shared memory, as in L2
    disk   preadv and pwritev of the same bytes in one preallocated file, with O_DIRECT if possible;
           both end with fdatasync
    redis  a bare client: sockets, RESP written by hand, values pipelined, received in place
    s3     a bare client: signed URLs over plain HTTP connections; puts of objects of a segment's
           size, gets of ranges of a frame's size

Figures are those of the best round; `ratio` is best over best, followed by the median of the
rounds' own ratios. CPU seconds are of this process, without servers. Every read checks its
length and a part of the bytes. `contains` looks up a run of 512 blocks; for L2 and disk it is
`match`, with a tier below that raises on access.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tier_media import (
    SIZES,
    DiskMedium,
    L2Medium,
    Medium,
    Pass,
    SidecarMedium,
    contains_local,
)

COLUMNS: Final = (
    "tier",
    "block",
    "operation",
    "GB/s",
    "limit, GB/s",
    "ratio",
    "p50, ms",
    "p99, ms",
)
CPU_COLUMNS: Final = ("CPU s/GB", "limit's")


def rounds_of(medium: Medium, rounds: int) -> list[dict[str, Pass]]:
    """Return the passes of each round, by name; tier and limit take turns."""
    found = []
    for number in range(rounds):
        one = {}
        medium.begin(number)
        for operation in ("write", "read"):
            one[f"limit {operation}"] = medium.limit(operation)
            one[operation] = medium.measured(operation)
        medium.end()
        found.append(one)
    return found


def row_of(operation: str, found: list[dict[str, Pass]]) -> dict[str, Any]:
    """Return one operation's figures: the best round of the tier and of the limit."""
    measured = [one[operation] for one in found]
    limits = [one[f"limit {operation}"] for one in found]
    best = max(measured, key=lambda one: one.gb_s)
    limit = max(limits, key=lambda one: one.gb_s)
    ratios = [tier.gb_s / bare.gb_s for tier, bare in zip(measured, limits, strict=True)]
    return {
        "operation": operation,
        "gb_s": best.gb_s,
        "limit_gb_s": limit.gb_s,
        "ratio": best.gb_s / limit.gb_s,
        "ratio_median": statistics.median(ratios),
        "p50_ms": min(one.percentile_ms(50) for one in measured),
        "p99_ms": min(one.percentile_ms(99) for one in measured),
        "cpu_s_per_gb": min(one.cpu_s_per_gb for one in measured),
        "limit_cpu_s_per_gb": min(one.cpu_s_per_gb for one in limits),
    }


def maker_of(tier: str, directory: str, stack: ExitStack) -> Callable[[int], Medium]:
    """Return the function that makes a tier's medium for a block size."""
    if tier == "l2":
        return L2Medium
    if tier == "sidecar":
        return SidecarMedium
    if tier == "disk":
        return lambda nbytes: DiskMedium(nbytes, directory)
    from tier_servers import redis_server, s3_server

    return redis_server(stack) if tier == "redis" else s3_server(stack)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tier in options.tiers.split(","):
        lookup: dict[str, float] = {}
        with ExitStack() as stack:
            make = maker_of(tier, options.directory, stack)
            for size in options.sizes.split(","):
                medium = make(SIZES[size])
                found = rounds_of(medium, options.rounds)
                named = {"tier": tier, "block": size}
                rows += [{**named, **row_of(operation, found)} for operation in ("write", "read")]
                lookup = lookup or medium.contains()
                medium.close()
        if tier in ("l2", "disk"):
            lookup = contains_local(tier, options.directory)
        if lookup:
            rows.append({"tier": tier, "block": "512 blocks", "operation": "contains", **lookup})
    return rows


def line_of(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [row["tier"], row["block"], row["operation"]]
    if row["operation"] == "contains":
        limit = row.get("limit_p50_ms")
        bare = "" if limit is None else f"{limit:.3f} ms"
        ratio = "" if limit is None else f"{limit / row['p50_ms']:.2f}"
        cells += ["", bare, ratio, f"{row['p50_ms']:.3f}", f"{row['p99_ms']:.3f}", "", ""]
    else:
        ratio = f"{row['ratio']:.2f} ({row['ratio_median']:.2f})"
        cells += [f"{row['gb_s']:.2f}", f"{row['limit_gb_s']:.2f}", ratio]
        cells += [f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}"]
        cells += [f"{row['cpu_s_per_gb']:.2f}", f"{row['limit_cpu_s_per_gb']:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiers", default="l2,sidecar,disk,redis,s3", help="tiers to measure")
    parser.add_argument("--sizes", default=",".join(SIZES), help="block sizes")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="directory on the disk to measure"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    Path(options.directory).mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    rows = measure(options)
    if options.json:
        print(json.dumps({"rows": rows, "load_before": load, "cores": os.cpu_count()}))
        return
    print(f"{os.cpu_count()} cores, load {load:.1f} before; best of {options.rounds} rounds\n")
    print(f"| {' | '.join(COLUMNS + CPU_COLUMNS)} |")
    print("| --- | --- | --- |" + " ---: |" * (len(COLUMNS + CPU_COLUMNS) - 3))
    for row in rows:
        print(line_of(row))


if __name__ == "__main__":
    main()
