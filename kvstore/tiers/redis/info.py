"""What the servers say of themselves, without anybody waiting for it.

Metrics are scraped whether the servers answer or not. So one thread at a time asks, at most once
in `AGE_MAX_S`; who wants to know waits for it `WAIT_S` at most, and takes the last answer if there
is no newer one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvstore.errors import TierError

log = logging.getLogger(__name__)

AGE_MAX_S: Final = 1.0
"""An answer is good for this long."""
WAIT_S: Final = 0.2
"""Longest a call waits for a new one."""

Info = Mapping[str, str]


class ServerInfo:
    """The last answers to INFO. ask: one mapping per server; may raise TierError, and may hang."""

    def __init__(self, ask: Callable[[], Sequence[Info]]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answers: Sequence[Info] = ()
        self._answered_at = float("-inf")
        self._asking = False

    def latest(self) -> Sequence[Info]:
        """The newest answers there are; none when no server ever answered."""
        with self._lock:
            if self._asking or time.monotonic() - self._answered_at < AGE_MAX_S:
                return self._answers
            self._asking = True
        done = threading.Event()
        threading.Thread(target=self._refresh, args=(done,), name="redis-info", daemon=True).start()
        done.wait(WAIT_S)
        with self._lock:
            return self._answers

    def _refresh(self, done: threading.Event) -> None:
        answers = None
        try:
            answers = self._ask()
        except TierError as error:
            log.debug("no INFO: %s", error)
        finally:
            with self._lock:
                self._asking = False
                self._answered_at = time.monotonic()
                if answers is not None:
                    self._answers = answers
            done.set()


def parse_info(text: bytes) -> dict[str, str]:
    """The fields of an INFO reply."""
    lines = (line for line in text.decode("utf-8", "replace").splitlines() if ":" in line)
    return dict(line.split(":", 1) for line in lines)


def total(infos: Sequence[Info], name: str) -> int:
    """The sum of a numeric field over all servers; what is no number counts as 0."""
    return sum(int(value) for info in infos if (value := info.get(name, "")).isdigit())


def keys_in(infos: Sequence[Info], database: int) -> int:
    """Keys of a database ("db0:keys=12,expires=0,...") over all servers."""
    count = 0
    for info in infos:
        fields = dict(part.partition("=")[::2] for part in info.get(f"db{database}", "").split(","))
        count += int(fields.get("keys", "0"))
    return count
