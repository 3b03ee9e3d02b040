"""Copies between slots and addresses of SGLang's host pool, several pages at once.

The host pool gives addresses, not tensors: a page is one or more *extents* (address, bytes), whose
concatenation is the block. Copies run without the GIL, so SGLang's other threads continue. A call
returns when all of its copies have ended, because slots and addresses may be reused after it.
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
"""(address, bytes) of the parts of one page, in the order of their bytes in the block."""

MIN_PART_BYTES: Final = 4 << 20
"""Minimum bytes of a part for another thread: waking a thread for less costs more."""
MEMMOVE_EXTENTS_MAX: Final = 8
"""Maximum number of extents that are copied by memmove. A regular page with more is one strided
copy."""


class Grid:
    """Memory as a numpy array: `rows` x 2 extents of `nbytes` each, at regular distances."""

    def __init__(self, address: int, rows: int, nbytes: int, strides: tuple[int, int]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": "|u1",
            "shape": (rows, 2, nbytes),
            "strides": (*strides, 1),
        }


class Copies:
    """Threads that copy. threads: number of threads that copy a batch, including the calling one.

    The constructor starts all of them. If a thread could not start during a batch, its part would
    stay in the queue and be copied after the slots were reused.

    Raises ConfigError: the system cannot start that many threads.
    """

    def __init__(self, threads: int) -> None:
        assert threads >= 1, f"{threads} threads"
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="kvstore-copies")
        started = threading.Barrier(threads)
        try:
            for _ in range(threads - 1):
                self._pool.submit(started.wait)
        except RuntimeError as error:
            started.abort()
            self._pool.shutdown()
            raise ConfigError(f"copy_threads = {threads}: {error}; use a lower number") from None
        started.wait()

    def to_host(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        """Copy the front of each slot to its page's extents."""
        self._copy_all(_slot_to_page, slots, pages)

    def to_slots(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        """Copy each page's extents to the front of its slot."""
        self._copy_all(_page_to_slot, slots, pages)

    def close(self) -> None:
        self._pool.shutdown()

    def _copy_all(
        self,
        copy: Callable[[memoryview, Extents], None],
        slots: Sequence[memoryview],
        pages: Sequence[Extents],
    ) -> None:
        assert len(slots) == len(pages), f"{len(slots)} slots for {len(pages)} pages"
        total = sum(page_bytes(page) for page in pages)
        parts = max(1, min(self._threads, len(pages), total // MIN_PART_BYTES))

        def part(number: int) -> None:
            for index in range(number, len(pages), parts):
                copy(slots[index], pages[index])

        others: list[Future[Any]] = [self._pool.submit(part, n) for n in range(1, parts)]
        try:
            part(0)
        finally:
            # Also after an exception here, no copy may run when the slots are released.
            errors = [future.exception() for future in others]
        for error in errors:
            if error is not None:
                raise error


def page_bytes(page: Extents) -> int:
    """Bytes of a page, the sum of its extents."""
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
    """The extents of a page as one array, if they have a regular pattern; else None.

    A layer-first page has such a pattern: K and V of each layer, layer after layer.
    """
    if len(page) <= MEMMOVE_EXTENTS_MAX or len(page) % 2:
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
