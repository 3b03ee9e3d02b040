"""Describes the pages of a host pool of SGLang: their addresses and their namespace.

SGLang's keys cover tokens only, not dtype, layout or geometry. These go into the namespace, so that
pages of different kinds never share a block. The module reads attributes of host pools and of the
storage config. It does not import sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import torch

from kvstore.blocks.key import DTYPE_BYTES, Namespace
from kvstore.connectors.sglang.copies import Extents
from kvstore.connectors.sglang.settings import TESTED_RELEASE
from kvstore.errors import ConfigError

RELEASE_SERIES: Final = TESTED_RELEASE.rpartition(".")[0]
"""Releases of SGLang in which the names of layouts have the same meaning."""
DTYPES: Final = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "uint8": "int8"}
"""Names of dtypes in the namespace that differ from torch's."""
DTYPE_NAMES: Final = ("dtype", "temporal_dtype", "conv_dtype")
"""Attributes of host pools with the dtypes of a page's parts."""
OPAQUE: Final = "int8"
"""Dtype of pages whose elements do not have one known type: bytes."""
RANKED_POOLS: Final = ("mamba",)
"""Side pools that differ between ranks even if the model's KV is the same on all ranks."""

EXTENTS: Final = "extents"
"""A block is the extents of a page in the order of `get_page_buffer_meta`."""
FLAT: Final = "flat"
"""A block is SGLang's flat page, as the generic interface passes it."""


class HostPool:
    """One host pool, as SGLang registered it.

    pool: the pool; name: SGLang's name of it ("kv", "mamba", ...).
    """

    def __init__(self, pool: Any, name: str) -> None:
        self.pool = pool
        self.name = name
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)

    @property
    def has_bytes(self) -> bool:
        """False for a logical anchor: an index space whose KV is in side pools."""
        return getattr(self.pool, "kv_buffer", self) is not None

    def extents(self, host_indices: Any) -> list[Extents]:
        """Addresses of the pages of these token slots, page by page.

        host_indices: int64 tensor of pages * page_tokens token slots; those of a page are
            contiguous.

        Raises the exception of the pool if it has no addresses.
        """
        pages = len(host_indices) // self.page_tokens
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        extents = list(zip(addresses, sizes, strict=True))
        each = len(extents) // max(1, pages)
        assert each * pages == len(extents), f"{len(extents)} extents for {pages} pages"
        return [extents[at : at + each] for at in range(0, len(extents), max(1, each))]

    def extent_sizes(self, page_format: str) -> tuple[int, ...]:
        """Bytes of each extent of a page in this format, in the order of the block; empty if the
        pool gives no addresses for its layout."""
        if page_format == FLAT:
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

        A pool that stores fp8 has the dtype uint8; its device pool has the exact kind of fp8.
        """
        stored = str(getattr(self.pool, "dtype", "uint8")).removeprefix("torch.")
        device = getattr(getattr(self.pool, "device_pool", None), "dtype", None)
        on_device = str(device).removeprefix("torch.") if device is not None else stored
        same_width = DTYPE_BYTES.get(DTYPES.get(on_device, on_device)) == 1
        name = on_device if stored == "uint8" and same_width else stored
        name = DTYPES.get(name, name)
        return name if name in DTYPE_BYTES else OPAQUE


def namespace_of(
    host: HostPool,
    config: Any,
    page_format: str,
    *,
    model: str,
    revision: str,
    compute_dtype: str = "",
) -> Namespace:
    """The namespace of a pool's pages on this rank.

    config: SGLang's HiCacheStorageConfig. page_format: `EXTENTS` or `FLAT`, whose bytes differ in
    some layouts. compute_dtype: the model's, "" if unknown; pages of one dtype that engines of
    two dtypes computed differ.

    Raises ConfigError: the pool gives no addresses for its layout.
    """
    pool, sizes = host.pool, host.extent_sizes(page_format)
    if not sizes:
        raise ConfigError(
            f"a host pool of layout {getattr(pool, 'layout', '')!r} gives no addresses; omit "
            "interface_v1 in the extra config, or use --hicache-mem-layout page_first"
        )
    replicated = bool(config.is_mla_model) and not _is_ranked(host)
    ranks = (1, 0) if replicated else (int(config.tp_size), int(config.tp_rank))
    heads = int(getattr(pool, "head_num", 0) or 0)
    about = {
        "sglang": RELEASE_SERIES,
        "pool": host.name,
        "kind": type(pool).__name__,
        "layout": str(getattr(pool, "layout", "")),
        "order": page_format,
        "pieces": ",".join(f"{len(list(same))}x{size}" for size, same in groupby(sizes)),
        "tag": str(getattr(pool, "storage_format_tag", None) or ""),
        "tokens": str(host.page_tokens),
        "layers": f"{getattr(pool, 'start_layer', 0)}+{getattr(pool, 'layer_num', 0)}",
        "heads": f"{heads}x{getattr(pool, 'head_dim', 0)}+{getattr(pool, 'v_head_dim', 0)}",
        "pp": f"{config.pp_rank}/{config.pp_size}",
        "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        "stored": ",".join(str(getattr(pool, name, "")) for name in DTYPE_NAMES),
    }
    if compute_dtype not in ("", host.dtype):
        about["computed"] = compute_dtype
    return Namespace(
        model=model,
        revision=revision,
        layout=";".join(f"{name}={value}" for name, value in about.items()),
        attention="mla" if replicated and not heads else "mha",
        tp_size=ranks[0],
        tp_rank=ranks[1],
        **_geometry(host, sum(sizes)),
    )


def _geometry(host: HostPool, nbytes: int) -> dict[str, Any]:
    """Fields of a namespace whose block has `nbytes` bytes.

    The pool's own geometry if it gives that size; else rows of elements, which give only the size
    (the layout field has the rest).
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
    """True if a side pool differs between ranks although the model's KV does not: states, and KV
    that is split by heads (an MHA draft model beside an MLA model)."""
    return host.name in RANKED_POOLS or bool(getattr(host.pool, "head_num", 0))


def tensor_extents(tensors: Sequence[Any]) -> list[Extents]:
    """Contiguous tensors in host memory as pages of one extent each."""
    for tensor in tensors:
        assert tensor.is_contiguous(), f"a page of strides {tensor.stride()}"
        assert tensor.device.type == "cpu", f"a page on {tensor.device}"
    return [[(t.data_ptr(), t.numel() * t.element_size())] for t in tensors]
