"""Paged attention with torch operations, for CPU and CUDA.

All layers of a step share one `AttentionPlan`. Rows with several new tokens attend one by one. Rows
with a single new token (decoding) are batched and padded to the longest row of their group. Groups
are by length, so padding at most doubles the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from kvstore.engine.hooks import LayerArrival


class StepRow:
    """One request's part of a step.

    tokens: [n] int32 new token ids. start: position of the first. pages: [pages] int32 page table
    that covers start + n tokens, or more. lora: name of the adapter, "" for none.
    """

    __slots__ = ("lora", "pages", "start", "tokens")

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        start: int,
        pages: npt.NDArray[np.int32],
        lora: str = "",
    ) -> None:
        self.tokens = tokens
        self.start = start
        self.pages = pages
        self.lora = lora


@dataclass(slots=True)
class PrefillRow:
    """A row of several new tokens: tokens first..end of the step, over kv_len tokens in pages."""

    first: int
    end: int
    kv_len: int
    pages: torch.Tensor
    mask: torch.Tensor | None
    """[end - first, kv_len], additive. None for a row that starts at 0 (plain causal), and on CUDA,
    where the kernels apply this mask themselves."""


@dataclass(slots=True)
class DecodeGroup:
    """Rows with one new token each.

    tokens: [rows] int64 indices into the step's tokens. pages: [rows * pages_each] int64.
    mask: [rows, 1, 1, kv_len], additive. None if every row has exactly kv_len tokens.
    """

    tokens: torch.Tensor
    pages: torch.Tensor
    pages_each: int
    kv_len: int
    mask: torch.Tensor | None


def lower_right_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last queries of a sequence over the whole sequence.

    q: [1, heads, n, head_dim]. k, v: [1, kv_heads, kv_len, head_dim], n <= kv_len.

    On CUDA this is FlashAttention, which needs no mask in memory, if torch has it for the dtype and
    head_dim. K and V are repeated for the query heads that share them. Not all of torch's kernels
    support sharing, and its fallback would keep all scores in memory.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2])
    mixed: torch.Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return mixed


class AttentionPlan:
    """Positions for a step's K and V, and the tokens that each new token attends to."""

    def __init__(
        self,
        rows: Sequence[StepRow],
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        arriving: Sequence[Sequence[LayerArrival]] = (),
    ) -> None:
        """arriving: loads in progress, each a list by layer."""
        self._arriving = arriving
        self._dtype = dtype
        self._device = device
        self._page_tokens = page_tokens
        self.prefills: list[PrefillRow] = []
        self.decodes: list[DecodeGroup] = []
        slots: list[npt.NDArray[np.int64]] = []
        ends: list[int] = []
        groups: dict[int, list[tuple[int, StepRow]]] = {}
        first = 0
        for row in rows:
            count = len(row.tokens)
            positions = np.arange(row.start, row.start + count, dtype=np.int64)
            table = row.pages.astype(np.int64)
            slots.append(table[positions // page_tokens] * page_tokens + positions % page_tokens)
            if count == 1:
                pages = -(-(row.start + 1) // page_tokens)
                groups.setdefault(pages.bit_length(), []).append((first, row))
            else:
                self.prefills.append(self._prefill(row, table, first))
            first += count
            ends.append(first - 1)
        self.decodes = [self._decode(group) for group in groups.values()]
        self.slots = torch.from_numpy(np.concatenate(slots)).to(device)
        self.last_tokens = torch.tensor(ends, device=device)
        self.tokens = first

    def _prefill(self, row: StepRow, table: npt.NDArray[np.int64], first: int) -> PrefillRow:
        count = len(row.tokens)
        kv_len = row.start + count
        pages = torch.from_numpy(table[: -(-kv_len // self._page_tokens)]).to(self._device)
        mask = None
        if row.start and self._device.type != "cuda":
            mask = torch.full(
                (count, kv_len), float("-inf"), dtype=self._dtype, device=self._device
            ).triu_(row.start + 1)
        return PrefillRow(first, first + count, kv_len, pages, mask)

    def _decode(self, group: list[tuple[int, StepRow]]) -> DecodeGroup:
        lengths = np.array([row.start + 1 for _, row in group])
        kv_len = int(lengths.max())
        pages_each = -(-kv_len // self._page_tokens)
        pages = np.empty((len(group), pages_each), dtype=np.int64)
        for index, (_, row) in enumerate(group):
            used = -(-(row.start + 1) // self._page_tokens)
            pages[index, :used] = row.pages[:used]
            # Pad with a page of the same row: no other row writes to it during the read.
            pages[index, used:] = row.pages[used - 1]
        mask = None
        if int(lengths.min()) < kv_len:
            beyond = np.arange(kv_len)[None, :] >= lengths[:, None]
            mask = torch.zeros(beyond.shape, dtype=self._dtype)
            mask.masked_fill_(torch.from_numpy(beyond), float("-inf"))
            mask = mask[:, None, None, :].to(self._device)
        return DecodeGroup(
            tokens=torch.tensor([first for first, _ in group], device=self._device),
            pages=torch.from_numpy(pages.reshape(-1)).to(self._device),
            pages_each=pages_each,
            kv_len=kv_len,
            mask=mask,
        )

    def begin_layer(self, index: int) -> None:
        """Wait for this layer of all arriving loads. Call it before using the layer's pool."""
        for layers in self._arriving:
            layers[index].order()

    def write(self, layer_pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] into their pages.

        layer_pool: [2, num_pages, page_tokens, kv_heads, head_dim], one layer of the pool.
        """
        flat = layer_pool.flatten(1, 2)
        flat[0].index_copy_(0, self.slots, k)
        flat[1].index_copy_(0, self.slots, v)

    def attend(self, q: torch.Tensor, layer_pool: torch.Tensor) -> torch.Tensor:
        """Compute attention of q [tokens, heads, head_dim] over the rows' pages.

        Returns: [tokens, heads * head_dim].
        """
        out = q.new_empty(q.shape)
        for row in self.prefills:
            self._attend_prefill(row, q, layer_pool, out)
        for group in self.decodes:
            self._attend_decode(group, q, layer_pool, out)
        return out.view(len(q), -1)

    def _attend_prefill(
        self, row: PrefillRow, q: torch.Tensor, layer_pool: torch.Tensor, out: torch.Tensor
    ) -> None:
        kv = layer_pool.index_select(1, row.pages).flatten(1, 2)[:, : row.kv_len]
        k, v = kv.transpose(1, 2)[:, None]
        if self._device.type == "cuda":
            mixed = lower_right_attention(q[row.first : row.end].transpose(0, 1)[None], k, v)
            out[row.first : row.end] = mixed[0].transpose(0, 1)
            return
        mixed = F.scaled_dot_product_attention(
            q[row.first : row.end].transpose(0, 1)[None],
            k,
            v,
            attn_mask=row.mask,
            is_causal=row.mask is None,
            enable_gqa=True,
        )
        out[row.first : row.end] = mixed[0].transpose(0, 1)

    def _attend_decode(
        self, group: DecodeGroup, q: torch.Tensor, layer_pool: torch.Tensor, out: torch.Tensor
    ) -> None:
        rows = len(group.tokens)
        heads, head_dim = q.shape[1:]
        kv_heads = layer_pool.shape[3]
        kv = layer_pool.index_select(1, group.pages)
        kv = kv.view(2, rows, -1, kv_heads, head_dim)[:, :, : group.kv_len]
        k, v = kv.transpose(2, 3)
        # Query heads that share a KV head become queries of that head: K is read once.
        folded = q[group.tokens].view(rows, kv_heads, heads // kv_heads, head_dim)
        mixed = F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask)
        out[group.tokens] = mixed.reshape(rows, heads, head_dim)
