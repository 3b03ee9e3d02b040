"""L1 in a replay: the engine's radix tree over a page pool, without KV."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.analysis.simulate.traces import TraceRequest
from kvstore.engine.pages import PagePool, useful_tokens
from kvstore.engine.radix import RadixCache

NAME_WORDS = 2
"""A block's id has 64 bits and is stored in the tree as two token ids of 32 bits."""


class Device:
    """An engine's pages and radix tree. A hit ends at a page and never has the last prompt token.

    pages: size of the pool. page_tokens: tokens per page, for a trace with token ids. None: a page
        is one block of the trace, and the block's id replaces its tokens.
    """

    def __init__(self, pages: int, page_tokens: int | None = None) -> None:
        self._pool = PagePool(pages)
        self._page_tokens = page_tokens
        self._width = page_tokens or NAME_WORDS
        self._tree = RadixCache(self._pool, self._width, max_stored_tokens=0)
        self.pages_evicted = 0
        self.pages_written = 0

    def hit_tokens(self, request: TraceRequest) -> int:
        """Return the number of leading prompt tokens that are cached."""
        words = self._words(request)
        if self._page_tokens is None:
            return request.hit_tokens(self._tree.match(words).tokens // NAME_WORDS)
        return self._tree.match(words[: useful_tokens(request.tokens, self._width)]).tokens

    def keep(self, request: TraceRequest) -> None:
        """Record that the request ran: cache its pages, as many leading ones as fit.

        As in the engine, the hit is locked, then the least recent leaves are evicted.
        """
        words = self._words(request)
        words = words[: len(words) // self._width * self._width]
        found = self._tree.match(words)
        cached = len(found.pages)
        if cached:
            self._tree.lock(found.node)
        lacking = len(words) // self._width - cached
        if lacking > self._pool.free:
            self.pages_evicted += self._tree.evict(lacking - self._pool.free)
        fresh = self._pool.alloc(min(lacking, self._pool.free))
        self.pages_written += len(fresh)
        pages: NDArray[np.int32] = np.concatenate([found.pages, fresh])
        self._tree.insert(words[: len(pages) * self._width], pages)
        if len(fresh):
            self._pool.drop_ref(fresh)
        if cached:
            self._tree.unlock(found.node)

    def _words(self, request: TraceRequest) -> NDArray[np.int32]:
        if self._page_tokens is None:
            return np.array(request.block_ids, np.int64).view(np.int32)
        assert request.token_ids is not None, "the trace has no token ids"
        return request.token_ids
