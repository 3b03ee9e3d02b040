"""Registers slabs with the CUDA driver, so that the device can read and write their slots.

A registration pins pages, not addresses, and outlives their mapping. A slab at the addresses of an
older one must be registered again, or the device would access the older one's pages. So slabs are
identified as objects, and unregistered before they are unmapped. Each process registers the slab
separately. Huge pages (`l2.huge_pages`) are pinned faster, because there are fewer of them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from kvstore.interface import SlabView
from kvstore.shm.slab import Slab

log = logging.getLogger(__name__)

REGISTER_PORTABLE_MAPPED = 1 | 2
"""cudaHostRegisterPortable | cudaHostRegisterMapped"""
SLABS_MAX = 4
"""Maximum mapped slabs: the current one, and those of recently lost connections."""


class MappedSlab(NamedTuple):
    """A slab that the device can access: `nbytes` at a host and at a device address."""

    slab: SlabView
    host: int
    device: int
    nbytes: int

    def overlaps(self, host: int, nbytes: int) -> bool:
        return self.host < host + nbytes and host < self.host + self.nbytes


class SlotAddresses(NamedTuple):
    """Addresses of slots, one uint64 each: for this process, and for the device."""

    host: np.ndarray
    device: np.ndarray


class SlabMap:
    """Slabs registered with the driver. Slabs can be closed in any thread.

    runtime: `cupy.cuda.runtime`, or `launchers.Registrar`. device: returns a context for each call
    of the runtime.
    """

    def __init__(self, runtime: Any, device: Callable[[], AbstractContextManager[Any]]) -> None:
        self._runtime = runtime
        self._device = device
        self._lock = threading.Lock()
        self._known: list[MappedSlab] = []

    def add(self, slab: SlabView) -> None:
        """Register a slab's memory. If that fails, the slab is left out."""
        host = _address(slab.view(0))
        nbytes = _address(slab.view(slab.slots - 1)) + slab.slot_bytes - host
        assert nbytes == slab.slots * slab.slot_bytes, "the slots of a slab must be contiguous"
        with self._lock:
            if any(known.slab is slab for known in self._known):
                return
            # An older slab at the same addresses has been unmapped by its owner.
            for known in [known for known in self._known if known.overlaps(host, nbytes)]:
                self._unregister(known)
            while len(self._known) >= SLABS_MAX:
                self._unregister(self._known[0])
            with self._device():
                try:
                    self._runtime.hostRegister(host, nbytes, REGISTER_PORTABLE_MAPPED)
                    device = self._runtime.pointerGetAttributes(host).devicePointer
                except self._runtime.CUDARuntimeError as error:
                    log.warning("cannot map slab of %d bytes for the device: %s", nbytes, error)
                    return
            self._known.append(MappedSlab(slab, host, device, nbytes))
        if isinstance(slab, Slab):
            slab.before_unmapping(functools.partial(self.remove, slab))

    def remove(self, slab: SlabView) -> None:
        """Unregister a slab, if it is registered. No copy of its slots may be running."""
        with self._lock:
            for known in [known for known in self._known if known.slab is slab]:
                self._unregister(known)

    def clear(self) -> None:
        """Unregister all slabs."""
        with self._lock:
            for known in list(self._known):
                self._unregister(known)

    def addresses(self, slots: Sequence[memoryview]) -> SlotAddresses | None:
        """Return the addresses of these slots. None: a slot is in no registered slab."""
        host = np.array([_address(slot) for slot in slots], dtype=np.uint64)
        device = np.zeros(len(slots), dtype=np.uint64)
        with self._lock:
            left = np.ones(len(slots), dtype=bool)
            for slab in self._known:
                inside = (host >= slab.host) & (host < slab.host + slab.nbytes)
                device[inside] = host[inside] - np.uint64(slab.host) + np.uint64(slab.device)
                left &= ~inside
        return None if left.any() else SlotAddresses(host, device)

    def _unregister(self, known: MappedSlab) -> None:
        self._known.remove(known)
        with self._device():
            try:
                self._runtime.hostUnregister(known.host)
            except self._runtime.CUDARuntimeError as error:
                log.warning("cannot unmap slab of %d bytes: %s", known.nbytes, error)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
