"""Samples the next token from logits: greedy, temperature, top-k, top-p, a seed per request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request.

    temperature: 0: greedy (the lowest id wins a tie). top_k: only the k most likely tokens. 0: all.
    top_p: only the most likely tokens whose probabilities sum up to p. 1: all. seed: equal seeds
    and logits give equal tokens, whatever else is in the batch. None: a seed from the system.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(f"temperature must be 0 to 100 (got {self.temperature})")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must be above 0 and at most 1 (got {self.top_p})")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be at least 0; 0 means all (got {self.top_k})")


class Sampler:
    """One request's sampler, with its own random numbers."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._random = random.Random(params.seed)

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0

    def draw(self, logits: npt.NDArray[np.float32]) -> int:
        """Sample a token from logits [vocab]. Uses exactly one random number unless greedy."""
        if self.greedy:
            return int(np.argmax(logits))
        params = self.params
        # Subtract the maximum before dividing, so that a tiny temperature does not overflow.
        below = logits.astype(np.float64) - float(logits.max())
        weights = np.exp(below / params.temperature)
        order: npt.NDArray[np.int64] | None = None
        if params.top_k or params.top_p < 1.0:
            order = np.argsort(-weights, kind="stable")
            if params.top_k:
                order = order[: params.top_k]
            weights = weights[order]
        mass = np.cumsum(weights)
        if params.top_p < 1.0:
            kept = int(np.searchsorted(mass, params.top_p * mass[-1])) + 1
            mass = mass[:kept]
        chosen = int(np.searchsorted(mass, self._random.random() * mass[-1], side="right"))
        chosen = min(chosen, len(mass) - 1)
        return chosen if order is None else int(order[chosen])


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return the next token of each row: logits [rows, vocab] on any device, a sampler per row."""
    assert len(logits) == len(samplers), (len(logits), len(samplers))
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [index for index, sampler in enumerate(samplers) if not sampler.greedy]
    if drawn:
        rows = logits[drawn].cpu().numpy()
        for index, row in zip(drawn, rows, strict=True):
            tokens[index] = samplers[index].draw(row)
    return tokens
