"""One request and its reply on a connection of redis-py.

redis-py opens and authenticates the connection. It copies a value three times on its way to the
caller, so frames bypass it: their bytes go directly between the socket and the caller's buffers.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, Final

from kvstore.tiers.redis import resp
from kvstore.tiers.redis.faults import CALL_ERRORS
from kvstore.tiers.redis.resp import ErrorReply, Value

MIN_BYTES_PER_S: Final = 8 << 20
"""Minimum transfer rate. A slower transfer fails, so that a peer that sends single bytes does not
block a worker."""
TLS_SEND_BYTES: Final = 256 << 10
"""Bytes per send on a TLS socket, which waits until all of them are sent."""

_TOO_LONG: Final = "the transfer took too long"
_CLOSED: Final = "the server closed the connection"
_NOTHING: Final = memoryview(b"")

Outcome = list[bytes] | Exception
"""One-line replies, or the error of the request."""


class Exchange:
    """Sends a request and receives exactly its reply. Not thread-safe; serves many calls.

    `reusable` is False between request and reply, and after any error except an error reply. Close
    such a connection: the next bytes on it may be the reply to an earlier request.
    """

    def __init__(self, connection: Any, timeout_s: float) -> None:
        """connection: a connected redis-py connection. timeout_s: maximum wait for data."""
        self.reusable = True
        self.connection = connection
        # redis-py has no public attribute for the socket. All its releases use this name.
        self._socket: socket.socket = connection._sock
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._scratch = _NOTHING
        self._unsent = _NOTHING
        self._lines = resp.LineReplies(0)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def begin_call(self, scratch: memoryview, nbytes: int = 0) -> None:
        """Start a call. scratch: `resp.SCRATCH_BYTES` bytes for this call only. nbytes: maximum
        bytes that the call transfers."""
        self._scratch = scratch
        self._deadline = time.monotonic() + self._timeout_s + nbytes / MIN_BYTES_PER_S

    def let_go(self) -> None:
        """In a forked child: close the descriptor, and send nothing."""
        self._socket.close()

    def fileno(self) -> int:
        """The socket's descriptor, for poll."""
        return self._socket.fileno()

    def is_idle(self) -> bool:
        """Whether the socket has no unread data and was not closed. Unread data would be taken for
        the next reply."""
        pending = self._tls and self._socket.pending()  # type: ignore[attr-defined]
        return not pending and not self._poll.poll(0)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send a request that consists of several buffers, without joining them."""
        self.reusable = False
        views = [memoryview(part) for part in parts]
        try:
            while views:
                if time.monotonic() > self._deadline:
                    raise TimeoutError(_TOO_LONG)
                sent = self._send_some(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
        except TimeoutError:
            raise
        except OSError:
            self._raise_error_reply()
            raise

    def read_lines(self, count: int) -> list[bytes]:
        """Receive `count` one-line replies; see `resp.read_lines`."""
        lines = resp.read_lines(self._receive, self._scratch, count)
        self.reusable = True
        return lines

    def start_request(self, request: bytes, count: int) -> None:
        """Start a request with `count` one-line replies without waiting.

        `advance_request` continues and `end_request` completes it. A thread can thus query several
        servers at the same time.
        """
        self.reusable = False
        self._socket.settimeout(0)
        self._unsent = memoryview(request)
        self._lines = resp.LineReplies(count)

    def advance_request(self) -> int:
        """Send and receive without waiting; returns the poll event to wait for, or 0 when all
        replies have arrived."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent[:TLS_SEND_BYTES]) :]
            while not self._lines.complete:
                count = self._socket.recv_into(self._scratch)
                if not count:
                    raise ConnectionResetError(_CLOSED)
                self._lines.feed(self._scratch[:count])
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except BlockingIOError:
            return select.POLLOUT if self._unsent else select.POLLIN
        except OSError:
            if self._unsent:
                self._raise_error_reply()
            raise
        return 0

    def end_request(self) -> list[bytes]:
        """The replies of the started request. Raises TimeoutError: some are missing."""
        self._socket.settimeout(self._timeout_s)
        if not self._lines.complete:
            raise TimeoutError(_TOO_LONG)
        replies = self._lines.replies()
        self.reusable = True
        return replies

    def read_value(self, header: memoryview, payload: memoryview) -> Value:
        """Receive a value into the caller's buffers; see `resp.read_value`."""
        try:
            value = resp.read_value(self._receive, self._scratch, header, payload)
        except ErrorReply:
            self.reusable = True
            raise
        self.reusable = value.drained
        return value

    def execute(self, *words: str | bytes | int) -> Any:
        """Run a command with a reply of any type through redis-py. Raises its exceptions."""
        self.reusable = False
        self.connection.send_command(*words)
        reply = self.connection.read_response()
        self.reusable = True
        return reply

    def _send_some(self, views: Sequence[memoryview]) -> int:
        if self._tls:
            return self._socket.send(views[0][:TLS_SEND_BYTES])
        return self._socket.sendmsg(views)

    def _receive(self, views: list[memoryview]) -> int:
        if time.monotonic() > self._deadline:
            raise TimeoutError(_TOO_LONG)
        if self._tls or len(views) == 1:
            count = self._socket.recv_into(views[0])
        else:
            count = self._socket.recvmsg_into(views)[0]
        if not count:
            raise ConnectionResetError(_CLOSED)
        return count

    def _raise_error_reply(self) -> None:
        """Raise ErrorReply if the server sent an error reply before it closed the connection.

        A server that rejects a request does so, and sending then fails before the reply is read.
        """
        if self._tls:
            return
        try:
            count = self._socket.recv_into(self._scratch, 0, socket.MSG_DONTWAIT)
        except OSError:
            return
        line, end, _ = bytes(self._scratch[:count]).partition(b"\r\n")
        error = resp.parse_error(line)
        if end and error:
            raise error


def exchange_all(exchanges: Sequence[Exchange], deadline_s: float) -> list[Outcome]:
    """Complete the started requests of all connections; returns the replies or the error of each.

    A server that sends nothing does not delay the others. deadline_s: end on the monotonic clock.
    """
    outcomes: list[Outcome] = [[] for _ in exchanges]
    waiting = {exchange.fileno(): index for index, exchange in enumerate(exchanges)}
    poll = select.poll()
    ready = list(waiting)
    for fd in ready:
        poll.register(fd, 0)
    timed_out = False
    while True:
        for fd in ready:
            index = waiting[fd]
            try:
                event = exchanges[index].advance_request()
                if event:
                    poll.modify(fd, event)
                    continue
                outcomes[index] = exchanges[index].end_request()
            except CALL_ERRORS as error:
                outcomes[index] = error
            poll.unregister(fd)
            del waiting[fd]
        if not waiting or timed_out:
            break
        # Data that arrived by the deadline counts, even if this thread reads it later.
        left_s = deadline_s - time.monotonic()
        timed_out = left_s <= 0
        ready = [fd for fd, _ in poll.poll(max(0.0, left_s * 1e3))]
    for index in waiting.values():
        try:
            outcomes[index] = exchanges[index].end_request()
        except CALL_ERRORS as error:
            outcomes[index] = error
    return outcomes
