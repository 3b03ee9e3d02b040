"""A bounded map of recently seen keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from kvstore.blocks.key import Key

V = TypeVar("V")

RECENT_KEYS_MAX: Final = 1 << 15
"""A map has at least the latest keys up to this number, and at most twice as many plus the keys of
one `update`."""


class RecentKeys(Generic[V]):
    """Two dictionaries, a new and an old one: when the new one is full, it replaces the old one."""

    def __init__(self) -> None:
        self._new: dict[Key, V] = {}
        self._old: dict[Key, V] = {}

    def __bool__(self) -> bool:
        return bool(self._new or self._old)

    def __contains__(self, key: Key) -> bool:
        return key in self._new or key in self._old

    def get(self, key: Key) -> V | None:
        """The value of a key; None if it is not in the map."""
        return self._new.get(key, self._old.get(key))

    def update(self, entries: Iterable[tuple[Key, V]]) -> None:
        """Add entries, or replace those of the same keys."""
        self._new.update(entries)
        if len(self._new) > RECENT_KEYS_MAX:
            self._new, self._old = {}, self._new

    def discard(self, key: Key) -> None:
        """Remove a key, if it is in the map."""
        self._new.pop(key, None)
        self._old.pop(key, None)
