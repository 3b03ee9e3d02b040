"""What the radix tree is asked with, and what it answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.pages import PageIds
from kvstore.engine.radix_node import Node, ids_of

TokenIds = NDArray[np.int32]
RootName = tuple[str, str]
"""(LoRA name, cache salt); prompts under different roots never meet."""
NO_ROOT: RootName = ("", "")


class RadixMatch:
    """What the tree holds of a prompt.

    node: ends exactly at `tokens`; what to lock. A root when nothing matched.
    tokens: leading tokens whose KV is on the device, whole pages.
    stored_tokens: at least `tokens`; up to here a lower tier is believed to hold the rest.
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
        """Page ids of the first `tokens` tokens in order, int32; the caller's own array.

        As they were at the time of the match. Gathered when first asked for: who only wants to
        know how long a hit is does not pay for them.
        """
        if self._pages is None:
            self._pages = ids_of(bytearray().join(self._parts))
        return self._pages

    def __repr__(self) -> str:
        return f"RadixMatch({self.tokens} tokens, {self.stored_tokens} stored)"


class Insert(NamedTuple):
    """node: ends exactly at the last token inserted. matched_tokens: the first so many were on the
    device already, in the tree's own pages; the pages given for them were not adopted."""

    node: Node
    matched_tokens: int


def raw_ids(ids: NDArray[np.int32]) -> bytes:
    """Token or page ids as bytes. Anything but one dimension of int32 is our own mistake."""
    assert ids.dtype == np.int32, f"ids of dtype {ids.dtype}, int32 expected"
    assert ids.ndim == 1, f"ids of {ids.ndim} dimensions"
    return ids.tobytes()
