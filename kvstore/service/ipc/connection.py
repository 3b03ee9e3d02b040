"""One engine's connection on the sidecar's socket: requests in, updates out, leases until the end.

Each connection has two threads. The *reader* reads requests and answers each as far as it can at
once. The *pusher* waits in `session.poll` while an operation is not done, and sends its updates. It
sleeps while the reader answers in full, because waking it costs as much as a small request. Both
send under the connection's lock, and block. So a client that reads no answers is not read either,
and the memory for it is bounded by its operations.

**When leases are released.** Only at the end of a connection, and only with proof that no copy by
the client can still run (the safety rule in `protocol`). The proof is one of two:

- the client's GOODBYE message,
- the end of the client's process.

After a protocol error the sidecar reads no further messages, and the session stays. An
end-of-stream is not a proof, because a client can shut down one direction only, so the reader waits
until both directions are closed. That is not a proof either while leases exist. A dying process
frees its memory and then closes its files, in any order, and the device copies until the file of
its driver is closed. The process ends after all of them, so the reader waits for the process. If
the system does not show the process (another pid namespace), the closed connection is the proof.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.interface import Load, Match, Operation, Save
from kvstore.ipc.protocol import (
    MAX_OPERATIONS,
    MalformedMessage,
    MessageType,
    Receiver,
    check_hashes,
    check_number,
    pack,
)
from kvstore.service.ipc.op_stats import OpStats
from kvstore.service.ipc.sockets import Peer, wait_for_hang_up
from kvstore.store.session import Session

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Longest wait of the pusher in one poll, and so its delay in noticing the connection's end."""


class ActiveOperation:
    """An operation of a client, and how much of it was sent to the client."""

    __slots__ = ("number", "operation", "sent", "sent_done")

    def __init__(self, number: int, operation: Operation) -> None:
        self.number = number
        self.operation = operation
        self.sent = 0
        self.sent_done = False

    def pending_updates(self) -> bytes:
        """The update message with everything not sent yet; empty when there is nothing.

        Under the connection's lock. `done` is read first: the store writes it last, so the fields
        read after it are complete.
        """
        operation = self.operation
        done = operation.done
        head = (MessageType.UPDATE, self.number, done, operation.fault if done else "")
        tail: tuple[Any, ...]
        if isinstance(operation, Match):
            end = len(operation.tiers)
            tail = (operation.tiers[self.sent : end], operation.beyond_gap if done else [])
        elif isinstance(operation, Load):
            # Tiers are appended before slots, so every slot seen here has its tier.
            end = len(operation.slots)
            tail = (operation.tiers[self.sent : end], operation.slots[self.sent : end])
        else:
            assert isinstance(operation, Save)
            end = len(operation.slot_assignments)
            assignments = operation.slot_assignments[self.sent : end]
            tail = ([number for pair in assignments for number in pair], operation.dropped)
        if end == self.sent and done == self.sent_done:
            return b""
        self.sent, self.sent_done = end, done
        return pack(*head, *tail)


class Connection:
    """One engine on the socket, after its handshake.

    stopping: a file descriptor, readable once the sidecar ends; it ends every wait for a process.
    """

    def __init__(
        self,
        sock: socket.socket,
        receiver: Receiver,
        session: Session,
        *,
        about: str,
        number: int,
        op_stats: OpStats,
        stopping: int,
    ) -> None:
        self.sock = sock
        self.about = about
        self.number = number
        self.over = threading.Event()
        self._receiver = receiver
        self._session = session
        self._operations: dict[int, ActiveOperation] = {}
        self._by_operation_id: dict[int, ActiveOperation] = {}
        self._lock = threading.Lock()
        self._undone: set[int] = set()
        self._has_undone = threading.Event()
        self._op_stats = op_stats
        self._stopping = stopping
        self._peer = Peer(sock)
        self._said_goodbye = False
        self._pusher = threading.Thread(target=self._run_pusher, name=f"push-{number}", daemon=True)

    def serve(self) -> None:
        """Serve the client until it is gone, then release its leases. In the reader's thread."""
        try:
            self._pusher.start()
        except RuntimeError as error:
            log.error("%s: connection closed, cannot start a thread: %s", self, error)
            self.end()  # no request was read, so there is no lease
            return
        try:
            self._read()
        except Exception:
            # The client is alive, so its leases stay.
            log.exception(
                "%s: internal error; no further messages are read "
                "(leases stay until the process exits)",
                self,
            )
        wait_for_hang_up(self.sock)
        self.over.set()
        self._has_undone.set()
        if not self._said_goodbye and self._may_have_leases():
            log.info(
                "%s closed the connection with leases; they stay until its process exits", self
            )
            self._peer.wait_for_exit(self._stopping)
        self.end()
        self._pusher.join()

    def end(self) -> None:
        """Release every lease. No copy of the client can run, or the sidecar ends."""
        self._session.close()
        self._peer.close()

    def snapshot(self) -> dict[str, Any]:
        """For statistics."""
        return {
            "about": self.about,
            "tenant": self._session.tenant,
            "namespace": self._session.namespace.digest,
            "operations_in_flight": len(self._operations),
        }

    def _read(self) -> None:
        """Handle messages until the end of the stream, a GOODBYE, or a protocol error."""
        while True:
            try:
                message = self._receiver.read()
                if message is None:
                    return
                start_s = time.perf_counter()
                if not self._handle(message):
                    return
                seconds = time.perf_counter() - start_s
                self._op_stats.record_request(message[0], seconds, self._session)
            except TimeoutError:
                continue
            except (MalformedMessage, ValueError, IndexError) as error:
                log.warning("%s: protocol error, no further messages are read: %s", self, error)
                return
            except (BrokenPipeError, ConnectionResetError):
                continue  # it reads no answers any more; its earlier messages are read to the end
            except OSError as error:
                log.info("%s: %s", self, error)
                return

    def _handle(self, message: list[Any]) -> bool:
        """Handle one message. False for the last message."""
        kind = message[0]
        if kind in (MessageType.MATCH, MessageType.LOAD, MessageType.SAVE):
            _, number, hashes = message
            self._start_operation(kind, check_number(number), check_hashes(hashes))
        elif kind == MessageType.COMMIT:
            _, number, assignments = message
            self._finish_operation(check_number(number), check_number(assignments))
        elif kind == MessageType.RELEASE:
            _, number = message
            self._finish_operation(check_number(number), None)
        elif kind == MessageType.LOOKUP_REPORT:
            _, hashes = message
            self._op_stats.record_lookup(self._session, check_hashes(hashes))
            self._session.record_lookup(hashes)
        elif kind == MessageType.PING:
            _, number = message
            self._send(pack(MessageType.PONG, check_number(number)))
        elif kind == MessageType.GOODBYE:
            self._goodbye()
            return False
        else:
            raise MalformedMessage(f"message type {kind!r} is not one that a client sends")
        return True

    def _start_operation(self, kind: int, number: int, hashes: Sequence[bytes]) -> None:
        if number in self._operations:
            raise MalformedMessage(f"operation {number} is in use")
        if len(self._operations) >= 2 * MAX_OPERATIONS:
            raise MalformedMessage(f"more than {2 * MAX_OPERATIONS} operations")
        if kind == MessageType.MATCH:
            self._op_stats.record_lookup(self._session, hashes)
        start: Callable[[Sequence[bytes]], Operation] = {
            MessageType.MATCH: self._session.match,
            MessageType.LOAD: self._session.load,
            MessageType.SAVE: self._session.save,
        }[MessageType(kind)]
        operation = start(hashes)
        active = ActiveOperation(number, operation)
        with self._lock:
            self._operations[number] = active
            self._by_operation_id[operation.operation_id] = active
            self._undone.add(number)
            self._send_update(active)
            if number in self._undone:
                self._has_undone.set()
        self._send_changed(0.0)

    def _finish_operation(self, number: int, assignments: int | None) -> None:
        """Release an operation; commit a save whose slot assignments the client has all seen.

        assignments: the number that the client has seen; None: the client does not commit.
        """
        with self._lock:
            active = self._operations.get(number)
            if active is None:
                raise MalformedMessage(f"operation {number} is not in flight")
            operation = active.operation
            if isinstance(operation, Match) or (
                assignments is not None and not isinstance(operation, Save)
            ):
                raise MalformedMessage(f"operation {number} cannot be committed or released")
            del self._operations[number]
            del self._by_operation_id[operation.operation_id]
            self._undone.discard(number)
        assert isinstance(operation, (Load, Save))
        if (
            isinstance(operation, Save)
            and operation.done
            and assignments == len(operation.slot_assignments)
        ):
            self._session.commit(operation)
        else:
            self._session.release(operation)

    def _send_update(self, active: ActiveOperation) -> None:
        """Send the pending updates of an operation. Under the lock; blocks until they are sent."""
        data = active.pending_updates()
        if data:
            self.sock.sendall(data)
        if not active.sent_done:
            return
        self._undone.discard(active.number)
        if isinstance(active.operation, Match):
            del self._operations[active.number]
            del self._by_operation_id[active.operation.operation_id]

    def _send_changed(self, timeout_s: float) -> None:
        """Send updates of the operations that changed; wait up to `timeout_s` for the first."""
        for operation in self._session.poll(timeout_s):
            with self._lock:
                active = self._by_operation_id.get(operation.operation_id)
                if active is not None:
                    self._send_update(active)

    def _run_pusher(self) -> None:
        """The pusher's thread: sends the changes that come after the reader's answer."""
        while not self.over.is_set():
            self._has_undone.wait()
            try:
                self._send_changed(POLL_S)
            except OSError:
                return  # the reader gets the same error
            with self._lock:
                if not self._undone and not self.over.is_set():
                    self._has_undone.clear()

    def _may_have_leases(self) -> bool:
        """Whether the client has operations that may have leases on slots."""
        with self._lock:
            return any(
                not isinstance(active.operation, Match) for active in self._operations.values()
            )

    def _send(self, data: bytes) -> None:
        with self._lock:
            self.sock.sendall(data)

    def _goodbye(self) -> None:
        """The client has no copy running, and waits for our hang-up before it closes."""
        self._said_goodbye = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def __repr__(self) -> str:
        return f"client {self.number} ({self.about})"
