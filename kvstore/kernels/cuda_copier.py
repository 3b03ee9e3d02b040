"""Gather and scatter on CUDA with kvstore's kernels, directly between pool and pinned slots.

The slab is registered with the driver once (`map_slab`). After that the device accesses its slots
without a staging copy by the host. Copies run on separate streams beside the model's. The caller
orders them with `mark`; the copier never waits for the whole device. A copy takes one of two paths
(`paths`). Slots outside all mapped slabs are copied by torch.

A `cuda_device.Device` provides streams, events and memory. On a GPU they are torch's.

One thread at a time calls a copier. Copies of one copier run in the order of the calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvstore.interface import SlabView
from kvstore.kernels.base import FINISHED, SKIP, Event, Plans, as_layout
from kvstore.kernels.cuda_device import CudaDevice, Device
from kvstore.kernels.formats import PLAIN, BlockFormat, dtype_name
from kvstore.kernels.launchers import Tables
from kvstore.kernels.layout import PoolLayout
from kvstore.kernels.paths import STAGING_BYTES, Direction, Path, path_for
from kvstore.kernels.plan import CopyPlan
from kvstore.kernels.slabs import SlabMap, SlotAddresses
from kvstore.kernels.torch_copier import DeviceCopier, device_mark


class CudaCopier:
    """The copier of a pool on a CUDA device.

    path: always take this path if possible. None: choose by size.
    device: queues the copies. None: the pool's own CUDA device.
    staging_bytes: device memory for the copy engine's path, for both halves together.
    """

    def __init__(
        self,
        pool: torch.Tensor | PoolLayout,
        form: BlockFormat = PLAIN,
        *,
        path: Path | None = None,
        device: Device | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._pool = as_layout(pool)
        self._path = path
        self._plans = Plans(self._pool, form)
        self._device = CudaDevice(self._pool.device) if device is None else device
        self._unmapped = DeviceCopier(self._pool, form)
        self._slabs = SlabMap(self._device.runtime, self._device.make_current)
        self._row_tables: dict[int, torch.Tensor] = {}
        self._half_bytes = staging_bytes // 2
        with self._device.make_current():
            self._streams = [self._device.new_stream(), self._device.new_stream()]
            self._staging = self._device.memory(2 * self._half_bytes)

    def gather(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        addresses = self._slabs.addresses(slots)
        if addresses is None:
            return self._unmapped.gather(pages, slots)
        return self._copy(self._plans.page_table(pages, slots), addresses, Direction.D2H)

    def scatter(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        addresses = self._slabs.addresses(slots)
        if addresses is None:
            return self._unmapped.scatter(pages, slots)
        return self._copy(self._plans.page_table(pages, slots), addresses, Direction.H2D)

    def scatter_layers(
        self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Sequence[Event]:
        """See `Copier.scatter_layers`. Uses kernels, because a layer's part of a block is small."""
        addresses = self._slabs.addresses(slots)
        if addresses is None:
            return self._unmapped.scatter_layers(pages, slots)
        table = self._plans.page_table(pages, slots)
        if not len(slots):
            return [FINISHED] * self._pool.layers
        stream = self._streams[0]
        events: list[Event] = []
        with self._device.make_current():
            uploaded = self._upload(stream, table, addresses.device)
            for layer in range(self._pool.layers):
                plan = self._plans.of(table.shape[1], layer)
                self._launch(stream, plan, table.shape[0], uploaded, Direction.H2D)
                events.append(self._event(stream, uploaded))
        return events

    def mark(self) -> Event:
        return device_mark(self._pool.device)

    def map_slab(self, slab: SlabView) -> None:
        """Register the slab's memory with the driver. If that fails, torch copies its slots."""
        self._slabs.add(slab)

    def close(self) -> None:
        for stream in self._streams:
            self._device.drain(stream)
        self._slabs.clear()

    # ---- the two paths ----

    def _copy(self, table: np.ndarray, addresses: SlotAddresses, direction: Direction) -> Event:
        if not len(table):
            return FINISHED
        plan = self._plans.of(table.shape[1])
        with self._device.make_current():
            if self._path_of(plan, table, direction) is Path.COPY_ENGINE:
                return self._through_staging(plan, table, addresses, direction)
            stream = self._streams[0]
            uploaded = self._upload(stream, table, addresses.device)
            self._launch(stream, plan, len(table), uploaded, direction)
            return self._event(stream, uploaded)

    def _path_of(self, plan: CopyPlan, table: np.ndarray, direction: Direction) -> Path:
        if self._staging is None or self._blocks_staged(plan) < 1:
            return Path.KERNEL
        if direction is Direction.D2H and table.min() == SKIP:
            return Path.KERNEL  # A whole block would overwrite skipped pages.
        return self._path or path_for(direction, len(table) * plan.block_bytes)

    def _blocks_staged(self, plan: CopyPlan) -> int:
        """Return the number of blocks in one half of the staging buffer."""
        return self._half_bytes // plan.block_bytes

    def _through_staging(
        self, plan: CopyPlan, table: np.ndarray, addresses: SlotAddresses, direction: Direction
    ) -> Event:
        """Copy groups of blocks, alternating between the two streams and halves."""
        assert self._staging is not None
        first, second = self._streams
        self._device.wait_stream(second, first)
        kept: list[torch.Tensor] = []
        size = self._blocks_staged(plan)
        for group, start in enumerate(range(0, len(table), size)):
            stream = self._streams[group % 2]
            pages, hosts = table[start : start + size], addresses.host[start : start + size]
            half = self._staging[group % 2 * self._half_bytes :]
            staged = np.arange(len(pages), dtype=np.uint64) * np.uint64(plan.block_bytes)
            staged += np.uint64(half.data_ptr())
            uploaded = self._upload(stream, pages, staged)
            kept.append(uploaded)
            if direction is Direction.D2H:
                self._launch(stream, plan, len(pages), uploaded, direction)
            self._move(stream, half, hosts, plan.block_bytes, direction)
            if direction is Direction.H2D:
                self._launch(stream, plan, len(pages), uploaded, direction)
        self._device.wait_stream(first, second)
        return self._event(first, kept)

    def _move(
        self,
        stream: Any,
        half: torch.Tensor,
        hosts: np.ndarray,
        block_bytes: int,
        direction: Direction,
    ) -> None:
        """Copy whole blocks between staging and slots. Adjacent slots are one copy."""
        for first, count in _neighbours(hosts, block_bytes):
            staged = half[first * block_bytes : (first + count) * block_bytes]
            memory = (ctypes.c_byte * (count * block_bytes)).from_address(int(hosts[first]))
            host = torch.frombuffer(memory, dtype=torch.uint8)
            if direction is Direction.D2H:
                self._device.copy(stream, host, staged)
            else:
                self._device.copy(stream, staged, host)

    # ---- launches ----

    def _upload(self, stream: Any, table: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Upload slot addresses, then page ids, to the device."""
        pages = np.ascontiguousarray(table, dtype=np.int32).reshape(-1)
        words = np.zeros(len(slots) + (len(pages) + 1) // 2, dtype=np.int64)
        words[: len(slots)] = slots.view(np.int64)
        words[len(slots) :].view(np.int32)[: len(pages)] = pages
        return self._device.upload(stream, words)

    def _launch(
        self,
        stream: Any,
        plan: CopyPlan,
        blocks: int,
        uploaded: torch.Tensor,
        direction: Direction,
    ) -> None:
        words = blocks * plan.pages_per_block
        pages = uploaded[blocks:].view(torch.int32)[:words].view(blocks, plan.pages_per_block)
        tables = Tables(self._row_table(plan), uploaded[:blocks], pages)
        dtype = dtype_name(self._pool.dtype)
        self._device.launch(stream, plan, dtype, tables, into_slots=direction is Direction.D2H)

    def _row_table(self, plan: CopyPlan) -> torch.Tensor:
        """Return the plan's rows on the device. Uploaded once, on the first stream; the second
        waits."""
        found = self._row_tables.get(id(plan))
        if found is None:
            first, second = self._streams
            rows = plan.table()
            found = self._device.upload(first, rows.view(np.int64).reshape(-1)).view(rows.shape)
            self._device.wait_stream(second, first)
            self._row_tables[id(plan)] = found
        return found

    def _event(self, stream: Any, kept: object) -> Event:
        return self._device.event(stream, kept)


def _neighbours(hosts: np.ndarray, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of slots that are adjacent without a gap."""
    breaks = np.flatnonzero(np.diff(hosts.astype(np.int64)) != block_bytes) + 1
    edges = [0, *breaks.tolist(), len(hosts)]
    for first, end in pairwise(edges):
        yield first, end - first
