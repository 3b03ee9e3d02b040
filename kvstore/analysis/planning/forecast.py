"""Replays traffic over tiers of several sizes: the hit rate, and what the hits save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from kvstore.analysis.simulate.run import Shape
from kvstore.analysis.simulate.sweep import Progress, Sweep
from kvstore.analysis.simulate.traces import TraceRequest
from kvstore.prefetch.costs import dollars_per_million_tokens

REQUESTS_MAX: Final = 20_000
"""Maximum requests of a trace that a plan uses, from its start. `kvstore simulate` uses all."""
BLOCKS_MAX: Final = 100_000
"""Maximum blocks that the requests of a plan look up. A plan replays them about twenty times."""
MONTH_S: Final = 365 * 24 * 3600 / 12
"""Seconds in a mean month."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Traffic:
    """Requests in memory, because a plan replays them many times. See `simulate.sweep.Requests`."""

    name: str
    format: str
    block_tokens: int
    all: tuple[TraceRequest, ...]

    @property
    def requests(self) -> Iterator[TraceRequest]:
        return iter(self.all)

    @property
    def seconds(self) -> float:
        """Return the time from the first request to the last."""
        times = [request.time_s for request in self.all]
        return max(times) - min(times) if times else 0.0

    @property
    def input_tokens(self) -> int:
        return sum(request.tokens for request in self.all)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.all)


def first_of(
    requests: Iterator[TraceRequest], most: int = REQUESTS_MAX, blocks: int = BLOCKS_MAX
) -> tuple[TraceRequest, ...]:
    """Return the first requests, at least one, up to so many requests and looked-up blocks."""
    found: list[TraceRequest] = []
    for request in islice(requests, most):
        blocks -= len(request.block_ids)
        if blocks < 0 and found:
            break
        found.append(request)
    return tuple(found)


def working_set(traffic: Traffic, bytes_per_token: int) -> Figures:
    """Return the distinct blocks, and how many of them are looked up more than once."""
    uses: Counter[int] = Counter()
    for request in traffic.all:
        uses.update(request.block_ids)
    block_bytes = traffic.block_tokens * bytes_per_token
    again = sum(count > 1 for count in uses.values())
    return {
        "blocks": len(uses),
        "bytes": len(uses) * block_bytes,
        "reused_blocks": again,
        "reused_bytes": again * block_bytes,
    }


def by_size(
    traffic: Traffic, shape: Shape, sizes: Sequence[int | None], report: Progress
) -> list[Figures]:
    """Return the figures of a replay for each size of L2, in blocks. 0: no L2."""
    there = [
        replace(shape, l2_blocks=size)
        for size in sizes
        if size != 0 or shape.l1_pages or _l3(shape)
    ]
    return Sweep(there, offline_optimal=False).run(traffic, report) if there else []


def worth(figures: Figures, traffic: Traffic, *, gpus: int, gpu_hour: float) -> Figures:
    """Return what the hits of a replay save, in GPU time and dollars.

    gpus: GPUs that compute one request. Dollars are per million prompt tokens.
    `usd_per_million_tokens_hit` is per million tokens that hit: the cost of computing them. A tier
    pays if it costs less.
    """
    saved_s, spent_s = figures["gpu_seconds_saved"] * gpus, figures["gpu_seconds"] * gpus
    tokens = figures["input_tokens"]
    hit_tokens = round(tokens * figures["token_hit_rate"] / 100)
    seconds = traffic.seconds
    cold, warm = figures["ttft_cold_s"], figures["ttft_s"]
    return {
        "gpu_seconds_saved": saved_s,
        "gpu_hours_saved_per_day": saved_s / seconds * 24 if seconds else 0.0,
        "prefill_load": (saved_s + spent_s) / gpus / seconds if seconds else 0.0,
        "prefill_load_with_cache": spent_s / gpus / seconds if seconds else 0.0,
        "ttft_saved_s": {key: cold[key] - warm[key] for key in cold},
        "usd_per_million_tokens": dollars_per_million_tokens(saved_s + spent_s, tokens, gpu_hour),
        "usd_saved_per_million_tokens": dollars_per_million_tokens(saved_s, tokens, gpu_hour),
        "usd_per_million_tokens_hit": dollars_per_million_tokens(saved_s, hit_tokens, gpu_hour),
    }


def net_of_tiers(saving: Figures, traffic: Traffic, month: float) -> Figures:
    """Return the savings per million prompt tokens, less the cost of the tiers.

    The results are None if the traffic takes no time. saving: from `worth`. month: dollars per
    month for all tiers, independent of the number of tokens.
    """
    millions, cost, net = traffic.input_tokens / 1e6, None, None
    if traffic.seconds and millions:
        cost = month * traffic.seconds / MONTH_S / millions
        net = saving["usd_saved_per_million_tokens"] - cost
    return {
        "usd_tiers_per_month": month,
        "usd_tiers_per_million_tokens": cost,
        "usd_net_per_million_tokens": net,
    }


def _l3(shape: Shape) -> bool:
    return shape.l3_blocks != 0
