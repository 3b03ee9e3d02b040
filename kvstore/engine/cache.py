"""Pages and radix tree as jobs use them: attach, reserve, grow, publish, detach.

A job holds one reference on every page of its table and one lock on the node its published prefix
ends in. The tree holds a reference of its own. A page is free when the last reference is gone, so
a job that ends or is preempted leaves its full pages in the tree and gives the rest back.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.pages import PagePool, useful_tokens
from kvstore.engine.radix import RadixCache
from kvstore.engine.request import Job


class PrefixCache:
    """The pool and the tree of one engine. Loop thread only."""

    def __init__(self, num_pages: int, page_tokens: int, *, enabled: bool = True) -> None:
        """enabled: False keeps the tree empty; every prompt is computed whole."""
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.enabled = enabled
        self.pool = PagePool(num_pages)
        self.tree = RadixCache(self.pool, page_tokens)

    @property
    def available_pages(self) -> int:
        """Pages that are free or can be made so by eviction."""
        return self.pool.free + self.tree.evictable_pages

    def useful_tokens(self, job: Job) -> int:
        """How many leading tokens of a job a hit may spare; see `pages.useful_tokens`."""
        return useful_tokens(job.length, self.page_tokens)

    def missing_pages(self, job: Job, tokens: int) -> int:
        """Pages the job lacks to hold KV of its first `tokens` tokens."""
        return max(0, -(-tokens // self.page_tokens) - job.page_count)

    def believed_tokens(self, job: Job) -> int:
        """Leading tokens the tree has on the device or believes a lower tier to hold."""
        return self.tree.match(job.known[: job.length - 1], job.root).stored_tokens

    def attach(self, job: Job) -> int:
        """Give a job without pages the longest prefix in the tree, held and locked.

        Returns: the length the tree believes to be on the device or in a lower tier, in tokens.
        """
        assert not job.page_count
        assert job.node is None
        found = self.tree.match(job.known[: job.length - 1], job.root)
        self.pool.hold(found.pages)
        self.tree.lock(found.node)
        job.node = found.node
        self._append(job, found.pages)
        job.computed = job.published = found.tokens
        return found.stored_tokens

    def detach(self, job: Job) -> None:
        """Take back the lock and every page reference of this job."""
        assert job.node is not None
        self.tree.unlock(job.node)
        self.pool.drop(job.pages)
        job.node = None
        job.page_count = 0
        job.computed = job.published = 0

    def reserve(self, pages: int) -> bool:
        """Have this many pages free, evicting as needed; False when that is not possible."""
        while self.pool.free < pages:
            if not self.tree.evict(pages - self.pool.free):
                return False
        return True

    def grow(self, job: Job, tokens: int) -> None:
        """Give the job pages for its first `tokens` tokens; they were reserved."""
        missing = self.missing_pages(job, tokens)
        if missing:
            self._append(job, self.pool.alloc(missing))

    def _append(self, job: Job, pages: np.ndarray) -> None:
        job.page_table[job.page_count : job.page_count + len(pages)] = pages
        job.page_count += len(pages)

    def publish(self, job: Job) -> None:
        """Put the job's full pages into the tree, so that others hit them at once.

        Where another job published the same tokens first, this job goes on with the tree's pages
        and gives its own back.
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
            self._adopt(job, full)
        job.published = full

    def _adopt(self, job: Job, full: int) -> None:
        """Swap the job's pages of its first `full` tokens for the tree's where they differ."""
        theirs = self.tree.match(job.tokens[:full], job.root).pages
        assert len(theirs) == full // self.page_tokens
        ours = job.pages[: len(theirs)]
        differ = theirs != ours
        self.pool.hold(theirs[differ])
        self.pool.drop(ours[differ])
        ours[:] = theirs

    def check_idle(self) -> None:
        """Assert that no job, copy or lock is left: every page is free or evictable."""
        self.tree.check()
        assert self.available_pages == self.num_pages, (
            self.pool.free,
            self.tree.evictable_pages,
            self.num_pages,
        )
