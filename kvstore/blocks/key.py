"""What a block is called: its key, and the namespace that fixes what its bytes mean.

A block's hash names *tokens*. Everything else that decides the bytes (model, weights, dtype,
geometry, layout, ranks) is digested into the namespace, so that two engines share a block only
when their bytes are interchangeable.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from kvstore.errors import ConfigError

FORMAT_VERSION = 1
"""Version of block bytes in a slot; part of every namespace."""

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}

LAYOUT_REFERENCE = "LKTHD"
"""Order of a block's axes in a slot: layer, K or V, token, head, dimension (our engine's)."""


class Key(NamedTuple):
    """Names one block in every tier. First writer wins; the bytes never change.

    tenant: set from the caller's credential, never from a request.
    namespace: `Namespace.digest`.
    hash: the block's chained hash (32 bytes for sha256_cbor).
    """

    tenant: str
    namespace: str
    hash: bytes


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that fixes a block's bytes.

    `layers`, `kv_heads` and `head_dim` are those of one rank. For MLA, `kv_heads` is 1,
    `head_dim` the latent's width and `head_dim_v` 0.

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
                f"unknown KV dtype {self.dtype!r}; one of {', '.join(DTYPE_BYTES)} is right"
            )
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "tp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.head_dim_v is not None and self.head_dim_v < 0:
            raise ConfigError(f"head_dim_v is {self.head_dim_v}; it must be at least 0")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank {self.tp_rank} is outside 0..{self.tp_size - 1}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers of one rank."""
        width_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return self.layers * self.kv_heads * (self.head_dim + width_v) * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in a slot."""
        return self.bytes_per_token * self.block_tokens

    @cached_property
    def digest(self) -> str:
        """32 hex digits: SHA-256 over this spec as canonical JSON, cut to 128 bits."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]
