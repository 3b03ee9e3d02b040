"""The sidecar's Unix-socket server: `BlockStore` for the engines of this node.

This module accepts clients, does the handshake and sends them the slab. Module `connection` serves
a client after that, and documents when its leases are released.

The acceptor also checks the socket's file. If it was removed, new clients cannot connect. Then it
listens on a new socket at the same path, and connected clients keep their connections. If another
process listens at the path, that process keeps it: two sidecars that take the path from each other
would disturb every engine. This sidecar then serves its connected clients only, and is not ready.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvstore.errors import ConfigError, KVStoreError
from kvstore.ipc.protocol import (
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    MalformedMessage,
    MessageType,
    pack,
    parse_namespace,
)
from kvstore.service.access.auth import Tenants
from kvstore.service.access.visibility import visible_stats
from kvstore.service.ipc.connection import Connection
from kvstore.service.ipc.index_builder import IndexBuilder
from kvstore.service.ipc.op_stats import OnLookup, OpStats
from kvstore.service.ipc.sockets import (
    ProcessReceiver,
    UnixListener,
    file_id,
    listen,
    set_timeouts,
)
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.telemetry.traffic import check_traffic_label
from kvstore.telemetry.usage_counters import Record

log = logging.getLogger(__name__)

MAX_NAME_CHARS: Final = 64
"""Characters kept of a client's name."""
ACCEPT_PAUSE_S: Final = 0.2
"""Pause after a failed accept, for example when no file descriptor is free."""
FILE_CHECK_S: Final = 1.0
"""Longest time between two checks of the socket's file."""
FILE_RETRY_S: Final = 30.0
"""Time between two attempts to listen at the path while the same file of another process is there.
"""


class SocketServer:
    """The listening socket (`sockets.listen`) and its connections.

    max_clients: maximum number of connections; more are rejected and may retry.
    handshake_timeout_s: longest time to the client's first message.
    stats: the answer to a STATS_REQUEST.
    on_lookup: called for each prefix lookup of a client. From the connections' threads; must return
        at once. record: called for each request, likewise.
    """

    def __init__(
        self,
        store: Store,
        listener: UnixListener,
        *,
        tenants: Tenants,
        max_clients: int,
        handshake_timeout_s: float,
        stats: Callable[[], dict[str, Any]],
        on_lookup: OnLookup | None = None,
        record: Record | None = None,
    ) -> None:
        self._store = store
        self._op_stats = OpStats(on_lookup, record)
        self._tenants = tenants
        self._max_clients = max_clients
        self._handshake_timeout_s = handshake_timeout_s
        self._stats = stats
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._counts = {"connections": 0, "rejected": 0, "socket_file_lost": 0, "foreign_bytes": 0}
        self._listener = listener
        self.owns_file = True
        """Whether new clients can reach this sidecar: its socket's file is in place."""
        self._other_file: tuple[int, int] | None = None
        self._retry_at_s = 0.0
        self._index_builder = IndexBuilder(store)
        self._stop_event = os.eventfd(0, os.EFD_CLOEXEC)
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)

    def set_limits(self, max_clients: int, handshake_timeout_s: float) -> None:
        """Change the limits. Connected clients stay."""
        self._max_clients = max_clients
        self._handshake_timeout_s = handshake_timeout_s

    def start(self) -> None:
        """Start accepting clients."""
        self._listener.settimeout(FILE_CHECK_S)
        self._index_builder.start()
        self._acceptor.start()

    def snapshot(self) -> dict[str, Any]:
        """Clients and their operations, for statistics."""
        with self._lock:
            clients = {str(n): c.snapshot() for n, c in self._connections.items()}
        return {
            **self._counts,
            "socket_file_own": int(self.owns_file),
            "clients": clients,
            "request_seconds": self._op_stats.request_seconds(),
        }

    def stop(self) -> None:
        """End every connection and release its leases.

        For the end of the sidecar only. The slab goes with it, so no slot is used again, and a copy
        that still runs writes into memory that only its client has.
        """
        # Connections end one by one: no connection may fill a slot that another one has released.
        self._store.manager.freeze()
        with self._lock:
            self._stopping = True
            sockets = list(self._sockets.values())
        # The file first, while this socket listens: later it may be the file of the next sidecar.
        self._listener.remove_file()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor.is_alive():
            self._acceptor.join()
        self._listener.close()
        os.eventfd_write(self._stop_event, 1)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        os.close(self._stop_event)
        self._index_builder.close()

    def _accept(self) -> None:
        """The acceptor's thread: accepts until `stop`, and continues after errors."""
        number = 0
        while not self._stopping:
            self._check_file()
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._stopping:
                    log.error("cannot accept a client: %s", error)
                    time.sleep(ACCEPT_PAUSE_S)
                continue
            number += 1
            try:
                reason = self._start_reader(sock, number)
            except RuntimeError as error:
                log.error("cannot accept a client: %s", error)
                reason = str(error)
            if reason:
                self._reject(sock, reason, retryable=True)
                sock.close()

    def _check_file(self) -> None:
        """Listen on a new socket if the file of the current one is gone."""
        if self._stopping:
            return
        if self._listener.owns_file():
            self.owns_file = True
            return
        path = self._listener.path
        other = file_id(path)
        if not self.owns_file and other == self._other_file and time.monotonic() < self._retry_at_s:
            return
        self._counts["socket_file_lost"] += self.owns_file
        try:
            listener = listen(path)
        except ConfigError as error:
            if self.owns_file:
                log.error("new clients cannot reach this sidecar, its socket is gone: %s", error)
            self.owns_file, self._other_file = False, other
            self._retry_at_s = time.monotonic() + FILE_RETRY_S
            return
        listener.settimeout(FILE_CHECK_S)
        old, self._listener = self._listener, listener
        old.close()
        self.owns_file = True
        log.warning("the socket %s was removed; listening on a new one", path)

    def _count_foreign(self, number: int, nbytes: int, pid: int) -> None:
        """Count the bytes that a process other than the client has sent on its connection."""
        with self._lock:
            first = not self._counts["foreign_bytes"]
            self._counts["foreign_bytes"] += nbytes
        log.log(
            logging.WARNING if first else logging.DEBUG,
            "connection %d: dropped %d bytes of process %d, which did not open it; a forked "
            "process must open its own client",
            number,
            nbytes,
            pid,
        )

    def _start_reader(self, sock: socket.socket, number: int) -> str:
        """Start the reader of a new connection. Returns why the client is rejected, or "".

        Raises RuntimeError: the system cannot start a thread.
        """
        thread = threading.Thread(
            target=self._serve, args=(sock, number), name=f"read-{number}", daemon=True
        )
        with self._lock:
            if self._stopping or len(self._sockets) >= self._max_clients:
                return f"{self._max_clients} clients are connected already"
            # The thread removes itself from these, and waits for the lock to do it.
            thread.start()
            self._sockets[number] = sock
            self._threads.add(thread)
        return ""

    def _serve(self, sock: socket.socket, number: int) -> None:
        """Serve one connection, in its reader's thread."""
        try:
            connection = self._handshake(sock, number)
            if connection is not None:
                connection.serve()
        except OSError as error:
            log.info("connection %d: %s", number, error)
        except Exception:
            log.exception("connection %d: internal error, closing", number)
        finally:
            with self._lock:
                self._connections.pop(number, None)
                self._sockets.pop(number, None)
                self._threads.discard(threading.current_thread())
            sock.close()

    def _handshake(self, sock: socket.socket, number: int) -> Connection | None:
        """Read the HELLO. There are no leases yet, so rejecting and closing is safe here."""
        set_timeouts(sock, self._handshake_timeout_s)
        on_foreign = partial(self._count_foreign, number)
        receiver = ProcessReceiver(sock, MAX_HELLO_BYTES, on_foreign)
        try:
            message = receiver.read()
            if message is None:
                return None
            if message[0] == MessageType.STATS_REQUEST and len(message) == 2:
                token = message[1] if isinstance(message[1], str) else None
                visible = self._tenants.visible_tenant(token)
                sock.sendall(pack(MessageType.STATS, visible_stats(visible, self._stats())))
                return None
            if message[0] != MessageType.HELLO or len(message) != 2 or type(message[1]) is not dict:
                raise MalformedMessage("the first message must be a HELLO")
            about = message[1]
            tenant = self._tenants.tenant_of(about.get("token"))
            namespace = parse_namespace(about)
            label = check_traffic_label(about.get("route", ""))
            session = self._store.session(namespace, tenant, traffic_label=label)
        except TimeoutError:
            self._reject(sock, f"no HELLO within {self._handshake_timeout_s:g} s")
            return None
        except KVStoreError as error:
            self._reject(sock, " ".join(str(error).split()))
            return None
        try:
            return self._add_client(sock, receiver, session, about, number)
        except BaseException:
            session.close()
            raise

    def _add_client(
        self,
        sock: socket.socket,
        receiver: ProcessReceiver,
        session: Session,
        about: dict[str, Any],
        number: int,
    ) -> Connection:
        """Register the connection and send the slab to the client."""
        set_timeouts(sock, 0.0)
        receiver.max_bytes = MAX_MESSAGE_BYTES
        name = (
            f"{str(about.get('client'))[:MAX_NAME_CHARS]}, pid {about.get('pid')}, {session.tenant}"
        )
        connection = Connection(
            sock,
            receiver,
            session,
            about=name,
            number=number,
            op_stats=self._op_stats,
            stopping=self._stop_event,
        )
        with self._lock:
            self._connections[number] = connection
            self._counts["connections"] += 1
        slab, index = self._store.slab, self._index_builder.index
        welcome = pack(
            MessageType.WELCOME,
            {
                "version": PROTOCOL_VERSION,
                "slots": slab.slots,
                "slot_bytes": slab.slot_bytes,
                "session": number,
                "salt": index.seed(session.tenant, session.namespace.digest),
            },
        )
        try:
            socket.send_fds(sock, [welcome], [slab.fd, index.fd])
        except BaseException:
            connection.end()
            raise
        log.info("%s connected", connection)
        return connection

    def _reject(self, sock: socket.socket, reason: str, *, retryable: bool = False) -> None:
        with self._lock:
            self._counts["rejected"] += 1
        log.info("client rejected: %s", reason)
        with contextlib.suppress(OSError):
            sock.sendall(pack(MessageType.REJECTED, reason, retryable))
