"""Shared by the tests of the SGLang backend: host memory of its shapes, and ranks over a sidecar.

`HostMemory` has the attributes and calls of SGLang's MHA host pool over a real tensor, so that the
tests run where no SGLang is installed; tests/engines/sglang runs the backend over the real one.
"""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sidecar_rig import ForkedSidecar

from kvstore.connectors.sglang.page_pools import KV, PagePools
from kvstore.connectors.sglang.settings import BackendSettings, backend_settings

torch.set_num_threads(1)

LAYERS, TOKENS, HEADS, WIDTH = 2, 4, 2, 64
"""Geometry of a pool: a page of bfloat16 has 4,096 bytes."""
PAGE_BYTES = LAYERS * TOKENS * HEADS * WIDTH * 2 * 2
LAYOUTS = ("page_first", "page_first_direct", "layer_first")


class HostMemory:
    """K and V of `pages` pages. Like SGLang's pool, "page_first" keeps tokens before layers,
    "page_first_direct" pages before layers, "layer_first" layers before all."""

    def __init__(
        self,
        pages: int,
        layout: str = "page_first",
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = TOKENS,
    ) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, page_size
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = LAYERS, HEADS, WIDTH, WIDTH
        self.start_layer, self.end_layer = 0, LAYERS
        self.pages = pages
        row = (HEADS, WIDTH)
        shape = {
            "page_first": (2, pages * page_size, LAYERS, *row),
            "page_first_direct": (2, pages, LAYERS, page_size, *row),
            "layer_first": (2, LAYERS, pages * page_size, *row),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=dtype)

    def fill(self, seed: int) -> None:
        """Write random bytes to every page."""
        noise = torch.Generator().manual_seed(seed)
        raw = self.kv_buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=noise, dtype=torch.uint8))

    def indices(self, pages: Sequence[int]) -> torch.Tensor:
        """Token slots of these pages."""
        slots = torch.tensor(list(pages)).reshape(-1, 1) * self.page_size
        return (slots + torch.arange(self.page_size)).reshape(-1)

    def page(self, number: int) -> bytes:
        """Bytes of one page, flat."""
        return self.get_data_page(number * self.page_size).view(torch.uint8).numpy().tobytes()

    def overwrite(self, number: int, data: bytes) -> None:
        """Write these bytes to a page."""
        raw = torch.frombuffer(bytearray(data), dtype=self.dtype)
        self.set_from_flat_data_page(number * self.page_size, raw)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        view = self._page(index)
        return view.flatten() if flat else view

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        view = self._page(index)
        view.copy_(data_page.reshape(view.shape))

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self._page(0)).flatten()

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        row = HEADS * WIDTH * self.dtype.itemsize
        half = self.kv_buffer.numel() // 2 * self.dtype.itemsize
        base = self.kv_buffer.data_ptr()
        addresses = []
        firsts = indices.tolist()[:: self.page_size]
        if self.layout == "layer_first":
            across = self.pages * self.page_size * row
            for first in firsts:
                for layer in range(LAYERS):
                    key = base + layer * across + first * row
                    addresses += [key, key + half]
            return addresses, [self.page_size * row] * len(addresses)
        for first in firsts:
            key = base + first * LAYERS * row
            addresses += [key, key + half]
        return addresses, [LAYERS * self.page_size * row] * len(addresses)

    def _page(self, index: int) -> torch.Tensor:
        if self.layout == "page_first":
            return self.kv_buffer[:, index : index + self.page_size]
        if self.layout == "page_first_direct":
            return self.kv_buffer[:, index // self.page_size : index // self.page_size + 1]
        return self.kv_buffer[:, :, index : index + self.page_size]


def config(**changed: Any) -> Any:
    """A HiCacheStorageConfig of one rank."""
    values = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "model_name": "m",
        "dcp_size": 1,
        "should_split_heads": False,
        "extra_config": {},
    }
    return SimpleNamespace(**{**values, **changed})


def settings(socket: str = "", **changed: Any) -> BackendSettings:
    """Settings whose max_wait only guards against hangs, unless a test changes it."""
    max_wait = {"base": 60_000, "max": 60_000}
    where = {"socket": socket} if socket else {}
    return backend_settings({"max_wait": max_wait, "copy_threads": 2, **where, **changed})


class Rank:
    """One rank of a server: its host memory, and its page pools over a store.

    changed: fields of the storage config.
    """

    def __init__(
        self,
        chosen: BackendSettings,
        host: HostMemory,
        *,
        zero_copy: bool = True,
        model: str = "m",
        revision: str = "r",
        **changed: Any,
    ) -> None:
        self.host = host
        self.page_pools = PagePools(
            chosen, config(**changed), zero_copy=zero_copy, model=model, revision=revision
        )
        self.page_pools.add_host_pool(host, KV)
        self.zero_copy = zero_copy

    def cached_prefix_len(self, keys: Sequence[str]) -> int:
        return self.page_pools.cached_prefix_len(keys)

    def set(self, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        if self.zero_copy:
            return self.page_pools.set_addressed(KV, keys, self.host.indices(pages))
        values = [self.host.get_data_page(page * self.host.page_size) for page in pages]
        return self.page_pools.set_flat(keys, values)

    def get(self, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        if self.zero_copy:
            return self.page_pools.get_addressed(KV, keys, self.host.indices(pages))
        targets = [self.host.get_dummy_flat_data_page() for _ in pages]
        got = self.page_pools.get_flat(keys, targets)
        for page, target, is_loaded in zip(pages, targets, got, strict=True):
            if is_loaded:
                self.host.set_from_flat_data_page(page * self.host.page_size, target)
        return got

    def close(self) -> None:
        self.page_pools.close()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def keys_of(name: str, count: int) -> list[str]:
    """Keys in the form of SGLang's: 64 hex digits."""
    return [hashlib.sha256(f"{name} {number}".encode()).hexdigest() for number in range(count)]


def slots(count: int) -> dict[str, Any]:
    """Overrides for a slab of this many pages."""
    return {"l2": {"bytes": count * PAGE_BYTES, "slot_bytes": PAGE_BYTES}}


def flush(sidecar: ForkedSidecar) -> None:
    """Wait until all blocks are written to the tiers below."""
    request = urllib.request.Request(f"{sidecar.url}/v1/flush", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer) == {"flushed": True}


def clear(sidecar: ForkedSidecar, tier: str) -> None:
    """Clear a tier."""
    request = urllib.request.Request(f"{sidecar.url}/v1/clear?tier={tier}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer) == {"cleared": tier}
