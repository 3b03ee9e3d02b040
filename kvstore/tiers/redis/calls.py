"""Calls to the servers: connections, concurrency and redirects.

A call takes one of a fixed number of scratch buffers, which also bounds the connections in use. It
takes a connection, sends, receives, and returns both. A connection that is not reusable is closed
instead of returned. Every wait on a socket has a timeout, and every transfer has a deadline.
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
from kvstore.forks import INHERITED, make_unusable, on_fork
from kvstore.tiers.redis import faults, resp
from kvstore.tiers.redis.exchange import Exchange, Outcome, exchange_all
from kvstore.tiers.redis.servers import Servers

MAX_BATCH_COMMANDS: Final = 8192
"""Maximum number of commands in one request. It bounds the buffers on both sides."""
CLOSE_WAIT_S: Final = 5.0
"""Maximum wait of `close` for running calls. A call that ends later closes its connection."""


class Calls:
    """Runs calls to the servers. Thread-safe. Raises `faults.CALL_ERRORS`, and TierError.

    max_calls: maximum number of concurrent calls. timeout_s: maximum wait for a scratch buffer, and
    for data from a server.
    """

    def __init__(self, servers: Servers, *, max_calls: int, timeout_s: float) -> None:
        self.servers = servers
        self.counts: Counter[str] = Counter()
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._closed_reason = "the tier is closed"
        self._idle: defaultdict[ConnectionPool, list[Exchange]] = defaultdict(list)
        self._scratch: queue.LifoQueue[memoryview] = queue.LifoQueue()
        for _ in range(max_calls):
            self._scratch.put(aligned_buffer(resp.SCRATCH_BYTES)[: resp.SCRATCH_BYTES])
        on_fork(self._let_go)

    @property
    def running(self) -> int:
        """Number of running calls."""
        return self._max_calls - self._scratch.qsize()

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self.counts[name] += by

    def counters(self, names: Sequence[str]) -> dict[str, int]:
        with self._lock:
            return {name: self.counts[name] for name in names}

    @contextlib.contextmanager
    def exchange(self, pool: ConnectionPool, nbytes: int = 0) -> Iterator[Exchange]:
        """A connection and a scratch buffer for one call that transfers at most `nbytes`."""
        with (
            self._take_scratch() as scratch,
            self._use_connection(pool, scratch, nbytes) as exchange,
        ):
            yield exchange

    def send_for_each(
        self, command: bytes, names: Sequence[bytes], *, partial: bool = True
    ) -> list[bytes | None]:
        """Send a small command for each name; returns its one-line replies, error replies included.

        partial: if a server fails and others answer, its replies are None. Without `partial`, or if
        all servers fail, its error is raised.
        """
        replies: list[bytes | None] = []
        failed: dict[ConnectionPool, Exception] = {}
        for first in range(0, len(names), MAX_BATCH_COMMANDS):
            part = names[first : first + MAX_BATCH_COMMANDS]
            answers: list[bytes | None] = [None] * len(part)
            redirected, failures = self._send_batch(
                command, part, range(len(part)), answers, failed
            )
            if failures and (not partial or all(line is None for line in answers)):
                raise failures[0]
            if redirected:
                self.on_redirect()
                redirected, failures = self._send_batch(command, part, redirected, answers, failed)
                if failures and not partial:
                    raise failures[0]
            for index in redirected:
                answers[index] = self._execute_following_redirects(command, part[index])
            replies += answers
        return replies

    def on_redirect(self) -> None:
        """Refresh the topology after a server redirected a key to another one."""
        if not self.servers.clustered:
            raise TierError(f"{self.servers} is a node of a cluster; use the key cluster for it")
        self.count("redirects")
        self.servers.refresh_topology(wait=True)

    def on_server_failure(self) -> None:
        """Refresh the topology after a server failed or changed its role.

        Does not wait for the refresh, which may query a server that hangs. Outside of a cluster all
        idle connections are closed. In a cluster `_use_connection` closes those to the failed
        server only.
        """
        if not self.servers.clustered:
            with self._lock:
                pools = list(self._idle)
            for pool in pools:
                self._close_idle(pool)
        self.servers.refresh_topology(wait=False)

    def close(self) -> None:
        """Reject new calls, wait for running ones, and close the connections."""
        if self._closed:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + CLOSE_WAIT_S
        with contextlib.suppress(queue.Empty):
            for _ in range(self._max_calls):
                self._scratch.get(timeout=max(0.0, deadline - time.monotonic()))
        with self._lock:
            idle = list(self._idle.items())
        for pool, exchanges in idle:
            for exchange in exchanges:
                self._close_connection(pool, exchange)
        self.servers.close()

    def _let_go(self) -> None:
        """In a forked child: close the child's descriptors. Replies on them are the parent's."""
        self._closed, self._closed_reason = True, f"the tier was {INHERITED}"
        make_unusable(self, "_lock", error=TierError)
        for exchanges in self._idle.values():
            for exchange in exchanges:
                exchange.let_go()
        self._idle.clear()

    def _send_batch(
        self,
        command: bytes,
        names: Sequence[bytes],
        indexes: Sequence[int],
        answers: list[bytes | None],
        failed: dict[ConnectionPool, Exception],
    ) -> tuple[list[int], list[Exception]]:
        """Write the replies into `answers`; returns the indexes of redirects, and the errors.

        Requests go to all servers at the same time, with one timeout in total. failed: servers that
        failed earlier in this call. They are skipped, and servers that fail now are added.
        """
        groups: defaultdict[ConnectionPool, list[int]] = defaultdict(list)
        for index in indexes:
            groups[self.servers.pool_of(names[index])].append(index)
        requests = {
            pool: (resp.pack_commands(command, [names[index] for index in group]), len(group))
            for pool, group in groups.items()
            if pool not in failed
        }
        with self._take_scratch() as scratch:
            outcomes = self._send_to_servers(requests, scratch)
        for pool, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                failed[pool] = outcome
                continue
            for index, line in zip(groups[pool], outcome, strict=True):
                answers[index] = line
        failures = [failed[pool] for pool in groups if pool in failed]
        if len(failures) < len(groups) and any(pool in failed for pool in requests):
            self.count("errors")
            self.on_server_failure()
        return [i for i in indexes if _is_redirect(answers[i])], failures

    def _send_to_servers(
        self, requests: Mapping[ConnectionPool, tuple[bytes, int]], scratch: memoryview
    ) -> dict[ConnectionPool, Outcome]:
        """Send each server its request; returns its replies or its error, within one timeout.

        requests: the request, and the number of its one-line replies.

        If there are several servers, a separate thread queries each server without an idle
        connection. A server that hangs still accepts a connection, but sends nothing. Such a thread
        ends at its timeout.
        """
        outcomes: dict[ConnectionPool, Outcome] = {}
        exchanges: dict[ConnectionPool, Exchange] = {}
        arrived: queue.SimpleQueue[tuple[ConnectionPool, Outcome]] = queue.SimpleQueue()
        waiting: set[ConnectionPool] = set()
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.ExitStack() as stack:
            for pool, request in requests.items():
                exchange = self._take_idle(pool)
                if exchange is None and len(requests) > 1:
                    waiting.add(pool)
                    words = (pool, request, arrived)
                    name = "kvstore-redis-query"
                    threading.Thread(
                        target=self._send_on_new_connection, args=words, name=name, daemon=True
                    ).start()
                    continue
                try:
                    exchange = stack.enter_context(
                        self._use_connection(pool, scratch, idle=exchange)
                    )
                except faults.CALL_ERRORS as error:
                    outcomes[pool] = error
                    continue
                exchange.start_request(*request)
                exchanges[pool] = exchange
            found = exchange_all(list(exchanges.values()), deadline_s)
            outcomes.update(zip(exchanges, found, strict=True))
            for pool, outcome in outcomes.items():
                if isinstance(outcome, Exception):
                    self._close_idle(pool)
        with contextlib.suppress(queue.Empty):
            while waiting:
                pool, outcome = arrived.get(timeout=max(0.0, deadline_s - time.monotonic()))
                waiting.discard(pool)
                outcomes[pool] = outcome
        outcomes.update((pool, TimeoutError("no reply within the timeout")) for pool in waiting)
        return outcomes

    def _send_on_new_connection(
        self,
        pool: ConnectionPool,
        request: tuple[bytes, int],
        arrived: queue.SimpleQueue[tuple[ConnectionPool, Outcome]],
    ) -> None:
        """Send a request on a new connection, which stays open for the next call."""
        words, count = request
        scratch = memoryview(bytearray(resp.SCRATCH_BYTES))
        try:
            with self._use_connection(pool, scratch, len(words)) as exchange:
                exchange.send(words)
                lines = exchange.read_lines(count)
        except faults.CALL_ERRORS as error:
            arrived.put((pool, error))
        else:
            arrived.put((pool, lines))

    def _execute_following_redirects(self, command: bytes, name: bytes) -> bytes:
        """The one-line reply to a command that the cluster redirects."""
        try:
            return b":%d" % self.servers.execute_following_redirects(command.decode(), name)
        except ResponseError as error:
            return b"-" + str(error).encode()

    @contextlib.contextmanager
    def _take_scratch(self) -> Iterator[memoryview]:
        """A scratch buffer. A call needs one before it uses a connection."""
        if self._closed:
            raise TierError(self._closed_reason)
        try:
            scratch = self._scratch.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TierError(f"all {self._max_calls} connections are in use") from None
        try:
            yield scratch
        finally:
            self._scratch.put(scratch)

    @contextlib.contextmanager
    def _use_connection(
        self,
        pool: ConnectionPool,
        scratch: memoryview,
        nbytes: int = 0,
        *,
        idle: Exchange | None = None,
    ) -> Iterator[Exchange]:
        """A connection for one call. Afterwards it is kept if it is reusable, else closed.

        idle: an idle connection that was taken already. Reusable connections are kept here, because
        returning one to redis-py's pool and taking it again costs more than the two system calls of
        a small read.
        """
        exchange = idle or self._take_idle(pool)
        if exchange is None:
            exchange = Exchange(pool.get_connection(), self._timeout_s)
        try:
            exchange.begin_call(scratch, nbytes)
            yield exchange
        except faults.CALL_ERRORS:
            if not exchange.reusable:
                self._close_idle(pool)
            raise
        finally:
            if exchange.reusable:
                self._return_idle(pool, exchange)
            else:
                self._close_connection(pool, exchange)

    def _return_idle(self, pool: ConnectionPool, exchange: Exchange) -> None:
        """Keep an idle connection for the next call; close it if the tier is closed."""
        with self._lock:
            if not self._closed:
                self._idle[pool].append(exchange)
                return
        self._close_connection(pool, exchange)

    def _close_idle(self, pool: ConnectionPool) -> None:
        """Close the idle connections to a server that failed or was replaced."""
        with self._lock:
            exchanges = self._idle.pop(pool, [])
        for exchange in exchanges:
            self._close_connection(pool, exchange)

    def _take_idle(self, pool: ConnectionPool) -> Exchange | None:
        """The most recently used idle connection without unread data, or None."""
        while True:
            with self._lock:
                idle = self._idle[pool]
                if not idle:
                    return None
                exchange = idle.pop()
            if exchange.is_idle():
                return exchange
            self._close_connection(pool, exchange)

    def _close_connection(self, pool: ConnectionPool, exchange: Exchange) -> None:
        exchange.connection.disconnect()
        pool.release(exchange.connection)


def _is_redirect(line: bytes | None) -> bool:
    if line is None or line[:1] != b"-":
        return False
    error = resp.parse_error(line)
    return error is not None and faults.is_redirect(error)
