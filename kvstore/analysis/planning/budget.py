"""What a GPU has left for cached prefixes when most requests are running."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.analysis.planning.spans import Spans

UTILISATION: Final = 0.9
"""Part of the GPU's memory that an engine takes; vLLM's default."""
BATCH_TOKENS: Final = 8192
"""Tokens of a step; vLLM's default on large GPUs."""
DECODE_RATE: Final = 30.0
"""Tokens a second of one request."""


@dataclass(frozen=True)
class Budget:
    """Bytes of one GPU (one rank). pool: for KV of running requests and of cached prefixes.

    peak_requests: running at a time, at most, each with peak_context tokens.
    """

    gpu_bytes: int
    weight_bytes: int
    activation_bytes: int
    pool_bytes: int
    peak_requests: int
    peak_context: int
    peak_bytes: int

    @property
    def left_bytes(self) -> int:
        """For cached prefixes, at the peak; 0 where running requests need it all."""
        return max(0, self.pool_bytes - self.peak_bytes)

    @property
    def requests_max(self) -> int:
        """Requests of that context that the pool holds at a time."""
        each = self.peak_bytes // self.peak_requests if self.peak_requests else 0
        return self.pool_bytes // each if each else 0


def budget(
    gpu_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
    spans: Spans,
    *,
    peak_requests: int,
    peak_context: int,
    utilisation: float = UTILISATION,
) -> Budget:
    """Of one rank: weights and activations are its own part of them."""
    pool = int(gpu_bytes * utilisation) - weight_bytes - activation_bytes
    return Budget(
        gpu_bytes=gpu_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        pool_bytes=max(0, pool),
        peak_requests=peak_requests,
        peak_context=peak_context,
        peak_bytes=peak_requests * spans.bytes_at(peak_context),
    )


def most_at_once(starts_s: Sequence[float], lasts_s: Sequence[float]) -> int:
    """The most requests that run at a time. starts_s: in any order."""
    ends: list[float] = []
    most = 0
    for start_s, last_s in sorted(zip(starts_s, lasts_s, strict=True)):
        while ends and ends[0] <= start_s:
            heapq.heappop(ends)
        heapq.heappush(ends, start_s + last_s)
        most = max(most, len(ends))
    return most
