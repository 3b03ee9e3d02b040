"""Replays a trace through one cache level and returns the fraction of prompt tokens that hit.

A request hits its leading blocks up to the first one that is absent. It then uses all its blocks,
the deepest first, so that the first block is the most recent. Then the level evicts down to its
capacity. `run` has all levels, policies and times.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.analysis.simulate.levels import Level
from kvstore.analysis.simulate.traces import TraceRequest


def hit_rates(requests: Sequence[TraceRequest], level: Level) -> tuple[float, float]:
    """Return two percentages of prompt tokens that hit: all requests, and the second half only.

    The first half warms the cache for the second.
    """
    hits, tokens = [0, 0], [0, 0]
    for number, request in enumerate(requests):
        half = number >= len(requests) // 2
        hits[half] += request.hit_tokens(level.lookup(request.block_ids))
        tokens[half] += request.tokens
        for key in reversed(request.block_ids):
            level.use(key)
        level.trim()
    return 100 * sum(hits) / max(1, sum(tokens)), 100 * hits[1] / max(1, tokens[1])
