"""Describes KV in an engine's pool, the same way for kvstore's engine, vLLM and SGLang.

A **sheet** is one part of one layer: its K, its V, or one vector for both (K‖V, or MLA's single
latent). A sheet is a view `[num_pages, page_tokens, heads, width]` of the engine's memory, with any
strides, whose last axis is contiguous. A pool is the list of its sheets, layer by layer. All
copiers work on sheets, so they support any engine whose KV can be viewed as sheets. A group of
layers of another shape (sliding window, an indexer) is a separate pool.

Since 0.26, vLLM registers a tensor `[blocks, kv_heads, block_tokens, K‖V]` per layer. This is a
logical order; the strides give the physical one (LBHNC, LBNHC, BLHNC, ...):

    PoolLayout.vllm(kv_caches.values(), head_dim=128)      # K and V as two parts
    PoolLayout.vllm(kv_caches.values())                    # one part: K‖V as it is, or MLA's latent

Before 0.26 it was `[2, blocks, block_tokens, kv_heads, head_dim]` or `[blocks, 2, ...]`:

    PoolLayout.stacked(kv_caches.values(), kv_axis=0)

SGLang's device pool has `[tokens, kv_heads, head_dim]` per layer for K and for V. Its host pool is
one tensor in a named order. Pages are `page_tokens` consecutive tokens:

    PoolLayout.token_lists(pool.k_buffer, pool.v_buffer, page_tokens=64)
    PoolLayout.sglang_host(pool.kv_buffer, "page_first", page_tokens=64)

No data is copied, and the tensors must not move. The layout keeps them alive.
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

    sheets: `[num_pages, page_tokens, heads, width]` each, with the same shape, dtype, device and
        strides; layer by layer, and within a layer K before V.
    parts: sheets per layer: 2 for K and V, 1 for a single vector.
    """

    sheets: tuple[torch.Tensor, ...]
    parts: int

    def __post_init__(self) -> None:
        assert self.parts in (1, 2), f"parts must be 1 or 2 (got {self.parts})"
        assert self.sheets, "a pool without layers"
        assert len(self.sheets) % self.parts == 0, "a layer with a missing part"
        first = self.sheets[0]
        assert first.dim() == 4, f"a sheet must have 4 axes (got {first.dim()})"
        assert min(first.shape) > 0, f"an empty sheet {tuple(first.shape)}"
        assert first.stride(3) == 1 or first.shape[3] == 1, "a vector must be contiguous"
        for sheet in self.sheets:
            assert sheet.shape == first.shape, "sheets must have the same shape"
            assert sheet.stride() == first.stride(), "sheets must have the same strides"
            assert sheet.dtype == first.dtype, "sheets must have the same dtype"
            assert sheet.device == first.device, "sheets must be on the same device"

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
        """Number of elements of a vector."""
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
        """Number of vectors of one token: layers * parts * heads."""
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
        """Return address and size of the allocation that contains a sheet."""
        storage = self.sheets[sheet].untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def bytes_of(self, sheet: int) -> torch.Tensor:
        """Return the whole allocation that contains a sheet, as flat uint8 (no copy)."""
        storage = self.sheets[sheet].untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    # ---- the engines' pools ----

    @classmethod
    def reference(cls, pool: torch.Tensor) -> PoolLayout:
        """Kvstore's engine's pool: `[layers, 2, num_pages, page_tokens, kv_heads, head_dim]`."""
        assert pool.dim() == 6, f"a pool must have 6 axes (got {pool.dim()})"
        assert pool.shape[1] == 2, f"a pool's second axis must be K and V (got {pool.shape[1]})"
        assert pool.is_contiguous(), "a pool must be contiguous"
        return cls(tuple(pool.detach().flatten(0, 1).unbind(0)), 2)

    @classmethod
    def vllm(cls, layers: Iterable[torch.Tensor], head_dim: int | None = None) -> PoolLayout:
        """vLLM's pool since 0.26: per layer `[blocks, kv_heads, block_tokens, C]`.

        C is K and V side by side, or MLA's latent with kv_heads = 1. head_dim: split C into K
        `[:head_dim]` and V, which must be as wide. None: keep C as one vector, for MLA, for V of
        another width, and for formats whose C is opaque bytes.
        """
        sheets: list[torch.Tensor] = []
        for layer in layers:
            assert layer.dim() == 4, f"a layer must have 4 axes (got {layer.dim()})"
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

        An engine with heads before tokens passes `layer.transpose(2, 3)` of its last four axes, as
        `[2, blocks, block_tokens, kv_heads, head_dim]` with its own strides.
        """
        assert kv_axis in (0, 1), f"kv_axis must be 0 or 1 (got {kv_axis})"
        sheets: list[torch.Tensor] = []
        for layer in layers:
            assert layer.dim() == 5, f"a layer must have 5 axes (got {layer.dim()})"
            assert layer.shape[kv_axis] == 2, f"axis {kv_axis} must be K and V"
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
        """SGLang's device pool: per layer `[tokens, heads, width]`, for K and, separately, for V.

        values: None for MLA's latent, `[tokens, 1, width]`. Page p starts at token
        p * page_tokens. Remaining tokens that fill no page are ignored (SGLang pads with one page).
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
        head_dim)`, page_first_direct `(2, pages, layers, page_tokens, heads, head_dim)`. For MLA
        they have no leading 2.
        """
        assert order in SGLANG_HOST_ORDERS, f"unknown host layout {order!r}"
        axes = 5 if order == "page_first_direct" else 4
        assert buffer.dim() in (axes, axes + 1), f"{order} must have {axes} axes, or one more"
        parts = 2 if buffer.dim() == axes + 1 else 1
        if parts == 2:
            assert buffer.shape[0] == 2, f"the first axis must be K and V (got {buffer.shape[0]})"
        by_part = list(buffer.detach().unbind(0)) if parts == 2 else [buffer.detach()]
        layer_axis = 0 if order == "layer_first" else 1
        by_layer = zip(*(part.unbind(layer_axis) for part in by_part), strict=True)
        sheets = [sheet for layer in by_layer for sheet in layer]
        if order != "page_first_direct":
            sheets = [_paged(sheet, page_tokens) for sheet in sheets]
        assert sheets[0].shape[1] == page_tokens, f"pages of {sheets[0].shape[1]} tokens"
        return cls(tuple(sheets), parts)


def _paged(tokens: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Return `[tokens, heads, width]` as `[pages, page_tokens, heads, width]`, without a copy."""
    assert tokens.dim() == 3, f"tokens must be [tokens, heads, width] (got {tokens.dim()} axes)"
    pages = tokens.shape[0] // page_tokens
    return tokens.detach()[: pages * page_tokens].view(pages, page_tokens, *tokens.shape[1:])
