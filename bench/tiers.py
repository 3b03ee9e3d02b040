"""How near does each tier come to its medium? Beside each figure, the medium's own limit.

    python bench/tiers.py [--tiers l2,sidecar,disk,redis,s3] [--sizes 64KiB,256KiB,2MiB,32MiB]
                          [--rounds 3] [--directory /var/tmp] [--json]

Ours: L2 through save, commit, load and release of a session, the copy being the engine's, once of a
store in this process and once of a sidecar, which is another; the others through their verbs,
identity frames, as many calls at once as the tier has workers.
The limits, in turns with ours, over the same bytes with as many threads:

    l2, sidecar
           memcpy between private memory, as an engine's is, and shared memory, as L2 has to be
    disk   preadv and pwritev of the same bytes in one preallocated file, O_DIRECT where it may be;
           both end with fdatasync
    redis  a bare client: sockets, RESP by hand, values pipelined, received where they belong
    s3     a bare client: signed URLs over plain HTTP connections; objects of a segment's size are
           put, ranges of a frame's size got

Figures are the best round's; `ratio` is best over best, and behind it the median of the rounds' own
ratios. CPU seconds are of this process, not of servers. Every read checks its length, and a part
of the bytes. `contains` asks for a run of 512 blocks; for L2 and disk through `match`, over a tier
that raises when it is touched.
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

COLUMNS: Final = ("tier", "block", "verb", "GB/s", "limit, GB/s", "ratio", "p50, ms", "p99, ms")
CPU_COLUMNS: Final = ("CPU s/GB", "limit's")


def rounds_of(medium: Medium, rounds: int) -> list[dict[str, Pass]]:
    """Passes by name, in turns."""
    found = []
    for number in range(rounds):
        one = {}
        medium.begin(number)
        for verb in ("write", "read"):
            one[f"limit {verb}"] = medium.limit(verb)
            one[verb] = medium.ours(verb)
        medium.end()
        found.append(one)
    return found


def row_of(verb: str, found: list[dict[str, Pass]]) -> dict[str, Any]:
    """One verb's figures: the best round, ours and the limit's."""
    ours = [one[verb] for one in found]
    limits = [one[f"limit {verb}"] for one in found]
    best = max(ours, key=lambda one: one.gb_s)
    limit = max(limits, key=lambda one: one.gb_s)
    ratios = [o.gb_s / bare.gb_s for o, bare in zip(ours, limits, strict=True)]
    return {
        "verb": verb,
        "gb_s": best.gb_s,
        "limit_gb_s": limit.gb_s,
        "ratio": best.gb_s / limit.gb_s,
        "ratio_median": statistics.median(ratios),
        "p50_ms": min(one.percentile_ms(50) for one in ours),
        "p99_ms": min(one.percentile_ms(99) for one in ours),
        "cpu_s_per_gb": min(one.cpu_s_per_gb for one in ours),
        "limit_cpu_s_per_gb": min(one.cpu_s_per_gb for one in limits),
    }


def maker_of(tier: str, directory: str, stack: ExitStack) -> Callable[[int], Medium]:
    """What makes the medium of a tier for a size of block."""
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
        asked: dict[str, float] = {}
        with ExitStack() as stack:
            make = maker_of(tier, options.directory, stack)
            for size in options.sizes.split(","):
                medium = make(SIZES[size])
                found = rounds_of(medium, options.rounds)
                named = {"tier": tier, "block": size}
                rows += [{**named, **row_of(verb, found)} for verb in ("write", "read")]
                asked = asked or medium.contains()
                medium.close()
        if tier in ("l2", "disk"):
            asked = contains_local(tier, options.directory)
        if asked:
            rows.append({"tier": tier, "block": "512 blocks", "verb": "contains", **asked})
    return rows


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [row["tier"], row["block"], row["verb"]]
    if row["verb"] == "contains":
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
    parser.add_argument("--tiers", default="l2,sidecar,disk,redis,s3")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to measure")
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
