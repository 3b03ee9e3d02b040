"""The queue of L2 events (block cached, block evicted) for the event publisher.

Without a publisher nothing is kept. Call it under the L2 manager's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kvstore.blocks.key import Key

EVENTS_MAX: Final = 1 << 16
"""Maximum events kept between two calls of `drain`; above it, `drain` returns a snapshot."""


@dataclass(frozen=True)
class L2EventBatch:
    """events: (key, whether it is now cached in L2), oldest first. is_snapshot: the events list all
    blocks of L2 and replace every earlier batch."""

    events: list[tuple[Key, bool]]
    is_snapshot: bool


class L2EventQueue:
    """cached_keys: returns every key that is in L2 now."""

    def __init__(self, cached_keys: Callable[[], Iterable[Key]]) -> None:
        self._cached_keys = cached_keys
        self._enabled = False
        self._needs_snapshot = False
        self._events: list[tuple[Key, bool]] = []

    def start(self) -> None:
        """Keep events from now on; the first `drain` returns a snapshot."""
        self._enabled = self._needs_snapshot = True

    def record(self, key: Key, cached: bool) -> None:
        """Queue an event."""
        if not self._enabled or self._needs_snapshot:
            return
        self._events.append((key, cached))
        if len(self._events) > EVENTS_MAX:
            self._events.clear()
            self._needs_snapshot = True

    def drain(self) -> L2EventBatch:
        """The events since the last call."""
        if self._needs_snapshot:
            self._needs_snapshot = False
            return L2EventBatch([(key, True) for key in self._cached_keys()], is_snapshot=True)
        batch = L2EventBatch(self._events, is_snapshot=False)
        self._events = []
        return batch
