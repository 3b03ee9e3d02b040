"""Which block leaves first.

A policy only orders keys: the brain tells it what happened and asks for victims. It is called
under the brain's lock, so every call is O(1) (`victims` per key it yields), and it knows no sizes,
no leases and no tiers: the brain skips what it may not take.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from kvstore.blocks import Key
from kvstore.errors import ConfigError


class EvictionPolicy(Protocol):
    """An order over the keys that are resident."""

    name: str

    def inserted(self, key: Key) -> None:
        """A new key is resident."""
        ...

    def touched(self, key: Key) -> None:
        """A resident key was used."""
        ...

    def removed(self, key: Key) -> None:
        """A key is resident no more."""
        ...

    def victims(self) -> Iterator[Key]:
        """All keys, coldest first. The caller stops early, and changes nothing meanwhile."""
        ...


class LRU:
    """Least recently used first."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def inserted(self, key: Key) -> None:
        assert key not in self._order, "inserted twice"
        self._order[key] = None

    def touched(self, key: Key) -> None:
        self._order.move_to_end(key)

    def removed(self, key: Key) -> None:
        del self._order[key]

    def victims(self) -> Iterator[Key]:
        return iter(self._order)


EVICTION_POLICIES: Final[dict[str, Callable[[], EvictionPolicy]]] = {LRU.name: LRU}


def eviction_policy(name: str) -> EvictionPolicy:
    """A fresh policy by name; ConfigError with the nearest right name for an unknown one."""
    made = EVICTION_POLICIES.get(name)
    if made is None:
        near = difflib.get_close_matches(name, EVICTION_POLICIES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown eviction policy {name!r}; the nearest is {near!r}")
    return made()
