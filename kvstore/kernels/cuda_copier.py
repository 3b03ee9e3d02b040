"""Gather and scatter on CUDA: our kernels, straight between pool and pinned slots.

The slab is registered with the driver once (`map_slab`), after which the device reaches its slots
without a staging copy by the host. Copies run on streams of their own beside the model's; the
caller orders them with `mark`, and nothing here waits for the whole device. A copy takes one of two
paths (`paths`). Slots outside every mapped slab go through torch.

Streams, events and memory are torch's; only the kernels' launch is a `launchers.Launcher`: the CUDA
source through cupy, or Triton.

One thread at a time calls a copier. Copies of one copier run in the order of the calls.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from kvstore.kernels.base import FINISHED, SKIP, Event, Plans, as_layout
from kvstore.kernels.formats import PLAIN, BlockFormat, dtype_name
from kvstore.kernels.launchers import Launcher, Tables, launcher_for
from kvstore.kernels.layout import PoolLayout
from kvstore.kernels.paths import STAGING_BYTES, Direction, Path, path_for
from kvstore.kernels.plan import CopyPlan
from kvstore.kernels.slabs import SlabMap, SlotAddresses
from kvstore.kernels.torch_copier import DeviceCopier, TorchEvent, device_mark
from kvstore.verbs import SlotBuffer

log = logging.getLogger(__name__)


class CudaCopier:
    """The copier of a pool on a CUDA device.

    path: takes this path always, where it can; None chooses by size.
    launcher: of the kernels; None: the CUDA source where cupy is installed, else Triton.
    """

    def __init__(
        self,
        pool: torch.Tensor | PoolLayout,
        form: BlockFormat = PLAIN,
        *,
        path: Path | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._pool = as_layout(pool)
        device = self._pool.device
        assert device.type == "cuda", f"a pool on a CUDA device, not on {device}"
        self._path = path
        self._plans = Plans(self._pool, form)
        self._device = functools.partial(torch.cuda.device, device)
        self._launcher = launcher_for(device) if launcher is None else launcher
        self._unmapped = DeviceCopier(self._pool, form)
        self._slabs = SlabMap(self._launcher.runtime, self._device)
        self._row_tables: dict[int, torch.Tensor] = {}
        with self._device():
            self._lanes = [self._launcher.stream(), self._launcher.stream()]
        self._staging = _staging(device)
        for lane in self._lanes:  # the allocator's memory may still be in use by earlier work
            lane.wait_stream(torch.cuda.current_stream(device))

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
        with self._device():
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
            lane.synchronize()
        self._slabs.clear()

    # ---- the two paths ----

    def _copy(self, table: np.ndarray, addresses: SlotAddresses, direction: Direction) -> Event:
        if not len(table):
            return FINISHED
        plan = self._plans.of(table.shape[1])
        with self._device():
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
        second.wait_stream(first)
        kept: list[torch.Tensor] = []
        size = self._blocks_staged(plan)
        for group, start in enumerate(range(0, len(table), size)):
            lane = self._lanes[group % 2]
            pages, hosts = table[start : start + size], addresses.host[start : start + size]
            half = self._staging[group % 2 * (STAGING_BYTES // 2) :]
            staged = np.arange(len(pages), dtype=np.uint64) * np.uint64(plan.block_bytes)
            staged += np.uint64(half.data_ptr())
            uploaded = self._upload(lane, pages, staged)
            kept.append(uploaded)
            if direction is Direction.D2H:
                self._launch(lane, plan, len(pages), uploaded, direction)
            self._move(lane, half, hosts, plan.block_bytes, direction)
            if direction is Direction.H2D:
                self._launch(lane, plan, len(pages), uploaded, direction)
        first.wait_stream(second)
        return self._event(first, kept)

    def _move(
        self,
        lane: torch.cuda.Stream,
        half: torch.Tensor,
        hosts: np.ndarray,
        block_bytes: int,
        direction: Direction,
    ) -> None:
        """Whole blocks between staging and slots, neighbouring slots in one copy."""
        with torch.cuda.stream(lane):
            for first, count in _neighbours(hosts, block_bytes):
                staged = half[first * block_bytes : (first + count) * block_bytes]
                memory = (ctypes.c_byte * (count * block_bytes)).from_address(int(hosts[first]))
                host = torch.frombuffer(memory, dtype=torch.uint8)
                if direction is Direction.D2H:
                    host.copy_(staged, non_blocking=True)
                else:
                    staged.copy_(host, non_blocking=True)

    # ---- launches ----

    def _upload(
        self, lane: torch.cuda.Stream, table: np.ndarray, slots: np.ndarray
    ) -> torch.Tensor:
        """Slot addresses, then page ids, on the device: by a copy of the lane's from pinned
        memory, which torch keeps until it has run."""
        pages = np.ascontiguousarray(table, dtype=np.int32).reshape(-1)
        words = len(slots) + (len(pages) + 1) // 2
        pinned = torch.empty(words, dtype=torch.int64, pin_memory=True)
        view = pinned.numpy()
        view[: len(slots)] = slots.view(np.int64)
        view[len(slots) :].view(np.int32)[: len(pages)] = pages
        with torch.cuda.stream(lane):
            return pinned.to(self._pool.device, non_blocking=True)

    def _launch(
        self,
        lane: torch.cuda.Stream,
        plan: CopyPlan,
        blocks: int,
        uploaded: torch.Tensor,
        direction: Direction,
    ) -> None:
        words = blocks * plan.pages_per_block
        pages = uploaded[blocks:].view(torch.int32)[:words].view(blocks, plan.pages_per_block)
        tables = Tables(self._row_table(plan), uploaded[:blocks], pages)
        dtype = dtype_name(self._pool.dtype)
        self._launcher.launch(lane, plan, dtype, tables, into_slots=direction is Direction.D2H)

    def _row_table(self, plan: CopyPlan) -> torch.Tensor:
        """The plan's rows on the device; uploaded once, before anything uses it."""
        found = self._row_tables.get(id(plan))
        if found is None:
            lane = self._lanes[0]
            with torch.cuda.stream(lane):
                found = torch.from_numpy(plan.table().view(np.int64)).to(self._pool.device)
            lane.synchronize()
            self._row_tables[id(plan)] = found
        return found

    def _event(self, lane: torch.cuda.Stream, kept: object) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(lane)
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
