"""The best that any order of eviction could have hit, knowing the future."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from typing import Final

from kvstore.simulate.traces import Asked

NEVER: Final = 1 << 62
"""Where the next use of a block that is never used again lies, at least."""


def optimal_hit_rates(requests: Sequence[Asked], capacity: int) -> tuple[float, float]:
    """Percent of prompt tokens that hit, as `replay.hit_rates`, with the offline optimum (Belady: A
    study of replacement algorithms for a virtual-storage computer, 1966) over `capacity` blocks.

    After each request the block whose next use lies furthest ahead goes first; of two that the same
    request uses next, the deeper one. Who uses a block uses all in front of it too, so a block is
    never used later than what hangs on it: no run gets a hole, and the blocks that hit are the most
    that can be. Where blocks hold different numbers of tokens, as in RAGPulse's trace, the most
    blocks need not be the most tokens; there it is a guess from below.
    """
    assert capacity > 0
    keys = array("q", (key for request in requests for key in request.run))
    after = _next_uses(keys)
    hits, asked = [0, 0], [0, 0]
    due: dict[int, int] = {}  # the resident blocks, and where the next use of each lies
    furthest: list[tuple[int, int]] = []
    start = 0
    for number, request in enumerate(requests):
        half = number >= len(requests) // 2
        run = next((n for n, key in enumerate(request.run) if key not in due), None)
        hits[half] += request.ends[len(request.run) if run is None else run]
        asked[half] += request.tokens
        for key, use in zip(request.run, after[start : start + len(request.run)], strict=True):
            due[key] = use
            heapq.heappush(furthest, (-use, key))
        while len(due) > capacity:
            use, key = heapq.heappop(furthest)
            if due.get(key) == -use:
                del due[key]
        start += len(request.run)
    return 100 * sum(hits) / max(1, sum(asked)), 100 * hits[1] / max(1, asked[1])


def _next_uses(keys: array[int]) -> array[int]:
    """For each place of `keys` the next place of the same key. Where there is none: NEVER and the
    place, so that of those never used again the deepest goes first."""
    after = array("q", bytes(8 * len(keys)))
    later: dict[int, int] = {}
    for place in range(len(keys) - 1, -1, -1):
        after[place] = later.get(keys[place], NEVER + place)
        later[keys[place]] = place
    return after
