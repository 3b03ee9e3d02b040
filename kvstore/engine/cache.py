"""Page and radix tree operations for jobs: attach, reserve, grow, publish, detach.

A job has one reference on each page of its table, and one lock on the node at the end of its
published prefix. The tree has its own references. A page without references is free. So a job that
ends or is preempted leaves its full pages in the tree and frees the others.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.pages import PagePool, useful_tokens
from kvstore.engine.radix import RadixCache
from kvstore.engine.radix_check import check_tree
from kvstore.engine.request import Job


class PrefixCache:
    """Page pool and radix tree of one engine. Loop thread only."""

    def __init__(self, num_pages: int, page_tokens: int, *, enabled: bool = True) -> None:
        """enabled: False keeps the tree empty, so every prompt is computed completely."""
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.enabled = enabled
        self.pool = PagePool(num_pages)
        self.tree = RadixCache(self.pool, page_tokens)

    @property
    def available_pages(self) -> int:
        """Pages that are free or can be evicted."""
        return self.pool.free + self.tree.evictable_pages

    def useful_tokens(self, job: Job) -> int:
        """Return the leading tokens of a job that a hit can save; see `pages.useful_tokens`."""
        return useful_tokens(job.length, self.page_tokens)

    def missing_pages(self, job: Job, tokens: int) -> int:
        """Return the number of pages the job lacks for its first `tokens` tokens."""
        return max(0, -(-tokens // self.page_tokens) - job.page_count)

    def believed_tokens(self, job: Job) -> int:
        """Return the leading tokens that are on the device or believed to be in a lower tier."""
        return self.tree.match(job.known[: job.length - 1], job.root).stored_tokens

    def attach(self, job: Job) -> int:
        """Give a job without pages the longest prefix in the tree, referenced and locked.

        Returns: leading tokens on the device or believed to be in a lower tier.
        """
        assert not job.page_count
        assert job.node is None
        found = self.tree.match(job.known[: job.length - 1], job.root)
        self.pool.add_ref(found.pages)
        self.tree.lock(found.node)
        job.node = found.node
        self._append(job, found.pages)
        job.computed = job.published = found.tokens
        return found.stored_tokens

    def detach(self, job: Job) -> None:
        """Release the job's lock and all its page references."""
        assert job.node is not None
        self.tree.unlock(job.node)
        self.pool.drop_ref(job.pages)
        job.node = None
        job.page_count = 0
        job.computed = job.published = 0

    def reserve(self, pages: int) -> bool:
        """Free this many pages, evicting as needed. Returns False if that is not possible."""
        while self.pool.free < pages:
            if not self.tree.evict(pages - self.pool.free):
                return False
        return True

    def grow(self, job: Job, tokens: int) -> None:
        """Give the job pages for its first `tokens` tokens. They must be reserved."""
        missing = self.missing_pages(job, tokens)
        if missing:
            self._append(job, self.pool.alloc(missing))

    def _append(self, job: Job, pages: np.ndarray) -> None:
        job.page_table[job.page_count : job.page_count + len(pages)] = pages
        job.page_count += len(pages)

    def publish(self, job: Job) -> None:
        """Insert the job's full pages into the tree, so that other jobs hit them at once.

        If another job published the same tokens first, this job takes the tree's pages and frees
        its own.
        """
        full = job.computed // self.page_tokens * self.page_tokens
        if full <= job.published or not self.enabled:
            return
        pages = job.pages[: full // self.page_tokens]
        inserted = self.tree.insert(job.tokens[:full], pages, job.root)
        self.tree.lock(inserted.node)
        self.tree.unlock(job.node)
        job.node = inserted.node
        if inserted.matched_tokens > job.published:
            self._use_tree_pages(job, full)
        job.published = full

    def _use_tree_pages(self, job: Job, full: int) -> None:
        """Replace the job's pages of its first `full` tokens with the tree's where they differ."""
        theirs = self.tree.match(job.tokens[:full], job.root).pages
        assert len(theirs) == full // self.page_tokens
        ours = job.pages[: len(theirs)]
        differ = theirs != ours
        self.pool.add_ref(theirs[differ])
        self.pool.drop_ref(ours[differ])
        ours[:] = theirs

    def check_idle(self) -> None:
        """Assert that no job, copy or lock is left: every page is free or evictable."""
        check_tree(self.tree)
        assert self.available_pages == self.num_pages, (
            self.pool.free,
            self.tree.evictable_pages,
            self.num_pages,
        )
