"""`BlockStore` in an engine's process, backed by the node's sidecar.

No operation waits for the sidecar. Requests are sent without blocking. One reader thread applies
updates to the operations and feeds `poll`. While the sidecar is unreachable, every operation ends
at once without blocks, and the reader reconnects in the background.

An operation ends early, with `fault` set:
- when the connection ends;
- when the sidecar sends nothing for `response_timeout_s` although an operation waits. All waiting
  operations end then, and new ones end at once until the sidecar responds again. This detects a
  hung process. A slow tier does not trigger it, because the sidecar answers pings meanwhile.

The sidecar may still assign slots to such an operation. They are freed when the operation is
released: RELEASE follows the request in order, and COMMIT tells how many slot assignments the
client has seen. So a late answer neither leaks slots nor publishes unfilled ones.

The safety rule of `protocol` holds: a connection is closed and its slab unmapped only when no
operation has slots of it.

In a forked child of the process, every operation ends at once with a fault, and `close` sends
nothing: the connection, the slots and the slab are the parent's (see `kvstore.forks`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError, TierUnavailable
from kvstore.forks import INHERITED, on_fork
from kvstore.interface import Load, Match, Operation, Save, SlabView
from kvstore.ipc.local_lookups import LocalLookups
from kvstore.ipc.open_operations import OpenOperations
from kvstore.ipc.protocol import (
    MAX_HASHES,
    MAX_OPERATIONS,
    MalformedMessage,
    MessageType,
    check_number,
    pack,
)
from kvstore.ipc.sidecar_connection import (
    EMPTY_SLAB,
    INHERITED_SLAB,
    L2,
    MAX_OUTBOUND_BYTES,
    SidecarConnection,
    connect,
)
from kvstore.telemetry.traffic import check_traffic_label

log = logging.getLogger(__name__)

RESPONSE_TIMEOUT_S: Final = 2.0
"""Silence after which the sidecar counts as unresponsive."""
HANDSHAKE_TIMEOUT_S: Final = 5.0
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 0.1
COUNTERS: Final = (
    "connections",
    "requests",
    "requests_not_sent",
    "local_answers",
    "operations_failed",
    "timeouts",
)
CLOSE_TIMEOUT_S: Final = 1.0
"""Time that `close` gives the sidecar to read earlier messages."""


class Client(LocalLookups):
    """One engine's client of the sidecar. Implements `interface.BlockStore`.

    socket_path: the sidecar's Unix socket.
    auth_token: identifies the tenant, if the sidecar requires it.
    name: client name in the sidecar's statistics and log.
    traffic_label: label of this client's traffic in the sidecar's statistics.
    response_timeout_s: silence after which the sidecar counts as unresponsive.
    connect_timeout_s: maximum time that the constructor waits for the sidecar. If the sidecar is
        still absent then, the constructor does not raise: the engine starts without it.

    Raises:
        ConfigError: the sidecar rejects this client (namespace, auth token, protocol version), or
            the traffic label is invalid.
    """

    def __init__(
        self,
        socket_path: str,
        namespace: Namespace,
        *,
        auth_token: str | None = None,
        name: str = "",
        traffic_label: str = "",
        response_timeout_s: float = RESPONSE_TIMEOUT_S,
        connect_timeout_s: float = 0.0,
    ) -> None:
        self._path = socket_path
        self._namespace = namespace
        self._auth_token = auth_token
        self._name = name
        self._traffic_label = check_traffic_label(traffic_label)
        self._response_timeout_s = response_timeout_s
        self._operations = OpenOperations()
        self._lock = self._operations.lock
        self._changed = self._operations.changed
        self._connection: SidecarConnection | None = None
        self._disconnect_reason = f"no sidecar at {socket_path} yet"
        self._closing = threading.Event()
        self._last_id = 0
        self._last_pong = 0
        self._closed_reason = "the client is closed"
        self._counts = dict.fromkeys(COUNTERS, 0)
        on_fork(self._let_go)
        first = self._connect_first(connect_timeout_s)
        self._reader = threading.Thread(
            target=self._run, args=(first,), name="kvstore-reader", daemon=True
        )
        self._reader.start()

    # The operations of an engine.

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def slab(self) -> SlabView | None:
        connection = self._connection
        return connection.slab if connection is not None else None

    @property
    def connected(self) -> bool:
        """Whether the sidecar is connected and responsive."""
        connection = self._connection
        return connection is not None and not connection.unresponsive

    def slab_of(self, operation: Load | Save) -> SlabView:
        """The slab of this operation's slots. It stays mapped until the operation is released."""
        entry = self._operations.get(operation.operation_id)
        if entry is None and self._closed_reason == INHERITED:
            return INHERITED_SLAB
        assert entry is not None, "the operation was already committed or released"
        return entry.connection.slab if entry.connection is not None else EMPTY_SLAB

    def match(self, hashes: Sequence[bytes]) -> Match:
        match = Match(self._next_id(), hashes)
        connection = self._connection
        prefix_len = None
        if connection is not None and not self._reject_reason():
            prefix_len = connection.cached_prefix_len(hashes)
        if prefix_len is None:
            self._send_request(MessageType.MATCH, match)
            return match
        match.tiers.extend([L2] * prefix_len)
        self.queue_lookup_report(lambda: match.hashes)
        with self._changed:
            self._operations.finish(match, "")
        return match

    def load(self, hashes: Sequence[bytes]) -> Load:
        load = Load(self._next_id(), hashes)
        self._send_request(MessageType.LOAD, load)
        return load

    def save(self, hashes: Sequence[bytes]) -> Save:
        save = Save(self._next_id(), hashes)
        self._send_request(MessageType.SAVE, save)
        return save

    def commit(self, save: Save) -> None:
        message = pack(MessageType.COMMIT, save.operation_id, len(save.slot_assignments))
        self._return_operation(save, message, commits=True)

    def release(self, operation: Load | Save) -> None:
        self._return_operation(operation, pack(MessageType.RELEASE, operation.operation_id))

    def poll(self, timeout_s: float = 0.0) -> list[Operation]:
        return self._operations.poll(timeout_s)

    def sync(self, timeout_s: float) -> bool:
        """Wait until the sidecar has handled all earlier messages. False on a timeout.

        The only method here that blocks. Use it in tests and for a hand-over between engines.
        """
        number = self._next_id()
        with self._changed:
            connection = self._connection
            if connection is None:
                return False
            connection.send(pack(MessageType.PING, number))
            return self._changed.wait_for(
                lambda: self._last_pong >= number or self._connection is not connection, timeout_s
            ) and (self._last_pong >= number)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            connection = self._connection
            return {
                **self._counts,
                "connected": connection is not None,
                "unresponsive": connection is not None and connection.unresponsive,
                "open_operations": len(self._operations),
                "outbound_bytes": connection.outbound_bytes if connection is not None else 0,
                "disconnect_reason": "" if connection is not None else self._disconnect_reason,
            }

    def close(self) -> None:
        """Release every lease and end the threads. The caller must have no copy running."""
        if self._closing.is_set():
            return
        with self._changed:
            self._closing.set()
            connection = self._connection
            connections = self._operations.clear()
        if connection is not None:
            # The sidecar reads all earlier messages, then answers GOODBYE by closing the socket.
            connection.send(pack(MessageType.GOODBYE))
            self._reader.join(CLOSE_TIMEOUT_S)
            connection.stop_reading()
        self._reader.join()
        connections |= {each for each in (connection, self._connection) if each is not None}
        self._connection = None
        for each in connections:
            each.open_operations = 0
            each.close()
        for each in connections:
            each.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        connection = self._connection
        if connection is None:
            state = self._disconnect_reason
        else:
            state = "unresponsive" if connection.unresponsive else repr(connection.slab)
        return f"Client({self._path}: {state}, {len(self._operations)} open operations)"

    # Requests.

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _send_request(self, message_type: MessageType, operation: Operation) -> None:
        with self._changed:
            fault = self._reject_reason()
            connection = None if fault else self._connection
            self._counts["requests_not_sent" if connection is None else "requests"] += 1
            if connection is not None or not isinstance(operation, Match):
                self._operations.add(operation, connection)
            if connection is None:
                self._operations.finish(operation, fault)
                return
            if not isinstance(operation, Match):
                connection.open_operations += 1
            connection.unanswered = True
            if connection.waiting_since_s is None:
                connection.waiting_since_s = time.monotonic()
        request = pack(message_type, operation.operation_id, operation.hashes[:MAX_HASHES])
        connection.send(connection.drain_lookup_reports() + request)

    def _reject_reason(self) -> str:
        """Why no request can be sent now; "" if it can."""
        connection = self._connection
        if self._closing.is_set():
            return self._closed_reason
        if connection is None:
            return self._disconnect_reason
        if connection.unresponsive:
            return f"no response from the sidecar for more than {self._response_timeout_s:g} s"
        if connection.outbound_bytes > MAX_OUTBOUND_BYTES:
            return "the sidecar does not read requests"
        if len(self._operations) >= MAX_OPERATIONS:
            return f"too many open operations ({MAX_OPERATIONS})"
        return ""

    def _return_operation(
        self, operation: Load | Save, message: bytes, *, commits: bool = False
    ) -> None:
        """Close an open operation and send its COMMIT or RELEASE."""
        with self._lock:
            entry = self._operations.pop(operation)
            if self._closing.is_set():
                return
            assert entry is not None, "the operation was already committed or released"
            connection = entry.connection
            if connection is None:
                return
            connection.open_operations -= 1
            connection.unacked_commit = self._last_id if commits else connection.unacked_commit
            unused = not connection.alive and connection.open_operations == 0
        if unused:
            connection.close()
        elif connection.alive:
            connection.send(message)

    def _let_go(self) -> None:
        """In a forked child: forget the parent's connection and operations, without their lock."""
        self._operations = OpenOperations()
        self._lock, self._changed = self._operations.lock, self._operations.changed
        self._connection = None
        self._disconnect_reason = self._closed_reason = INHERITED
        self._closing = threading.Event()
        self._closing.set()

    def _fail_all(self, connection: SidecarConnection, fault: str) -> None:
        """End every operation that still waits for this connection. Under the lock."""
        self._counts["operations_failed"] += self._operations.fail_all(connection, fault)
        connection.waiting_since_s = None

    # The reader thread.

    def _connect_first(self, timeout_s: float) -> SidecarConnection | None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._connect()
            except TierUnavailable as error:
                self._disconnect_reason = str(error)
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(BACKOFF_FIRST_S)

    def _connect(self) -> SidecarConnection:
        connection = connect(
            self._path,
            self._namespace,
            self._auth_token,
            self._name,
            traffic_label=self._traffic_label,
            timeout_s=min(HANDSHAKE_TIMEOUT_S, self._response_timeout_s),
            read_timeout_s=self._response_timeout_s / 4,
        )
        with self._changed:
            self._connection = connection
            self._counts["connections"] += 1
            self._changed.notify_all()
        return connection

    def _run(self, connection: SidecarConnection | None) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._closing.is_set():
            if connection is None:
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
                connection = self._reconnect()
                continue
            backoff_s = BACKOFF_FIRST_S
            reason = self._read_messages(connection)
            self._on_disconnect(connection, reason)
            connection = None

    def _reconnect(self) -> SidecarConnection | None:
        if self._closing.is_set():
            return None
        try:
            return self._connect()
        except (TierUnavailable, ConfigError) as error:
            if isinstance(error, ConfigError) and self._disconnect_reason != str(error):
                log.error("%s", error)
            self._disconnect_reason = str(error)
            return None

    def _read_messages(self, connection: SidecarConnection) -> str:
        """Read messages until the stream ends. Returns the reason."""
        while True:
            try:
                message = connection.receiver.read()
                if message is None:
                    return "the sidecar closed the connection"
                self._on_message(connection, message)
            except TimeoutError:
                self._check_silence(connection)
            except (OSError, MalformedMessage, TypeError, ValueError, IndexError) as error:
                return f"the connection to the sidecar failed: {error}"

    def _on_message(self, connection: SidecarConnection, message: list[Any]) -> None:
        with self._changed:
            connection.unresponsive = connection.ping_sent = connection.unanswered = False
            connection.waiting_since_s = time.monotonic()
            if message[0] == MessageType.UPDATE:
                self._operations.update(message, connection)
            elif message[0] == MessageType.PONG:
                self._last_pong = max(self._last_pong, check_number(message[1]))
                self._changed.notify_all()
            unacked = connection.unacked_commit
            if unacked is not None and check_number(message[1]) > unacked:
                connection.unacked_commit = None

    def _check_silence(self, connection: SidecarConnection) -> None:
        """No message came within the read timeout: ping the sidecar. After the response timeout,
        fail all open operations."""
        connection.send(connection.drain_lookup_reports())
        with self._changed:
            waiting = connection.unanswered or self._operations.is_waiting(connection)
            if not waiting or connection.waiting_since_s is None:
                connection.waiting_since_s = None
                return
            silent_s = time.monotonic() - connection.waiting_since_s
            if silent_s >= self._response_timeout_s:
                connection.unresponsive = True
                self._counts["timeouts"] += 1
                log.warning(
                    "no response from the sidecar at %s; continuing without the cache", self._path
                )
                fault = f"no response from the sidecar for {self._response_timeout_s:g} s"
                self._fail_all(connection, fault)
                return
            ping = not connection.ping_sent and silent_s >= self._response_timeout_s / 2
            connection.ping_sent = connection.ping_sent or ping
        if ping:
            connection.send(pack(MessageType.PING, 0))

    def _on_disconnect(self, connection: SidecarConnection, reason: str) -> None:
        """The stream has ended: fail its operations. Close the connection if none has slots."""
        with self._changed:
            self._connection = None
            self._disconnect_reason = reason
            connection.alive = False
            if self._closing.is_set():
                return  # Client.close() closes it
            log.warning("lost the connection to the sidecar at %s: %s", self._path, reason)
            self._fail_all(connection, reason)
            unused = connection.open_operations == 0
            self._changed.notify_all()
        if unused:
            connection.close()
