"""Argument and result types of the radix tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.pages import PageIds
from kvstore.engine.radix_node import Node, ids_of

TokenIds = NDArray[np.int32]
RootName = tuple[str, str]
"""(LoRA name, cache salt). Prompts under different roots share nothing."""
NO_ROOT: RootName = ("", "")


class RadixMatch:
    """Result of a lookup in the tree.

    node: the node that ends exactly at `tokens`, to be locked. A root if nothing matched.
    tokens: leading tokens with KV on the device, in whole pages.
    stored_tokens: at least `tokens`. Up to here a lower tier is believed to have the rest.
    """

    __slots__ = ("_pages", "_parts", "node", "stored_tokens", "tokens")

    def __init__(self, node: Node, tokens: int, parts: list[Any], stored_tokens: int) -> None:
        self.node = node
        self.tokens = tokens
        self.stored_tokens = stored_tokens
        self._parts = parts
        self._pages: PageIds | None = None

    @property
    def pages(self) -> PageIds:
        """Page ids of the first `tokens` tokens in order, int32. A separate array.

        They are those at the time of the match. They are gathered on first use, so a caller that
        needs only the length of the hit does not pay for them.
        """
        if self._pages is None:
            self._pages = ids_of(bytearray().join(self._parts))
        return self._pages

    def __repr__(self) -> str:
        return f"RadixMatch({self.tokens} tokens, {self.stored_tokens} stored)"


class Insert(NamedTuple):
    """node: ends exactly at the last inserted token. matched_tokens: leading tokens that were
    already on the device, in the tree's own pages. The tree did not take the pages given for them.
    """

    node: Node
    matched_tokens: int


def raw_ids(ids: NDArray[np.int32]) -> bytes:
    """Return token or page ids as bytes. They must be one-dimensional int32."""
    assert ids.dtype == np.int32, f"ids of dtype {ids.dtype}, int32 expected"
    assert ids.ndim == 1, f"ids of {ids.ndim} dimensions"
    return ids.tobytes()
