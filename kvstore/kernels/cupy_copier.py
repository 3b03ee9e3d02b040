"""Gather and scatter on CUDA: one kernel per call, straight between pool and pinned slots.

The slab is registered with the driver once (`map_slab`), after which the device reads and writes
its slots over the bus without a staging copy. Copies run on a stream of their own beside the
model's; the caller orders them with `mark`. Slots outside every mapped slab go through torch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.kernels.base import FINISHED, Event, PoolShape, page_table
from kvstore.kernels.cuda_source import CUDA_SOURCE, launch_shape
from kvstore.kernels.torch_copier import DeviceCopier, device_mark
from kvstore.verbs import SlotBuffer

log = logging.getLogger(__name__)

REGISTER_PORTABLE_MAPPED = 1 | 2
"""cudaHostRegisterPortable | cudaHostRegisterMapped"""


SLABS_MAX = 4
"""Slabs mapped at once: the live one, and those of connections lost a short while ago."""


class MappedSlab(NamedTuple):
    """A slab the device can reach: the same `nbytes` at a host and at a device address."""

    host: int
    device: int
    nbytes: int

    def overlaps(self, host: int, nbytes: int) -> bool:
        return self.host < host + nbytes and host < self.host + self.nbytes


class CupyEvent:
    """The end of one launch; keeps the launch's tables alive until then."""

    def __init__(self, event: Any, tables: tuple[Any, ...]) -> None:
        self._event = event
        self._tables = tables

    def done(self) -> bool:
        return bool(self._event.done)

    def wait(self) -> None:
        self._event.synchronize()


class CupyCopier:
    """The copier of a pool on a CUDA device."""

    def __init__(self, pool: torch.Tensor) -> None:
        import cupy

        assert pool.device.type == "cuda", f"a pool on a CUDA device, not on {pool.device}"
        self._cupy = cupy
        self._pool = pool
        self._shape = PoolShape.of(pool)
        self._device = cupy.cuda.Device(pool.device.index or 0)
        self._unmapped = DeviceCopier(pool)
        self._slabs: list[MappedSlab] = []
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._gather = _module(self._device.id).get_function("kvstore_gather")
            self._scatter = _module(self._device.id).get_function("kvstore_scatter")

    def gather(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        addresses = self._addresses(slots)
        if addresses is None:
            return self._unmapped.gather(pages, slots)
        return self._launch(self._gather, page_table(self._shape, pages, slots), addresses)

    def scatter(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        addresses = self._addresses(slots)
        if addresses is None:
            return self._unmapped.scatter(pages, slots)
        return self._launch(self._scatter, page_table(self._shape, pages, slots), addresses)

    def mark(self) -> Event:
        return device_mark(self._pool.device)

    def map_slab(self, slab: SlotBuffer) -> None:
        """Register the slab's memory with the driver; unmappable slabs are copied by torch."""
        host = _address(slab.view(0))
        nbytes = _address(slab.view(slab.slots - 1)) + slab.slot_bytes - host
        assert nbytes == slab.slots * slab.slot_bytes, "a slab's slots lie one behind the other"
        if any(known.host == host and known.nbytes == nbytes for known in self._slabs):
            return
        # An older slab at the same addresses has been unmapped by its owner since.
        for known in [known for known in self._slabs if known.overlaps(host, nbytes)]:
            self._unmap(known)
        while len(self._slabs) >= SLABS_MAX:
            self._unmap(self._slabs[0])
        runtime = self._cupy.cuda.runtime
        with self._device:
            try:
                runtime.hostRegister(host, nbytes, REGISTER_PORTABLE_MAPPED)
                device = runtime.pointerGetAttributes(host).devicePointer
            except runtime.CUDARuntimeError as error:
                log.warning("cannot map a slab of %d bytes for the device: %s", nbytes, error)
                return
        self._slabs.append(MappedSlab(host, device, nbytes))

    def close(self) -> None:
        self._stream.synchronize()
        for slab in list(self._slabs):
            self._unmap(slab)

    def _unmap(self, slab: MappedSlab) -> None:
        self._slabs.remove(slab)
        runtime = self._cupy.cuda.runtime
        with self._device:
            try:
                runtime.hostUnregister(slab.host)
            except runtime.CUDARuntimeError as error:
                log.warning("cannot unmap a slab of %d bytes: %s", slab.nbytes, error)

    def _launch(self, kernel: Any, table: np.ndarray, addresses: np.ndarray) -> Event:
        blocks, pages_per_block = table.shape
        spans = blocks * pages_per_block * self._shape.rows
        if not spans:
            return FINISHED
        grid, block = launch_shape(spans)
        with self._device, self._stream:
            pages_on_device = self._cupy.asarray(np.ascontiguousarray(table))
            slots_on_device = self._cupy.asarray(addresses)
            sizes = (blocks, pages_per_block, *self._sizes())
            arguments = (
                np.uint64(self._pool.data_ptr()),
                slots_on_device,
                pages_on_device,
                *(np.uint64(size) for size in sizes),
            )
            kernel(grid, block, arguments)
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream)
        return CupyEvent(event, (pages_on_device, slots_on_device))

    def _sizes(self) -> tuple[int, int, int]:
        return self._shape.rows, self._shape.num_pages, self._shape.page_bytes

    def _addresses(self, slots: Sequence[memoryview]) -> np.ndarray | None:
        """The slots' device addresses; None when one lies in no mapped slab."""
        found = np.empty(len(slots), dtype=np.uint64)
        for index, slot in enumerate(slots):
            host = _address(slot)
            for slab in self._slabs:
                if slab.host <= host < slab.host + slab.nbytes:
                    found[index] = slab.device + (host - slab.host)
                    break
            else:
                return None
        return found


@functools.cache
def _module(device_id: int) -> Any:
    """The compiled kernels of one device (cupy keeps the binary on disk as well)."""
    import cupy

    module = cupy.RawModule(code=CUDA_SOURCE, options=("-std=c++17",))
    module.compile()
    return module


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
