"""The best that any order of eviction could have hit, knowing the future.

Belady: A study of replacement algorithms for a virtual-storage computer, 1966. After each request
the block whose next use lies furthest ahead goes first; of two that the same request uses next, the
deeper one. Who uses a block uses all in front of it too, so a block is never used later than what
hangs on it: no run gets a hole, and the blocks that hit are the most that can be. Where blocks hold
different numbers of tokens, as in RAGPulse's trace, the most blocks need not be the most tokens;
there it is a guess from below.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.analysis.simulate.traces import Asked

HEAP_SLACK = 1 << 16
"""Entries of the heap, and as many as there are blocks, that may be out of date at a time."""
REPORT_REQUESTS = 1024
"""Requests between two reports of progress."""


class Optimum:
    """What the optimum needs of a trace: 8 bytes a block asked for, and some 40 a request.

    Fed request by request; then asked for any number of capacities, which takes another 16 bytes a
    block asked for, and time in proportion to them.
    """

    def __init__(self) -> None:
        self._keys = array("q")
        self._ends = array("q")
        """Hit tokens by blocks, of each request from 0 on."""
        self._lengths = array("q")
        self._tokens = array("q")
        self._next: NDArray[np.int64] | None = None

    def add(self, request: Asked) -> None:
        """The next request."""
        self._keys.extend(request.run)
        self._lengths.append(len(request.run))
        self._tokens.append(request.tokens)
        ends = request.ends
        if request.useful is not None and ends[-1] > request.useful:
            ends = tuple(min(end, request.useful) for end in ends)
        self._ends.extend(ends)

    def hit_rates(
        self, capacity: int | None, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[float, float]:
        """Percent of prompt tokens that hit with so many blocks, as `replay.hit_rates`.

        capacity: None: any number. progress: told requests done, and all.
        """
        assert capacity is None or capacity > 0
        if self._next is None:
            self._next = next_uses(np.frombuffer(self._keys, np.int64) if self._keys else _NONE)
        requests = len(self._lengths)
        hits = [0, 0]
        cache = _Endless() if capacity is None else _Furthest(capacity)
        start = ends_at = 0
        for number, length in enumerate(self._lengths):
            run = self._keys[start : start + length]
            hit = cache.request(run, self._next[start : start + length].tolist())
            hits[number >= requests // 2] += self._ends[ends_at + hit]
            start += length
            ends_at += length + 1
            if not number % REPORT_REQUESTS:
                progress(number, requests)
        asked = np.frombuffer(self._tokens, np.int64) if requests else _NONE
        whole, half = int(asked.sum()), int(asked[requests // 2 :].sum())
        return 100 * sum(hits) / max(1, whole), 100 * hits[1] / max(1, half)


def optimal_hit_rates(requests: Sequence[Asked], capacity: int) -> tuple[float, float]:
    """Percent of prompt tokens that hit, as `replay.hit_rates`, with the offline optimum over
    `capacity` blocks."""
    optimum = Optimum()
    for request in requests:
        optimum.add(request)
    return optimum.hit_rates(capacity)


_NONE: NDArray[np.int64] = np.empty(0, np.int64)


def next_uses(keys: NDArray[Any]) -> NDArray[np.int64]:
    """For each place of `keys` the next place of the same key; where there is none, the number of
    places and its own, so that of those never used again the deepest goes first."""
    order = np.argsort(keys, kind="stable")
    after = np.arange(len(keys), 2 * len(keys), dtype=np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    after[order[:-1][same]] = order[1:][same]
    return after


class _Furthest:
    """A cache that evicts what is used furthest ahead.

    No two blocks are next used at the same place, so a place stands for its block: the heap holds
    places, negative for the largest first, and is made anew when most are out of date.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._due: dict[int, int] = {}
        self._block_at: dict[int, int] = {}
        self._heap: list[int] = []

    def request(self, run: Sequence[int], after: Sequence[int]) -> int:
        """Leading blocks of the run that are here; then all of it is, and what must goes."""
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


class _Endless:
    """A cache that never evicts."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def request(self, run: Sequence[int], after: Sequence[int]) -> int:
        """See `_Furthest.request`."""
        held = self._held
        hit = next((n for n, key in enumerate(run) if key not in held), len(run))
        held.update(run)
        return hit
