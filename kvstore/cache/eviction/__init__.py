"""Which key leaves first: the orders of eviction, by name.

`base` says what an order is; each policy is one file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Final

from kvstore.cache.eviction.auto import Auto
from kvstore.cache.eviction.base import EvictionPolicy
from kvstore.cache.eviction.cost import Cost
from kvstore.cache.eviction.lfu import LFU
from kvstore.cache.eviction.lru import LRU
from kvstore.cache.eviction.s3fifo import S3FIFO
from kvstore.errors import ConfigError

__all__ = ["EVICTION_POLICIES", "LRU", "EvictionPolicy", "check_eviction", "eviction_policy"]

_MAKE: Final[dict[str, Callable[[int], EvictionPolicy[Any]]]] = {
    LRU.name: lambda capacity: LRU(),
    LFU.name: LFU,
    S3FIFO.name: S3FIFO,
    Cost.name: Cost,
    Auto.name: Auto,
}

EVICTION_POLICIES: Final = tuple(_MAKE)
"""Every name that `eviction_policy` knows."""


def check_eviction(name: str) -> str:
    """The name itself; ConfigError with the nearest right name for an unknown one."""
    if name not in _MAKE:
        near = difflib.get_close_matches(name.lower(), _MAKE, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown eviction policy {name!r}; the nearest is {near!r}")
    return name


def eviction_policy(name: str, capacity: int) -> EvictionPolicy[Any]:
    """A fresh policy by name, for an owner that holds up to `capacity` keys.

    Raises ConfigError with the nearest right name for an unknown one.
    """
    assert capacity > 0
    return _MAKE[check_eviction(name)](capacity)
