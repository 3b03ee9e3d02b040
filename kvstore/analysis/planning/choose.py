"""Which policies suit some traffic: by replaying it with each.

Eviction: the one whose hits save most GPU time; of those within TIE of it the first in the order
lru, lfu, s3fifo, cost, auto (the plainest). Write: of those whose hits save at least 1 - TIE of the
most, the one that writes least to the tier below (it wears, and its writes are in the way of its
reads); write_through besides keeps what a crash would lose. Prefetch: the least mean time to first
token; `never` stands for not loading at all, and where it wins the tiers do not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from kvstore.analysis.planning.forecast import Figures, Traffic
from kvstore.analysis.simulate.run import Shape
from kvstore.analysis.simulate.sweep import Progress, Sweep
from kvstore.analysis.simulate.waits import LOADING
from kvstore.cache.eviction import EVICTION_POLICIES
from kvstore.cache.write_policy import WRITE_POLICIES

TIE: Final = 0.01


def choose(traffic: Traffic, shape: Shape, report: Progress) -> Figures:
    """The policies to take over these tiers, and what each of the others would do."""
    evictions = _replayed(traffic, shape, "eviction", EVICTION_POLICIES, report)
    most = max(row["gpu_seconds_saved"] for row in evictions)
    best = next(row for row in evictions if row["gpu_seconds_saved"] >= most * (1 - TIE))
    shape = replace(shape, eviction=best["policy"], l3_eviction=best["policy"])
    found: Figures = {"eviction": best["policy"], "evictions": evictions}
    if shape.l3_blocks != 0 and shape.l2_blocks != 0:
        writes = _replayed(traffic, shape, "write", WRITE_POLICIES, report)
        most = max(row["gpu_seconds_saved"] for row in writes)
        good = [row for row in writes if row["gpu_seconds_saved"] >= most * (1 - TIE)]
        least = min(good, key=lambda row: row["bytes_written"])
        shape = replace(shape, write=least["policy"])
        found |= {"write": least["policy"], "writes": writes}
    waits = _replayed(traffic, shape, "prefetch", LOADING, report)
    soonest = min(waits, key=lambda row: row["ttft_mean_s"])
    return found | {"prefetch": soonest["policy"], "prefetches": waits}


def _replayed(
    traffic: Traffic, shape: Shape, field: str, names: Sequence[str], report: Progress
) -> list[dict[str, Any]]:
    """What each policy of this field of a shape does."""
    if field == "eviction":
        shapes = [replace(shape, eviction=name, l3_eviction=name) for name in names]
    elif field == "write":
        shapes = [replace(shape, write=name) for name in names]
    else:
        shapes = [replace(shape, prefetch=name) for name in names]
    rows = Sweep(shapes, optimum=False).run(traffic, report)
    return [
        {
            "policy": name,
            "token_hit_rate": row["token_hit_rate"],
            "gpu_seconds_saved": row["gpu_seconds_saved"],
            "ttft_mean_s": row["ttft_s"]["mean"],
            "bytes_written": row["bytes_written"].get("l3", 0),
        }
        for name, row in zip(names, rows, strict=True)
    ]
