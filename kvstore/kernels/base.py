"""The contract of a copier: pages of a paged KV pool into slots, and back.

A pool is whatever `layout.PoolLayout` describes; our engine's is one contiguous tensor
`[layers, 2, num_pages, page_tokens, kv_heads, head_dim]`. A block in a slot holds the same vectors
in the order and storage of a `formats.BlockFormat`, of `pages_per_block` pages; a plain block of
our engine is `[layers, 2, block_tokens, kv_heads, head_dim]`, contiguous ("LKTHD"). `plan` cuts
either into runs of bytes: no copier knows dtypes, except to split or quantise.

Who calls: one copier thread of a connector (`gather` and `scatter`), after it has waited for the
`mark` its caller took: a copier's stream is not the stream the engine computes on. Whoever calls
keeps pages and slots alive, leased and untouched until the event is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kvstore.interface import SlotBuffer
from kvstore.kernels.formats import BlockFormat
from kvstore.kernels.layout import PoolLayout
from kvstore.kernels.plan import CopyPlan, copy_plan

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

    def order(self) -> None:
        """Have what this thread queues on its device stream from here on run after the copy.

        Does not block the thread.
        """
        ...


class Finished:
    """An event that was done when it was made: copies on CPU end before they return."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def order(self) -> None:
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

    def scatter_layers(
        self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Sequence[Event]:
        """Like `scatter`, layer by layer: one event for each layer of the pool, in order.

        When the last one is done, all are.
        """
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


def as_layout(pool: torch.Tensor | PoolLayout) -> PoolLayout:
    """A pool's layout; a bare tensor is our engine's pool."""
    return pool if isinstance(pool, PoolLayout) else PoolLayout.reference(pool)


class Plans:
    """The plans of one pool and format, made once for each size of block and range of layers."""

    def __init__(self, pool: PoolLayout, form: BlockFormat) -> None:
        form.check(pool)
        self.pool = pool
        self.form = form
        self._made: dict[tuple[int, int | None], CopyPlan] = {}

    def of(self, pages_per_block: int, layer: int | None = None) -> CopyPlan:
        """The plan of all layers, or of one."""
        key = (pages_per_block, layer)
        if key not in self._made:
            layers = None if layer is None else range(layer, layer + 1)
            self._made[key] = copy_plan(self.pool, self.form, pages_per_block, layers)
        return self._made[key]

    def page_table(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> np.ndarray:
        """`pages` as int32 `[blocks, pages_per_block]`, checked against pool and slots."""
        assert len(pages) == len(slots), f"{len(pages)} rows of pages for {len(slots)} slots"
        table = np.asarray(pages, dtype=np.int32)
        if not len(slots):
            return table.reshape(0, 1)
        assert table.ndim == 2, "every block has the same number of pages"
        assert table.shape[1] > 0, "a block has at least one page"
        assert table.min() >= SKIP, f"page {table.min()} is below {SKIP}"
        assert table.max() < self.pool.num_pages, f"page {table.max()} of {self.pool.num_pages}"
        need = self.form.block_bytes(self.pool, table.shape[1])
        for slot in slots:
            assert slot.nbytes >= need, f"a slot of {slot.nbytes} bytes for a block of {need}"
        return table
