"""A wrapper around the store for connectors: errors of the store never reach the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore.errors import KVStoreError
from kvstore.interface import BlockStore, Load, Match, Operation, Save

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedStore:
    """The operations of a store for a connector that must not raise.

    A store never raises for its own errors. If one does, the call is a miss: the error is counted,
    and the first one is logged. AssertionError (a bug in kvstore) passes.
    """

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.errors = 0

    def match(self, hashes: Sequence[bytes]) -> Match | None:
        return self._call(self.store.match, hashes)

    def load(self, hashes: Sequence[bytes]) -> Load | None:
        return self._call(self.store.load, hashes)

    def save(self, hashes: Sequence[bytes]) -> Save | None:
        return self._call(self.store.save, hashes)

    def commit(self, save: Save) -> bool:
        """True if the store accepted the commit."""
        errors = self.errors
        self._call(self.store.commit, save)
        return self.errors == errors

    def release(self, operation: Load | Save) -> None:
        self._call(self.store.release, operation)

    def poll(self, timeout_s: float) -> list[Operation]:
        return self._call(self.store.poll, timeout_s) or []

    def _call(self, operation: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return operation(*arguments)
        except KVStoreError as error:
            if not self.errors:
                log.warning("the store raised an error; continuing without it: %s", error)
            self.errors += 1
            return None
