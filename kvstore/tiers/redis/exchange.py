"""One request and its reply on a connection that redis-py opened, authenticated and lends.

redis-py copies a value three times on its way to the caller. So the bytes of frames go past it,
straight between the connection's socket and the caller's buffers; everything else stays redis-py's.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, Final

from kvstore.tiers.redis import resp
from kvstore.tiers.redis.faults import FOREIGN
from kvstore.tiers.redis.resp import ErrorReply, Value

SLOWEST_BYTES_PER_S: Final = 8 << 20
"""A transfer that goes on for longer than its timeout and this rate allow is given up: a peer that
sends a byte now and then must not hold a worker."""
TLS_PIECE_BYTES: Final = 256 << 10
"""A TLS socket waits for all that it is given at once; so it is given this much."""

_TOO_LONG: Final = "the transfer took too long"
_CLOSED: Final = "the server closed the connection"
_NOTHING: Final = memoryview(b"")

Outcome = list[bytes] | Exception
"""One-line replies, or why there are none."""


class Exchange:
    """Send, then receive exactly what was asked for. Not thread-safe; used again and again.

    in_step is False between the two, and after any fault but an error reply: such a connection
    must be closed, because what arrives on it next may be the answer to this request.
    """

    def __init__(self, connection: Any, timeout_s: float) -> None:
        """connection: redis-py's, connected. timeout_s: longest wait for one byte."""
        self.in_step = True
        self.connection = connection
        # redis-py gives no public way to the socket; all its releases call it this.
        self._socket: socket.socket = connection._sock
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._scratch = _NOTHING
        self._unsent = _NOTHING
        self._lines = resp.Lines(0)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def begin(self, scratch: memoryview, nbytes: int = 0) -> None:
        """A new call. scratch: `resp.SCRATCH_BYTES` nobody else uses meanwhile. nbytes: how much
        will cross, at most."""
        self._scratch = scratch
        self._deadline = time.monotonic() + self._timeout_s + nbytes / SLOWEST_BYTES_PER_S

    def fileno(self) -> int:
        """Of the socket, to poll it."""
        return self._socket.fileno()

    def is_quiet(self) -> bool:
        """Whether nothing has come since the last call: neither its end nor bytes nobody asked
        for, which would be taken for the next reply."""
        pending = self._tls and self._socket.pending()  # type: ignore[attr-defined]
        return not pending and not self._poll.poll(0)

    def send(self, *pieces: bytes | memoryview) -> None:
        """Send a request that lies in pieces, without joining them."""
        self.in_step = False
        views = [memoryview(piece) for piece in pieces]
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
            self._raise_last_words()
            raise

    def lines(self, count: int) -> list[bytes]:
        """`count` one-line replies; see `resp.read_lines`."""
        lines = resp.read_lines(self._receive, self._scratch, count)
        self.in_step = True
        return lines

    def start(self, request: bytes, count: int) -> None:
        """Begin a request with `count` one-line replies that `advance` carries on and `end` ends,
        none of them waiting: how several servers are asked at once."""
        self.in_step = False
        self._socket.settimeout(0)
        self._unsent = memoryview(request)
        self._lines = resp.Lines(count)

    def advance(self) -> int:
        """Send and receive what goes without waiting; which poll event to wait for, 0 for none:
        the replies have come."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent[:TLS_PIECE_BYTES]) :]
            while not self._lines.complete:
                count = self._socket.recv_into(self._scratch)
                if not count:
                    raise ConnectionResetError(_CLOSED)
                self._lines.take(self._scratch[:count])
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except BlockingIOError:
            return select.POLLOUT if self._unsent else select.POLLIN
        except OSError:
            if self._unsent:
                self._raise_last_words()
            raise
        return 0

    def end(self) -> list[bytes]:
        """The replies to what was started. Raises TimeoutError: they have not come."""
        self._socket.settimeout(self._timeout_s)
        if not self._lines.complete:
            raise TimeoutError(_TOO_LONG)
        replies = self._lines.replies()
        self.in_step = True
        return replies

    def value(self, header: memoryview, payload: memoryview) -> Value:
        """A value into the caller's buffers; see `resp.read_value`."""
        try:
            value = resp.read_value(self._receive, self._scratch, header, payload)
        except ErrorReply:
            self.in_step = True
            raise
        self.in_step = value.drained
        return value

    def ask(self, *words: str | bytes | int) -> Any:
        """A command with a reply of any shape, by redis-py's own means. Raises its exceptions."""
        self.in_step = False
        self.connection.send_command(*words)
        reply = self.connection.read_response()
        self.in_step = True
        return reply

    def _send_some(self, views: Sequence[memoryview]) -> int:
        if self._tls:
            return self._socket.send(views[0][:TLS_PIECE_BYTES])
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

    def _raise_last_words(self) -> None:
        """A server that refuses a request says why and closes; sending then fails before the
        reason is read. Raises ErrorReply when there is one."""
        if self._tls:
            return
        try:
            count = self._socket.recv_into(self._scratch, 0, socket.MSG_DONTWAIT)
        except OSError:
            return
        line, end, _ = bytes(self._scratch[:count]).partition(b"\r\n")
        error = resp.error_in(line)
        if end and error:
            raise error


def converse(exchanges: Sequence[Exchange], deadline_s: float) -> list[Outcome]:
    """Carry on what was started on all of them, each as far as it goes, until `deadline_s` on the
    monotonic clock: one that says nothing keeps no other waiting. The replies of each, or its
    fault."""
    outcomes: list[Outcome] = [[] for _ in exchanges]
    waiting = {exchange.fileno(): index for index, exchange in enumerate(exchanges)}
    poll = select.poll()
    ready = list(waiting)
    for place in ready:
        poll.register(place, 0)
    late = False
    while True:
        for place in ready:
            index = waiting[place]
            try:
                event = exchanges[index].advance()
                if event:
                    poll.modify(place, event)
                    continue
                outcomes[index] = exchanges[index].end()
            except FOREIGN as fault:
                outcomes[index] = fault
            poll.unregister(place)
            del waiting[place]
        if not waiting or late:
            break
        # What has come by the deadline counts, also when this thread was late to look at it.
        left_s = deadline_s - time.monotonic()
        late = left_s <= 0
        ready = [place for place, _ in poll.poll(max(0.0, left_s * 1e3))]
    for index in waiting.values():
        try:
            outcomes[index] = exchanges[index].end()
        except FOREIGN as fault:
            outcomes[index] = fault
    return outcomes
