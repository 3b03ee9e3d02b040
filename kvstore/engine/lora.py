"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): W x becomes W x + (alpha / r) B A x.

An adapter changes K and V, so KV computed under one adapter is wrong under every other: the
engine's cache keeps a tree per adapter, and the adapter's name is part of every block's hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class LoraPart(NamedTuple):
    """One adapted matrix within a stacked one.

    a: [rank, in]; b: [out, rank], already scaled; first: its first output column in the stack.
    """

    a: torch.Tensor
    b: torch.Tensor
    first: int


@dataclass(slots=True)
class LoraAdapter:
    """One adapter's matrices.

    parts: (layer, stack) -> parts, where stack is "qkv", "output", "gate_up" or "down".
    digest: names the weights, hex.
    """

    rank: int
    digest: str
    parts: dict[tuple[int, str], list[LoraPart]] = field(default_factory=dict)


@dataclass(slots=True)
class LoraSegment:
    """Consecutive tokens of one step (first..end) that use one adapter."""

    adapter: LoraAdapter
    first: int
    end: int

    def apply(self, layer: int, stack: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapter's share to out [tokens, width], in place, for this segment's tokens."""
        for part in self.adapter.parts.get((layer, stack), ()):
            share = x[self.first : self.end] @ part.a.T @ part.b.T
            out[self.first : self.end, part.first : part.first + len(part.b)] += share
