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
from kvstore.tiers.redis.resp import ErrorReply, Value

SLOWEST_BYTES_PER_S: Final = 8 << 20
"""A transfer that goes on for longer than its timeout and this rate allow is given up: a peer that
sends a byte now and then must not hold a worker."""
TLS_PIECE_BYTES: Final = 256 << 10
"""A TLS socket waits for all that it is given at once; so it is given this much."""

_TOO_LONG: Final = "the transfer took too long"
_NOTHING: Final = memoryview(b"")


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
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def begin(self, scratch: memoryview, nbytes: int = 0) -> None:
        """A new call. scratch: `resp.SCRATCH_BYTES` nobody else uses meanwhile. nbytes: how much
        will cross, at most."""
        self._scratch = scratch
        self._deadline = time.monotonic() + self._timeout_s + nbytes / SLOWEST_BYTES_PER_S

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
            raise ConnectionResetError("the server closed the connection")
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
