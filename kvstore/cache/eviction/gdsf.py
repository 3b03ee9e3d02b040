"""GreedyDual-Size with Frequency: keep the blocks that save the most compute seconds per byte."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, Generic

from kvstore.cache.eviction.base import K
from kvstore.cache.eviction.ghost_frequencies import USES_MAX, GhostFrequencies
from kvstore.cache.eviction.ranked_keys import RankedKeys

DOUBLING_BYTES: Final = 4 << 30
"""KV bytes before a block that double the cost of computing it; see `GDSF`."""
VALUE_MAX: Final = 16.0
"""Maximum value of a block; the first block of a prompt has value 1."""
RANKS_PER_USE: Final = 4
"""Ranks per use of a first block. With USES_MAX and VALUE_MAX it bounds the ranks in use to about a
thousand."""
LOOKUP_POSITIONS_MAX: Final = 65_536
"""Maximum number of looked-up keys, not resident yet, whose positions are kept."""


class GDSF(Generic[K]):
    """Evicts the block that saves the fewest seconds per byte first.

    A key's rank is `age + uses * value`. The age is the rank of the last evicted key
    (GreedyDual-Size with Frequency; Cherkasova: Improving WWW proxies performance with
    greedy-dual-size-frequency caching policy, 1998, where the value is cost / size).

    Cost: a token's forward pass takes 2 N operations for N weights, plus 4 * layers * context *
    d_model for attention (Kaplan et al.: Scaling laws for neural language models, 2020, table 1,
    counting both matrix products over the causal context). KV in 16 bits takes 4 * layers *
    d_model / G bytes per token of context, G query heads sharing one KV head. So attention takes G
    operations per KV byte before the token, and a token costs 2 N + G * bytes_before. All blocks of
    a namespace have the same number of tokens per byte. Hence, up to a constant factor:

        seconds per byte ~ 1 + bytes_before / DOUBLING_BYTES,    DOUBLING_BYTES = 2 N / G.

    Llama-3-8B (N = 8.0e9, G = 4) has 4.0e9, Qwen2.5-7B (7.6e9, 7) 2.2e9, Llama-3-70B (70e9, 8)
    17.5e9. The bytes before a block are its position in the prompt (from `on_lookup`) times its
    size.

    A block is useless without the blocks before it. The blocks of a prompt are used from last to
    first (`cache.manager`). So each key gets at least the rank of the key used just before it, if
    that one is the next block of the prompt. No block then ranks below a block that depends on it.

    capacity: maximum number of keys of the owner. stride: lookups contain one in this many keys.
    """

    name = "gdsf"

    def __init__(self, capacity: int, stride: int = 1) -> None:
        self._ranked: RankedKeys[K] = RankedKeys()
        self._uses: dict[K, int] = {}
        self._positions: dict[K, tuple[int, int]] = {}
        """(position in the prompt, bytes) of each resident key; position -1 if unknown."""
        self._ghosts = GhostFrequencies(capacity)
        self._stride = stride
        self._lookup_positions: OrderedDict[K, int] = OrderedDict()
        self._age = 0
        self._next_victim: K | None = None
        self._last = (-1, 0)
        """(position, rank) of the last used key."""

    def __len__(self) -> int:
        return len(self._uses)

    def on_lookup(self, keys: Sequence[K]) -> None:
        self._last = (-1, 0)
        pending = self._lookup_positions
        for position, key in enumerate(keys):
            if key not in self._uses:
                pending[key] = position
            elif self._positions[key][0] < 0:
                self._positions[key] = (position, self._positions[key][1])
        while len(pending) > LOOKUP_POSITIONS_MAX:
            pending.popitem(last=False)

    def on_insert(self, key: K, nbytes: int = 1) -> None:
        assert key not in self._uses, "inserted twice"
        self._positions[key] = (self._lookup_positions.pop(key, -1), nbytes)
        self._count_use(key, self._ghosts.get(key) + 1)

    def on_access(self, key: K) -> None:
        self._count_use(key, self._uses[key] + 1)

    def on_remove(self, key: K) -> None:
        self._ghosts.put(key, self._uses.pop(key))
        del self._positions[key]
        rank = self._ranked.remove(key)
        if key == self._next_victim:
            self._age = max(self._age, rank)

    def eviction_order(self) -> Iterator[K]:
        for key in self._ranked:
            self._next_victim = key
            yield key

    def nbytes(self, key: K) -> int:
        """Bytes of a resident key, as given to `on_insert`."""
        return self._positions[key][1]

    def stats(self) -> dict[str, int | float | str]:
        return {
            "policy": self.name,
            "resident": len(self._uses),
            "age": self._age / RANKS_PER_USE,
            "lookup_positions": len(self._lookup_positions),
        }

    def _count_use(self, key: K, uses: int) -> None:
        uses = self._uses[key] = min(uses, USES_MAX)
        position, nbytes = self._positions[key]
        bytes_before = max(0, position) * self._stride * nbytes
        value = min(1.0 + bytes_before / DOUBLING_BYTES, VALUE_MAX)
        rank = self._age + round(uses * value * RANKS_PER_USE)
        last_position, last_rank = self._last
        if 0 <= position == last_position - 1:
            rank = max(rank, last_rank)
        self._last = (position, rank)
        self._ranked.put(key, rank)
