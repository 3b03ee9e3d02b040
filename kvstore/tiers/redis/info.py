"""INFO of the servers, with a bounded wait.

Metrics are scraped whether the servers respond or not. One thread at a time queries them, at most
once in `MAX_AGE_S` seconds. A caller waits at most `MAX_WAIT_S` seconds for it, and else gets the
previous reply.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvstore.errors import TierError

log = logging.getLogger(__name__)

MAX_AGE_S: Final = 1.0
"""Age at which a reply is outdated."""
MAX_WAIT_S: Final = 0.2
"""Maximum wait of a caller for a new reply."""

Info = Mapping[str, str]


class ServerInfo:
    """The last INFO replies. query: returns one mapping per server; may raise TierError or hang."""

    def __init__(self, query: Callable[[], Sequence[Info]]) -> None:
        self._query = query
        self._lock = threading.Lock()
        self._answers: Sequence[Info] = ()
        self._answered_at = float("-inf")
        self._querying = False

    def latest(self) -> Sequence[Info]:
        """The latest replies; empty if no server has replied yet."""
        with self._lock:
            if self._querying or time.monotonic() - self._answered_at < MAX_AGE_S:
                return self._answers
            self._querying = True
        done = threading.Event()
        threading.Thread(target=self._refresh, args=(done,), name="redis-info", daemon=True).start()
        done.wait(MAX_WAIT_S)
        with self._lock:
            return self._answers

    def _refresh(self, done: threading.Event) -> None:
        answers = None
        try:
            answers = self._query()
        except TierError as error:
            log.debug("INFO failed: %s", error)
        finally:
            with self._lock:
                self._querying = False
                self._answered_at = time.monotonic()
                if answers is not None:
                    self._answers = answers
            done.set()


def parse_info(text: bytes) -> dict[str, str]:
    """Parse the fields of an INFO reply."""
    lines = (line for line in text.decode("utf-8", "replace").splitlines() if ":" in line)
    return dict(line.split(":", 1) for line in lines)


def sum_field(infos: Sequence[Info], name: str) -> int:
    """The sum of a numeric field over all servers. Other values count as 0."""
    return sum(int(value) for info in infos if (value := info.get(name, "")).isdigit())


def count_keys(infos: Sequence[Info], database: int) -> int:
    """The number of keys in a database ("db0:keys=12,expires=0,...") on all servers."""
    count = 0
    for info in infos:
        fields = dict(part.partition("=")[::2] for part in info.get(f"db{database}", "").split(","))
        count += int(fields.get("keys", "0"))
    return count
