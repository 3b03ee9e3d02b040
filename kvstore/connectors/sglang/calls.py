"""Calls from SGLang's threads: none raises into them, and none is under way when all is closed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Calls:
    """Counts the calls under way, and turns whatever goes wrong in one into a miss."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        self.faults = 0

    def answer(self, what: str, miss: Callable[[], T], call: Callable[[], T]) -> T:
        """`call()`; what `miss()` makes once this is closed, or when the call fails.

        A call fails only by a mistake, of ours or of its caller: the store's faults are answers.
        SGLang goes on all the same, so the first is logged in full and every one is counted.
        """
        with self._changed:
            if self._closed:
                return miss()
            self._under_way += 1
        try:
            return call()
        except Exception:
            if not self.faults:
                log.exception("%s failed; it and its like are misses from here on", what)
            self.faults += 1
            return miss()
        finally:
            with self._changed:
                self._under_way -= 1
                if self._closed:
                    self._changed.notify_all()

    def close(self, limit_s: float) -> bool:
        """Refuse further calls; whether those under way ended within the limit."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not self._under_way, limit_s)
