"""Calls to the servers: which connection, how many at once, and what a redirect leads to.

A call takes one of a fixed number of scratch buffers, which is also what bounds the connections in
use; borrows a connection; sends; receives; and gives both back. A connection goes back in step or
closed, never in between. Every wait on a socket has a timeout, and every transfer an end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from redis.connection import ConnectionPool
from redis.exceptions import ResponseError

from kvstore.blocks.frame import aligned_buffer
from kvstore.errors import TierError
from kvstore.tiers.redis import faults, resp
from kvstore.tiers.redis.exchange import Exchange, Outcome, converse
from kvstore.tiers.redis.servers import Servers

ASK_MAX: Final = 8192
"""Small commands sent in one go, so that neither side buffers without bound."""
CLOSE_WAIT_S: Final = 5.0
"""Longest `close` waits for calls under way; a later one closes its connection by itself."""


class Calls:
    """Thread-safe. Raises what `faults.edge` maps, and TierError.

    at_once: calls at once, at most. timeout_s: longest wait for a turn, and for a server's word.
    """

    def __init__(self, servers: Servers, *, at_once: int, timeout_s: float) -> None:
        self.servers = servers
        self.counts: Counter[str] = Counter()
        self._at_once = at_once
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._idle: defaultdict[ConnectionPool, list[Exchange]] = defaultdict(list)
        self._scratch: queue.LifoQueue[memoryview] = queue.LifoQueue()
        for _ in range(at_once):
            self._scratch.put(aligned_buffer(resp.SCRATCH_BYTES)[: resp.SCRATCH_BYTES])

    @property
    def running(self) -> int:
        """Calls under way."""
        return self._at_once - self._scratch.qsize()

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self.counts[name] += by

    def counted(self, names: Sequence[str]) -> dict[str, int]:
        with self._lock:
            return {name: self.counts[name] for name in names}

    @contextlib.contextmanager
    def exchange(self, pool: ConnectionPool, nbytes: int = 0) -> Iterator[Exchange]:
        """A connection and a scratch buffer for one call that moves `nbytes` at most."""
        with self._permit() as scratch, self._borrowed(pool, scratch, nbytes) as exchange:
            yield exchange

    def ask(
        self, word: bytes, names: Sequence[bytes], *, partial: bool = True
    ) -> list[bytes | None]:
        """One-line replies to a small command about each name; errors are replies too.

        partial: None stands for the replies of a server that failed while others answered; else,
        and when all failed, its fault is raised.
        """
        replies: list[bytes | None] = []
        away: dict[ConnectionPool, Exception] = {}
        for first in range(0, len(names), ASK_MAX):
            part = names[first : first + ASK_MAX]
            answers: list[bytes | None] = [None] * len(part)
            left, failures = self._ask_once(word, part, range(len(part)), answers, away)
            if failures and (not partial or all(line is None for line in answers)):
                raise failures[0]
            if left:
                self.look_elsewhere()
                left, failures = self._ask_once(word, part, left, answers, away)
                if failures and not partial:
                    raise failures[0]
            for index in left:
                answers[index] = self._follow(word, part[index])
            replies += answers
        return replies

    def look_elsewhere(self) -> None:
        """A server said that it is another who has a name."""
        if not self.servers.clustered:
            raise TierError(f"{self.servers} is a node of a cluster; give it as cluster")
        self.count("redirects")
        self.servers.look_again(wait=True)

    def look_again(self) -> None:
        """A server failed, or is not who it was: ask where they are, without waiting for it, since
        one that hangs would be asked too. Of a cluster, only the connections to the server that
        failed are new; see `_borrowed`."""
        if not self.servers.clustered:
            with self._lock:
                pools = list(self._idle)
            for pool in pools:
                self._drop(pool)
        self.servers.look_again(wait=False)

    def close(self) -> None:
        """Let no call begin, wait for those under way, close the connections. Once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + CLOSE_WAIT_S
        with contextlib.suppress(queue.Empty):
            for _ in range(self._at_once):
                self._scratch.get(timeout=max(0.0, deadline - time.monotonic()))
        with self._lock:
            idle = list(self._idle.items())
        for pool, exchanges in idle:
            for exchange in exchanges:
                self._end(pool, exchange)
        self.servers.close()

    def _ask_once(
        self,
        word: bytes,
        names: Sequence[bytes],
        which: Sequence[int],
        answers: list[bytes | None],
        away: dict[ConnectionPool, Exception],
    ) -> tuple[list[int], list[Exception]]:
        """Put the replies into `answers`; returns those that are redirects, and what failed.

        All servers are asked at once, and waited for one timeout in all. away: servers that have
        failed in this call before; they are not asked again, and those that fail now join them.
        """
        groups: defaultdict[ConnectionPool, list[int]] = defaultdict(list)
        for index in which:
            groups[self.servers.pool_of(names[index])].append(index)
        asked = {
            pool: (resp.commands(word, [names[index] for index in group]), len(group))
            for pool, group in groups.items()
            if pool not in away
        }
        with self._permit() as scratch:
            outcomes = self._ask_all(asked, scratch)
        for pool, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                away[pool] = outcome
                continue
            for index, line in zip(groups[pool], outcome, strict=True):
                answers[index] = line
        failures = [away[pool] for pool in groups if pool in away]
        if len(failures) < len(groups) and any(pool in away for pool in asked):
            self.count("faults")
            self.look_again()
        return [i for i in which if _is_redirect(answers[i])], failures

    def _ask_all(
        self, asked: Mapping[ConnectionPool, tuple[bytes, int]], scratch: memoryview
    ) -> dict[ConnectionPool, Outcome]:
        """The replies of each server, or its fault, within one timeout. asked: a request, and how
        many one-line replies it has.

        A server that has no idle connection is asked in a thread of its own where there are others:
        one that hangs still accepts a connection, and is silent then. Such a thread ends by itself.
        """
        outcomes: dict[ConnectionPool, Outcome] = {}
        exchanges: dict[ConnectionPool, Exchange] = {}
        arrived: queue.SimpleQueue[tuple[ConnectionPool, Outcome]] = queue.SimpleQueue()
        left: set[ConnectionPool] = set()
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.ExitStack() as borrowed:
            for pool, request in asked.items():
                exchange = self._kept(pool)
                if exchange is None and len(asked) > 1:
                    left.add(pool)
                    words = (pool, request, arrived)
                    name = "kvstore-redis-ask"
                    threading.Thread(
                        target=self._ask_anew, args=words, name=name, daemon=True
                    ).start()
                    continue
                try:
                    exchange = borrowed.enter_context(self._borrowed(pool, scratch, kept=exchange))
                except faults.FOREIGN as fault:
                    outcomes[pool] = fault
                    continue
                exchange.start(*request)
                exchanges[pool] = exchange
            found = converse(list(exchanges.values()), deadline_s)
            outcomes.update(zip(exchanges, found, strict=True))
            for pool, outcome in outcomes.items():
                if isinstance(outcome, Exception):
                    self._drop(pool)
        with contextlib.suppress(queue.Empty):
            while left:
                pool, outcome = arrived.get(timeout=max(0.0, deadline_s - time.monotonic()))
                left.discard(pool)
                outcomes[pool] = outcome
        outcomes.update((pool, TimeoutError("it does not say a word")) for pool in left)
        return outcomes

    def _ask_anew(
        self,
        pool: ConnectionPool,
        request: tuple[bytes, int],
        arrived: queue.SimpleQueue[tuple[ConnectionPool, Outcome]],
    ) -> None:
        """Ask a server on a new connection, which stays for the next call."""
        words, count = request
        scratch = memoryview(bytearray(resp.SCRATCH_BYTES))
        try:
            with self._borrowed(pool, scratch, len(words)) as exchange:
                exchange.send(words)
                lines = exchange.lines(count)
        except faults.FOREIGN as fault:
            arrived.put((pool, fault))
        else:
            arrived.put((pool, lines))

    def _follow(self, word: bytes, name: bytes) -> bytes:
        """The one-line reply to a command that a cluster sends from node to node."""
        try:
            return b":%d" % self.servers.follow(word.decode(), name)
        except ResponseError as error:
            return b"-" + str(error).encode()

    @contextlib.contextmanager
    def _permit(self) -> Iterator[memoryview]:
        """A scratch buffer, and with it the right to use connections."""
        if self._closed:
            raise TierError("the tier is closed")
        try:
            scratch = self._scratch.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TierError(f"all {self._at_once} connections are in use") from None
        try:
            yield scratch
        finally:
            self._scratch.put(scratch)

    @contextlib.contextmanager
    def _borrowed(
        self,
        pool: ConnectionPool,
        scratch: memoryview,
        nbytes: int = 0,
        *,
        kept: Exchange | None = None,
    ) -> Iterator[Exchange]:
        """A connection, closed before it goes back unless it is in step. kept: one taken already.

        Those in step are kept here: giving one to redis-py's pool and taking it out again costs
        more than the two system calls of a small read.
        """
        exchange = kept or self._kept(pool)
        if exchange is None:
            exchange = Exchange(pool.get_connection(), self._timeout_s)
        try:
            exchange.begin(scratch, nbytes)
            yield exchange
        except faults.FOREIGN:
            if not exchange.in_step:
                self._drop(pool)
            raise
        finally:
            if exchange.in_step:
                self._keep(pool, exchange)
            else:
                self._end(pool, exchange)

    def _keep(self, pool: ConnectionPool, exchange: Exchange) -> None:
        """An idle connection, for the next call; after `close` there is none."""
        with self._lock:
            if not self._closed:
                self._idle[pool].append(exchange)
                return
        self._end(pool, exchange)

    def _drop(self, pool: ConnectionPool) -> None:
        """Close the idle connections to a server: it is another, or they are as dead as the one
        that failed."""
        with self._lock:
            exchanges = self._idle.pop(pool, [])
        for exchange in exchanges:
            self._end(pool, exchange)

    def _kept(self, pool: ConnectionPool) -> Exchange | None:
        """The connection used last, if one is idle and nothing has happened to it."""
        while True:
            with self._lock:
                idle = self._idle[pool]
                if not idle:
                    return None
                exchange = idle.pop()
            if exchange.is_quiet():
                return exchange
            self._end(pool, exchange)

    def _end(self, pool: ConnectionPool, exchange: Exchange) -> None:
        exchange.connection.disconnect()
        pool.release(exchange.connection)


def _is_redirect(line: bytes | None) -> bool:
    if line is None or line[:1] != b"-":
        return False
    error = resp.error_in(line)
    return error is not None and faults.is_redirect(error)
