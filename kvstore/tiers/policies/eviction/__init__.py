"""Which key leaves first: the orders of eviction, by name.

`base` says what an order is; each policy is one file.
"""

from __future__ import annotations

import difflib
from typing import Any, Final

from kvstore.errors import ConfigError
from kvstore.tiers.policies.eviction.base import EvictionPolicy
from kvstore.tiers.policies.eviction.lru import LRU

__all__ = ["EVICTION_POLICIES", "LRU", "EvictionPolicy", "check_eviction", "eviction_policy"]

EVICTION_POLICIES: Final = ("lru",)
"""Every name that `eviction_policy` knows."""


def check_eviction(name: str) -> str:
    """The name itself; ConfigError with the nearest right name for an unknown one."""
    if name not in EVICTION_POLICIES:
        near = difflib.get_close_matches(name, EVICTION_POLICIES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown eviction policy {name!r}; the nearest is {near!r}")
    return name


def eviction_policy(name: str, capacity: int) -> EvictionPolicy[Any]:
    """A fresh policy by name, for an owner that holds up to `capacity` keys.

    Raises ConfigError with the nearest right name for an unknown one.
    """
    check_eviction(name)
    assert capacity > 0
    return LRU()
