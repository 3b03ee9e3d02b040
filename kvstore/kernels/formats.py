"""What a block's bytes in a slot mean: the order of its axes, and how a vector is kept.

Both are in the namespace, so blocks of two formats never answer for one another. A format makes the
store's namespace out of the engine's (`BlockFormat.namespace`), and `format_of` reads it back.

**Order**: letters from the outermost axis in: L layer, K part (K or V), T token of the block,
H head, and last the vector: D where K and V are apart, C where they are one vector (K‖V, or MLA's
latent). "LKTHD" is our engine's; "LHTC" is the bytes of a page of vLLM's LBHNC, "KTLHD" those of
SGLang's page_first. Any pool can be kept in any order that has its parts; a pool's own physical
order copies fastest, since the contiguous runs are longest.

**Storage** of a vector: "plain", as it lies in the pool. "planes": the block's bytes in the order
in which `codecs.zstd_planes` compresses them, every element's most significant byte first, then
the next ones: a plane of the whole block each. "int8": lossy, see `quantise`.

In a store's namespace `dtype`, `head_dim` and `head_dim_v` describe what lies in the slot: planes
and int8 vectors are bytes ("int8"), which also makes the store pick a codec that does not split
again.
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
"""Bytes of the float32 scale behind the values of an int8 vector."""

QUANTISABLE = ("float32", "bfloat16", "float16")
_PLANES = re.compile(r"(\w+)-planes-(\w+)")
_INT8 = re.compile(r"(.*)\+kv-int8-(\w+)")
_BYTES = "int8"


@dataclass(frozen=True)
class BlockFormat:
    """Order and storage of the blocks of one namespace.

    Raises:
        ConfigError: letters that are no order, or an unknown storage.
    """

    order: str = LAYOUT_REFERENCE
    storage: str = "plain"

    def __post_init__(self) -> None:
        axes, vector = self.order[:-1], self.order[-1:]
        if sorted(axes) != sorted({"D": "LKTH", "C": "LTH"}.get(vector, "?")):
            raise ConfigError(
                f"block layout {self.order!r}: L, K, T, H in any order, then D, is right, or L, T, "
                f"H in any order, then C, such as {LAYOUT_REFERENCE!r} or 'LHTC'"
            )
        if self.storage not in STORAGES:
            raise ConfigError(f"block storage {self.storage!r}; one of {STORAGES} is right")

    def namespace(self, engine: Namespace) -> Namespace:
        """The store's namespace for blocks of this format, of the engine that `engine` describes.

        engine: as the engine's KV is: its dtype, its head_dim, its own quantisation.

        Raises:
            ConfigError: a dtype that cannot be kept as int8.
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
                    f"KV of dtype {engine.dtype!r} cannot be kept as int8; one of "
                    f"{', '.join(QUANTISABLE)} can"
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
        """Bytes that one vector takes in a slot."""
        return pool.width + SCALE_BYTES if self.storage == "int8" else pool.vector_bytes

    def block_bytes(self, pool: PoolLayout, pages_per_block: int) -> int:
        """Bytes of a block in a slot."""
        tokens = pages_per_block * pool.page_tokens
        return tokens * pool.vectors_per_token * self.slot_vector_bytes(pool)

    def slot_strides(self, pool: PoolLayout, pages_per_block: int) -> dict[str, int]:
        """Bytes in a slot from one to the next along L, K, T and H (K: 0 in a pool of one part).

        Of planes: as if plain; in a plane everything lies at its element's index.
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
        """Assert that blocks of this pool can be kept so: "K" stands for two parts."""
        assert pool.parts == 2 or "K" not in self.order, (
            f"a pool whose K and V are one vector cannot be kept in order {self.order!r}"
        )
        if self.storage == "int8":
            assert dtype_name(pool.dtype) in QUANTISABLE, f"{pool.dtype} cannot be kept as int8"


PLAIN = BlockFormat()


def format_of(namespace: Namespace) -> tuple[BlockFormat, Namespace]:
    """The format of a store's namespace, and the namespace of the engine behind it.

    Raises:
        ConfigError: a layout that is none of ours.
    """
    width_v = namespace.head_dim_v
    if found := _PLANES.fullmatch(namespace.layout):
        order, dtype = found.groups()
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"layout {namespace.layout!r} names no dtype of ours")
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
    """A torch dtype by the namespace's name."""
    name = str(dtype).removeprefix("torch.")
    return {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(name, name)


def check_layout(namespace: Namespace, pool: PoolLayout) -> tuple[BlockFormat, int]:
    """That blocks of `namespace` can be copied out of `pool`: their format, and pages per block.

    A pool of uint8 may hold any dtype of one byte (engines keep fp8 so).

    Raises:
        ConfigError: the namespace speaks of another geometry or dtype, or its block is not a whole
            number of pages.
    """
    form, engine = format_of(namespace)
    width_v = engine.head_dim if engine.head_dim_v is None else engine.head_dim_v
    together = pool.parts == 1
    held = "a single vector" if together else "K and V apart"
    if (together and "K" in form.order) or (engine.attention == "mla" and not together):
        raise ConfigError(
            f"the namespace's layout is {namespace.layout!r} of {engine.attention}, but the KV is "
            f"{held}"
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
            f"block_tokens is {namespace.block_tokens}; it must be a whole multiple of the "
            f"engine's page of {pool.page_tokens} tokens"
        )
    pages_per_block = namespace.block_tokens // pool.page_tokens
    assert form.block_bytes(pool, pages_per_block) == namespace.block_bytes, "sizes that agree"
    return form, pages_per_block
