"""What a host pool of SGLang says of its pages: where they lie, and all that fixes their bytes.

SGLang's keys name tokens only, without dtype, layout or geometry. Those go into the namespace here,
so that a page of another kind under the same key is another page. Reads attributes of host pools
and of the storage config, so it needs no sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import torch

from kvstore.blocks.key import DTYPE_BYTES, Namespace
from kvstore.connectors.sglang.copies import Extents
from kvstore.connectors.sglang.settings import TRIED
from kvstore.errors import ConfigError

RELEASES: Final = TRIED.rpartition(".")[0]
"""Releases of SGLang that mean the same by the name of a layout."""
DTYPES: Final = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "uint8": "int8"}
"""torch's names that are not the namespace's own."""
DTYPE_NAMES: Final = ("dtype", "temporal_dtype", "conv_dtype")
"""Where pools keep the dtypes of what a page is made of."""
OPAQUE: Final = "int8"
"""Of pages whose elements are not of one known type: bytes."""
RANKED_POOLS: Final = ("mamba",)
"""Side pools that differ from rank to rank also where the model's KV is the same on all."""

EXTENTS: Final = "extents"
"""A block is a page's pieces in the order of `get_page_buffer_meta`."""
FLAT: Final = "flat"
"""A block is SGLang's flat page: what the generic interface hands over."""


class HostPool:
    """One host pool, as SGLang registered it.

    pool: the pool; name: SGLang's name of it ("kv", "mamba", ...).
    """

    def __init__(self, pool: Any, name: str) -> None:
        self.pool = pool
        self.name = name
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)

    @property
    def holds_bytes(self) -> bool:
        """False for a logical anchor: an index space whose KV lies in side pools."""
        return getattr(self.pool, "kv_buffer", self) is not None

    def extents(self, host_indices: Any) -> list[Extents]:
        """Where the pages of these token slots lie, page by page.

        host_indices: int64 tensor of pages * page_tokens token slots, a page's all in a row.
        Raises what the pool raises where it has no addresses to give.
        """
        pages = len(host_indices) // self.page_tokens
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        pieces = list(zip(addresses, sizes, strict=True))
        each = len(pieces) // max(1, pages)
        assert each * pages == len(pieces), f"{len(pieces)} pieces for {pages} pages"
        return [pieces[at : at + each] for at in range(0, len(pieces), max(1, each))]

    def pieces(self, order: str) -> tuple[int, ...]:
        """Bytes of each piece of a page in this order, as a block holds them; nothing where the
        pool gives no addresses for its layout."""
        if order == FLAT:
            page = self.pool.get_dummy_flat_data_page()
            return (int(page.numel() * page.element_size()),)
        first_page = torch.arange(self.page_tokens, dtype=torch.int64)
        try:
            return tuple(nbytes for _, nbytes in self.extents(first_page)[0])
        except (NotImplementedError, ValueError, AttributeError):
            return ()

    @property
    def dtype(self) -> str:
        """The namespace's name for the dtype.

        A pool that stores fp8 as bytes says so itself; its device pool knows which fp8 it is.
        """
        stored = str(getattr(self.pool, "dtype", "uint8")).removeprefix("torch.")
        device = getattr(getattr(self.pool, "device_pool", None), "dtype", None)
        told = str(device).removeprefix("torch.") if device is not None else stored
        same_width = DTYPE_BYTES.get(DTYPES.get(told, told)) == 1
        name = told if stored == "uint8" and same_width else stored
        name = DTYPES.get(name, name)
        return name if name in DTYPE_BYTES else OPAQUE


def namespace_of(
    host: HostPool, config: Any, order: str, *, model: str, revision: str
) -> Namespace:
    """The namespace of a pool's pages on this rank.

    config: SGLang's HiCacheStorageConfig. order: `EXTENTS` or `FLAT`, which differ in some layouts.

    Raises ConfigError: the pool gives no addresses for its layout.
    """
    pool, pieces = host.pool, host.pieces(order)
    if not pieces:
        raise ConfigError(
            f"a host pool of layout {getattr(pool, 'layout', '')!r} gives no addresses; leave "
            "interface_v1 out of the extra config, or choose --hicache-mem-layout page_first"
        )
    replicated = bool(config.is_mla_model) and not _is_ranked(host)
    ranks = (1, 0) if replicated else (int(config.tp_size), int(config.tp_rank))
    heads = int(getattr(pool, "head_num", 0) or 0)
    about = {
        "sglang": RELEASES,
        "pool": host.name,
        "kind": type(pool).__name__,
        "layout": str(getattr(pool, "layout", "")),
        "order": order,
        "pieces": ",".join(f"{len(list(same))}x{size}" for size, same in groupby(pieces)),
        "tag": str(getattr(pool, "storage_format_tag", None) or ""),
        "tokens": str(host.page_tokens),
        "layers": f"{getattr(pool, 'start_layer', 0)}+{getattr(pool, 'layer_num', 0)}",
        "heads": f"{heads}x{getattr(pool, 'head_dim', 0)}+{getattr(pool, 'v_head_dim', 0)}",
        "pp": f"{config.pp_rank}/{config.pp_size}",
        "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        "stored": ",".join(str(getattr(pool, name, "")) for name in DTYPE_NAMES),
    }
    return Namespace(
        model=model,
        revision=revision,
        layout=";".join(f"{name}={value}" for name, value in about.items()),
        attention="mla" if replicated and not heads else "mha",
        tp_size=ranks[0],
        tp_rank=ranks[1],
        **_geometry(host, sum(pieces)),
    )


def _geometry(host: HostPool, nbytes: int) -> dict[str, Any]:
    """Fields of a namespace whose block has `nbytes` bytes.

    The pool's own geometry where it multiplies to that; else rows of elements, which say no more
    than how many bytes there are (the layout names the rest).
    """
    pool, dtype = host.pool, host.dtype
    layers, heads = (int(getattr(pool, name, 0) or 0) for name in ("layer_num", "head_num"))
    width = int(getattr(pool, "head_dim", 0) or 0)
    width_v = int(getattr(pool, "v_head_dim", width) or 0)
    each = DTYPE_BYTES[dtype]
    if layers * host.page_tokens * heads * (width + width_v) * each == nbytes and heads * width:
        return {
            "dtype": dtype,
            "layers": layers,
            "kv_heads": heads,
            "head_dim": width,
            "head_dim_v": width_v,
            "block_tokens": host.page_tokens,
        }
    if nbytes % each:
        dtype, each = OPAQUE, 1
    tokens = host.page_tokens if nbytes % (each * host.page_tokens) == 0 else 1
    return {
        "dtype": dtype,
        "layers": 1,
        "kv_heads": 1,
        "head_dim": nbytes // (each * tokens),
        "head_dim_v": 0,
        "block_tokens": tokens,
    }


def _is_ranked(host: HostPool) -> bool:
    """Whether a side pool is each rank's own although the model's KV is every rank's: states are,
    and so is KV that is divided by heads (an MHA draft beside an MLA model)."""
    return host.name in RANKED_POOLS or bool(getattr(host.pool, "head_num", 0))


def tensor_extents(tensors: Sequence[Any]) -> list[Extents]:
    """Contiguous tensors in host memory as pages of one extent each."""
    for tensor in tensors:
        assert tensor.is_contiguous(), f"a page of strides {tensor.stride()}"
        assert tensor.device.type == "cpu", f"a page on {tensor.device}"
    return [[(t.data_ptr(), t.numel() * t.element_size())] for t in tensors]
