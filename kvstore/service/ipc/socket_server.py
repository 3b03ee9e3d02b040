"""The sidecar's hot path: `BlockStore` for the engines of this node, over a Unix socket.

Here clients are let in: accepted, asked who they are, given the slab. What becomes of one after
that, and when its leases come back, is said in `connection`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from kvstore.errors import KVStoreError
from kvstore.ipc.protocol import (
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Malformed,
    Receiver,
    Verb,
    namespace_of,
    pack,
)
from kvstore.service.auth import Tenants
from kvstore.service.http.visibility import seen_by
from kvstore.service.index_builder import Keeper
from kvstore.service.ipc.connection import Connection
from kvstore.service.ipc.op_stats import Asked, Ears
from kvstore.service.ipc.sockets import set_timeouts
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.telemetry.histogram import check_route
from kvstore.telemetry.usage_counters import Record

log = logging.getLogger(__name__)

MAX_NAME: Final = 64
"""Characters kept of what a client calls itself."""
ACCEPT_PAUSE_S: Final = 0.2
"""How long taking clients rests when the system has no room for one more."""


class HotPath:
    """The listening socket (`sockets.listen`) and its connections.

    max_clients: connections at once; more are told to come again.
    hello_s: how long a connection may take to say who it is.
    stats: what a STATS_ASK is answered with.
    asked: told of every run that a client asks for: tenant, namespace digest, hashes. From the
        connections' threads; must return at once. record: likewise, of every verb.
    """

    def __init__(
        self,
        store: Store,
        listener: socket.socket,
        *,
        tenants: Tenants,
        max_clients: int,
        hello_s: float,
        stats: Callable[[], dict[str, Any]],
        asked: Asked | None = None,
        record: Record | None = None,
    ) -> None:
        self._store = store
        self._ears = Ears(asked, record)
        self._tenants = tenants
        self._max_clients = max_clients
        self._hello_s = hello_s
        self._stats = stats
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._counts = {"connections": 0, "refused": 0}
        self._listener = listener
        self._keeper = Keeper(store)
        self._told_to_stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)

    def bound(self, max_clients: int, hello_s: float) -> None:
        """From here on, these bounds; who is connected already stays."""
        self._max_clients = max_clients
        self._hello_s = hello_s

    def start(self) -> None:
        """Begin to accept."""
        self._keeper.start()
        self._acceptor.start()

    def snapshot(self) -> dict[str, Any]:
        """Clients and their tickets, for statistics."""
        with self._lock:
            clients = {str(n): c.snapshot() for n, c in self._connections.items()}
        return {**self._counts, "clients": clients, "verb_seconds": self._ears.seconds()}

    def stop(self) -> None:
        """End every connection and give the leases back.

        For the end of the sidecar only: the slab goes with it, so no slot is used again, and what
        a client still copies falls into memory that only that client has.
        """
        # Connections end one by one: what one gives back, none of the others may take and fill.
        self._store.brain.freeze()
        with self._lock:
            self._stopping = True
            sockets = list(self._sockets.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor.is_alive():
            self._acceptor.join()
        self._listener.close()
        os.eventfd_write(self._told_to_stop, 1)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        os.close(self._told_to_stop)
        self._keeper.close()

    def _accept(self) -> None:
        """The acceptor: goes on until told to stop, whatever the system refuses meanwhile."""
        number = 0
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping:
                    log.error("cannot take a client: %s", error)
                    time.sleep(ACCEPT_PAUSE_S)
                continue
            number += 1
            try:
                reason = self._take(sock, number)
            except RuntimeError as error:
                log.error("cannot take a client: %s", error)
                reason = str(error)
            if reason:
                self._refuse(sock, reason, again=True)
                sock.close()

    def _take(self, sock: socket.socket, number: int) -> str:
        """Give a new connection its reader; else why it may come again later.

        Raises RuntimeError: the system starts no thread.
        """
        thread = threading.Thread(
            target=self._serve, args=(sock, number), name=f"read-{number}", daemon=True
        )
        with self._lock:
            if self._stopping or len(self._sockets) >= self._max_clients:
                return f"{self._max_clients} clients are connected already"
            # The thread takes itself off these; it waits for the lock.
            thread.start()
            self._sockets[number] = sock
            self._threads.add(thread)
        return ""

    def _serve(self, sock: socket.socket, number: int) -> None:
        """A connection's life, in its reader's thread."""
        try:
            connection = self._welcome(sock, number)
            if connection is not None:
                connection.serve()
        except OSError as error:
            log.info("connection %d: %s", number, error)
        except Exception:
            log.exception("connection %d ends by a mistake", number)
        finally:
            with self._lock:
                self._connections.pop(number, None)
                self._sockets.pop(number, None)
                self._threads.discard(threading.current_thread())
            sock.close()

    def _welcome(self, sock: socket.socket, number: int) -> Connection | None:
        """Take the hello; nothing is leased yet, so refusing and closing is safe here."""
        set_timeouts(sock, self._hello_s)
        receiver = Receiver(sock, MAX_HELLO_BYTES)
        try:
            message = receiver.read()
            if message is None:
                return None
            if message[0] == Verb.STATS_ASK and len(message) == 2:
                token = message[1] if isinstance(message[1], str) else None
                sees = self._tenants.sees(token)
                sock.sendall(pack(Verb.STATS, seen_by(sees, self._stats())))
                return None
            if message[0] != Verb.HELLO or len(message) != 2 or type(message[1]) is not dict:
                raise Malformed("the first message must be a hello")
            about = message[1]
            tenant = self._tenants.of(about.get("token"))
            namespace = namespace_of(about)
            route = check_route(about.get("route", ""))
            session = self._store.session(namespace, tenant, route=route)
        except TimeoutError:
            self._refuse(sock, f"no hello within {self._hello_s:g} s")
            return None
        except KVStoreError as error:
            self._refuse(sock, " ".join(str(error).split()))
            return None
        try:
            return self._join(sock, receiver, session, about, number)
        except BaseException:
            session.close()
            raise

    def _join(
        self,
        sock: socket.socket,
        receiver: Receiver,
        session: Session,
        about: dict[str, Any],
        number: int,
    ) -> Connection:
        """Give a client the slab, and its connection a place among the others."""
        set_timeouts(sock, 0.0)
        receiver.max_bytes = MAX_MESSAGE_BYTES
        name = f"{str(about.get('client'))[:MAX_NAME]}, pid {about.get('pid')}, {session.tenant}"
        connection = Connection(
            sock,
            receiver,
            session,
            about=name,
            number=number,
            ears=self._ears,
            stopping=self._told_to_stop,
        )
        with self._lock:
            self._connections[number] = connection
            self._counts["connections"] += 1
        slab, catalog = self._store.slab, self._keeper.catalog
        welcome = pack(
            Verb.WELCOME,
            {
                "version": PROTOCOL_VERSION,
                "slots": slab.slots,
                "slot_bytes": slab.slot_bytes,
                "session": number,
                "salt": catalog.salt(session.tenant, session.namespace.digest),
            },
        )
        try:
            socket.send_fds(sock, [welcome], [slab.fd, catalog.fd])
        except BaseException:
            connection.end()
            raise
        log.info("%s joined", connection)
        return connection

    def _refuse(self, sock: socket.socket, reason: str, *, again: bool = False) -> None:
        with self._lock:
            self._counts["refused"] += 1
        log.info("refused a client: %s", reason)
        with contextlib.suppress(OSError):
            sock.sendall(pack(Verb.REFUSED, reason, again))
