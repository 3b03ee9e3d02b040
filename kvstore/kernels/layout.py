"""Where KV lies in an engine's pool: one description for our engine, vLLM and SGLang.

A **sheet** is one part of one layer: its K, its V, or, where an engine keeps both in one vector (or
MLA's single latent), that vector. A sheet is a view `[num_pages, page_tokens, heads, width]` of the
engine's own memory, of any strides, whose last axis is contiguous. A pool is the list of its
sheets, layer by layer, and all copiers work on sheets: whoever can show their KV as sheets can be
served. A group of layers of another shape (sliding window, an indexer) is a pool of its own.

vLLM since 0.26 registers per layer a tensor `[blocks, kv_heads, block_tokens, K‖V]` (a logical
order; the strides tell the physical one, LBHNC, LBNHC, BLHNC, ...):

    PoolLayout.vllm(kv_caches.values(), head_dim=128)      # K and V as two parts
    PoolLayout.vllm(kv_caches.values())                    # one part: K‖V as it is, or MLA's latent

and before 0.26 `[2, blocks, block_tokens, kv_heads, head_dim]` or `[blocks, 2, ...]`:

    PoolLayout.stacked(kv_caches.values(), kv_axis=0)

SGLang's device pool is per layer `[tokens, kv_heads, head_dim]` for K and for V, its host pool one
tensor in an order of its name; pages are `page_tokens` consecutive tokens:

    PoolLayout.token_lists(pool.k_buffer, pool.v_buffer, page_tokens=64)
    PoolLayout.sglang_host(pool.kv_buffer, "page_first", page_tokens=64)

Nothing is copied and nothing may move afterwards: the layout keeps the tensors alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

SGLANG_HOST_ORDERS = ("layer_first", "page_first", "page_first_direct")


@dataclass(frozen=True, eq=False)
class PoolLayout:
    """A paged pool as sheets.

    sheets: `[num_pages, page_tokens, heads, width]` each, all of one shape, dtype, device and
        strides; layer by layer, and within a layer K before V.
    parts: sheets of a layer: 2 for K and V, 1 for a single vector.
    """

    sheets: tuple[torch.Tensor, ...]
    parts: int

    def __post_init__(self) -> None:
        assert self.parts in (1, 2), f"a layer has 1 or 2 parts, not {self.parts}"
        assert self.sheets, "a pool without layers"
        assert len(self.sheets) % self.parts == 0, "a layer lacks a part"
        first = self.sheets[0]
        assert first.dim() == 4, f"a sheet has 4 axes, not {first.dim()}"
        assert min(first.shape) > 0, f"an empty sheet {tuple(first.shape)}"
        assert first.stride(3) == 1 or first.shape[3] == 1, "a vector is contiguous"
        for sheet in self.sheets:
            assert sheet.shape == first.shape, "all sheets have one shape"
            assert sheet.stride() == first.stride(), "all sheets have the same strides"
            assert sheet.dtype == first.dtype, "all sheets have one dtype"
            assert sheet.device == first.device, "all sheets are on one device"

    # ---- sizes ----

    @property
    def layers(self) -> int:
        return len(self.sheets) // self.parts

    @property
    def num_pages(self) -> int:
        return int(self.sheets[0].shape[0])

    @property
    def page_tokens(self) -> int:
        return int(self.sheets[0].shape[1])

    @property
    def heads(self) -> int:
        return int(self.sheets[0].shape[2])

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return int(self.sheets[0].shape[3])

    @property
    def dtype(self) -> torch.dtype:
        return self.sheets[0].dtype

    @property
    def device(self) -> torch.device:
        return self.sheets[0].device

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def vector_bytes(self) -> int:
        return self.width * self.element_bytes

    @property
    def vectors_per_token(self) -> int:
        """Vectors of one token: layers * parts * heads."""
        return len(self.sheets) * self.heads

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Address of page 0 of each sheet."""
        return tuple(sheet.data_ptr() for sheet in self.sheets)

    @cached_property
    def strides_bytes(self) -> tuple[int, int, int]:
        """Bytes from one page, token and head to the next."""
        page, token, head, _ = (step * self.element_bytes for step in self.sheets[0].stride())
        return page, token, head

    def storage_of(self, sheet: int) -> tuple[int, int]:
        """Address and bytes of the allocation that a sheet lies in."""
        storage = self.sheets[sheet].untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def bytes_of(self, sheet: int) -> torch.Tensor:
        """The whole allocation that a sheet lies in, as flat uint8 (no copy)."""
        storage = self.sheets[sheet].untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    # ---- the engines' pools ----

    @classmethod
    def reference(cls, pool: torch.Tensor) -> PoolLayout:
        """Our engine's pool: `[layers, 2, num_pages, page_tokens, kv_heads, head_dim]`."""
        assert pool.dim() == 6, f"a pool has 6 axes, not {pool.dim()}"
        assert pool.shape[1] == 2, f"a pool's second axis is K and V, not {pool.shape[1]}"
        assert pool.is_contiguous(), "a pool is contiguous"
        return cls(tuple(pool.detach().flatten(0, 1).unbind(0)), 2)

    @classmethod
    def vllm(cls, layers: Iterable[torch.Tensor], head_dim: int | None = None) -> PoolLayout:
        """vLLM's pool since 0.26: per layer `[blocks, kv_heads, block_tokens, C]`.

        C is K and V side by side, or MLA's latent with kv_heads = 1. head_dim: splits C into K
        `[:head_dim]` and V, which must be as wide; None keeps C as one vector, as for MLA, for V
        of another width, and for formats whose C is opaque bytes.
        """
        sheets: list[torch.Tensor] = []
        for layer in layers:
            assert layer.dim() == 4, f"a layer has 4 axes, not {layer.dim()}"
            vectors = layer.detach().transpose(1, 2)
            if head_dim is None:
                sheets.append(vectors)
                continue
            assert layer.shape[3] == 2 * head_dim, f"K‖V of {layer.shape[3]} for {head_dim} each"
            sheets += [vectors[..., :head_dim], vectors[..., head_dim:]]
        return cls(tuple(sheets), 1 if head_dim is None else 2)

    @classmethod
    def stacked(cls, layers: Iterable[torch.Tensor], *, kv_axis: int = 0) -> PoolLayout:
        """K and V stacked: per layer `[2, blocks, block_tokens, kv_heads, head_dim]` (kv_axis 0)
        or `[blocks, 2, block_tokens, kv_heads, head_dim]` (kv_axis 1): vLLM's before 0.26.

        An engine that keeps heads before tokens passes `layer.transpose(2, 3)` of its last four
        axes, as `[2, blocks, block_tokens, kv_heads, head_dim]` with the strides it has.
        """
        assert kv_axis in (0, 1), f"K and V are axis 0 or 1, not {kv_axis}"
        sheets: list[torch.Tensor] = []
        for layer in layers:
            assert layer.dim() == 5, f"a layer has 5 axes, not {layer.dim()}"
            assert layer.shape[kv_axis] == 2, f"axis {kv_axis} is K and V"
            sheets += list(layer.detach().unbind(kv_axis))
        return cls(tuple(sheets), 2)

    @classmethod
    def token_lists(
        cls,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor] | None = None,
        *,
        page_tokens: int,
    ) -> PoolLayout:
        """SGLang's device pool: per layer `[tokens, heads, width]`, for K and, apart, for V.

        values: None for MLA's latent, `[tokens, 1, width]`. Page p is the tokens from
        p * page_tokens on; a rest of tokens that fill no page (SGLang pads with one page) is left.
        """
        sheets: list[torch.Tensor] = []
        for index, key in enumerate(keys):
            sheets.append(_paged(key, page_tokens))
            if values is not None:
                sheets.append(_paged(values[index], page_tokens))
        return cls(tuple(sheets), 1 if values is None else 2)

    @classmethod
    def sglang_host(cls, buffer: torch.Tensor, order: str, *, page_tokens: int) -> PoolLayout:
        """SGLang's host pool, `kv_buffer` of its `--hicache-mem-layout`:

        layer_first `(2, layers, tokens, heads, head_dim)`, page_first `(2, tokens, layers, heads,
        head_dim)`, page_first_direct `(2, pages, layers, page_tokens, heads, head_dim)`; for MLA
        the same without the leading 2.
        """
        assert order in SGLANG_HOST_ORDERS, f"host layout {order!r} is not among them"
        axes = 5 if order == "page_first_direct" else 4
        assert buffer.dim() in (axes, axes + 1), f"{order} has {axes} axes, and K and V before"
        parts = 2 if buffer.dim() == axes + 1 else 1
        if parts == 2:
            assert buffer.shape[0] == 2, f"the first axis is K and V, not {buffer.shape[0]}"
        by_part = list(buffer.detach().unbind(0)) if parts == 2 else [buffer.detach()]
        layer_axis = 0 if order == "layer_first" else 1
        by_layer = zip(*(part.unbind(layer_axis) for part in by_part), strict=True)
        sheets = [sheet for layer in by_layer for sheet in layer]
        if order != "page_first_direct":
            sheets = [_paged(sheet, page_tokens) for sheet in sheets]
        assert sheets[0].shape[1] == page_tokens, f"pages of {sheets[0].shape[1]} tokens"
        return cls(tuple(sheets), parts)


def _paged(tokens: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """`[tokens, heads, width]` as `[pages, page_tokens, heads, width]`, in place."""
    assert tokens.dim() == 3, f"tokens of {tokens.dim()} axes, not [tokens, heads, width]"
    pages = tokens.shape[0] // page_tokens
    return tokens.detach()[: pages * page_tokens].view(pages, page_tokens, *tokens.shape[1:])
