"""The engine's KV pages: which are free, and how many hold each of the others.

A page is `page_tokens` tokens of KV in the device's pool, named by its index. Everyone who needs
a page to stay as it is (a running request, the radix tree, a save under way) holds one reference;
the page is free when the last of them drops it. One count, never clamped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]


def useful_tokens(prompt_tokens: int, page_tokens: int = 1) -> int:
    """How many leading tokens of a prompt a hit may spare: whole pages, never the last token,
    which is computed to get the first logits."""
    return max(0, prompt_tokens - 1) // page_tokens * page_tokens


class OutOfPages(Exception):
    """`alloc` was asked for more pages than are free: the caller looks first, or evicts."""


class PagePool:
    """Counts per page over `num_pages` pages, all free at first. Used from one thread.

    The pages given in one call are distinct; saying one twice raises AssertionError, as does
    holding or dropping a free page.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self._counts: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        # The free pages are stack[:free]; the last freed is the first handed out again.
        self._stack: PageIds = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free = num_pages

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return self._free

    def alloc(self, pages: int) -> PageIds:
        """`pages` free page ids, int32, each now held once by the caller.

        Raises:
            OutOfPages: fewer than that are free; nothing was taken.
        """
        assert pages >= 0, f"alloc of {pages} pages"
        if pages > self._free:
            raise OutOfPages(f"{pages} pages wanted, {self._free} of {self.num_pages} free")
        self._free -= pages
        taken = self._stack[self._free : self._free + pages].copy()
        self._counts[taken] = 1
        return taken

    def hold(self, pages: PageIds) -> None:
        """One more reference on each of these pages, none of them free."""
        if len(pages) == 1:
            page, count = self._one(pages)
            self._counts[page] = count + 1
            return
        at, counts = self._many(pages)
        counts += 1
        self._counts[at] = counts

    def drop(self, pages: PageIds) -> int:
        """One reference less on each of these pages. Returns how many became free by it."""
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
        """References on one page; 0 when it is free."""
        return int(self._counts[page])

    def check(self) -> None:
        """Assert that the free stack holds exactly the pages without a reference."""
        free = np.sort(self._stack[: self._free])
        assert np.array_equal(free, np.flatnonzero(self._counts == 0)), "free stack is not the free"
        assert (self._counts >= 0).all(), "a count below zero"

    def _one(self, pages: PageIds) -> tuple[int, int]:
        """A single page, and its count, above zero."""
        page = pages.item()
        assert page >= 0, f"page {page} is below 0"
        count = self._counts.item(page)
        assert count > 0, f"page {page} is free: held or dropped too late"
        return page, count

    def _many(self, pages: PageIds) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """These pages as an index, and a copy of their counts, all above zero.

        Leaves marks where their counts were; the caller writes the new counts there.
        """
        # A page below zero becomes one far too large.
        at = pages.view(np.uint32).astype(np.intp)
        counts: NDArray[np.int32] = self._counts[at]
        held = np.count_nonzero(counts)
        assert held == len(at), f"page {pages[counts == 0][0]} is free: held or dropped too late"
        # A page named twice keeps only the later of its two marks. (numpy's reductions cost 6 µs
        # a call, which is why none is used here.)
        marks = np.arange(len(at), dtype=np.int32)
        self._counts[at] = marks
        if self._counts[at].tobytes() != marks.tobytes():
            self._counts[at] = counts
            raise AssertionError("a page is named twice in one call")
        return at, counts

    def __repr__(self) -> str:
        return f"PagePool({self._free}/{self.num_pages} pages free)"
