"""The engine's KV pages, with a reference count per page.

A page is `page_tokens` tokens of KV in the device's pool, identified by its index. Each user of a
page (a running request, the radix tree, a save in progress) has one reference. A page is free when
its last reference is dropped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]


def useful_tokens(prompt_tokens: int, page_tokens: int = 1) -> int:
    """Return how many leading tokens of a prompt a hit can save: whole pages, without the last
    token, which is computed to get the first logits."""
    return max(0, prompt_tokens - 1) // page_tokens * page_tokens


class OutOfPages(Exception):
    """`alloc` was called for more pages than are free. The caller must check first, or evict."""


class PagePool:
    """Reference counts of `num_pages` pages, all free at first. Used from one thread.

    The pages in one call must be distinct. A duplicate raises AssertionError, and so does a free
    page in `add_ref` or `drop_ref`.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self._counts: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        # The free pages are stack[:free]. The last freed page is allocated first.
        self._stack: PageIds = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free = num_pages

    @property
    def free(self) -> int:
        """Number of pages without a reference."""
        return self._free

    def alloc(self, pages: int) -> PageIds:
        """Allocate free pages. Returns their ids, int32. The caller has one reference on each.

        Raises:
            OutOfPages: fewer pages are free; none was allocated.
        """
        assert pages >= 0, f"alloc of {pages} pages"
        if pages > self._free:
            raise OutOfPages(f"{pages} pages needed, {self._free} of {self.num_pages} free")
        self._free -= pages
        taken = self._stack[self._free : self._free + pages].copy()
        self._counts[taken] = 1
        return taken

    def add_ref(self, pages: PageIds) -> None:
        """Add one reference to each of these pages. None of them may be free."""
        if len(pages) == 1:
            page, count = self._one(pages)
            self._counts[page] = count + 1
            return
        at, counts = self._many(pages)
        counts += 1
        self._counts[at] = counts

    def drop_ref(self, pages: PageIds) -> int:
        """Drop one reference of each of these pages. Returns how many became free."""
        if len(pages) == 1:
            page, count = self._one(pages)
            self._counts[page] = count - 1
            if count > 1:
                return 0
            self._stack[self._free] = page
            self._free += 1
            return 1
        at, counts = self._many(pages)
        counts -= 1
        self._counts[at] = counts
        kept = np.count_nonzero(counts)
        gone = pages[counts == 0] if kept else pages
        self._stack[self._free : self._free + len(gone)] = gone
        self._free += len(gone)
        return len(gone)

    def count(self, page: int) -> int:
        """Return the number of references on a page. 0: free."""
        return int(self._counts[page])

    def check(self) -> None:
        """Assert that the free stack has exactly the pages without a reference."""
        free = np.sort(self._stack[: self._free])
        assert np.array_equal(free, np.flatnonzero(self._counts == 0)), "wrong free stack"
        assert (self._counts >= 0).all(), "a count below zero"

    def _one(self, pages: PageIds) -> tuple[int, int]:
        """Return a single page and its count, which must be above zero."""
        page = pages.item()
        assert page >= 0, f"page {page} is below 0"
        count = self._counts.item(page)
        assert count > 0, f"page {page} is free: reference added or dropped too late"
        return page, count

    def _many(self, pages: PageIds) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Return these pages as an index, and a copy of their counts, all above zero.

        Overwrites their counts with marks. The caller writes the new counts there.
        """
        # A negative page becomes a far too large one.
        at = pages.view(np.uint32).astype(np.intp)
        counts: NDArray[np.int32] = self._counts[at]
        referenced = np.count_nonzero(counts)
        assert referenced == len(at), (
            f"page {pages[counts == 0][0]} is free: reference added or dropped too late"
        )
        # A duplicate page keeps only the later of its two marks. (numpy's reductions take 6 µs a
        # call, so none is used here.)
        marks = np.arange(len(at), dtype=np.int32)
        self._counts[at] = marks
        if self._counts[at].tobytes() != marks.tobytes():
            self._counts[at] = counts
            raise AssertionError("a page is given twice in one call")
        return at, counts

    def __repr__(self) -> str:
        return f"PagePool({self._free}/{self.num_pages} pages free)"
