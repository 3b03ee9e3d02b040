"""When a connection's leases come back: with a BYE, or with the end of the client's process. And
a sidecar that the system refuses something goes on taking clients."""

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
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    SLOT_BYTES,
    SLOTS,
    ForkedSidecar,
    RawClient,
    PeerProcess,
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

HASHES = hashes_of("lives", 4)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path)
    yield made
    made.kill()


def filling(sidecar: ForkedSidecar) -> int:
    slots: int = sidecar.stats()["l2"]["slots_filling"]
    return slots


# Leases and lives.


def test_a_hang_up_frees_nothing_while_the_process_lives(sidecar: ForkedSidecar) -> None:
    """Its device may still copy: the socket of a dying process closes before the device's file."""
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


def test_a_bye_is_enough_even_of_one_who_does_not_hear_the_answers(
    sidecar: ForkedSidecar,
) -> None:
    raw = RawClient(sidecar.socket)
    assert len(raw.save(1, HASHES)) == 4
    sidecar.suspend()
    asked = b"".join(pack(MessageType.MATCH, number, HASHES) for number in range(2, 50))
    raw.sock.sendall(asked + pack(MessageType.GOODBYE))
    raw.sock.close()  # what the sidecar answers finds nobody
    sidecar.resume()
    wait_until(lambda: filling(sidecar) == 0, "its slots are free")
    assert not sidecar.stats()["sessions"]
    raw.end()
    assert sidecar.stop() == 0


def test_a_hand_back_that_cannot_be_leaves_the_lease_known(sidecar: ForkedSidecar) -> None:
    """A commit of a load ends the conversation; the load's slots are the client's all the same."""
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
    wait_until(lambda: sidecar.stats()["l2"]["slots_leased"] == 0, "its leases are back")
    assert sidecar.stop() == 0


def test_the_end_of_the_sidecar_waits_for_no_client(sidecar: ForkedSidecar) -> None:
    hung_up, connected = RawClient(sidecar.socket), RawClient(sidecar.socket)
    for number, raw in enumerate((hung_up, connected)):
        assert len(raw.save(1, hashes_of(f"open {number}", 4))) == 4
    hung_up.sock.close()
    assert sidecar.stop() == 0
    hung_up.end()
    connected.end()


def test_a_process_is_waited_for(tmp_path: Path) -> None:
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
        assert not Peer(sock).known, "who has hung up may have given its pid to another"
        peer.close()
        sock.close()
    never.close()


def test_a_process_that_is_not_shown_is_not_waited_for() -> None:
    """No pid comes with an internet socket, as none does from a pid namespace out of sight."""
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


# What the system refuses.


class Refusing:
    """A listener whose next calls of `accept` fail, each with its own error."""

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
    """A hot path over a store in this process."""

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
    """The system starts no thread of this process: none has room for such a stack."""
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


def test_a_client_that_gets_no_reader_is_told_to_come_again(tmp_path: Path) -> None:
    served = Served(tmp_path, [])
    with no_more_threads(), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(served.path)
        receiver = Receiver(sock)
        verb, _, again = receiver.read() or [None, None, None]
        assert (verb, again) == (MessageType.REJECTED, True)
        assert receiver.read() is None
    for _ in range(3):  # more than clients may be: none has kept a place
        served.check_serves()
    served.close()


def test_a_client_that_gets_no_pusher_leaves_no_session(tmp_path: Path) -> None:
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
            verb, *_ = receiver.read() or [None]
            assert verb == MessageType.WELCOME
            assert receiver.read() is None, "it may dial again"
        assert not served.store.stats()["sessions"]
    for _ in range(3):
        served.check_serves()
    served.close()
