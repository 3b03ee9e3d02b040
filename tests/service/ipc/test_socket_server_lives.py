"""Leases are released by a GOODBYE or at the end of the client's process. The sidecar continues to
accept clients after errors of the system."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fork_rig import IGNORE_FORK_WARNING, in_child
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    SLOT_BYTES,
    SLOTS,
    ForkedSidecar,
    PeerProcess,
    RawClient,
    hashes_of,
    put,
    wait_until,
)

from kvstore.ipc.client import Client
from kvstore.ipc.protocol import MessageType, Receiver, pack, pack_hello
from kvstore.service.access.auth import Tenants
from kvstore.service.ipc.socket_server import SocketServer
from kvstore.service.ipc.sockets import Peer, listen
from kvstore.shm.slab import Slab
from kvstore.store.store import Store

pytestmark = pytest.mark.filterwarnings(IGNORE_FORK_WARNING)

HASHES = hashes_of("lives", 4)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path)
    yield made
    made.kill()


def filling(sidecar: ForkedSidecar) -> int:
    slots: int = sidecar.stats()["l2"]["slots_filling"]
    return slots


# Leases and processes.


def test_a_hang_up_releases_nothing_while_the_process_lives(sidecar: ForkedSidecar) -> None:
    """Its device may still copy: a dying process can close the socket before the device's file."""
    raw = RawClient(sidecar.socket)
    assert len(raw.save(1, HASHES)) == 4
    raw.sock.close()
    time.sleep(0.3)
    assert filling(sidecar) == 4
    raw.end()
    wait_until(lambda: filling(sidecar) == 0, "its slots are free")
    assert sidecar.stop() == 0


def test_without_leases_a_hang_up_is_enough(sidecar: ForkedSidecar) -> None:
    raw = RawClient(sidecar.socket)
    slots = raw.save(1, HASHES)
    raw.sock.sendall(pack(MessageType.COMMIT, 1, len(slots)))
    raw.request(MessageType.MATCH, 2, HASHES)
    raw.sock.close()
    wait_until(lambda: not sidecar.stats()["sessions"], "the session is closed")
    raw.end()
    assert sidecar.stop() == 0


def test_a_goodbye_is_enough_even_if_the_client_reads_no_answers(
    sidecar: ForkedSidecar,
) -> None:
    raw = RawClient(sidecar.socket)
    assert len(raw.save(1, HASHES)) == 4
    sidecar.suspend()
    asked = b"".join(pack(MessageType.MATCH, number, HASHES) for number in range(2, 50))
    raw.sock.sendall(asked + pack(MessageType.GOODBYE))
    raw.sock.close()  # so that answers cannot be delivered
    sidecar.resume()
    wait_until(lambda: filling(sidecar) == 0, "its slots are free")
    assert not sidecar.stats()["sessions"]
    raw.end()
    assert sidecar.stop() == 0


def test_an_invalid_commit_keeps_the_lease(sidecar: ForkedSidecar) -> None:
    """A commit of a load ends reading; the client keeps the lease on the load's slots."""
    with Client(sidecar.socket, NAMESPACE) as client:
        put(client, HASHES)
        assert client.sync(10.0)
    raw = RawClient(sidecar.socket)
    assert len(raw.request(MessageType.LOAD, 1, HASHES)[5]) == 4
    raw.sock.sendall(pack(MessageType.COMMIT, 1, 4))
    raw.sock.close()
    time.sleep(0.3)
    assert sidecar.stats()["l2"]["slots_leased"] == 4
    raw.end()
    wait_until(lambda: sidecar.stats()["l2"]["slots_leased"] == 0, "its leases are released")
    assert sidecar.stop() == 0


def test_only_the_process_that_connected_is_heard(sidecar: ForkedSidecar) -> None:
    """A forked child has the socket too. What it sends is dropped, wherever it comes in between."""
    raw = RawClient(sidecar.socket)
    slots = raw.save(1, HASHES)
    ping = pack(MessageType.PING, 7)
    for message in (
        pack(MessageType.GOODBYE),
        pack(MessageType.RELEASE, 1),
        pack(MessageType.COMMIT, 1, len(slots)),
        b"\xff" * 1000,
    ):
        raw.sock.sendall(ping[:5])
        in_child(lambda message=message: raw.sock.sendall(message))
        raw.sock.sendall(ping[5:])
        assert raw.receiver.read() == [MessageType.PONG, 7]
    assert filling(sidecar) == 4
    assert sidecar.stats()["service"]["foreign_bytes"] > 1000
    raw.sock.sendall(pack(MessageType.GOODBYE))
    wait_until(lambda: filling(sidecar) == 0, "its slots are free")
    raw.end()
    assert sidecar.stop() == 0


def test_the_sidecars_end_waits_for_no_client(sidecar: ForkedSidecar) -> None:
    hung_up, connected = RawClient(sidecar.socket), RawClient(sidecar.socket)
    for number, raw in enumerate((hung_up, connected)):
        assert len(raw.save(1, hashes_of(f"open {number}", 4))) == 4
    hung_up.sock.close()
    assert sidecar.stop() == 0
    hung_up.end()
    connected.end()


def test_the_sidecar_waits_for_a_process(tmp_path: Path) -> None:
    never, _far_end = socket.socketpair()
    with listen(str(tmp_path / "socket")) as listener:
        stranger = PeerProcess(str(tmp_path / "socket"))
        sock, _ = listener.accept()
        peer = Peer(sock)
        assert peer.known
        waiting = threading.Thread(target=peer.wait_for_exit, args=(never.fileno(),))
        waiting.start()
        stranger.sock.close()
        time.sleep(0.1)
        assert waiting.is_alive()
        stranger.end()
        waiting.join(LIMIT_S)
        assert not waiting.is_alive()
        assert not Peer(sock).known, "another process may have its pid"
        peer.close()
        sock.close()
    never.close()


def test_the_sidecar_does_not_wait_for_an_unknown_process() -> None:
    """An internet socket has no pid, as a process in another pid namespace."""
    never, _far_end = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        peer = Peer(far)
        assert not peer.known
        peer.wait_for_exit(never.fileno())
        peer.close()
        near.close()
        far.close()
    never.close()


# Errors of the system.


class Refusing:
    """A listener whose next calls of `accept` fail, each with one of the errors."""

    def __init__(self, inner: socket.socket, errors: list[int]) -> None:
        self._inner = inner
        self.errors = errors

    def accept(self) -> tuple[socket.socket, Any]:
        if self.errors:
            raise OSError(self.errors.pop(0), "refused")
        return self._inner.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Served:
    """A socket server over a store in this process."""

    def __init__(self, folder: Path, errors: list[int]) -> None:
        self.path = str(folder / "socket")
        self.store = Store(Slab.create(SLOTS, SLOT_BYTES))
        self.listener: Any = Refusing(listen(self.path), errors)
        self.hot = SocketServer(
            self.store,
            self.listener,
            tenants=Tenants({}),
            max_clients=2,
            handshake_timeout_s=LIMIT_S,
            stats=dict,
        )
        self.hot.start()
        self._rounds = 0

    def check_serves(self) -> None:
        self._rounds += 1
        with Client(self.path, NAMESPACE, connect_timeout_s=LIMIT_S) as client:
            assert put(client, hashes_of(f"round {self._rounds}", 4)) == 4

    def close(self) -> None:
        self.hot.stop()
        self.store.close()


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Make the start of a thread fail: there is no memory for such a stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_no_error_of_accept_ends_the_acceptor(tmp_path: Path) -> None:
    served = Served(tmp_path, [errno.EMFILE, errno.ENOBUFS, errno.EPERM, errno.EPROTO])
    served.check_serves()
    assert not served.listener.errors
    served.close()


def test_a_client_without_a_reader_thread_may_retry(tmp_path: Path) -> None:
    served = Served(tmp_path, [])
    with no_more_threads(), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(served.path)
        receiver = Receiver(sock)
        verb, _, again = receiver.read() or [None, None, None]
        assert (verb, again) == (MessageType.REJECTED, True)
        assert receiver.read() is None
    for _ in range(3):  # more than the maximum: none keeps a place
        served.check_serves()
    served.close()


def test_a_client_without_a_pusher_thread_leaves_no_session(tmp_path: Path) -> None:
    served = Served(tmp_path, [])
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(served.path)
        wait_until(
            lambda: any(thread.name == "read-1" for thread in threading.enumerate()),
            "it has a reader",
        )
        with no_more_threads():
            sock.sendall(pack_hello(NAMESPACE, None, "raw", 1))
            receiver = Receiver(sock)
            kind, *_ = receiver.read() or [None]
            assert kind == MessageType.WELCOME
            assert receiver.read() is None, "it may connect again"
        assert not served.store.stats()["sessions"]
    for _ in range(3):
        served.check_serves()
    served.close()
