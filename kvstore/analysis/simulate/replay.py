"""A trace through one level of cache: what part of its prompt tokens hits.

A request hits its longest run of leading blocks that are all there. After it, all its blocks are
used, the deepest first, so that the first is the most recent of all; then the coldest leave until
the capacity holds. `run` has all levels, policies and times.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.analysis.simulate.levels import Level
from kvstore.analysis.simulate.traces import Asked


def hit_rates(requests: Sequence[Asked], level: Level) -> tuple[float, float]:
    """Percent of prompt tokens that hit: of all requests, and of those from the middle one on, the
    cache warmed by the first half."""
    hits, asked = [0, 0], [0, 0]
    for number, request in enumerate(requests):
        half = number >= len(requests) // 2
        hits[half] += request.hit_tokens(level.asked(request.run))
        asked[half] += request.tokens
        for key in reversed(request.run):
            level.use(key)
        level.trim()
    return 100 * sum(hits) / max(1, sum(asked)), 100 * hits[1] / max(1, asked[1])
