"""The interface of an eviction policy.

A policy only orders keys. Its owner reports every insert, access and removal, and evicts in the
policy's order. The policy knows no leases, no media and no clock: the owner skips keys that it must
keep. The keys are blocks in L2 and segments in the disk tier, so a key is any hashable value.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """An order of the resident keys.

    The owner makes every call under its lock. So a call does no I/O and is O(1) amortised per key
    passed in (`eviction_order`: per key yielded). Memory is bounded: a constant per resident key,
    plus a limited number of keys that are no longer resident ("ghosts").
    """

    name: str

    def on_lookup(self, keys: Sequence[K]) -> None:
        """A prompt was looked up; `keys`: all its blocks in order, resident or not.

        It comes before the `on_access` and `on_insert` calls of the same request. No other call
        shows keys that are not resident, or the position of a key in its prompt. An owner without
        prompts never calls it; every policy works without it.
        """
        ...

    def on_insert(self, key: K, nbytes: int = 1) -> None:
        """A key became resident and takes nbytes bytes. It was not resident before."""
        ...

    def on_access(self, key: K) -> None:
        """A resident key was used."""
        ...

    def on_remove(self, key: K) -> None:
        """A key is no longer resident, whether or not it was first in the eviction order."""
        ...

    def eviction_order(self) -> Iterator[K]:
        """All resident keys, the first to evict first. The caller usually stops early. It must not
        change anything while it iterates."""
        ...

    def stats(self) -> dict[str, int | float | str]:
        """ "policy" (its name), "resident" (number of keys), and counters of the policy."""
        ...
