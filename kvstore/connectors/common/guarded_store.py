"""A guard around the store, for connectors: no fault of it reaches the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore.errors import KVStoreError
from kvstore.interface import BlockStore, Load, Match, Save, Ticket

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedStore:
    """A store's verbs for a connector that must not raise: a fault is a miss, logged and counted.

    A store promises not to raise for its own faults; this keeps the engine going should one break
    that promise. AssertionError (our own mistake) passes.
    """

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.faults = 0

    def match(self, hashes: Sequence[bytes]) -> Match | None:
        return self._ask(self.store.match, hashes)

    def load(self, hashes: Sequence[bytes]) -> Load | None:
        return self._ask(self.store.load, hashes)

    def save(self, hashes: Sequence[bytes]) -> Save | None:
        return self._ask(self.store.save, hashes)

    def commit(self, ticket: Save) -> bool:
        """Whether the store took it."""
        faults = self.faults
        self._ask(self.store.commit, ticket)
        return self.faults == faults

    def release(self, ticket: Load | Save) -> None:
        self._ask(self.store.release, ticket)

    def poll(self, timeout_s: float) -> list[Ticket]:
        return self._ask(self.store.poll, timeout_s) or []

    def _ask(self, verb: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return verb(*arguments)
        except KVStoreError as error:
            if not self.faults:
                log.warning("the store fails; going on without it: %s", error)
            self.faults += 1
            return None
