"""Gather and scatter on CUDA: our kernels through cupy, straight between pool and pinned slots.

The slab is registered with the driver once (`map_slab`), after which the device reaches its slots
without a staging copy by the host. Copies run on streams of their own beside the model's; the
caller orders them with `mark`, and nothing here waits for the whole device. A copy takes one of two
paths (`paths`). Slots outside every mapped slab go through torch.

One thread at a time calls a copier. Copies of one copier run in the order of the calls.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvstore.kernels.base import FINISHED, SKIP, Event, Plans, as_layout
from kvstore.kernels.cuda_source import (
    CUDA_SOURCE,
    KERNELS,
    kernel_name,
    launch_shape,
    launch_sizes,
)
from kvstore.kernels.formats import PLAIN, BlockFormat, dtype_name
from kvstore.kernels.layout import PoolLayout
from kvstore.kernels.paths import STAGING_BYTES, Direction, Path, path_for
from kvstore.kernels.plan import CopyPlan
from kvstore.kernels.slabs import SlabMap, SlotAddresses
from kvstore.kernels.torch_copier import DeviceCopier, TorchEvent, device_mark
from kvstore.verbs import SlotBuffer

log = logging.getLogger(__name__)


class Lane:
    """A stream of ours, as cupy and as torch know it."""

    def __init__(self, cupy: Any, device: torch.device) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.torch = torch.cuda.ExternalStream(self.stream.ptr, device=device)  # type: ignore[no-untyped-call]

    def after(self, other: Lane) -> None:
        """What is queued here from now on runs after what the other has queued so far."""
        self.torch.wait_stream(other.torch)


class CupyCopier:
    """The copier of a pool on a CUDA device.

    path: takes this path always, where it can; None chooses by size.
    """

    def __init__(
        self,
        pool: torch.Tensor | PoolLayout,
        form: BlockFormat = PLAIN,
        *,
        path: Path | None = None,
    ) -> None:
        import cupy

        self._pool = as_layout(pool)
        device = self._pool.device
        assert device.type == "cuda", f"a pool on a CUDA device, not on {device}"
        self._cupy = cupy
        self._path = path
        self._plans = Plans(self._pool, form)
        self._device = cupy.cuda.Device(device.index or 0)
        self._unmapped = DeviceCopier(self._pool, form)
        self._slabs = SlabMap(cupy.cuda.runtime, self._device)
        self._kernels = _kernels(self._device.id)
        self._row_tables: dict[int, torch.Tensor] = {}
        with self._device:
            self._lanes = [Lane(cupy, device), Lane(cupy, device)]
        self._staging = _staging(device)

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
        """See `Copier.scatter_layers`. By kernels: a layer's part of a block is small."""
        addresses = self._slabs.addresses(slots)
        if addresses is None:
            return self._unmapped.scatter_layers(pages, slots)
        table = self._plans.page_table(pages, slots)
        if not len(slots):
            return [FINISHED] * self._pool.layers
        lane = self._lanes[0]
        events: list[Event] = []
        with self._device:
            uploaded = self._upload(lane, table, addresses.device)
            for layer in range(self._pool.layers):
                plan = self._plans.of(table.shape[1], layer)
                self._launch(lane, plan, table.shape[0], uploaded, Direction.H2D)
                events.append(self._event(lane, uploaded))
        return events

    def mark(self) -> Event:
        return device_mark(self._pool.device)

    def map_slab(self, slab: SlotBuffer) -> None:
        """Register the slab's memory with the driver; unmappable slabs are copied by torch."""
        self._slabs.add(slab)

    def close(self) -> None:
        for lane in self._lanes:
            lane.stream.synchronize()
        self._slabs.clear()

    # ---- the two paths ----

    def _copy(self, table: np.ndarray, addresses: SlotAddresses, direction: Direction) -> Event:
        if not len(table):
            return FINISHED
        plan = self._plans.of(table.shape[1])
        with self._device:
            if self._path_of(plan, table, direction) is Path.COPY_ENGINE:
                return self._through_staging(plan, table, addresses, direction)
            lane = self._lanes[0]
            uploaded = self._upload(lane, table, addresses.device)
            self._launch(lane, plan, len(table), uploaded, direction)
            return self._event(lane, uploaded)

    def _path_of(self, plan: CopyPlan, table: np.ndarray, direction: Direction) -> Path:
        if self._staging is None or self._blocks_staged(plan) < 1:
            return Path.KERNEL
        if direction is Direction.D2H and table.min() == SKIP:
            return Path.KERNEL  # a whole block would overwrite what shall stay
        return self._path or path_for(direction, len(table) * plan.block_bytes)

    def _blocks_staged(self, plan: CopyPlan) -> int:
        """Blocks that one half of the staging buffer holds."""
        return STAGING_BYTES // 2 // plan.block_bytes

    def _through_staging(
        self, plan: CopyPlan, table: np.ndarray, addresses: SlotAddresses, direction: Direction
    ) -> Event:
        """Groups of blocks, alternating between the two lanes and halves."""
        assert self._staging is not None
        first, second = self._lanes
        second.after(first)
        kept: list[torch.Tensor] = []
        size = self._blocks_staged(plan)
        for group, start in enumerate(range(0, len(table), size)):
            lane = self._lanes[group % 2]
            pages, hosts = table[start : start + size], addresses.host[start : start + size]
            half = self._staging.data_ptr() + group % 2 * (STAGING_BYTES // 2)
            staged = np.arange(len(pages), dtype=np.uint64) * np.uint64(plan.block_bytes)
            staged += np.uint64(half)
            uploaded = self._upload(lane, pages, staged)
            kept.append(uploaded)
            if direction is Direction.D2H:
                self._launch(lane, plan, len(pages), uploaded, direction)
            self._move(lane, staged, hosts, plan.block_bytes, direction)
            if direction is Direction.H2D:
                self._launch(lane, plan, len(pages), uploaded, direction)
        first.after(second)
        return self._event(first, kept)

    def _move(
        self,
        lane: Lane,
        staged: np.ndarray,
        hosts: np.ndarray,
        block_bytes: int,
        direction: Direction,
    ) -> None:
        """Whole blocks between staging and slots, neighbouring slots in one copy."""
        runtime = self._cupy.cuda.runtime
        for first, count in _neighbours(hosts, block_bytes):
            device, host, nbytes = int(staged[first]), int(hosts[first]), count * block_bytes
            if direction is Direction.D2H:
                kind = runtime.memcpyDeviceToHost
                runtime.memcpyAsync(host, device, nbytes, kind, lane.stream.ptr)
            else:
                kind = runtime.memcpyHostToDevice
                runtime.memcpyAsync(device, host, nbytes, kind, lane.stream.ptr)

    # ---- launches ----

    def _upload(self, lane: Lane, table: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Slot addresses, then page ids, on the device: by a copy of the lane's from pinned
        memory, which torch keeps until it has run."""
        pages = np.ascontiguousarray(table, dtype=np.int32).reshape(-1)
        words = len(slots) + (len(pages) + 1) // 2
        pinned = torch.empty(words, dtype=torch.int64, pin_memory=True)
        view = pinned.numpy()
        view[: len(slots)] = slots.view(np.int64)
        view[len(slots) :].view(np.int32)[: len(pages)] = pages
        with torch.cuda.stream(lane.torch):
            return pinned.to(self._pool.device, non_blocking=True)

    def _launch(
        self, lane: Lane, plan: CopyPlan, blocks: int, uploaded: torch.Tensor, direction: Direction
    ) -> None:
        into_slots = direction is Direction.D2H
        name = kernel_name(plan, dtype_name(self._pool.dtype), into_slots=into_slots)
        grid, block = launch_shape(blocks * plan.pages_per_block * plan.runs_per_page)
        counts, strides = launch_sizes(plan, blocks)
        slots = uploaded.data_ptr()
        addresses = (self._row_table(plan).data_ptr(), slots, slots + 8 * blocks)
        arguments = (
            *(np.uint64(address) for address in addresses),
            *(np.uint32(count) for count in counts),
            *(np.uint64(stride) for stride in strides),
        )
        with lane.stream:
            self._kernels[name](grid, block, arguments)

    def _row_table(self, plan: CopyPlan) -> torch.Tensor:
        """The plan's rows on the device; uploaded once, before anything uses it."""
        found = self._row_tables.get(id(plan))
        if found is None:
            lane = self._lanes[0]
            with torch.cuda.stream(lane.torch):
                found = torch.from_numpy(plan.table().view(np.int64)).to(self._pool.device)
            lane.stream.synchronize()
            self._row_tables[id(plan)] = found
        return found

    def _event(self, lane: Lane, kept: object) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(lane.torch)
        return TorchEvent(event, self._pool.device, kept)


def _staging(device: torch.device) -> torch.Tensor | None:
    """Memory for the copy engine's path; without it, kernels do everything."""
    try:
        return torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        log.warning("no %d bytes on %s for staging; copies go by kernels", STAGING_BYTES, device)
        return None


def _neighbours(hosts: np.ndarray, block_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, count) of slots that lie one behind the other without a gap."""
    breaks = np.flatnonzero(np.diff(hosts.astype(np.int64)) != block_bytes) + 1
    edges = [0, *breaks.tolist(), len(hosts)]
    for first, end in pairwise(edges):
        yield first, end - first


@functools.cache
def _kernels(device_id: int) -> dict[str, Any]:
    """The compiled kernels of one device (cupy keeps the binary on disk as well)."""
    import cupy

    with cupy.cuda.Device(device_id):
        module = cupy.RawModule(code=CUDA_SOURCE, options=("-std=c++17",))
        return {name: module.get_function(name) for name in KERNELS}
