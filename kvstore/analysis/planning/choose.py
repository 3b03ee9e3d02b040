"""Chooses policies for some traffic by replaying it with each.

Eviction: the policy that saves most GPU time. Within TIE of the best, the first of lru, lfu,
s3fifo, gdsf, auto, in order of simplicity. Write: among the policies that save at least 1 - TIE of
the most, the one that writes least to the tier below, because writes wear the tier and slow its
reads. (write_through also keeps blocks that a crash would lose.) Load: the policy with the shortest
mean time to first token. If that is `never`, which loads nothing, the tiers do not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from kvstore.analysis.planning.forecast import Figures, Traffic
from kvstore.analysis.simulate.run import Shape
from kvstore.analysis.simulate.sweep import Progress, Sweep
from kvstore.analysis.simulate.waits import LOAD_POLICIES
from kvstore.cache.eviction import EVICTION_POLICIES
from kvstore.cache.write_policy import WRITE_POLICIES

TIE: Final = 0.01


def choose(traffic: Traffic, shape: Shape, report: Progress) -> Figures:
    """Return the best policies for these tiers, with the figures of all others."""
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
    loads = _replayed(traffic, shape, "load_policy", LOAD_POLICIES, report)
    soonest = min(loads, key=lambda row: row["ttft_mean_s"])
    return found | {"load_policy": soonest["policy"], "load_policies": loads}


def _replayed(
    traffic: Traffic, shape: Shape, field: str, names: Sequence[str], report: Progress
) -> list[dict[str, Any]]:
    """Return the figures of each policy in this field of a shape."""
    if field == "eviction":
        shapes = [replace(shape, eviction=name, l3_eviction=name) for name in names]
    elif field == "write":
        shapes = [replace(shape, write=name) for name in names]
    else:
        shapes = [replace(shape, load_policy=name) for name in names]
    rows = Sweep(shapes, offline_optimal=False).run(traffic, report)
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
