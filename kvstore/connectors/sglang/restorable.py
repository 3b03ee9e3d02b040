"""Prefix lengths that can be restored if side pools must have their part of the prefix.

SGLang's rules: KV has a number of leading pages. A pool of `ALL_PAGES` truncates it to its own
leading pages. A pool of `TRAILING_PAGES` (states, windows) needs only the last few pages of a
prefix, so some lengths in between may be missing. `BLOCK_GROUPS` never truncates KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

ALL_PAGES: Final = "all_pages"
TRAILING_PAGES: Final = "trailing_pages"


@dataclass
class RestorablePrefixes:
    """The result of a lookup.

    lengths: pages of every prefix that can be restored, ascending. by_pool: pages of the longest
    prefix that each pool has by itself; pools without any are omitted.
    """

    lengths: list[int]
    by_pool: dict[str, int] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        """Pages of the longest prefix."""
        return self.lengths[-1] if self.lengths else 0

    def restrict(self, name: str, lengths: Sequence[int]) -> None:
        """Keep only these lengths, which are those that a pool has."""
        if lengths:
            self.by_pool[name] = lengths[-1]
        allowed = set(lengths)
        self.lengths = [length for length in self.lengths if length in allowed]


def kv_prefixes(name: str, pages: int) -> RestorablePrefixes:
    """All prefixes of the first `pages` pages of KV."""
    return RestorablePrefixes(list(range(1, pages + 1)), {name: pages} if pages else {})


def trailing_lengths(cached: Sequence[bool], window: int) -> list[int]:
    """Lengths whose last `window` pages (all pages of a shorter prefix) are cached."""
    lengths = []
    unbroken = 0
    for length, is_cached in enumerate(cached, start=1):
        unbroken = unbroken + 1 if is_cached else 0
        if unbroken >= min(window, length):
            lengths.append(length)
    return lengths
