"""GPU memory that is left for cached prefixes at peak load."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.analysis.planning.spans import Spans

UTILISATION: Final = 0.9
"""Fraction of the GPU's memory that an engine uses. vLLM's default."""
BATCH_TOKENS: Final = 8192
"""Maximum tokens per step. vLLM's default on large GPUs."""
DECODE_RATE: Final = 30.0
"""Tokens per second of one request."""


@dataclass(frozen=True)
class Budget:
    """Memory of one GPU (one rank), in bytes.

    pool_bytes: for the KV of running requests and of cached prefixes. peak_requests: maximum number
    of concurrent requests, with peak_context tokens each.
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
        """Return the bytes left for cached prefixes at the peak. 0 if requests need all."""
        return max(0, self.pool_bytes - self.peak_bytes)

    @property
    def requests_max(self) -> int:
        """Return how many requests of that context fit into the pool at once."""
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
    """Return the budget of one rank. Weights and activations: the rank's part of them."""
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
    """Return the maximum number of concurrent requests. starts_s: in any order."""
    ends: list[float] = []
    most = 0
    for start_s, last_s in sorted(zip(starts_s, lasts_s, strict=True)):
        while ends and ends[0] <= start_s:
            heapq.heappop(ends)
        heapq.heappush(ends, start_s + last_s)
        most = max(most, len(ends))
    return most
