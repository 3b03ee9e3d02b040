"""Pooled HTTP connections to one endpoint, with one exchange at a time on each.

Replies are received directly into the caller's buffers, and requests are sent directly from them.
boto3's transport takes two to three times as much CPU for 2 MiB reads
(docs/decisions/0008-s3-tier.md).
"""

from __future__ import annotations

import fcntl
import http.client
import select
import socket
import ssl
import struct
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Final

from kvstore.tiers.s3 import faults

SEND_BYTES: Final = 256 << 10
"""Bytes of one send. Each send must complete within the stall timeout, and adds it to the maximum
time of its exchange."""
MAX_BODY_BYTES: Final = 8 << 20
"""Maximum size of a reply without a caller's buffer, such as a page of a listing."""
MAX_IDLE_S: Final = 15.0
"""Idle time after which a connection is closed; services close theirs after 20 s or more."""
EXCHANGE_STALLS: Final = 4
"""Maximum time of an exchange without a body to send, as a multiple of the stall timeout."""

_STALE = (ConnectionError, http.client.BadStatusLine)


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply. body: empty if the bytes went into the caller's buffers."""

    status: int
    headers: Message
    body: bytes
    nbytes: int
    """Size of the body, also if it went into the caller's buffers."""


class HttpPool:
    """A pool of connections to `host` (name or name:port). Thread-safe.

    stall_timeout_s: maximum time to open a connection, and maximum time without progress.
    max_idle: maximum number of idle connections.
    """

    def __init__(
        self,
        host: str,
        *,
        secure: bool,
        stall_timeout_s: float,
        max_idle: int,
        ca_file: str | None = None,
    ) -> None:
        self.host = host
        self._stall_timeout_s = stall_timeout_s
        self._max_idle = max_idle
        self._tls = ssl.create_default_context(cafile=ca_file) if secure else None
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._closed = False

    def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """Send a request and receive its reply.

        into: buffers for the body of a 200 or 206 reply. They are used if their total length is the
        length of the body. Raises faults.Unavailable.
        """
        what = f"{method} {target.partition('?')[0]}"
        stalls = EXCHANGE_STALLS + sum(map(len, body)) / SEND_BYTES
        deadline_s = time.monotonic() + stalls * self._stall_timeout_s
        connection = self._take_idle()
        is_new = connection is None
        try:
            while True:
                connection = connection or self._connect()
                try:
                    response, sock = self._send_request(
                        connection, method, target, headers, body, deadline_s
                    )
                    break
                except _STALE:
                    connection.close()
                    if is_new:
                        raise
                    # The service had closed this idle connection and did not process the request.
                    connection, is_new = None, True
            return self._read_reply(connection, response, sock, into, deadline_s, what)
        except (OSError, http.client.HTTPException) as error:
            if connection is not None:
                connection.close()
            raise faults.from_error(error, what) from error
        except BaseException:
            if connection is not None:
                connection.close()
            raise

    def close(self) -> None:
        """Close idle connections. A connection in use is closed after its exchange."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    # ------------------------------------------------------------------ one exchange

    def _send_request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Sequence[memoryview],
        deadline_s: float,
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        """Send the request; returns the reply, without its body, and its socket."""
        sock = connection.sock
        self._set_timeout(sock, deadline_s)
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        try:
            for view in body:
                for at in range(0, len(view), SEND_BYTES):
                    self._set_timeout(sock, deadline_s)
                    sock.sendall(view[at : at + SEND_BYTES])
        except (BrokenPipeError, ConnectionResetError):
            # A service that rejects a request replies and closes before it has read the body.
            try:
                return connection.getresponse(), sock
            except (OSError, http.client.HTTPException):
                pass
            raise
        self._wait_sent(sock, deadline_s)
        self._set_timeout(sock, deadline_s)
        return connection.getresponse(), sock

    def _wait_sent(self, sock: socket.socket, deadline_s: float) -> None:
        """Wait until the service replies or has the request: the system sends megabytes of it after
        the last send has returned. Raises TimeoutError: no progress within the stall timeout."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        left = _unsent_bytes(sock)
        while left:
            wait_s = min(self._stall_timeout_s, deadline_s - time.monotonic())
            if poll.poll(max(0.0, wait_s) * 1e3):
                return
            before, left = left, _unsent_bytes(sock)
            if left >= before:
                raise TimeoutError("the service does not receive the request")

    def _read_reply(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        sock: socket.socket,
        into: Sequence[memoryview],
        deadline_s: float,
        what: str,
    ) -> Reply:
        length = response.length
        wanted = sum(map(len, into))
        if into and response.status in (200, 206) and length == wanted:
            for view in into:
                self._read_exactly(response, sock, view, deadline_s, what)
            response.close()
            body, nbytes = b"", wanted
        else:
            body = self._read_small_body(response, sock, deadline_s, what)
            nbytes = len(body)
        if response.will_close or not response.isclosed():
            connection.close()
        else:
            self._return_idle(connection)
        return Reply(response.status, response.headers, body, nbytes)

    def _read_exactly(
        self,
        response: http.client.HTTPResponse,
        sock: socket.socket,
        view: memoryview,
        deadline_s: float,
        what: str,
    ) -> None:
        """Fill a view, with a timeout for each receive to detect a slow transfer."""
        done = 0
        while done < len(view):
            self._set_timeout(sock, deadline_s)
            got = response.fp.readinto1(view[done:])
            if not got:
                raise faults.Unavailable("truncated", f"{what}: the reply ends early")
            done += got

    def _read_small_body(
        self,
        response: http.client.HTTPResponse,
        sock: socket.socket,
        deadline_s: float,
        what: str,
    ) -> bytes:
        """Read the body of a reply without a buffer, up to MAX_BODY_BYTES."""
        parts: list[bytes] = []
        total = 0
        while total < MAX_BODY_BYTES:
            self._set_timeout(sock, deadline_s)
            part = response.read1(1 << 16)
            if not part:
                break
            parts.append(part)
            total += len(part)
        if response.length and total < MAX_BODY_BYTES:
            raise faults.Unavailable("truncated", f"{what}: the reply ends early")
        if response.length == 0:
            response.close()
        return b"".join(parts)

    def _set_timeout(self, sock: socket.socket, deadline_s: float) -> None:
        """Set the socket's timeout for its next use. Raises TimeoutError: the deadline is over."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the exchange took too long")
        sock.settimeout(min(left_s, self._stall_timeout_s))

    # ------------------------------------------------------------------ the pool

    def _connect(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self.host, timeout=self._stall_timeout_s)
        else:
            connection = http.client.HTTPSConnection(
                self.host, timeout=self._stall_timeout_s, context=self._tls
            )
        connection.connect()
        return connection

    def _take_idle(self) -> http.client.HTTPConnection | None:
        oldest_s = time.monotonic() - MAX_IDLE_S
        with self._lock:
            while self._idle:
                connection, since_s = self._idle.pop()
                if since_s > oldest_s:
                    return connection
                connection.close()
        return None

    def _return_idle(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._max_idle:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()


def _unsent_bytes(sock: socket.socket) -> int:
    """Bytes of earlier sends that the peer has not received."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(count)
