"""L1 in a replay: the engine's own radix tree over a pool of pages, without KV."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.analysis.simulate.traces import Asked
from kvstore.engine.pages import PagePool, useful_tokens
from kvstore.engine.radix import RadixCache

NAME_WORDS = 2
"""A block's name, 64 bits, stands in the tree as two token ids of 32."""


class Device:
    """An engine's pages and its tree. A hit ends at a page, and never has the prompt's last token.

    pages: of the pool. page_tokens: of a page, for traces that have token ids; None: a page is one
        of the trace's blocks, whose names then stand for their tokens.
    """

    def __init__(self, pages: int, page_tokens: int | None = None) -> None:
        self._pool = PagePool(pages)
        self._page_tokens = page_tokens
        self._width = page_tokens or NAME_WORDS
        self._tree = RadixCache(self._pool, self._width, max_stored_tokens=0)
        self.pages_evicted = 0
        self.pages_written = 0

    def hit_tokens(self, request: Asked) -> int:
        """Leading prompt tokens that are here."""
        words = self._words(request)
        if self._page_tokens is None:
            return request.hit_tokens(self._tree.match(words).tokens // NAME_WORDS)
        return self._tree.match(words[: useful_tokens(request.tokens, self._width)]).tokens

    def keep(self, request: Asked) -> None:
        """The request ran: all its pages are here now, or as many from the first as there are.

        As in the engine: what hits is locked, then least recent leaves make room for the rest.
        """
        words = self._words(request)
        words = words[: len(words) // self._width * self._width]
        found = self._tree.match(words)
        held = len(found.pages)
        if held:
            self._tree.lock(found.node)
        lacking = len(words) // self._width - held
        if lacking > self._pool.free:
            self.pages_evicted += self._tree.evict(lacking - self._pool.free)
        fresh = self._pool.alloc(min(lacking, self._pool.free))
        self.pages_written += len(fresh)
        pages: NDArray[np.int32] = np.concatenate([found.pages, fresh])
        self._tree.insert(words[: len(pages) * self._width], pages)
        if len(fresh):
            self._pool.drop(fresh)
        if held:
            self._tree.unlock(found.node)

    def _words(self, request: Asked) -> NDArray[np.int32]:
        if self._page_tokens is None:
            return np.array(request.run, np.int64).view(np.int32)
        assert request.token_ids is not None, "a tree of tokens over a trace without any"
        return request.token_ids
