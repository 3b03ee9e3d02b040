"""Most seconds saved per byte stay: what is dear to compute again, and used often."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, Generic

from kvstore.cache.eviction.base import K
from kvstore.cache.eviction.ranked import Ranked
from kvstore.cache.eviction.uses import USES_MAX, PastUses

DOUBLING_BYTES: Final = 4 << 30
"""KV bytes in front of a block that double the work of computing it; see `Cost`."""
VALUE_MAX: Final = 16.0
"""A block is worth at most so many first blocks of a run."""
RANKS_PER_USE: Final = 4
"""Ranks between one use and two of a first block; with the two bounds above it bounds the ranks
in use to about a thousand."""
COMING_MAX: Final = 65_536
"""Keys asked for that are not resident yet whose places are remembered, at most."""


class Cost(Generic[K]):
    """Least saved seconds per byte first.

    A key's rank is `age + uses * value`, the age being the rank of the key evicted last
    (GreedyDual-Size with Frequency; Cherkasova: Improving WWW proxies performance with
    greedy-dual-size-frequency caching policy, 1998, where the value is cost / size).

    Cost: a token's forward pass takes 2 N operations for N weights, plus 4 * layers * context *
    d_model for attention (Kaplan et al.: Scaling laws for neural language models, 2020, table 1,
    counting both matrix products over the causal context). KV in 16 bits takes 4 * layers *
    d_model / G bytes per token of context, G query heads sharing one KV head; so attention takes G
    operations per KV byte in front of the token, and a token costs 2 N + G * bytes_in_front. Tokens
    per byte are the same for all blocks of a namespace, hence up to a factor

        seconds per byte ~ 1 + bytes_in_front / DOUBLING_BYTES,    DOUBLING_BYTES = 2 N / G.

    Llama-3-8B (N = 8.0e9, G = 4) has 4.0e9, Qwen2.5-7B (7.6e9, 7) 2.2e9, Llama-3-70B (70e9, 8)
    17.5e9. The bytes in front are the key's place in its run, learnt from `asked`, times its size.

    A key without those in front of it is worth nothing. A run is used from its end to its start
    (`tiers.manager`), so each rank is raised to that of the key used just before it when that one
    is the next of its run: no key ranks below what hangs on it.

    capacity: keys that the owner holds at most. stride: `asked` shows one in so many keys.
    """

    name = "cost"

    def __init__(self, capacity: int, stride: int = 1) -> None:
        self._ranked: Ranked[K] = Ranked()
        self._uses: dict[K, int] = {}
        self._place: dict[K, tuple[int, int]] = {}
        """(place in the run, bytes) of each resident key; place -1 where it is not known."""
        self._past = PastUses(capacity)
        self._stride = stride
        self._coming: OrderedDict[K, int] = OrderedDict()
        self._age = 0
        self._offered: K | None = None
        self._last = (-1, 0)
        """(place, rank) of the key used last."""

    def __len__(self) -> int:
        return len(self._uses)

    def asked(self, run: Sequence[K]) -> None:
        self._last = (-1, 0)
        coming = self._coming
        for place, key in enumerate(run):
            if key not in self._uses:
                coming[key] = place
            elif self._place[key][0] < 0:
                self._place[key] = (place, self._place[key][1])
        while len(coming) > COMING_MAX:
            coming.popitem(last=False)

    def inserted(self, key: K, nbytes: int = 1) -> None:
        assert key not in self._uses, "inserted twice"
        self._place[key] = (self._coming.pop(key, -1), nbytes)
        self._used(key, self._past.get(key) + 1)

    def touched(self, key: K) -> None:
        self._used(key, self._uses[key] + 1)

    def removed(self, key: K) -> None:
        self._past.keep(key, self._uses.pop(key))
        del self._place[key]
        rank = self._ranked.drop(key)
        if key == self._offered:
            self._age = max(self._age, rank)

    def victims(self) -> Iterator[K]:
        for key in self._ranked:
            self._offered = key
            yield key

    def nbytes(self, key: K) -> int:
        """Bytes of a resident key, as told."""
        return self._place[key][1]

    def stats(self) -> dict[str, int | float | str]:
        return {
            "policy": self.name,
            "resident": len(self._uses),
            "age": self._age / RANKS_PER_USE,
            "coming": len(self._coming),
        }

    def _used(self, key: K, uses: int) -> None:
        uses = self._uses[key] = min(uses, USES_MAX)
        place, nbytes = self._place[key]
        in_front = max(0, place) * self._stride * nbytes
        value = min(1.0 + in_front / DOUBLING_BYTES, VALUE_MAX)
        rank = self._age + round(uses * value * RANKS_PER_USE)
        last_place, last_rank = self._last
        if 0 <= place == last_place - 1:
            rank = max(rank, last_rank)
        self._last = (place, rank)
        self._ranked.put(key, rank)
