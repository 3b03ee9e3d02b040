"""Bytes between slots and addresses of SGLang's host pool, several pages at once.

The host pool gives addresses, not tensors: a page is one or more *extents* (address, bytes), whose
concatenation is the block. Every copy here runs without the interpreter's lock, so SGLang's other
threads go on; a call returns when all of its copies have ended, for neither the slots nor the
addresses are its own after that.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from kvstore.errors import ConfigError

Extents = Sequence[tuple[int, int]]
"""(address, bytes) of the parts of one page, in the order in which a block holds them."""

PART_BYTES: Final = 4 << 20
"""Less than this is copied by the calling thread alone: waking another costs more."""
FEW_EXTENTS: Final = 8
"""Up to here each extent is one memmove; beyond, a regular page is one strided copy."""


class Grid:
    """Memory as numpy sees it: `rows` x 2 pieces of `nbytes` each, at regular distances."""

    def __init__(self, address: int, rows: int, nbytes: int, strides: tuple[int, int]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": "|u1",
            "shape": (rows, 2, nbytes),
            "strides": (*strides, 1),
        }


class Copies:
    """Threads that copy. `threads`: how many copy one batch, the calling one among them.

    All are started here: one that could not be started in the middle of a batch would leave its
    part in the queue, to be copied when the slots are another's.

    Raises ConfigError: the system starts no more threads.
    """

    def __init__(self, threads: int) -> None:
        assert threads >= 1, f"{threads} threads"
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="kvstore-copies")
        met = threading.Barrier(threads)
        try:
            for _ in range(threads - 1):
                self._pool.submit(met.wait)
        except RuntimeError as error:
            met.abort()
            self._pool.shutdown()
            raise ConfigError(f"copy_threads = {threads}: {error}; fewer are right") from None
        met.wait()

    def to_host(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        """Copy the front of each slot to its page's extents."""
        self._all(_slot_to_page, slots, pages)

    def to_slots(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        """Copy each page's extents to the front of its slot."""
        self._all(_page_to_slot, slots, pages)

    def close(self) -> None:
        self._pool.shutdown()

    def _all(
        self,
        copy: Callable[[memoryview, Extents], None],
        slots: Sequence[memoryview],
        pages: Sequence[Extents],
    ) -> None:
        assert len(slots) == len(pages), f"{len(slots)} slots for {len(pages)} pages"
        total = sum(page_bytes(page) for page in pages)
        parts = max(1, min(self._threads, len(pages), total // PART_BYTES))

        def part(number: int) -> None:
            for index in range(number, len(pages), parts):
                copy(slots[index], pages[index])

        others: list[Future[Any]] = [self._pool.submit(part, n) for n in range(1, parts)]
        try:
            part(0)
        finally:
            # Whatever happens here, nothing may still run when the slots are handed back.
            faults = [future.exception() for future in others]
        for fault in faults:
            if fault is not None:
                raise fault


def page_bytes(page: Extents) -> int:
    """Bytes of a page, all extents together."""
    return sum(nbytes for _, nbytes in page)


def _slot_to_page(slot: memoryview, page: Extents) -> None:
    start = _address(slot)
    grid = _grid_of(page)
    if grid is not None:
        grid[...] = _block(start, grid)
        return
    for address, nbytes in page:
        ctypes.memmove(address, start, nbytes)
        start += nbytes


def _page_to_slot(slot: memoryview, page: Extents) -> None:
    start = _address(slot)
    grid = _grid_of(page)
    if grid is not None:
        _block(start, grid)[...] = grid
        return
    for address, nbytes in page:
        ctypes.memmove(start, address, nbytes)
        start += nbytes


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _grid_of(page: Extents) -> np.ndarray[Any, Any] | None:
    """Many extents that lie in a regular pattern, as one array; None for any other page.

    A layer-first page is such a pattern: K and V of each layer, layer after layer.
    """
    if len(page) <= FEW_EXTENTS or len(page) % 2:
        return None
    (first, nbytes), (second, _), (third, _) = page[0], page[1], page[2]
    down, across = third - first, second - first
    for index, (address, size) in enumerate(page):
        if size != nbytes or address != first + index // 2 * down + index % 2 * across:
            return None
    return np.asarray(Grid(first, len(page) // 2, nbytes, (down, across)))


def _block(start: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The contiguous bytes of a slot in the shape of a grid."""
    rows, _, nbytes = like.shape
    return np.asarray(Grid(start, rows, nbytes, (2 * nbytes, nbytes)))
