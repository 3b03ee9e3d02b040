"""Splits a copy into runs, which all fast copiers execute.

A block in a slot and its pages in the pool are two orders of the same vectors. Axes along which
both are contiguous become one **run** of bytes. The rest are rows (a table of their start on both
sides) and at most two regular axes within a row. For any layout, a copier then does one thing: for
each block, page, row and step of the two axes, copy one run.

    in the pool:  rows[r].address + page * page_stride + i * axes[0].pool + j * axes[1].pool
    in the slot:  rows[r].offset  + index * slot_page_stride + i * axes[0].slot + j * axes[1].slot

`page` is the page's id and `index` its position in the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvstore.kernels.formats import BlockFormat
from kvstore.kernels.layout import PoolLayout


class Axis(NamedTuple):
    """`steps` steps of `pool` bytes in the pool and `slot` bytes in the slot."""

    steps: int
    pool: int
    slot: int


ONE_STEP = Axis(1, 0, 0)


class Row(NamedTuple):
    """Start of a row: in page 0 of the pool, and in a slot; and the sheet of its allocation."""

    address: int
    offset: int
    sheet: int


@dataclass(frozen=True)
class CopyPlan:
    """All runs of a block. Slot offsets and strides are bytes of the plain (or int8) block.

    page_stride, slot_page_stride: bytes from page to page in the pool, and in the slot.
    run_bytes: bytes of a run in the pool. For int8 a run is one vector, with another length in the
        slot. plane_bytes: bytes of the block in one byte plane. 0: no planes.
    """

    pages_per_block: int
    rows: tuple[Row, ...]
    axes: tuple[Axis, Axis]
    page_stride: int
    slot_page_stride: int
    run_bytes: int
    element_bytes: int
    block_bytes: int
    storage: str

    @property
    def runs_per_page(self) -> int:
        return len(self.rows) * self.axes[0].steps * self.axes[1].steps

    @property
    def plane_bytes(self) -> int:
        return self.block_bytes // self.element_bytes if self.storage == "planes" else 0

    def table(self) -> np.ndarray:
        """Return the rows as uint64 `[rows, 2]`: address in the pool, offset in the slot."""
        return np.array([row[:2] for row in self.rows], dtype=np.uint64)


def copy_plan(
    pool: PoolLayout,
    form: BlockFormat,
    pages_per_block: int,
    layers: range | None = None,
) -> CopyPlan:
    """Return the plan for blocks of `pages_per_block` pages. layers: None: all layers."""
    layers = range(pool.layers) if layers is None else layers
    assert len(layers) > 0, "a copy of no layers"
    assert layers.step == 1, "layers must be consecutive"
    assert layers[0] >= 0, layers
    assert layers[-1] < pool.layers, layers
    slot = form.slot_strides(pool, pages_per_block)
    page_stride, token_stride, head_stride = pool.strides_bytes
    run_bytes = pool.vector_bytes
    axes = [
        Axis(pool.page_tokens, token_stride, slot["T"]),
        Axis(pool.heads, head_stride, slot["H"]),
    ]
    sheets = [[layer * pool.parts + part for part in range(pool.parts)] for layer in layers]
    firsts = [numbers[0] for numbers in sheets]
    part_step = _regular(pool, [list(column) for column in sheets])
    if part_step is not None:
        axes.append(Axis(pool.parts, part_step, slot["K"]))
        heads_of_rows = [(number, 0) for number in firsts]
    else:
        heads_of_rows = [
            (number, part * slot["K"]) for numbers in sheets for part, number in enumerate(numbers)
        ]
    rows = [
        Row(pool.addresses[number], number // pool.parts * slot["L"] + offset, number)
        for number, offset in heads_of_rows
    ]
    layer_step = _regular(pool, [firsts]) if part_step is not None else None
    if layer_step is not None:
        axes.append(Axis(len(layers), layer_step, slot["L"]))
        rows = rows[:1]
    axes = [axis for axis in axes if axis.steps > 1]
    if form.storage != "int8":
        axes, run_bytes = _lengthened(axes, run_bytes)
    axes = _merged(axes)
    while len(axes) > 2:
        rows = _expanded(rows, axes.pop(0))
    padded = [ONE_STEP] * (2 - len(axes)) + axes
    return CopyPlan(
        pages_per_block=pages_per_block,
        rows=tuple(rows),
        axes=(padded[0], padded[1]),
        page_stride=page_stride,
        slot_page_stride=pool.page_tokens * slot["T"],
        run_bytes=run_bytes,
        element_bytes=pool.element_bytes,
        block_bytes=form.block_bytes(pool, pages_per_block),
        storage=form.storage,
    )


def _regular(pool: PoolLayout, lines: list[list[int]]) -> int | None:
    """Return the step in bytes between neighbours in all lines of sheets, if it is the same.

    It must be positive and within one allocation. 0: lines of a single sheet. None: no such step.
    """
    steps = set()
    for numbers in lines:
        for before, after in pairwise(numbers):
            if pool.storage_of(before) != pool.storage_of(after):
                return None
            steps.add(pool.addresses[after] - pool.addresses[before])
    if not steps:
        return 0
    return steps.pop() if len(steps) == 1 and min(steps) > 0 else None


def _lengthened(axes: list[Axis], run_bytes: int) -> tuple[list[Axis], int]:
    """Extend the run by axes whose steps are contiguous runs on both sides."""
    axes = list(axes)
    while True:
        inner = [axis for axis in axes if axis.pool == axis.slot == run_bytes]
        if not inner:
            return axes, run_bytes
        axes.remove(inner[0])
        run_bytes *= inner[0].steps


def _merged(axes: list[Axis]) -> list[Axis]:
    """Merge axes that continue each other on both sides. The widest steps come first."""
    axes = sorted(axes, key=lambda axis: axis.pool, reverse=True)
    for outer in axes:
        for inner in axes:
            if (outer.pool, outer.slot) == (inner.pool * inner.steps, inner.slot * inner.steps):
                rest = [axis for axis in axes if axis not in (outer, inner)]
                joined = Axis(outer.steps * inner.steps, inner.pool, inner.slot)
                return _merged([*rest, joined])
    return axes


def _expanded(rows: list[Row], axis: Axis) -> list[Row]:
    """Return the rows after an axis has become part of the table."""
    return [
        Row(row.address + step * axis.pool, row.offset + step * axis.slot, row.sheet)
        for row in rows
        for step in range(axis.steps)
    ]
