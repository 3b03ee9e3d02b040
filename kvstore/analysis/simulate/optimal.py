"""Offline-optimal eviction (Belady's OPT): the best hit rate that any eviction policy can reach.

Belady: A study of replacement algorithms for a virtual-storage computer, 1966. After each request,
OPT evicts the block whose next use is furthest ahead. Of two blocks that the same request uses
next, it evicts the deeper one. A request that uses a block uses all blocks in front of it, so a
block's next use is never later than that of the blocks behind it. Cached prefixes therefore have no
gaps, and the number of block hits is the maximum. If blocks hold different numbers of tokens, as in
RAGPulse's trace, the most blocks need not be the most tokens. There the result is a lower bound.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.analysis.simulate.traces import TraceRequest

HEAP_SLACK = 1 << 16
"""Stale heap entries allowed, beyond as many as there are blocks."""
REPORT_REQUESTS = 1024
"""Number of requests between two progress reports."""


class OfflineOptimal:
    """Belady's OPT over one trace. Needs 8 bytes per requested block and about 40 per request.

    Add all requests, then compute any number of capacities. Computing takes another 16 bytes per
    requested block. Its time is proportional to the number of blocks.
    """

    def __init__(self) -> None:
        self._keys = array("q")
        self._ends = array("q")
        """Hit tokens by number of blocks, from 0 on, for each request in turn."""
        self._lengths = array("q")
        self._tokens = array("q")
        self._next: NDArray[np.int64] | None = None

    def add(self, request: TraceRequest) -> None:
        """Add the next request."""
        self._keys.extend(request.block_ids)
        self._lengths.append(len(request.block_ids))
        self._tokens.append(request.tokens)
        ends = request.ends
        if request.useful is not None and ends[-1] > request.useful:
            ends = tuple(min(end, request.useful) for end in ends)
        self._ends.extend(ends)

    def hit_rates(
        self, capacity: int | None, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[float, float]:
        """Return the percentage of prompt tokens that hit, as `replay.hit_rates`.

        capacity: number of blocks. None: unlimited. progress: called with requests done and total.
        """
        assert capacity is None or capacity > 0
        if self._next is None:
            self._next = next_uses(np.frombuffer(self._keys, np.int64) if self._keys else _NONE)
        requests = len(self._lengths)
        hits = [0, 0]
        cache = _Unlimited() if capacity is None else _FurthestNextUse(capacity)
        start = ends_at = 0
        for number, length in enumerate(self._lengths):
            run = self._keys[start : start + length]
            hit = cache.request(run, self._next[start : start + length].tolist())
            hits[number >= requests // 2] += self._ends[ends_at + hit]
            start += length
            ends_at += length + 1
            if not number % REPORT_REQUESTS:
                progress(number, requests)
        tokens = np.frombuffer(self._tokens, np.int64) if requests else _NONE
        whole, half = int(tokens.sum()), int(tokens[requests // 2 :].sum())
        return 100 * sum(hits) / max(1, whole), 100 * hits[1] / max(1, half)


def optimal_hit_rates(requests: Sequence[TraceRequest], capacity: int) -> tuple[float, float]:
    """Return the percentage of prompt tokens that hit with OPT over `capacity` blocks.

    The two figures are those of `replay.hit_rates`.
    """
    optimal = OfflineOptimal()
    for request in requests:
        optimal.add(request)
    return optimal.hit_rates(capacity)


_NONE: NDArray[np.int64] = np.empty(0, np.int64)


def next_uses(keys: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index of the next use of each key in `keys`.

    Without a next use, return len(keys) plus the key's own index. So of blocks that are never used
    again, OPT evicts the deepest first.
    """
    order = np.argsort(keys, kind="stable")
    after = np.arange(len(keys), 2 * len(keys), dtype=np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    after[order[:-1][same]] = order[1:][same]
    return after


class _FurthestNextUse:
    """A cache that evicts the block whose next use is furthest ahead.

    No two blocks have the same next use, so an index identifies its block. The heap has negated
    indices, to pop the largest first. It is rebuilt when most of its entries are stale.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._due: dict[int, int] = {}
        self._block_at: dict[int, int] = {}
        self._heap: list[int] = []

    def request(self, run: Sequence[int], after: Sequence[int]) -> int:
        """Return the number of leading blocks that are cached, then cache all and evict."""
        due, block_at, heap = self._due, self._block_at, self._heap
        hit = next((n for n, key in enumerate(run) if key not in due), len(run))
        for key, use in zip(run, after, strict=True):
            before = due.get(key)
            if before is not None:
                block_at.pop(before, None)
            due[key] = use
            block_at[use] = key
            heapq.heappush(heap, -use)
        while len(due) > self._capacity:
            gone = block_at.pop(-heapq.heappop(heap), None)
            if gone is not None:
                del due[gone]
        if len(heap) > 2 * len(due) + HEAP_SLACK:
            self._heap = [-use for use in due.values()]
            heapq.heapify(self._heap)
        return hit


class _Unlimited:
    """A cache that never evicts."""

    def __init__(self) -> None:
        self._cached: set[int] = set()

    def request(self, run: Sequence[int], after: Sequence[int]) -> int:
        """See `_Furthest.request`."""
        cached = self._cached
        hit = next((n for n, key in enumerate(run) if key not in cached), len(run))
        cached.update(run)
        return hit
