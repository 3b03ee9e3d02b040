"""Eviction policies, by name. `base` defines the interface; each policy is one module."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Final

from kvstore.cache.eviction.auto import Auto
from kvstore.cache.eviction.base import EvictionPolicy
from kvstore.cache.eviction.gdsf import GDSF
from kvstore.cache.eviction.lfu import LFU
from kvstore.cache.eviction.lru import LRU
from kvstore.cache.eviction.s3fifo import S3FIFO
from kvstore.config.renamed import refuse_value
from kvstore.errors import ConfigError

__all__ = ["EVICTION_POLICIES", "LRU", "EvictionPolicy", "check_eviction", "eviction_policy"]

_FACTORIES: Final[dict[str, Callable[[int], EvictionPolicy[Any]]]] = {
    LRU.name: lambda capacity: LRU(),
    LFU.name: LFU,
    S3FIFO.name: S3FIFO,
    GDSF.name: GDSF,
    Auto.name: Auto,
}

EVICTION_POLICIES: Final = tuple(_FACTORIES)
"""The names that `eviction_policy` accepts."""


def check_eviction(name: str) -> str:
    """Returns the name if it is valid.

    Raises ConfigError: a former name (tells the new one), or an unknown name (suggests the closest
    one).
    """
    refuse_value("eviction policy", name)
    if name not in _FACTORIES:
        near = difflib.get_close_matches(name.lower(), _FACTORIES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown eviction policy {name!r}: did you mean {near!r}?")
    return name


def eviction_policy(name: str, capacity: int) -> EvictionPolicy[Any]:
    """A new policy by name; `capacity`: maximum number of keys of its owner.

    Raises ConfigError like `check_eviction`.
    """
    assert capacity > 0
    return _FACTORIES[check_eviction(name)](capacity)
