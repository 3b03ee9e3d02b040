"""HTTP to one endpoint: pooled connections, and one exchange at a time on each.

boto3's own transport costs two to three times the CPU of this one for 2 MiB reads
(docs/decisions/0008-s3-tier.md). Here a reply is received straight into the caller's buffers, and a
request is sent straight out of them.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Final

from kvstore.tiers.s3 import faults

SEND_BYTES: Final = 1 << 20
"""Bytes handed to the socket at once: a piece must leave within one stall."""
MAX_BODY_BYTES: Final = 8 << 20
"""Largest reply that is taken without a buffer for it: a page of a listing."""
MAX_IDLE_S: Final = 15.0
"""A connection that was idle longer is not used again; services close theirs after 20 s or more."""
STALLS: Final = 4
"""A whole exchange may take this many times as long as one stall."""

_STALE = (ConnectionError, http.client.BadStatusLine)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. body: empty when it went into the caller's buffers."""

    status: int
    headers: Message
    body: bytes
    nbytes: int
    """Bytes of the body, wherever they went."""


class Link:
    """Connections to `host` (name or name:port). Thread-safe.

    stall_s: longest a connection may take to open, or may stay without progress.
    idle: most connections kept open for the next exchange.
    """

    def __init__(
        self, host: str, *, secure: bool, stall_s: float, idle: int, ca_file: str | None = None
    ) -> None:
        self.host = host
        self._stall_s = stall_s
        self._max_idle = idle
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

        into: where the body of a 200 or 206 goes, if it is exactly as long as they are together.
        Raises faults.Away.
        """
        what = f"{method} {target.partition('?')[0]}"
        deadline_s = time.monotonic() + STALLS * self._stall_s
        connection = self._take()
        fresh = connection is None
        try:
            while True:
                connection = connection or self._open()
                try:
                    response, sock = self._ask(
                        connection, method, target, headers, body, deadline_s
                    )
                    break
                except _STALE:
                    connection.close()
                    if fresh:
                        raise
                    # It was idle, and the service has closed it: no reply, nothing was done.
                    connection, fresh = None, True
            return self._receive(connection, response, sock, into, deadline_s, what)
        except (OSError, http.client.HTTPException) as error:
            if connection is not None:
                connection.close()
            raise faults.from_error(error, what) from error
        except BaseException:
            if connection is not None:
                connection.close()
            raise

    def close(self) -> None:
        """Close idle connections; those in use close when they are done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    # ------------------------------------------------------------------ one exchange

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Sequence[memoryview],
        deadline_s: float,
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        """Send the request; the reply, its body not yet read, and the socket it comes from."""
        sock = connection.sock
        self._limit(sock, deadline_s)
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        try:
            for view in body:
                for at in range(0, len(view), SEND_BYTES):
                    self._limit(sock, deadline_s)
                    sock.sendall(view[at : at + SEND_BYTES])
        except (BrokenPipeError, ConnectionResetError):
            # A service that refuses a body answers before it has read it, and hangs up.
            try:
                return connection.getresponse(), sock
            except (OSError, http.client.HTTPException):
                pass
            raise
        self._limit(sock, deadline_s)
        return connection.getresponse(), sock

    def _receive(
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
                self._fill(response, sock, view, deadline_s, what)
            response.close()
            body, nbytes = b"", wanted
        else:
            body = self._small(response, sock, deadline_s, what)
            nbytes = len(body)
        if response.will_close or not response.isclosed():
            connection.close()
        else:
            self._give(connection)
        return Reply(response.status, response.headers, body, nbytes)

    def _fill(
        self,
        response: http.client.HTTPResponse,
        sock: socket.socket,
        view: memoryview,
        deadline_s: float,
        what: str,
    ) -> None:
        """Receive exactly a view. One receive at a time, so that a slow drip is noticed too."""
        done = 0
        while done < len(view):
            self._limit(sock, deadline_s)
            got = response.fp.readinto1(view[done:])
            if not got:
                raise faults.Away("truncated", f"{what}: the reply ends early")
            done += got

    def _small(
        self,
        response: http.client.HTTPResponse,
        sock: socket.socket,
        deadline_s: float,
        what: str,
    ) -> bytes:
        """The body of a reply that has no buffer; the first part of one that is too large."""
        pieces: list[bytes] = []
        total = 0
        while total < MAX_BODY_BYTES:
            self._limit(sock, deadline_s)
            piece = response.read1(1 << 16)
            if not piece:
                break
            pieces.append(piece)
            total += len(piece)
        if response.length and total < MAX_BODY_BYTES:
            raise faults.Away("truncated", f"{what}: the reply ends early")
        if response.length == 0:
            response.close()
        return b"".join(pieces)

    def _limit(self, sock: socket.socket, deadline_s: float) -> None:
        """Bound the next use of the socket."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the exchange took too long")
        sock.settimeout(min(left_s, self._stall_s))

    # ------------------------------------------------------------------ the pool

    def _open(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self.host, timeout=self._stall_s)
        else:
            connection = http.client.HTTPSConnection(
                self.host, timeout=self._stall_s, context=self._tls
            )
        connection.connect()
        return connection

    def _take(self) -> http.client.HTTPConnection | None:
        oldest_s = time.monotonic() - MAX_IDLE_S
        with self._lock:
            while self._idle:
                connection, since_s = self._idle.pop()
                if since_s > oldest_s:
                    return connection
                connection.close()
        return None

    def _give(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._max_idle:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()
