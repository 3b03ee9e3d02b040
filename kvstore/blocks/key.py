"""The key of a block, and the namespace that its bytes depend on.

A block's hash covers the *tokens*. Everything else that the bytes depend on (model, weights, dtype,
geometry, layout, ranks) goes into the digest of the namespace. So two engines share a block only if
their bytes are interchangeable.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from kvstore.errors import ConfigError

FORMAT_VERSION = 1
"""Version of the block format in a slot; part of every namespace."""

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}

LAYOUT_REFERENCE = "LKTHD"
"""Axes of a block in a slot: layer, K or V, token, head, dimension (the reference engine's)."""


class Key(NamedTuple):
    """Names one block in every tier. The first writer wins; the bytes never change.

    tenant: derived from the caller's auth token, never from a request.
    namespace: `Namespace.digest`.
    hash: the block's chained hash (32 bytes for sha256_cbor).
    """

    tenant: str
    namespace: str
    hash: bytes


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that a block's bytes depend on.

    `layers`, `kv_heads` and `head_dim` are those of one rank. For MLA, `kv_heads` is 1, `head_dim`
    is the width of the latent and `head_dim_v` is 0.

    Raises:
        ConfigError: a size is not positive, or the dtype is unknown.
    """

    model: str
    revision: str = ""
    dtype: str = "bfloat16"
    quantisation: str = "none"
    layers: int
    kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    block_tokens: int = 16
    layout: str = LAYOUT_REFERENCE
    attention: Literal["mha", "mla"] = "mha"
    tp_size: int = 1
    tp_rank: int = 0
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"unknown KV dtype {self.dtype!r}: use one of {', '.join(DTYPE_BYTES)}"
            )
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "tp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 (got {getattr(self, name)})")
        if self.head_dim_v is not None and self.head_dim_v < 0:
            raise ConfigError(f"head_dim_v must be at least 0 (got {self.head_dim_v})")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank must be 0 to {self.tp_size - 1} (got {self.tp_rank})")

    @property
    def bytes_per_token(self) -> int:
        """Size of K and V of one token over all layers of one rank."""
        width_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return self.layers * self.kv_heads * (self.head_dim + width_v) * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Size of one block in a slot."""
        return self.bytes_per_token * self.block_tokens

    @cached_property
    def digest(self) -> str:
        """32 hex digits: SHA-256 of these fields as canonical JSON, truncated to 128 bits."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]
