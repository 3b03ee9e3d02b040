"""What gather and scatter mean, in loops: the one reference every copier is held to.

Works on host memory only, and slowly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvstore.kernels.base import SKIP


def gather(pool: torch.Tensor, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> None:
    """Copy the pages `pages[i]` of `pool` into `slots[i]`, token by token."""
    for block_pages, slot in zip(pages, slots, strict=True):
        block = _block(pool, len(block_pages), slot)
        for layer, kv, position, page, token in _tokens(pool, block_pages):
            block[layer, kv, position] = pool[layer, kv, page, token]


def scatter(
    pool: torch.Tensor, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
) -> None:
    """Copy `slots[i]` into the pages `pages[i]` of `pool`, token by token."""
    for block_pages, slot in zip(pages, slots, strict=True):
        block = _block(pool, len(block_pages), slot)
        for layer, kv, position, page, token in _tokens(pool, block_pages):
            pool[layer, kv, page, token] = block[layer, kv, position]


def _tokens(pool: torch.Tensor, pages: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """(layer, K or V, token in block, page id, token in page) of every token that is copied."""
    layers, _, _, page_tokens, _, _ = pool.shape
    for layer in range(layers):
        for kv in range(2):
            for index, page in enumerate(pages):
                for token in range(page_tokens):
                    if page != SKIP:
                        yield layer, kv, index * page_tokens + token, page, token


def _block(pool: torch.Tensor, pages_per_block: int, slot: memoryview) -> torch.Tensor:
    """The slot's bytes as `[layers, 2, block_tokens, kv_heads, head_dim]`."""
    layers, _, _, page_tokens, kv_heads, head_dim = pool.shape
    shape = (layers, 2, pages_per_block * page_tokens, kv_heads, head_dim)
    count = layers * 2 * pages_per_block * page_tokens * kv_heads * head_dim
    return torch.frombuffer(slot, dtype=pool.dtype, count=count).view(shape)
