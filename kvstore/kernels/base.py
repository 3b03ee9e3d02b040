"""The contract of a copier: pages of a paged KV pool into slots, and back.

A pool is one contiguous tensor `[layers, 2, num_pages, page_tokens, kv_heads, head_dim]`. A block
in a slot is `[layers, 2, block_tokens, kv_heads, head_dim]`, contiguous, of the same dtype (layout
"LKTHD"); `block_tokens` is a whole number of pages. So a block is `layers * 2` rows of
`pages_per_block` pages, and every page in it is one contiguous span of `page_bytes` on both sides:
copying needs no knowledge of the dtype.

Who calls: one copier thread of a connector (`gather` and `scatter`), after it has waited for the
`mark` its caller took: a copier's stream is not the stream the engine computes on. Whoever calls
keeps pages and slots alive, leased and untouched until the event is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvstore.verbs import SlotBuffer

SKIP = -1
"""A page id that means: leave this page of the block alone."""


class Event(Protocol):
    """The end of a copy."""

    def done(self) -> bool:
        """Whether the copy has ended; does not block."""
        ...

    def wait(self) -> None:
        """Return once the copy has ended. Raises RuntimeError when the device failed."""
        ...


class Finished:
    """An event that was done when it was made: copies on CPU end before they return."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


FINISHED = Finished()


class Copier(Protocol):
    """Copies between one pool and any slots; equal to `reference` bit for bit."""

    def gather(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        """Copy pages into slots: `pages[i]` are the page ids of the block in `slots[i]`.

        A page id of SKIP leaves its part of the slot as it is. Slots may be longer than a block;
        what lies behind the block stays as it is.
        """
        ...

    def scatter(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        """Copy slots into pages; a page id of SKIP leaves its part of the slot out."""
        ...

    def mark(self) -> Event:
        """An event for all work this thread has queued on the pool's device so far."""
        ...

    def map_slab(self, slab: SlotBuffer) -> None:
        """Make this slab's slots reachable for the device; nothing to do on CPU."""
        ...

    def close(self) -> None:
        """Unmap every slab. No copy may be running."""
        ...


@dataclass(frozen=True)
class PoolShape:
    """A pool as a copier sees it: rows of pages of bytes."""

    rows: int
    """layers * 2"""
    num_pages: int
    page_bytes: int

    @classmethod
    def of(cls, pool: torch.Tensor) -> PoolShape:
        """The shape of `[layers, 2, num_pages, page_tokens, kv_heads, head_dim]`."""
        assert pool.dim() == 6, f"a pool has 6 axes, not {pool.dim()}"
        assert pool.shape[1] == 2, f"a pool's second axis is K and V, not {pool.shape[1]}"
        assert pool.is_contiguous(), "a pool is contiguous"
        layers, _, num_pages, page_tokens, kv_heads, head_dim = pool.shape
        page_bytes = page_tokens * kv_heads * head_dim * pool.element_size()
        return cls(layers * 2, num_pages, page_bytes)

    def block_bytes(self, pages_per_block: int) -> int:
        return self.rows * pages_per_block * self.page_bytes


def page_table(
    pool: PoolShape, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
) -> np.ndarray:
    """`pages` as int32 `[blocks, pages_per_block]`, checked against pool and slots."""
    assert len(pages) == len(slots), f"{len(pages)} rows of pages for {len(slots)} slots"
    table = np.asarray(pages, dtype=np.int32)
    if not len(slots):
        return table.reshape(0, 1)
    assert table.ndim == 2, "every block has the same number of pages"
    assert table.shape[1] > 0, "a block has at least one page"
    assert table.min() >= SKIP, f"page {table.min()} is below {SKIP}"
    assert table.max() < pool.num_pages, f"page {table.max()} of {pool.num_pages}"
    need = pool.block_bytes(table.shape[1])
    for slot in slots:
        assert slot.nbytes >= need, f"a slot of {slot.nbytes} bytes for a block of {need}"
    return table
