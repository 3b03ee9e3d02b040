"""Gather and scatter for every device that torch supports.

On CPU each page is copied once, directly between pool and slot, one run at a time. numpy copies
elements of opaque bytes without the interpreter lock, and without waking torch's thread pool from
the copier thread.

On any other device, pages are gathered there by `index_select`, split or quantised there, and
transferred in one copy per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from kvstore.interface import SlabView
from kvstore.kernels.base import FINISHED, SKIP, Event, Plans, as_layout
from kvstore.kernels.formats import PLAIN, SCALE_BYTES, BlockFormat
from kvstore.kernels.layout import PoolLayout
from kvstore.kernels.plan import CopyPlan, Row
from kvstore.kernels.quantise import dequantise, quantise

UNLOCKED_ELEMENTS = 501
"""numpy releases the interpreter lock for an assignment of more than 500 elements."""
ELEMENT_BYTES_MIN = 256
"""Minimum size of the elements into which runs are split to reach that number."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class HostCopier:
    """The copier of a pool in host memory. Copies end before gather and scatter return."""

    def __init__(self, pool: torch.Tensor | PoolLayout, form: BlockFormat = PLAIN) -> None:
        self._pool = as_layout(pool)
        assert self._pool.device.type == "cpu", (
            f"the pool must be in host memory (is on {self._pool.device})"
        )
        self._plans = Plans(self._pool, form)
        self._views: dict[int, list[np.ndarray]] = {}

    def gather(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        self._copy(pages, slots, into_slots=True)
        return FINISHED

    def scatter(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        self._copy(pages, slots, into_slots=False)
        return FINISHED

    def scatter_layers(
        self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Sequence[Event]:
        # All at once: no concurrent work could start with the first layers.
        self.scatter(pages, slots)
        return [FINISHED] * self._pool.layers

    def mark(self) -> Event:
        return FINISHED

    def map_slab(self, slab: SlabView) -> None:
        return None

    def close(self) -> None:
        return None

    def _copy(
        self,
        pages: Sequence[Sequence[int]],
        slots: Sequence[memoryview],
        *,
        into_slots: bool,
    ) -> None:
        table = self._plans.page_table(pages, slots)
        plan = self._plans.of(table.shape[1])
        copy = {"plain": _copy_plain, "planes": _copy_planes, "int8": self._copy_int8}[plan.storage]
        for block_pages, slot in zip(table, slots, strict=True):
            for row, in_pool in zip(plan.rows, self._pool_views(plan), strict=True):
                in_slot = _slot_views(plan, row, slot)
                for index in np.flatnonzero(block_pages > SKIP):
                    there = in_pool[block_pages[index]]
                    copy(there, [view[index] for view in in_slot], into_slots)

    def _pool_views(self, plan: CopyPlan) -> list[np.ndarray]:
        """Return elements `[num_pages, n0, n1, elements of a run]` for each row."""
        found = self._views.get(id(plan))
        if found is None:
            element = _element(plan)
            found = [
                _view(
                    self._pool.bytes_of(row.sheet).numpy(),
                    row.address - self._pool.storage_of(row.sheet)[0],
                    element,
                    (self._pool.num_pages, plan.page_stride),
                    *((axis.steps, axis.pool) for axis in plan.axes),
                    (plan.run_bytes // element.itemsize, element.itemsize),
                )
                for row in plan.rows
            ]
            self._views[id(plan)] = found
        return found

    def _copy_int8(
        self, there: np.ndarray, in_slot: Sequence[np.ndarray], into_slots: bool
    ) -> None:
        values, scales = in_slot
        if into_slots:
            found = torch.from_numpy(np.ascontiguousarray(there)).view(self._pool.dtype)
            q, scale = quantise(found)
            values[...] = q.view(torch.uint8).numpy()
            scales[...] = scale.view(torch.uint8).numpy()
            return
        q = torch.from_numpy(np.ascontiguousarray(values)).view(torch.int8)
        scale = torch.from_numpy(scales.copy()).view(torch.float32)
        there[...] = dequantise(q, scale, self._pool.dtype).view(torch.uint8).numpy()


def _copy_plain(there: np.ndarray, in_slot: Sequence[np.ndarray], into_slots: bool) -> None:
    if into_slots:
        in_slot[0][...] = there
    else:
        there[...] = in_slot[0]


def _copy_planes(there: np.ndarray, in_slot: Sequence[np.ndarray], into_slots: bool) -> None:
    """Copy elements as unsigned integers, to or from one view of bytes per plane."""
    if into_slots:
        for plane, bytes_ in enumerate(in_slot):
            shift = 8 * (len(in_slot) - 1 - plane)
            np.right_shift(there, shift, out=bytes_, casting="unsafe")
        return
    there[...] = in_slot[0]
    for bytes_ in in_slot[1:]:
        np.left_shift(there, 8, out=there)
        np.bitwise_or(there, bytes_, out=there)


def _element(plan: CopyPlan) -> np.dtype[Any]:
    """Return the type that numpy copies: opaque bytes, unless it must access elements."""
    if plan.storage == "planes":
        return np.dtype(_UNSIGNED[plan.element_bytes])
    if plan.storage == "int8":
        return np.dtype(np.uint8)
    size, count = plan.run_bytes, plan.axes[0].steps * plan.axes[1].steps
    while count < UNLOCKED_ELEMENTS and size % 2 == 0 and size >= 2 * ELEMENT_BYTES_MIN:
        size, count = size // 2, count * 2
    return np.dtype((np.void, size))


def _slot_views(plan: CopyPlan, row: Row, slot: memoryview) -> list[np.ndarray]:
    """Return a row's runs in a slot, `[pages_per_block, n0, n1, elements of a run]`.

    One view for plain, one per plane for planes, values and scales for int8.
    """
    steps = [
        (plan.pages_per_block, plan.slot_page_stride),
        *((axis.steps, axis.slot) for axis in plan.axes),
    ]
    byte = np.dtype(np.uint8)
    if plan.storage == "planes":
        size = plan.element_bytes
        narrow = [(count, step // size) for count, step in steps]
        run = (plan.run_bytes // size, 1)
        starts = [plane * plan.plane_bytes + row.offset // size for plane in range(size)]
        return [_view(slot, start, byte, *narrow, run) for start in starts]
    if plan.storage == "int8":
        width = plan.run_bytes // plan.element_bytes
        values = _view(slot, row.offset, byte, *steps, (width, 1))
        return [values, _view(slot, row.offset + width, byte, *steps, (SCALE_BYTES, 1))]
    element = _element(plan)
    run = (plan.run_bytes // element.itemsize, element.itemsize)
    return [_view(slot, row.offset, element, *steps, run)]


def _view(
    buffer: np.ndarray | memoryview,
    offset: int,
    element: np.dtype[Any],
    *axes: tuple[int, int],
) -> np.ndarray:
    """View elements of a buffer along axes of (count, byte step)."""
    shape = tuple(count for count, _ in axes)
    strides = tuple(step for _, step in axes)
    return np.ndarray(shape, element, buffer, offset, strides)


class DeviceCopier:
    """The copier of a pool on any device, by torch's indexing. Blocks until copied."""

    def __init__(self, pool: torch.Tensor | PoolLayout, form: BlockFormat = PLAIN) -> None:
        self._pool = as_layout(pool)
        self._plans = Plans(self._pool, form)
        self._device = self._pool.device
        self._views: dict[int, list[torch.Tensor]] = {}
        cuda = self._device.type == "cuda"
        # A separate stream, so that the copies do not delay the engine's computing.
        self._stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]

    def gather(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        table = self._plans.page_table(pages, slots)
        plan = self._plans.of(table.shape[1])
        with self._own_stream():
            for block_pages, slot in zip(table, slots, strict=True):
                keep, ids = self._kept(block_pages)
                if not len(keep):
                    continue
                found = [row.index_select(0, ids) for row in self._rows(plan)]
                for row, part in zip(plan.rows, self._packed(plan, found).cpu(), strict=True):
                    _into_slot(plan, row, slot, keep, part.numpy())
        return FINISHED

    def scatter(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        self._scatter(pages, slots, None)
        return FINISHED

    def scatter_layers(
        self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Sequence[Event]:
        for layer in range(self._pool.layers):
            self._scatter(pages, slots, layer)
        return [FINISHED] * self._pool.layers

    def mark(self) -> Event:
        return device_mark(self._device)

    def map_slab(self, slab: SlabView) -> None:
        return None

    def close(self) -> None:
        return None

    def _scatter(
        self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview], layer: int | None
    ) -> None:
        table = self._plans.page_table(pages, slots)
        plan = self._plans.of(table.shape[1], layer)
        with self._own_stream():
            for block_pages, slot in zip(table, slots, strict=True):
                keep, ids = self._kept(block_pages)
                if not len(keep):
                    continue
                found = np.stack([_from_slot(plan, row, slot, keep) for row in plan.rows])
                runs = self._unpacked(plan, torch.from_numpy(found).to(self._device))
                for row, part in zip(self._rows(plan), runs, strict=True):
                    row.index_copy_(0, ids, part)
            self.mark().wait()

    def _rows(self, plan: CopyPlan) -> list[torch.Tensor]:
        """Return uint8 `[num_pages, n0, n1, run]` for each row, a view of the pool."""
        found = self._views.get(id(plan))
        if found is None:
            outer, inner = plan.axes
            shape = (self._pool.num_pages, outer.steps, inner.steps, plan.run_bytes)
            strides = (plan.page_stride, outer.pool, inner.pool, 1)
            found = []
            for row in plan.rows:
                start = row.address - self._pool.storage_of(row.sheet)[0]
                found.append(self._pool.bytes_of(row.sheet).as_strided(shape, strides, start))
            self._views[id(plan)] = found
        return found

    def _packed(self, plan: CopyPlan, runs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return runs as in the slot, uint8 `[rows, pages, n0, n1, bytes]`.

        Planes are concatenated in the last axis.
        """
        stacked = torch.stack(list(runs))
        if plan.storage == "planes":
            size = plan.element_bytes
            elements = stacked.view(*stacked.shape[:-1], plan.run_bytes // size, size)
            return elements.flip(-1).transpose(-1, -2).flatten(-2)
        if plan.storage == "int8":
            q, scale = quantise(stacked.view(self._pool.dtype))
            return torch.cat([q.view(torch.uint8), scale.view(torch.uint8)], dim=-1)
        return stacked

    def _unpacked(self, plan: CopyPlan, packed: torch.Tensor) -> torch.Tensor:
        """Reverse `_packed`. Returns one tensor over all rows."""
        if plan.storage == "planes":
            size = plan.element_bytes
            planes = packed.view(*packed.shape[:-1], size, plan.run_bytes // size)
            return planes.transpose(-1, -2).flip(-1).flatten(-2)
        if plan.storage == "int8":
            width = plan.run_bytes // plan.element_bytes
            q = packed[..., :width].contiguous().view(torch.int8)
            # Cloned: a view may not be aligned for a float.
            scale = packed[..., width:].clone(memory_format=torch.contiguous_format)
            return dequantise(q, scale.view(torch.float32), self._pool.dtype).view(torch.uint8)
        return packed

    def _kept(self, row: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """Return the positions in the block to copy, and their pages on the device."""
        keep = np.flatnonzero(row > SKIP)
        return keep, torch.from_numpy(row[keep].astype(np.int64)).to(self._device)

    def _own_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _into_slot(
    plan: CopyPlan, row: Row, slot: memoryview, keep: np.ndarray, part: np.ndarray
) -> None:
    """Write bytes `[kept pages, n0, n1, bytes]` in the form of `DeviceCopier._packed`."""
    at = 0
    for view in _slot_views(plan, row, slot):
        length = view.shape[-1] * view.itemsize
        bytes_ = np.ascontiguousarray(part[..., at : at + length])
        view[keep] = bytes_.view(view.dtype)
        at += length


def _from_slot(plan: CopyPlan, row: Row, slot: memoryview, keep: np.ndarray) -> np.ndarray:
    """Read bytes `[kept pages, n0, n1, bytes]`. Reverses `_into_slot`."""
    parts = [view[keep].view(np.uint8) for view in _slot_views(plan, row, slot)]
    return np.concatenate(parts, axis=-1)


class TorchEvent:
    """A CUDA event of torch. Keeps the data of earlier work alive until the event is freed."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, kept: object = None) -> None:
        self._event = event
        self._device = device
        self._kept = kept

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def device_mark(device: torch.device) -> Event:
    """Return an event after all work that this thread has queued on `device` so far."""
    if device.type != "cuda":
        return FINISHED
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return TorchEvent(event, device)
