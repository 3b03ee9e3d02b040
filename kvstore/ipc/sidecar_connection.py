"""One connection of a client to the sidecar: handshake, slab mapping, sending and closing.

`client.Client` has one connection at a time and opens the next when it ends. Sending never blocks
the caller: bytes that the socket does not accept at once wait for the writer thread. Closing does
not block either: unmapping a large slab takes seconds, and the writer thread does it last.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError, StoreClosed, TierUnavailable
from kvstore.forks import INHERITED, on_fork
from kvstore.ipc.protocol import (
    MAX_HASHES,
    PROTOCOL_VERSION,
    MalformedMessage,
    MessageType,
    Receiver,
    check_number,
    pack,
    pack_hello,
)
from kvstore.shm.shared_index import SharedIndexView
from kvstore.shm.slab import Slab

MAX_OUTBOUND_BYTES: Final = 16 << 20
"""Queued outbound bytes above which a client sends no new requests. COMMIT and RELEASE are still
sent: their number is bounded by the open operations."""
LOOKUP_REPORT_BATCH: Final = 16
"""Lookup reports that wait for the next request. The writer sends a full batch at once."""
MAX_LOOKUP_REPORTS: Final = 256
"""Lookup reports kept while the sidecar is slow to read; the oldest are dropped."""
L2: Final = "l2"
"""The tier of blocks in the shared index."""


class EmptySlab:
    """The slab of operations that were never sent to a sidecar. It has no slots."""

    slots = 0
    slot_bytes = 0

    def view(self, slot: int) -> memoryview:
        raise AssertionError(f"slot {slot} of an empty slab")


class InheritedSlab(EmptySlab):
    """The slab of operations that a forked child inherited. Their slots are the parent's."""

    def view(self, slot: int) -> memoryview:
        raise StoreClosed(f"slot {slot} was {INHERITED}")


EMPTY_SLAB = EmptySlab()
INHERITED_SLAB = InheritedSlab()


class SidecarConnection:
    """A connection after its handshake.

    slab: the sidecar's slab, mapped into this process.
    alive: the stream is open; False once its reader has reached the end.
    unresponsive: no message for longer than the timeout; the sidecar may still recover.
    unanswered: a request was sent after the latest message. It counts as waiting even if its
        operation was given up, so that a hung sidecar is noticed.
    shared_index: the sidecar's shared index of L2; None if it has none.
    unacked_commit: the highest operation id before the latest commit. None once the sidecar has
        answered a later operation, because then it has handled the commit.
    open_operations: operations with slots that are not yet released or committed. The safety rule
        of `protocol`: `close` is called only when this is zero.

    Raises RuntimeError: the system cannot start another thread. The caller keeps the socket and
    the slab.
    """

    def __init__(
        self,
        sock: socket.socket,
        receiver: Receiver,
        slab: Slab,
        session: int,
        shared_index: SharedIndexView | None = None,
    ) -> None:
        self.sock = sock
        self.receiver = receiver
        self.slab = slab
        self.session = session
        self.shared_index = shared_index
        self.unacked_commit: int | None = None
        self.alive = True
        self.unresponsive = False
        self.unanswered = False
        self.open_operations = 0
        self.waiting_since_s: float | None = None
        self.ping_sent = False
        self.outbound_bytes = 0
        self._lookup_reports: deque[Callable[[], Sequence[bytes]]] = deque(
            maxlen=MAX_LOOKUP_REPORTS
        )
        self._pending: deque[bytes] = deque()
        self._writing = False
        self._broken = False
        self._closing = False
        self._out = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="kvstore-writer", daemon=True)
        self._writer.start()

    def send(self, data: bytes) -> None:
        """Send in order, without blocking. The reader thread handles a broken stream."""
        with self._out:
            if self._broken:
                return
            if not self._pending and not self._writing:
                try:
                    sent = self.sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    return
                if sent == len(data):
                    return
                data = data[sent:]
            self._pending.append(data)
            self.outbound_bytes += len(data)
            self._out.notify()

    def _write(self) -> None:
        """The writer thread: sends queued bytes. After `close`, it closes the socket and unmaps the
        slab once everything is sent or the stream is broken."""
        while True:
            with self._out:
                self._writing = False
                while not (self._closing or self._pending or self._reports_due()):
                    self._out.wait()
                if not self._pending and not self._reports_due():
                    break
                data = self._pending.popleft() if self._pending else b""
                self._writing = True
            try:
                self.sock.sendall(data or self.drain_lookup_reports())
            except OSError:
                with self._out:
                    self._pending.clear()
                    self._broken = True
                continue
            with self._out:
                self.outbound_bytes -= len(data)
        self.sock.close()
        self.slab.close()

    def cached_prefix_len(self, hashes: Sequence[bytes]) -> int | None:
        """Length of the cached prefix according to the shared index. None if only the sidecar
        knows: the next block may be in a tier, or may belong to an unacknowledged commit."""
        if self.shared_index is None or not hashes:
            return None
        prefix_len = self.shared_index.cached_prefix_len(hashes)
        certain = prefix_len == len(hashes) or self.is_absent(hashes[prefix_len])
        return prefix_len if certain else None

    def cached_prefix_len_packed(self, joined: bytes, size: int) -> int | None:
        """`cached_prefix_len` of concatenated hashes of `size` bytes each."""
        if self.shared_index is None or not joined:
            return None
        prefix_len = self.shared_index.cached_prefix_len_packed(joined, size)
        end = prefix_len * size
        certain = end == len(joined) or self.is_absent(joined[end : end + size])
        return prefix_len if certain else None

    def is_absent(self, name: bytes) -> bool:
        """True if the block is certainly in no tier. False if it may be in one."""
        if self.unacked_commit is not None or self.shared_index is None:
            return False
        return self.shared_index.is_absent(name)

    def block_states(self, hashes: Sequence[bytes]) -> list[bool | None]:
        """For each block: True if it is in L2, False if it is certainly in no tier, else None."""
        shared_index = self.shared_index
        if shared_index is None:
            return [None] * len(hashes)
        states: list[bool | None] = []
        for name in hashes:
            if self.is_absent(name):
                states.append(False)
            else:
                states.append(shared_index.contains(name) or None)
        return states

    def queue_lookup_report(self, get_hashes: Callable[[], Sequence[bytes]]) -> None:
        """Queue the report of a lookup that the shared index answered. It is sent with the next
        request or in a full batch.

        get_hashes: called when the report is sent, so that the lookup itself stays cheap.
        """
        self._lookup_reports.append(get_hashes)
        if len(self._lookup_reports) >= LOOKUP_REPORT_BATCH:
            with self._out:
                self._out.notify()

    def drain_lookup_reports(self) -> bytes:
        """Take a batch of queued lookup reports, as messages to send before the next request."""
        messages: list[bytes] = []
        with contextlib.suppress(IndexError):  # another thread may take them too
            while len(messages) < LOOKUP_REPORT_BATCH:
                get_hashes = self._lookup_reports.popleft()
                messages.append(pack(MessageType.LOOKUP_REPORT, get_hashes()[:MAX_HASHES]))
        return b"".join(messages)

    def _reports_due(self) -> bool:
        return len(self._lookup_reports) >= LOOKUP_REPORT_BATCH and not self._broken

    def stop_reading(self) -> None:
        """Wake a blocked reader, as at the end of the stream. Queued bytes are still sent."""
        try:
            self.sock.shutdown(socket.SHUT_RD)
        except OSError:
            return  # the sidecar has closed the connection

    def close(self) -> None:
        """Have the writer send GOODBYE, close the socket and unmap the slab. Does not block.

        No open operation may have slots of the slab. GOODBYE is queued even if the sidecar does not
        read now: without it, the sidecar would keep this client's leases until this process ends.
        """
        assert self.open_operations == 0, f"{self.open_operations} operations still use this slab"
        self.send(pack(MessageType.GOODBYE))
        with self._out:
            self._closing = True
            self._out.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the writer thread after `close`, at most timeout_s."""
        self._writer.join(timeout_s)


def connect(
    path: str,
    namespace: Namespace,
    auth_token: str | None,
    client: str,
    *,
    traffic_label: str = "",
    timeout_s: float,
    read_timeout_s: float,
) -> SidecarConnection:
    """Connect, do the handshake and map the slab.

    timeout_s: timeout of each step. read_timeout_s: a `receiver.read` without data raises
    TimeoutError after this time.

    Raises:
        TierUnavailable: no sidecar listens, or it is busy.
        ConfigError: the sidecar rejected this client.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    on_fork(sock.close)  # else the connection would stay open while a forked child lives
    fds: list[int] = []
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        hello = pack_hello(namespace, auth_token, client, os.getpid(), traffic_label)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(hello)  # if the sidecar has closed already, its reason can still be read
        receiver = Receiver(sock)
        flags = socket.MSG_CMSG_CLOEXEC
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 2, flags)
        if not data:
            raise TierUnavailable(_closed_in_handshake(path))
        receiver.feed(data)
        about = _parse_welcome(receiver.read(), path)
        if not fds:
            raise TierUnavailable(f"the sidecar at {path} sent no slab")
        seed = about.get("salt")
        shared_index = None
        if len(fds) > 1 and type(seed) is bytes:
            shared_index = SharedIndexView(fds[1], seed)
        numbers = [check_number(about.get(name)) for name in ("slots", "slot_bytes", "session")]
        slots, slot_bytes, session = numbers
        slab = Slab.attach(fds.pop(0), slots, slot_bytes)
        sock.settimeout(None)
        seconds = int(read_timeout_s)
        micros = max(1, int((read_timeout_s - seconds) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, micros))
        try:
            return SidecarConnection(sock, receiver, slab, session, shared_index)
        except RuntimeError as error:
            slab.close()
            raise TierUnavailable(
                f"cannot start a thread for the sidecar at {path}: {error}"
            ) from None
    except (OSError, MalformedMessage) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise TierUnavailable(f"no sidecar at {path}: {reason}") from None
    except BaseException:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _closed_in_handshake(path: str) -> str:
    return f"the sidecar at {path} closed the connection during the handshake"


def _parse_welcome(message: list[Any] | None, path: str) -> dict[str, Any]:
    """Parse the sidecar's answer to HELLO."""
    if message is None:
        raise TierUnavailable(_closed_in_handshake(path))
    if message[0] == MessageType.REJECTED and len(message) == 3:
        if message[2]:
            raise TierUnavailable(f"the sidecar at {path} is busy: {message[1]}")
        raise ConfigError(f"the sidecar at {path} rejected this client: {message[1]}")
    if message[0] != MessageType.WELCOME or len(message) != 2 or type(message[1]) is not dict:
        raise MalformedMessage("the first message is not WELCOME")
    about: dict[str, Any] = message[1]
    if about.get("version") != PROTOCOL_VERSION:
        raise ConfigError(
            f"the sidecar at {path} uses protocol version {about.get('version')!r}, this client "
            f"{PROTOCOL_VERSION}; run the same kvstore version on both sides"
        )
    return about


def request_stats(path: str, auth_token: str | None, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """Request the statistics of the sidecar at `path`, without opening a session.

    Raises TierUnavailable: no answer. Raises ConfigError: rejected.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(path)
            sock.sendall(pack(MessageType.STATS_REQUEST, auth_token))
            message = Receiver(sock).read()
    except (OSError, MalformedMessage) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TierUnavailable(f"no sidecar at {path}: {reason}") from None
    if message is not None and message[0] == MessageType.STATS and type(message[-1]) is dict:
        numbers: dict[str, Any] = message[1]
        return numbers
    _parse_welcome(message, path)
    raise TierUnavailable(f"the sidecar at {path} sent no statistics")
