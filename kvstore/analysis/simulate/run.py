"""A complete replay: L1, L2, a tier below, their policies, and times from a cost model.

The replay uses the store's own code: the engine's radix tree (`device`), the eviction policies
(`levels`), the write policies (`tiers`) and the prefetch policies (`waits`). Requests take effect
one after another in trace order: the blocks of one are cached when the next arrives. Time is
virtual. It decides how much is prefetched and how long a request waits, not what is cached.

A request takes two times: prefill, which hits shorten, and decode, which is always the same and is
left out. Time to first token is the sum of three parts. The first is the longer of the waits for an
engine and for blocks from below. The second is the copy of L2's blocks to the device. The third is
computing the rest. A saved GPU second is a second of prefill that was not computed: copies overlap
with computing.
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
from kvstore.analysis.simulate.traces import TraceRequest
from kvstore.analysis.simulate.waits import ALWAYS, MIN_TOKENS, LoadResult, WaitModel
from kvstore.cache.write_policy import write_policy
from kvstore.prefetch.costs import CostModel

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Shape:
    """Configuration of a replay. A tier of 0 blocks does not exist. None: it never evicts.

    l1_pages: size of the engine's page pool. page_tokens: tokens per page. None: one block.
    engines: maximum requests computed concurrently, without batching slowdown. 0: unlimited.
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
    load_policy: str = ALWAYS
    min_tokens: int = MIN_TOKENS
    concurrency: int = 0

    @property
    def tiers(self) -> tuple[str, ...]:
        """Return the names of the existing tiers, from the top."""
        there = {L1: self.l1_pages, L2: self.l2_blocks, L3: self.l3_blocks}
        return tuple(name for name, size in there.items() if size != 0)

    def blocks(self, tier: str, block_tokens: int) -> int | None:
        """Return the capacity of a tier, in blocks of `block_tokens` tokens."""
        if tier == L1:
            return self.l1_pages * (self.page_tokens or block_tokens) // block_tokens
        return self.l2_blocks if tier == L2 else self.l3_blocks

    def all_blocks(self, block_tokens: int) -> int | None:
        """Return the blocks that all tiers hold together. None: a tier never evicts."""
        sizes = [self.blocks(tier, block_tokens) for tier in self.tiers]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


@dataclass
class Counts:
    """Counts of a replay, one entry per request in order. 8 bytes each."""

    tokens: array[int] = field(default_factory=lambda: array("q"))
    hits: dict[str, array[int]] = field(default_factory=dict)
    """Prompt tokens that hit, by tier."""
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    cold_s: array[float] = field(default_factory=lambda: array("d"))
    """Time to first token with an empty cache and an idle engine."""
    gpu_s: float = 0.0
    gpu_cold_s: float = 0.0


class Replay:
    """Replay of one shape, driven request by request."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.counts = Counts(hits={tier: array("q") for tier in shape.tiers})
        tiers = shape.tiers
        self._device = Device(shape.l1_pages, shape.page_tokens) if L1 in tiers else None
        host = Level(shape.l2_blocks, shape.eviction) if L2 in tiers else None
        below = Level(shape.l3_blocks, shape.l3_eviction) if L3 in tiers else None
        write = write_policy(shape.write, selective_hits=shape.selective_hits)
        self._tiers = Tiers(host, below, write)
        self._waits = WaitModel(shape.load_policy, shape.costs, shape.min_tokens)
        self._free_s = [0.0] * shape.concurrency

    def step(self, request: TraceRequest) -> None:
        """Replay the next request of the trace."""
        shape, device = self.shape, self._device
        ends, bpt = request.ends, shape.bytes_per_token
        here = device.hit_tokens(request) if device is not None else 0
        first = 0
        while here and first < len(request.block_ids) and ends[first + 1] <= here:
            first += 1
        run = request.block_ids[first:] if first else request.block_ids
        inner = ends[first:]
        sizes = [(b - a) * bpt for a, b in pairwise(inner)]
        found = self._tiers.find(run)
        now_s = request.time_s
        can_start_s = max(0.0, self._free_s[0] - now_s) if self._free_s else 0.0
        taken = self._waits.load(now_s, found, sizes, inner[1:], can_start_s, inner[0])
        found = found[: taken.blocks]
        if taken.computed:
            found = [COMPUTED if n in taken.computed else tier for n, tier in enumerate(found)]
        self._count(request, here, first, found)
        hit = max(here, request.hit_tokens(first + taken.blocks))
        self._time(request, hit, can_start_s, taken)
        self._tiers.keep(run, sizes, found)
        if device is not None:
            device.keep(request)

    def _count(self, request: TraceRequest, here: int, first: int, found: Sequence[str]) -> None:
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

    def _time(self, request: TraceRequest, hit: int, can_start_s: float, taken: LoadResult) -> None:
        prefill = self.shape.costs.prefill
        cold_s = prefill.cold_s(request.tokens)
        compute_s = prefill.seconds(max(0, min(hit, request.tokens - 1)), request.tokens)
        wait_s, load_s = max(can_start_s, taken.wait_s), taken.load_s
        if self._free_s:
            heapq.heapreplace(self._free_s, request.time_s + wait_s + load_s + compute_s)
        self._waits.record_prefill(min(hit, request.tokens - 1), request.tokens, compute_s)
        counts = self.counts
        counts.ttft_s.append(wait_s + load_s + compute_s)
        counts.cold_s.append(cold_s)
        counts.gpu_s += compute_s + taken.computed_s
        counts.gpu_cold_s += cold_s

    def result(self, block_tokens: int) -> dict[str, Any]:
        """Return all figures for JSON. Rates are percentages of prompt tokens."""
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
    """Return percentages of tokens that hit: of all requests, and of the second half."""
    half = len(tokens) // 2
    return (
        100 * int(hits.sum()) / max(1, int(tokens.sum())),
        100 * int(hits[half:].sum()) / max(1, int(tokens[half:].sum())),
    )


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, percentiles and maximum of some times."""
    if not len(seconds):
        return {}
    values = np.array(seconds)
    found = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(values.mean()), **found, "max": float(values.max())}
