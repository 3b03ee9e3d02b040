"""Which lengths of a prefix can be restored when side pools must have their part of it.

SGLang's rules, as data: KV has a leading run; a pool of `ALL_PAGES` cuts it where its own run ends;
a pool of `TRAILING_PAGES` (states, windows) needs the last few pages before the cut only, so it
leaves lengths out in between; `BLOCK_GROUPS` never cuts KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

ALL_PAGES: Final = "all_pages"
TRAILING_PAGES: Final = "trailing_pages"


@dataclass
class PrefixHits:
    """What a query found.

    lengths: pages of every prefix that can be restored, ascending. by_pool: pages of the longest
    prefix that each pool could serve by itself, pools with none left out.
    """

    lengths: list[int]
    by_pool: dict[str, int] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        """Of the longest prefix."""
        return self.lengths[-1] if self.lengths else 0

    def restrict(self, name: str, lengths: Sequence[int]) -> None:
        """A pool can serve these lengths only."""
        if lengths:
            self.by_pool[name] = lengths[-1]
        allowed = set(lengths)
        self.lengths = [length for length in self.lengths if length in allowed]


def kv_hits(name: str, run: int) -> PrefixHits:
    """KV holds the first `run` pages."""
    return PrefixHits(list(range(1, run + 1)), {name: run} if run else {})


def trailing_lengths(held: Sequence[bool], window: int) -> list[int]:
    """Lengths whose last `window` pages (all, of a shorter prefix) are held."""
    lengths = []
    unbroken = 0
    for length, is_held in enumerate(held, start=1):
        unbroken = unbroken + 1 if is_held else 0
        if unbroken >= min(window, length):
            lengths.append(length)
    return lengths
