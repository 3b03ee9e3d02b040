"""Counting without a metrics library, for code that only counts.

The service turns these, and the numbers of `Store.stats()`, into Prometheus' text.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Sequence
from typing import Any, Final

from kvstore.errors import ConfigError

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
"""Upper bounds of a latency histogram's buckets: a verb takes tens of microseconds, a disk read
milliseconds."""


OTHER: Final = "(other)"
"""Label of what comes after as many as are told apart."""

_ROUTE = re.compile(r"[A-Za-z0-9_.:/-]{0,64}")


def check_route(route: Any) -> str:
    """A route's name. Raises ConfigError for what can be none."""
    if not isinstance(route, str) or not _ROUTE.fullmatch(route):
        raise ConfigError(
            f"route {str(route)[:80]!r}: at most 64 letters, digits and _ . : / - are right"
        )
    return route


class Histogram:
    """How values are distributed over fixed buckets. `observe` may be called from any thread."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must rise"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value; a bound belongs to the bucket below it."""
        index = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += 1
            self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """bounds, counts (one more: above the last bound; not cumulative), sum, count."""
        with self._lock:
            counts = list(self._counts)
            total = self._sum
        return {"bounds": list(self._bounds), "counts": counts, "sum": total, "count": sum(counts)}
