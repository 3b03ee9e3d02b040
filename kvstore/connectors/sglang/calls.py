"""Calls from SGLang's threads: none raises, and `close` waits for those under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from kvstore.forks import on_fork

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedCalls:
    """Counts the calls under way, and turns an exception in a call into a miss."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        self.errors = 0
        self.inherited = False
        """This process is a forked child of the one that SGLang runs in."""
        on_fork(self._let_go)

    def run(self, what: str, miss: Callable[[], T], call: Callable[[], T]) -> T:
        """Return `call()`; return `miss()` after `close`, or if the call raises.

        An exception is an internal error or an invalid call: errors of the store are results.
        SGLang continues. The first exception is logged in full, and every one is counted.
        """
        with self._changed:
            if self._closed:
                return miss()
            self._under_way += 1
        try:
            return call()
        except Exception:
            if not self.errors:
                log.exception(
                    "%s raised an exception; returning a miss (others are counted, not logged)",
                    what,
                )
            self.errors += 1
            return miss()
        finally:
            with self._changed:
                self._under_way -= 1
                if self._closed:
                    self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Reject further calls; True if those under way end within the timeout."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)

    def _let_go(self) -> None:
        """In a forked child: every call is a miss, and none is under way."""
        self._changed = threading.Condition()
        self._closed, self._under_way, self.inherited = True, 0, True
