"""Rotary position embedding: a table of angles, and the rotation of queries and keys.

RoPE: Su et al. 2021, arXiv 2104.09864. Two conventions pair the dimensions that rotate together:
half-split (i with i + d/2: Hugging Face) and interleaved (2i with 2i + 1: GGUF's llama files).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvstore.errors import ConfigError

SCALING_KINDS = ("none", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Parameters that turn positions into angles.

    scaling: "none"; "linear" (positions divided by `factor`); "llama3" (long wavelengths divided by
    `factor`, short ones kept, a ramp between, by `low_freq_factor`, `high_freq_factor` and
    `original_max_positions`: Llama 3.1's model card).
    divisors: one per pair, divides its frequency. GGUF files store a llama3 scaling in this form.
    Empty: none.

    Raises:
        ConfigError: the scaling is unknown.
    """

    theta: float = 10000.0
    interleaved: bool = False
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.scaling not in SCALING_KINDS:
            raise ConfigError(
                f"rope scaling {self.scaling!r} is not supported; "
                f"use one of {', '.join(SCALING_KINDS)}"
            )


def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the radians per position of each pair: [head_dim / 2] float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.divisors:
        freqs = freqs / torch.tensor(rope.divisors, dtype=torch.float64)
    if rope.scaling == "linear":
        return freqs / rope.factor
    if rope.scaling == "llama3":
        cycles = rope.original_max_positions * freqs / (2 * math.pi)
        kept = (cycles - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return freqs * kept + freqs / rope.factor * (1.0 - kept)
    return freqs


class RopeTable:
    """cos and sin of every position: two [max_positions, 1, head_dim / 2] float32 tensors."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float64)
        angles = torch.outer(positions, frequencies(rope, head_dim))[:, None, :]
        self.interleaved = rope.interleaved
        self.cos = angles.cos().float().to(device)
        self.sin = angles.sin().float().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of these positions ([tokens] int64): two [tokens, 1, head_dim / 2]."""
        return self.cos[positions], self.sin[positions]

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [tokens, heads, head_dim] by its tokens' angles. Computes in float32."""
        wide = x.float()
        if self.interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = wide.tensor_split(2, dim=-1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return rotated.to(x.dtype)
