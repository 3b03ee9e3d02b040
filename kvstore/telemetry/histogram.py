"""Histograms for code that must not depend on a metrics library.

Module `prometheus` exports them, and the statistics of `Store.stats()`.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from typing import Any, Final

LATENCY_BOUNDS_S: Final = (
    1e-5,
    2.5e-5,
    5e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    1e-2,
    2.5e-2,
    5e-2,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
)
"""Upper bounds of the buckets: operations take tens of microseconds, disk reads milliseconds."""


class Histogram:
    """A histogram with fixed buckets. `observe` may be called from any thread."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must increase"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value. A value equal to a bound is in the bucket below the bound."""
        index = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += 1
            self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """bounds, counts (one more than bounds; not cumulative), sum, count."""
        with self._lock:
            counts = list(self._counts)
            total = self._sum
        return {"bounds": list(self._bounds), "counts": counts, "sum": total, "count": sum(counts)}
