"""Gather and scatter on CUDA: one kernel per call, straight between pool and pinned slots.

The slab is registered with the driver once (`map_slab`), after which the device reads and writes
its slots over the bus without a staging copy. Copies run on a stream of their own beside the
model's; the caller orders them with `mark`. Slots outside every mapped slab go through torch.

A registration is of pages, not of addresses: it pins them, and outlives their mapping. A slab that
is mapped where an older one lay must be registered anew, or the device would read and write the old
one's pages. So slabs are told apart as objects, and unregistered before they are unmapped.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.kernels.base import FINISHED, Event, PoolShape, page_table
from kvstore.kernels.cuda_source import CUDA_SOURCE, launch_shape
from kvstore.kernels.torch_copier import DeviceCopier, device_mark
from kvstore.leases import Slab
from kvstore.verbs import SlotBuffer

log = logging.getLogger(__name__)

REGISTER_PORTABLE_MAPPED = 1 | 2
"""cudaHostRegisterPortable | cudaHostRegisterMapped"""
SLABS_MAX = 4
"""Slabs mapped at once: the live one, and those of connections lost a short while ago."""


class MappedSlab(NamedTuple):
    """A slab the device can reach: the same `nbytes` at a host and at a device address."""

    slab: SlotBuffer
    host: int
    device: int
    nbytes: int

    def overlaps(self, host: int, nbytes: int) -> bool:
        return self.host < host + nbytes and host < self.host + self.nbytes


class SlabMap:
    """The slabs registered with the driver. Slabs may be closed in any thread.

    runtime: `cupy.cuda.runtime`. device: entered around each call of it.
    """

    def __init__(self, runtime: Any, device: AbstractContextManager[Any]) -> None:
        self._runtime = runtime
        self._device = device
        self._lock = threading.Lock()
        self._known: list[MappedSlab] = []

    def add(self, slab: SlotBuffer) -> None:
        """Register a slab's memory; one that cannot be is left out."""
        host = _address(slab.view(0))
        nbytes = _address(slab.view(slab.slots - 1)) + slab.slot_bytes - host
        assert nbytes == slab.slots * slab.slot_bytes, "a slab's slots lie one behind the other"
        with self._lock:
            if any(known.slab is slab for known in self._known):
                return
            # An older slab at the same addresses has been unmapped by its owner since.
            for known in [known for known in self._known if known.overlaps(host, nbytes)]:
                self._unregister(known)
            while len(self._known) >= SLABS_MAX:
                self._unregister(self._known[0])
            with self._device:
                try:
                    self._runtime.hostRegister(host, nbytes, REGISTER_PORTABLE_MAPPED)
                    device = self._runtime.pointerGetAttributes(host).devicePointer
                except self._runtime.CUDARuntimeError as error:
                    log.warning("cannot map a slab of %d bytes for the device: %s", nbytes, error)
                    return
            self._known.append(MappedSlab(slab, host, device, nbytes))
        if isinstance(slab, Slab):
            slab.before_unmapping(functools.partial(self.remove, slab))

    def remove(self, slab: SlotBuffer) -> None:
        """Unregister a slab, if it is there. No copy of its slots runs."""
        with self._lock:
            for known in [known for known in self._known if known.slab is slab]:
                self._unregister(known)

    def clear(self) -> None:
        """Unregister every slab."""
        with self._lock:
            for known in list(self._known):
                self._unregister(known)

    def addresses(self, slots: Sequence[memoryview]) -> np.ndarray | None:
        """The slots' device addresses; None when one lies in no registered slab."""
        found = np.empty(len(slots), dtype=np.uint64)
        with self._lock:
            for index, slot in enumerate(slots):
                host = _address(slot)
                for slab in self._known:
                    if slab.host <= host < slab.host + slab.nbytes:
                        found[index] = slab.device + (host - slab.host)
                        break
                else:
                    return None
        return found

    def _unregister(self, known: MappedSlab) -> None:
        self._known.remove(known)
        with self._device:
            try:
                self._runtime.hostUnregister(known.host)
            except self._runtime.CUDARuntimeError as error:
                log.warning("cannot unmap a slab of %d bytes: %s", known.nbytes, error)


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
        self._slabs = SlabMap(cupy.cuda.runtime, self._device)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._gather = _module(self._device.id).get_function("kvstore_gather")
            self._scatter = _module(self._device.id).get_function("kvstore_scatter")

    def gather(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        addresses = self._slabs.addresses(slots)
        if addresses is None:
            return self._unmapped.gather(pages, slots)
        return self._launch(self._gather, page_table(self._shape, pages, slots), addresses)

    def scatter(self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]) -> Event:
        addresses = self._slabs.addresses(slots)
        if addresses is None:
            return self._unmapped.scatter(pages, slots)
        return self._launch(self._scatter, page_table(self._shape, pages, slots), addresses)

    def mark(self) -> Event:
        return device_mark(self._pool.device)

    def map_slab(self, slab: SlotBuffer) -> None:
        """Register the slab's memory with the driver; unmappable slabs are copied by torch."""
        self._slabs.add(slab)

    def close(self) -> None:
        self._stream.synchronize()
        self._slabs.clear()

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


@functools.cache
def _module(device_id: int) -> Any:
    """The compiled kernels of one device (cupy keeps the binary on disk as well)."""
    import cupy

    module = cupy.RawModule(code=CUDA_SOURCE, options=("-std=c++17",))
    module.compile()
    return module


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
