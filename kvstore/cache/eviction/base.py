"""What an order of eviction is.

A policy only orders keys: its owner tells it what happened and asks for victims. It knows no
leases, no media and no clock: the owner skips what it may not take. L2 orders blocks by it, a
disk tier its segments, so a key is any hashable value.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """An order over the keys that are resident.

    Every call is made under the owner's lock, so each is O(1) amortised per key it is given
    (`victims`: per key it yields) and does no I/O. Memory is bounded: so much per resident key,
    and a named number of keys that are resident no more ("ghosts").
    """

    name: str

    def asked(self, run: Sequence[K]) -> None:
        """A prompt's whole run of keys was asked for, first block first, resident or not.

        Comes before the `touched` and `inserted` that follow from it. Nothing else shows a policy
        the keys that are not resident, or the position of a key in its run. An owner that knows no
        runs never calls it, and every policy works without it.
        """
        ...

    def inserted(self, key: K, nbytes: int = 1) -> None:
        """A new key is resident, and takes nbytes bytes. It was not resident before."""
        ...

    def touched(self, key: K) -> None:
        """A resident key was used."""
        ...

    def removed(self, key: K) -> None:
        """A key is resident no more, whether this policy named it as a victim or not."""
        ...

    def victims(self) -> Iterator[K]:
        """All resident keys, coldest first. The caller stops early, changing nothing meanwhile."""
        ...

    def stats(self) -> dict[str, int | float | str]:
        """ "policy" (its name), "resident" (keys), and what more it counts."""
        ...
