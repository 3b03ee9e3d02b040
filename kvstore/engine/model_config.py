"""The shape of a model: its config, and the shapes its weights must have."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvstore.engine.rope import RopeConfig
from kvstore.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
STACKS = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "output": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}
"""Hugging Face's matrices in each stacked matrix of the engine, in order."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model. Sizes are in elements, lengths in tokens.

    Raises:
        ConfigError: the family is not supported, or the sizes do not fit together.
    """

    family: str = "llama"
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                f"architecture {self.family!r} is not supported; use one of {', '.join(FAMILIES)}"
            )
        for name in ("layers", "heads", "kv_heads", "hidden", "intermediate", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model {name} must be at least 1 (got {getattr(self, name)})")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads must be a multiple of kv_heads ({self.kv_heads}) (got {self.heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions (got {self.head_dim})")
        pairs = len(self.rope.divisors)
        if pairs not in (0, self.head_dim // 2):
            raise ConfigError(
                f"rope divisors must be {self.head_dim // 2} for head_dim {self.head_dim} "
                f"(got {pairs})"
            )

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of the seven matrices of a layer, by Hugging Face's short names."""
        return {
            "q_proj": (self.q_width, self.hidden),
            "k_proj": (self.kv_width, self.hidden),
            "v_proj": (self.kv_width, self.hidden),
            "o_proj": (self.hidden, self.q_width),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }
