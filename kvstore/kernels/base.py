"""The interface of a copier: pages of a paged KV pool into slots, and back.

`layout.PoolLayout` describes a pool. kvstore's engine's is one contiguous tensor
`[layers, 2, num_pages, page_tokens, kv_heads, head_dim]`. A block in a slot has the same vectors,
in the order and storage of a `formats.BlockFormat`, of `pages_per_block` pages. A plain block of
that engine is `[layers, 2, block_tokens, kv_heads, head_dim]`, contiguous ("LKTHD"). `plan` splits
both into runs of bytes. A copier does not depend on dtypes, except to split or quantise.

One copier thread of a connector calls `gather` and `scatter`. Before, it waits for the `mark` taken
by its caller, because a copier's stream is not the stream the engine computes on. The caller keeps
pages and slots alive, leased and unchanged until the event is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kvstore.interface import SlabView
from kvstore.kernels.formats import BlockFormat
from kvstore.kernels.layout import PoolLayout
from kvstore.kernels.plan import CopyPlan, copy_plan

SKIP = -1
"""A page id that means: skip this page of the block."""


class Event(Protocol):
    """The end of a copy."""

    def done(self) -> bool:
        """Return whether the copy has ended. Does not block."""
        ...

    def wait(self) -> None:
        """Return when the copy has ended. Raises RuntimeError if the device failed."""
        ...

    def order(self) -> None:
        """Make later work of this thread on its device stream run after the copy.

        Does not block the thread.
        """
        ...


class Finished:
    """An event that is always done: copies on CPU end before they return."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def order(self) -> None:
        return None


FINISHED = Finished()


class Copier(Protocol):
    """Copies between one pool and any slots. All copiers give the bytes of `reference`."""

    def gather(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        """Copy pages into slots: `pages[i]` are the page ids of the block in `slots[i]`.

        A page id of SKIP leaves its part of the slot unchanged. Slots can be longer than a block;
        the rest stays unchanged.
        """
        ...

    def scatter(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        """Copy slots into pages. A page id of SKIP skips its part of the slot."""
        ...

    def scatter_layers(
        self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Sequence[Event]:
        """Like `scatter`, layer by layer. Returns one event for each layer of the pool, in order.

        If the last one is done, all are.
        """
        ...

    def mark(self) -> Event:
        """Return an event for all work this thread has queued on the pool's device so far."""
        ...

    def map_slab(self, slab: SlabView) -> None:
        """Make this slab's slots accessible to the device. No effect on CPU."""
        ...

    def close(self) -> None:
        """Unmap all slabs. No copy may be running."""
        ...


def as_layout(pool: torch.Tensor | PoolLayout) -> PoolLayout:
    """Return a pool's layout. A bare tensor is the pool of kvstore's engine."""
    return pool if isinstance(pool, PoolLayout) else PoolLayout.reference(pool)


class Plans:
    """Plans of one pool and format, cached by block size and range of layers."""

    def __init__(self, pool: PoolLayout, form: BlockFormat) -> None:
        form.check(pool)
        self.pool = pool
        self.form = form
        self._made: dict[tuple[int, int | None], CopyPlan] = {}

    def of(self, pages_per_block: int, layer: int | None = None) -> CopyPlan:
        """Return the plan of all layers, or of one."""
        key = (pages_per_block, layer)
        if key not in self._made:
            layers = None if layer is None else range(layer, layer + 1)
            self._made[key] = copy_plan(self.pool, self.form, pages_per_block, layers)
        return self._made[key]

    def page_table(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> np.ndarray:
        """Return `pages` as int32 `[blocks, pages_per_block]`, checked against pool and slots."""
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
