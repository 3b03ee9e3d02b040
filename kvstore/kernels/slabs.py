"""Slabs registered with the CUDA driver, so that the device reads and writes their slots.

A registration is of pages, not of addresses: it pins them, and outlives their mapping. A slab that
is mapped where an older one lay must be registered anew, or the device would read and write the old
one's pages. So slabs are told apart as objects, and unregistered before they are unmapped. Every
process registers the slab for itself; pages that lie in huge pages (`l2.huge_pages`) are pinned the
faster for being fewer.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from kvstore.interface import SlotBuffer
from kvstore.shm.slab import Slab

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


class SlotAddresses(NamedTuple):
    """Where slots lie, one uint64 each: for this process, and for the device."""

    host: np.ndarray
    device: np.ndarray


class SlabMap:
    """The slabs registered with the driver. Slabs may be closed in any thread.

    runtime: `cupy.cuda.runtime`, or `launchers.Registrar`. device: gives what is entered around
    each call of it.
    """

    def __init__(self, runtime: Any, device: Callable[[], AbstractContextManager[Any]]) -> None:
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
            with self._device():
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

    def addresses(self, slots: Sequence[memoryview]) -> SlotAddresses | None:
        """Where these slots lie; None when one lies in no registered slab."""
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
                log.warning("cannot unmap a slab of %d bytes: %s", known.nbytes, error)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
