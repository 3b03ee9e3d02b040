"""The bytes of a block in a slot: the order of its axes, and the storage of a vector.

The namespace includes both, so blocks of different formats never match each other. A format
converts the engine's namespace into the store's (`BlockFormat.namespace`); `format_of` reverses it.

**Order**: letters from the outermost axis in: L layer, K part (K or V), T token of the block,
H head, and last the vector: D if K and V are separate, C if they are one vector (K‖V, or MLA's
latent). "LKTHD" is kvstore's engine's. "LHTC" is the order of a page in vLLM's LBHNC, "KTLHD" in
SGLang's page_first. Any pool can be stored in any order with its parts. A pool's own physical order
copies fastest, because its contiguous runs are longest.

**Storage** of a vector: "plain", as in the pool. "planes": the block's bytes in the order in which
`codecs.byteshuffle_zstd` compresses them: all elements' most significant bytes first, then the next
ones, as one plane of the whole block each. "int8": lossy, see `quantise`.

In a store's namespace, `dtype`, `head_dim` and `head_dim_v` describe the slot. Planes and int8
vectors are bytes ("int8"). This also makes the store choose a codec that does not split again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from kvstore.blocks.key import DTYPE_BYTES, LAYOUT_REFERENCE, Namespace
from kvstore.errors import ConfigError
from kvstore.kernels.layout import PoolLayout

STORAGES = ("plain", "planes", "int8")
SCALE_BYTES = 4
"""Bytes of the float32 scale after the values of an int8 vector."""

QUANTISABLE = ("float32", "bfloat16", "float16")
_PLANES = re.compile(r"(\w+)-planes-(\w+)")
_INT8 = re.compile(r"(.*)\+kv-int8-(\w+)")
_BYTES = "int8"


@dataclass(frozen=True)
class BlockFormat:
    """Order and storage of the blocks of one namespace.

    Raises:
        ConfigError: the order or the storage is invalid.
    """

    order: str = LAYOUT_REFERENCE
    storage: str = "plain"

    def __post_init__(self) -> None:
        axes, vector = self.order[:-1], self.order[-1:]
        if sorted(axes) != sorted({"D": "LKTH", "C": "LTH"}.get(vector, "?")):
            raise ConfigError(
                f"invalid block layout {self.order!r}: use L, K, T, H in any order, then D, or "
                f"L, T, H in any order, then C, such as {LAYOUT_REFERENCE!r} or 'LHTC'"
            )
        if self.storage not in STORAGES:
            raise ConfigError(
                f"invalid block storage {self.storage!r}: use one of {', '.join(STORAGES)}"
            )

    def namespace(self, engine: Namespace) -> Namespace:
        """Return the store's namespace for an engine's blocks in this format.

        engine: describes the engine's KV: its dtype, its head_dim, its own quantisation.

        Raises:
            ConfigError: the dtype cannot be stored as int8.
        """
        width_v = engine.head_dim if engine.head_dim_v is None else engine.head_dim_v
        if self.storage == "planes":
            size = DTYPE_BYTES[engine.dtype]
            return replace(
                engine,
                layout=f"{self.order}-planes-{engine.dtype}",
                dtype=_BYTES,
                head_dim=engine.head_dim * size,
                head_dim_v=width_v * size,
            )
        if self.storage == "int8":
            if engine.dtype not in QUANTISABLE:
                raise ConfigError(
                    f"KV of dtype {engine.dtype!r} cannot be stored as int8; use one of "
                    f"{', '.join(QUANTISABLE)}"
                )
            return replace(
                engine,
                layout=self.order,
                quantisation=f"{engine.quantisation}+kv-int8-{engine.dtype}",
                dtype=_BYTES,
                head_dim=engine.head_dim + SCALE_BYTES,
                head_dim_v=width_v + SCALE_BYTES if width_v else 0,
            )
        return replace(engine, layout=self.order)

    def slot_vector_bytes(self, pool: PoolLayout) -> int:
        """Return the bytes of one vector in a slot."""
        return pool.width + SCALE_BYTES if self.storage == "int8" else pool.vector_bytes

    def block_bytes(self, pool: PoolLayout, pages_per_block: int) -> int:
        """Return the bytes of a block in a slot."""
        tokens = pages_per_block * pool.page_tokens
        return tokens * pool.vectors_per_token * self.slot_vector_bytes(pool)

    def slot_strides(self, pool: PoolLayout, pages_per_block: int) -> dict[str, int]:
        """Return the byte steps in a slot along L, K, T and H (K: 0 in a pool of one part).

        For planes, they are those of plain storage. In a plane, each byte is at its element's
        index.
        """
        self.check(pool)
        tokens = pages_per_block * pool.page_tokens
        counts = {"L": pool.layers, "K": pool.parts, "T": tokens, "H": pool.heads}
        axes = self.order[:-1] if "K" in self.order else self.order[:-1] + "K"
        strides = {}
        step = self.slot_vector_bytes(pool)
        for axis in reversed(axes):
            strides[axis] = step
            step *= counts[axis]
        return strides

    def check(self, pool: PoolLayout) -> None:
        """Assert that blocks of this pool fit this format: "K" requires two parts."""
        assert pool.parts == 2 or "K" not in self.order, (
            f"order {self.order!r} needs K and V as separate vectors in the pool"
        )
        if self.storage == "int8":
            assert dtype_name(pool.dtype) in QUANTISABLE, f"{pool.dtype} cannot be stored as int8"


PLAIN = BlockFormat()


def format_of(namespace: Namespace) -> tuple[BlockFormat, Namespace]:
    """Return the format of a store's namespace, and the engine's namespace.

    Raises:
        ConfigError: the layout is unknown.
    """
    width_v = namespace.head_dim_v
    if found := _PLANES.fullmatch(namespace.layout):
        order, dtype = found.groups()
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"layout {namespace.layout!r} has an unknown dtype")
        size = DTYPE_BYTES[dtype]
        engine = replace(
            namespace,
            layout=order,
            dtype=dtype,
            head_dim=namespace.head_dim // size,
            head_dim_v=None if width_v is None else width_v // size,
        )
        return BlockFormat(order, "planes"), engine
    if found := _INT8.fullmatch(namespace.quantisation):
        engine = replace(
            namespace,
            quantisation=found[1],
            dtype=found[2],
            head_dim=namespace.head_dim - SCALE_BYTES,
            head_dim_v=width_v - SCALE_BYTES if width_v else width_v,
        )
        return BlockFormat(namespace.layout, "int8"), engine
    return BlockFormat(namespace.layout), namespace


def dtype_name(dtype: torch.dtype) -> str:
    """Return the namespace's name of a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    return {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(name, name)


def check_layout(namespace: Namespace, pool: PoolLayout) -> tuple[BlockFormat, int]:
    """Check that blocks of `namespace` can be copied out of `pool`.

    Returns their format, and pages per block. A pool of uint8 can have any dtype of one byte
    (engines store fp8 this way).

    Raises:
        ConfigError: the namespace has another geometry or dtype, or its block is not a whole number
            of pages.
    """
    form, engine = format_of(namespace)
    width_v = engine.head_dim if engine.head_dim_v is None else engine.head_dim_v
    together = pool.parts == 1
    in_engine = "a single vector" if together else "separate K and V"
    if (together and "K" in form.order) or (engine.attention == "mla" and not together):
        raise ConfigError(
            f"the namespace's layout is {namespace.layout!r} of {engine.attention}, but the "
            f"engine's KV is {in_engine}"
        )
    in_pool = dtype_name(pool.dtype)
    if in_pool == "uint8" and DTYPE_BYTES[engine.dtype] == 1:
        in_pool = engine.dtype
    expected = {
        "layers": (engine.layers, pool.layers),
        "kv_heads": (engine.kv_heads, pool.heads),
        "head_dim": (engine.head_dim, pool.width - width_v if together else pool.width),
        "head_dim_v": (width_v, width_v if together else pool.width),
        "dtype": (engine.dtype, in_pool),
    }
    for field, (in_namespace, there) in expected.items():
        if in_namespace != there:
            raise ConfigError(
                f"the namespace's {field} is {in_namespace}, but the engine's KV has {there}"
            )
    if namespace.block_tokens % pool.page_tokens:
        raise ConfigError(
            f"block_tokens must be a multiple of the engine's page of {pool.page_tokens} tokens "
            f"(got {namespace.block_tokens})"
        )
    pages_per_block = namespace.block_tokens // pool.page_tokens
    assert form.block_bytes(pool, pages_per_block) == namespace.block_bytes, "sizes must agree"
    return form, pages_per_block
