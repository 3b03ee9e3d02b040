"""The sidecar's hot path: `BlockStore` for the engines of this node, over a Unix socket.

Two threads per connection. The *reader* takes verbs and answers each as far as it can be answered
at once; the *pusher* waits in `session.poll` while some ticket is not done, and sends what moved
(it sleeps through what the reader answers in full: waking it costs as much as a small verb). Both
send under the connection's lock, blocking: a client that does not read its answers blocks them, so
it is not read any more either, and nothing piles up here but what its bounded tickets can hold.

**When leases come back.** Only at the end of a connection, and that end is the kernel's word that
the client's process has no memory left through which a copy could run (`protocol`, the safety
rule). A client that breaks the protocol is told so and not read any more; its session stays until
it hangs up. Even an end-of-stream is not enough by itself, for a client could have shut down one
direction only: the reader waits for the hang-up of both.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.errors import KVStoreError
from kvstore.metrics import Histogram
from kvstore.protocol import (
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_TICKETS,
    PROTOCOL_VERSION,
    Malformed,
    Receiver,
    Verb,
    check_hashes,
    check_number,
    namespace_of,
    pack,
)
from kvstore.service.auth import Tenants
from kvstore.service.sockets import await_hang_up, set_timeouts
from kvstore.session import Session
from kvstore.store import Store
from kvstore.verbs import Load, Match, Save, Ticket

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""How long a pusher waits in one poll: bounds how late it notices that its connection is over."""
MAX_NAME: Final = 64
"""Characters kept of what a client calls itself."""


class Live:
    """A ticket of a client, and how much of it the client has been told."""

    __slots__ = ("number", "ticket", "told", "told_done")

    def __init__(self, number: int, ticket: Ticket) -> None:
        self.number = number
        self.ticket = ticket
        self.told = 0
        self.told_done = False

    def news(self) -> bytes:
        """The update that tells what is new, or nothing. Under the connection's lock.

        `done` is read first: the store writes it last, so what is read after it is complete.
        """
        ticket = self.ticket
        done = ticket.done
        head = (Verb.UPDATE, self.number, done, ticket.fault if done else "")
        tail: tuple[Any, ...]
        if isinstance(ticket, Match):
            end = len(ticket.tiers)
            tail = (ticket.tiers[self.told : end],)
        elif isinstance(ticket, Load):
            # Tiers are appended before slots, so there is one for every slot seen here.
            end = len(ticket.slots)
            tail = (ticket.tiers[self.told : end], ticket.slots[self.told : end])
        else:
            assert isinstance(ticket, Save)
            end = len(ticket.grants)
            flat = [number for grant in ticket.grants[self.told : end] for number in grant]
            tail = (flat, ticket.dropped)
        if end == self.told and done == self.told_done:
            return b""
        self.told, self.told_done = end, done
        return pack(*head, *tail)


class Connection:
    """One engine on the socket, after its hello."""

    def __init__(
        self,
        sock: socket.socket,
        receiver: Receiver,
        session: Session,
        *,
        about: str,
        number: int,
        verb_s: Histogram,
    ) -> None:
        self.sock = sock
        self.about = about
        self.number = number
        self.over = threading.Event()
        self._receiver = receiver
        self._session = session
        self._live: dict[int, Live] = {}
        self._by_store_id: dict[int, Live] = {}
        self._lock = threading.Lock()
        self._undone: set[int] = set()
        self._any_undone = threading.Event()
        self._verb_s = verb_s
        self._pusher = threading.Thread(target=self._push, name=f"push-{number}", daemon=True)

    def serve(self) -> None:
        """Run until the client is gone, and then give its leases back. In the reader's thread."""
        self._pusher.start()
        try:
            self._read()
        except Exception:
            # A mistake of ours; the client is alive, so its leases stay all the same.
            log.exception("%s is not read any more", self)
        await_hang_up(self.sock)
        self.over.set()
        self._any_undone.set()
        self._session.close()
        self._pusher.join()

    def snapshot(self) -> dict[str, Any]:
        """For statistics."""
        return {"about": self.about, "tickets": len(self._live)}

    def _read(self) -> None:
        """Handle verbs until the end of the stream, a BYE, or nonsense."""
        while True:
            try:
                message = self._receiver.read()
                if message is None:
                    return
                start_s = time.perf_counter()
                if not self._handle(message):
                    return
                self._verb_s.observe(time.perf_counter() - start_s)
            except TimeoutError:
                continue
            except (Malformed, ValueError, IndexError) as error:
                log.warning("%s breaks the protocol and is not read any more: %s", self, error)
                return
            except OSError as error:
                log.info("%s: %s", self, error)
                return

    def _handle(self, message: list[Any]) -> bool:
        """One message; False when it was the last."""
        verb = message[0]
        if verb in (Verb.MATCH, Verb.LOAD, Verb.SAVE):
            _, number, hashes = message
            self._ask(verb, check_number(number), check_hashes(hashes))
        elif verb == Verb.COMMIT:
            _, number, grants = message
            self._hand_back(check_number(number), check_number(grants))
        elif verb == Verb.RELEASE:
            _, number = message
            self._hand_back(check_number(number), None)
        elif verb == Verb.PING:
            _, number = message
            self._send(pack(Verb.PONG, check_number(number)))
        elif verb == Verb.BYE:
            self._bye()
            return False
        else:
            raise Malformed(f"verb {verb!r} is none of a client's")
        return True

    def _ask(self, verb: int, number: int, hashes: Sequence[bytes]) -> None:
        if number in self._live:
            raise Malformed(f"ticket {number} is in use")
        if len(self._live) >= 2 * MAX_TICKETS:
            raise Malformed(f"more than {2 * MAX_TICKETS} tickets")
        ask: Callable[[Sequence[bytes]], Ticket] = {
            Verb.MATCH: self._session.match,
            Verb.LOAD: self._session.load,
            Verb.SAVE: self._session.save,
        }[Verb(verb)]
        ticket = ask(hashes)
        live = Live(number, ticket)
        with self._lock:
            self._live[number] = live
            self._by_store_id[ticket.ticket_id] = live
            self._undone.add(number)
            self._tell(live)
            if number in self._undone:
                self._any_undone.set()
        self._tell_moved(0.0)

    def _hand_back(self, number: int, grants: int | None) -> None:
        """Release a ticket, or commit it when the client saw every grant of it."""
        with self._lock:
            live = self._live.pop(number, None)
            if live is None:
                raise Malformed(f"ticket {number} is not outstanding")
            del self._by_store_id[live.ticket.ticket_id]
            self._undone.discard(number)
        ticket = live.ticket
        if isinstance(ticket, Match) or (grants is not None and not isinstance(ticket, Save)):
            raise Malformed(f"ticket {number} cannot be handed back like this")
        assert isinstance(ticket, (Load, Save))
        if isinstance(ticket, Save) and ticket.done and grants == len(ticket.grants):
            self._session.commit(ticket)
        else:
            self._session.release(ticket)

    def _tell(self, live: Live) -> None:
        """Send what is new of a ticket. Under the lock; blocks while the client does not read."""
        data = live.news()
        if data:
            self.sock.sendall(data)
        if not live.told_done:
            return
        self._undone.discard(live.number)
        if isinstance(live.ticket, Match):
            del self._live[live.number]
            del self._by_store_id[live.ticket.ticket_id]

    def _tell_moved(self, timeout_s: float) -> None:
        """Send what the session says has moved, waiting for the first up to `timeout_s`."""
        for ticket in self._session.poll(timeout_s):
            with self._lock:
                live = self._by_store_id.get(ticket.ticket_id)
                if live is not None:
                    self._tell(live)

    def _push(self) -> None:
        """The pusher: sends what moves after the verb was answered."""
        while not self.over.is_set():
            self._any_undone.wait()
            try:
                self._tell_moved(POLL_S)
            except OSError:
                return  # the reader meets the same end
            with self._lock:
                if not self._undone and not self.over.is_set():
                    self._any_undone.clear()

    def _send(self, data: bytes) -> None:
        with self._lock:
            self.sock.sendall(data)

    def _bye(self) -> None:
        """The client says that no copy runs and waits for our hang-up before it closes."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def __repr__(self) -> str:
        return f"client {self.number} ({self.about})"


class HotPath:
    """The listening socket (`sockets.listen`) and its connections.

    max_clients: connections at once; more are told to come again.
    hello_s: how long a connection may take to say who it is.
    stats: what a STATS_ASK is answered with.
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
    ) -> None:
        self._store = store
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
        self._verb_s = Histogram()
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    def snapshot(self) -> dict[str, Any]:
        """Clients and their tickets, for statistics."""
        with self._lock:
            clients = {str(n): c.snapshot() for n, c in self._connections.items()}
        return {**self._counts, "clients": clients, "verb_seconds": self._verb_s.snapshot()}

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
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()

    def _accept(self) -> None:
        number = 0
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    log.error("cannot take a client: %s", error)
                    time.sleep(0.1)
                    continue
                return
            number += 1
            thread = threading.Thread(
                target=self._serve, args=(sock, number), name=f"read-{number}", daemon=True
            )
            with self._lock:
                refuse = self._stopping or len(self._sockets) >= self._max_clients
                if not refuse:
                    self._sockets[number] = sock
                    self._threads.add(thread)
            if refuse:
                self._refuse(sock, f"{self._max_clients} clients are connected already", again=True)
                sock.close()
            else:
                thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        """A connection's life, in its reader's thread."""
        try:
            connection = self._welcome(sock, number)
            if connection is not None:
                connection.serve()
        except OSError as error:
            log.info("connection %d: %s", number, error)
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
                self._tenants.of(message[1])
                sock.sendall(pack(Verb.STATS, self._stats()))
                return None
            if message[0] != Verb.HELLO or len(message) != 2 or type(message[1]) is not dict:
                raise Malformed("the first message must be a hello")
            about = message[1]
            tenant = self._tenants.of(about.get("token"))
            namespace = namespace_of(about)
            session = self._store.session(namespace, tenant)
        except TimeoutError:
            self._refuse(sock, f"no hello within {self._hello_s:g} s")
            return None
        except KVStoreError as error:
            self._refuse(sock, " ".join(str(error).split()))
            return None
        set_timeouts(sock, 0.0)
        receiver.max_bytes = MAX_MESSAGE_BYTES
        name = f"{str(about.get('client'))[:MAX_NAME]}, pid {about.get('pid')}, {tenant}"
        connection = Connection(
            sock, receiver, session, about=name, number=number, verb_s=self._verb_s
        )
        with self._lock:
            self._connections[number] = connection
            self._counts["connections"] += 1
        slab = self._store.slab
        welcome = pack(
            Verb.WELCOME,
            {
                "version": PROTOCOL_VERSION,
                "slots": slab.slots,
                "slot_bytes": slab.slot_bytes,
                "session": number,
            },
        )
        try:
            socket.send_fds(sock, [welcome], [slab.fd])
        except OSError:
            session.close()
            raise
        log.info("%s joined", connection)
        return connection

    def _refuse(self, sock: socket.socket, reason: str, *, again: bool = False) -> None:
        with self._lock:
            self._counts["refused"] += 1
        log.info("refused a client: %s", reason)
        with contextlib.suppress(OSError):
            sock.sendall(pack(Verb.REFUSED, reason, again))
