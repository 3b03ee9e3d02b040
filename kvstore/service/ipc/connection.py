"""One engine on the sidecar's socket: verbs in, updates out, and leases bound to a life.

Two threads per connection. The *reader* takes verbs and answers each as far as it can be answered
at once; the *pusher* waits in `session.poll` while some ticket is not done, and sends what moved
(it sleeps through what the reader answers in full: waking it costs as much as a small verb). Both
send under the connection's lock, blocking: a client that does not read its answers blocks them, so
it is not read any more either, and nothing piles up here but what its bounded tickets can hold.

**When leases come back.** Only at the end of a connection, and only on proof that no copy of the
client's can run any more (`protocol`, the safety rule). The proof is either its word, a BYE that
was read, or the end of its process. A client that breaks the protocol is told so and not read any
more; its session stays. Even an end-of-stream is not enough by itself, for a client could have shut
down one direction only: the reader waits for the hang-up of both. And a hang-up of both is not
enough where leases are out: a dying process gives up its memory, then its files, in no order that
counts, and the device copies on until its driver's file is closed. Only after all of them does the
process itself count as ended, and that is what is waited for. Where the system does not show the
process (another pid namespace), the hang-up has to do.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.interface import Load, Match, Save, Ticket
from kvstore.ipc.protocol import (
    MAX_TICKETS,
    Malformed,
    Receiver,
    Verb,
    check_hashes,
    check_number,
    pack,
)
from kvstore.service.ipc.op_stats import Ears
from kvstore.service.ipc.sockets import Peer, await_hang_up
from kvstore.store.session import Session

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""How long a pusher waits in one poll: bounds how late it notices that its connection is over."""


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
            tail = (ticket.tiers[self.told : end], ticket.behind if done else [])
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
    """One engine on the socket, after its hello.

    stopping: a file descriptor that is readable once the sidecar ends: nobody is waited for then.
    """

    def __init__(
        self,
        sock: socket.socket,
        receiver: Receiver,
        session: Session,
        *,
        about: str,
        number: int,
        ears: Ears,
        stopping: int,
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
        self._ears = ears
        self._stopping = stopping
        self._peer = Peer(sock)
        self._said_bye = False
        self._pusher = threading.Thread(target=self._push, name=f"push-{number}", daemon=True)

    def serve(self) -> None:
        """Run until the client is gone, and then give its leases back. In the reader's thread."""
        try:
            self._pusher.start()
        except RuntimeError as error:
            log.error("%s is sent away: %s", self, error)
            self.end()  # no verb was read, so it has no lease
            return
        try:
            self._read()
        except Exception:
            # A mistake of ours; the client is alive, so its leases stay all the same.
            log.exception("%s is not read any more", self)
        await_hang_up(self.sock)
        self.over.set()
        self._any_undone.set()
        if not self._said_bye and self._leases_out():
            log.info("%s hung up with leases; they wait for the end of its process", self)
            self._peer.await_end(self._stopping)
        self.end()
        self._pusher.join()

    def end(self) -> None:
        """Give every lease back. No copy of the client's can run, or the sidecar ends."""
        self._session.close()
        self._peer.close()

    def snapshot(self) -> dict[str, Any]:
        """For statistics."""
        return {
            "about": self.about,
            "tenant": self._session.tenant,
            "namespace": self._session.namespace.digest,
            "tickets": len(self._live),
        }

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
                self._ears.handled(message[0], time.perf_counter() - start_s, self._session)
            except TimeoutError:
                continue
            except (Malformed, ValueError, IndexError) as error:
                log.warning("%s breaks the protocol and is not read any more: %s", self, error)
                return
            except (BrokenPipeError, ConnectionResetError):
                continue  # it does not hear any more; what it said before is read to the end
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
        elif verb == Verb.ASKED:
            _, hashes = message
            self._ears.matched(self._session, check_hashes(hashes))
            self._session.asked(hashes)
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
        if verb == Verb.MATCH:
            self._ears.matched(self._session, hashes)
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
            live = self._live.get(number)
            if live is None:
                raise Malformed(f"ticket {number} is not outstanding")
            ticket = live.ticket
            if isinstance(ticket, Match) or (grants is not None and not isinstance(ticket, Save)):
                raise Malformed(f"ticket {number} cannot be handed back like this")
            del self._live[number]
            del self._by_store_id[ticket.ticket_id]
            self._undone.discard(number)
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

    def _leases_out(self) -> bool:
        """Whether the client has tickets that may hold slots."""
        with self._lock:
            return any(not isinstance(live.ticket, Match) for live in self._live.values())

    def _send(self, data: bytes) -> None:
        with self._lock:
            self.sock.sendall(data)

    def _bye(self) -> None:
        """The client says that no copy runs and waits for our hang-up before it closes."""
        self._said_bye = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def __repr__(self) -> str:
        return f"client {self.number} ({self.about})"
