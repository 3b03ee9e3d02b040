"""A whole replay: L1, L2, a tier below, their policies, and times under a cost model.

What is replayed is the store's own code: the engine's radix tree (`device`), the orders of eviction
(`levels`), the write policies (`tiers`) and the prefetch policies (`waits`). Requests take effect
one after another in the trace's order: the blocks of one are there when the next asks. Time is
virtual: it decides what prefetch brings and what a request waits, not what is cached.

Two terms make a request's time: prefill, of which hits spare a part, and decode, which is the same
whatever is cached and is left out. Time to first token = waiting for an engine, or for blocks from
below, whichever is longer; then copying what lies in L2 to the device; then computing the rest. A
GPU second saved is one of prefill that was not computed: copies run beside computing.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from kvstore.analysis.simulate.device import Device
from kvstore.analysis.simulate.levels import Level
from kvstore.analysis.simulate.tiers import COMPUTED, L1, L2, L3, Tiers
from kvstore.analysis.simulate.traces import Asked
from kvstore.analysis.simulate.waits import ALWAYS, MIN_TOKENS, Taken, Waits
from kvstore.cache.write_policy import write_policy
from kvstore.prefetch.costs import CostModel

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Shape:
    """What is replayed. A tier of 0 blocks is not there; None: it never evicts.

    l1_pages: of the engine's pool; page_tokens: of a page, None: a page is a block.
    engines: requests computed at a time, each as if alone; 0: any number.
    """

    costs: CostModel
    bytes_per_token: int
    l1_pages: int = 0
    page_tokens: int | None = None
    l2_blocks: int | None = None
    l3_blocks: int | None = 0
    eviction: str = "lru"
    l3_eviction: str = "lru"
    write: str = "write_through"
    selective_hits: int = 2
    prefetch: str = ALWAYS
    min_tokens: int = MIN_TOKENS
    engines: int = 0

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers that are there, from the top."""
        there = {L1: self.l1_pages, L2: self.l2_blocks, L3: self.l3_blocks}
        return tuple(name for name, size in there.items() if size != 0)

    def blocks(self, tier: str, block_tokens: int) -> int | None:
        """Capacity of a tier, in blocks of so many tokens."""
        if tier == L1:
            return self.l1_pages * (self.page_tokens or block_tokens) // block_tokens
        return self.l2_blocks if tier == L2 else self.l3_blocks

    def all_blocks(self, block_tokens: int) -> int | None:
        """Blocks that all tiers hold together; None where one never evicts."""
        sizes = [self.blocks(tier, block_tokens) for tier in self.tiers]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


@dataclass
class Counts:
    """What a replay counted of each request, in order. 8 bytes a request each."""

    tokens: array[int] = field(default_factory=lambda: array("q"))
    hits: dict[str, array[int]] = field(default_factory=dict)
    """Prompt tokens that hit, by tier."""
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    cold_s: array[float] = field(default_factory=lambda: array("d"))
    """Time to first token with nothing cached and an engine free."""
    gpu_s: float = 0.0
    gpu_cold_s: float = 0.0


class Replay:
    """One shape, driven request by request."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.counts = Counts(hits={tier: array("q") for tier in shape.tiers})
        tiers = shape.tiers
        self._device = Device(shape.l1_pages, shape.page_tokens) if L1 in tiers else None
        host = Level(shape.l2_blocks, shape.eviction) if L2 in tiers else None
        below = Level(shape.l3_blocks, shape.l3_eviction) if L3 in tiers else None
        write = write_policy(shape.write, selective_hits=shape.selective_hits)
        self._tiers = Tiers(host, below, write)
        self._waits = Waits(shape.prefetch, shape.costs, shape.min_tokens)
        self._free_s = [0.0] * shape.engines

    def step(self, request: Asked) -> None:
        """The next request of the trace."""
        shape, device = self.shape, self._device
        ends, bpt = request.ends, shape.bytes_per_token
        here = device.hit_tokens(request) if device is not None else 0
        first = 0
        while here and first < len(request.run) and ends[first + 1] <= here:
            first += 1
        run = request.run[first:] if first else request.run
        inner = ends[first:]
        sizes = [(b - a) * bpt for a, b in pairwise(inner)]
        found = self._tiers.find(run)
        now_s = request.time_s
        can_start_s = max(0.0, self._free_s[0] - now_s) if self._free_s else 0.0
        taken = self._waits.take(now_s, found, sizes, inner[1:], can_start_s, inner[0])
        found = found[: taken.blocks]
        if taken.computed:
            found = [COMPUTED if n in taken.computed else tier for n, tier in enumerate(found)]
        self._count(request, here, first, found)
        hit = max(here, request.hit_tokens(first + taken.blocks))
        self._time(request, hit, can_start_s, taken)
        self._tiers.keep(run, sizes, found)
        if device is not None:
            device.keep(request)

    def _count(self, request: Asked, here: int, first: int, found: Sequence[str]) -> None:
        self.counts.tokens.append(request.tokens)
        hits = {L1: here, L2: 0, L3: 0, COMPUTED: 0}
        at, index = here, first
        for tier, same in groupby(found):
            index += len(list(same))
            end = request.hit_tokens(index)
            if end > at:
                hits[tier] += end - at
                at = end
        for tier, kept in self.counts.hits.items():
            kept.append(hits[tier])

    def _time(self, request: Asked, hit: int, can_start_s: float, taken: Taken) -> None:
        prefill = self.shape.costs.prefill
        cold_s = prefill.cold_s(request.tokens)
        compute_s = prefill.seconds(max(0, min(hit, request.tokens - 1)), request.tokens)
        wait_s, load_s = max(can_start_s, taken.wait_s), taken.load_s
        if self._free_s:
            heapq.heapreplace(self._free_s, request.time_s + wait_s + load_s + compute_s)
        self._waits.computed(min(hit, request.tokens - 1), request.tokens, compute_s)
        counts = self.counts
        counts.ttft_s.append(wait_s + load_s + compute_s)
        counts.cold_s.append(cold_s)
        counts.gpu_s += compute_s + taken.computed_s
        counts.gpu_cold_s += cold_s

    def result(self, block_tokens: int) -> dict[str, Any]:
        """All figures, as JSON has them. Rates are percent of prompt tokens."""
        counts, shape = self.counts, self.shape
        tokens = np.array(counts.tokens, np.int64)
        hits = {tier: np.array(kept, np.int64) for tier, kept in counts.hits.items()}
        together = sum(hits.values(), np.zeros(len(tokens), np.int64))
        tiers = {tier: self._tier(tier, hits[tier], tokens, block_tokens) for tier in shape.tiers}
        whole, half = rates(together, tokens)
        return {
            "requests": len(tokens),
            "input_tokens": int(tokens.sum()),
            "token_hit_rate": whole,
            "token_hit_rate_second_half": half,
            "evictions": sum(tier["evictions"] for tier in tiers.values()),
            "bytes_read": {name: tier["bytes_read"] for name, tier in tiers.items()},
            "bytes_written": {name: tier["bytes_written"] for name, tier in tiers.items()},
            "tiers": tiers,
            "ttft_s": spread(counts.ttft_s),
            "ttft_cold_s": spread(counts.cold_s),
            "gpu_seconds": counts.gpu_s,
            "gpu_seconds_saved": counts.gpu_cold_s - counts.gpu_s,
        }

    def _tier(self, tier: str, hits: Any, tokens: Any, block_tokens: int) -> dict[str, Any]:
        whole, half = rates(hits, tokens)
        shape, device = self.shape, self._device
        figures: dict[str, Any] = {
            "capacity_blocks": shape.blocks(tier, block_tokens),
            "token_hit_rate": whole,
            "token_hit_rate_second_half": half,
        }
        if tier == L1:
            assert device is not None
            page = (shape.page_tokens or block_tokens) * shape.bytes_per_token
            return figures | {
                "evictions": device.pages_evicted,
                "bytes_read": int(hits.sum()) * shape.bytes_per_token,
                "bytes_written": device.pages_written * page,
            }
        level = self._tiers.host if tier == L2 else self._tiers.below
        assert level is not None
        return figures | {
            "evictions": level.evictions,
            "bytes_read": self._tiers.bytes_read[tier],
            "bytes_written": self._tiers.bytes_written[tier],
            "blocks": len(level),
        }


def rates(hits: Any, tokens: Any) -> tuple[float, float]:
    """Percent of tokens that hit: of all requests, and of those from the middle one on."""
    half = len(tokens) // 2
    return (
        100 * int(hits.sum()) / max(1, int(tokens.sum())),
        100 * int(hits[half:].sum()) / max(1, int(tokens[half:].sum())),
    )


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and most of some times."""
    if not len(seconds):
        return {}
    values = np.array(seconds)
    found = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(values.mean()), **found, "max": float(values.max())}
