"""The sidecar with real engine processes: shared blocks, leases, rejected clients."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import (
    NAMESPACE,
    SLOT_BYTES,
    SLOTS,
    ForkedSidecar,
    RawClient,
    content,
    disk,
    get,
    hashes_of,
    match,
    put,
    until_done,
    wait_until,
)

from kvstore.errors import ConfigError
from kvstore.ipc.client import Client
from kvstore.ipc.protocol import MAX_HASHES, PROTOCOL_VERSION, MessageType, pack
from kvstore.service.access.auth import Tenants
from kvstore.service.ipc.socket_server import SocketServer
from kvstore.service.ipc.sockets import listen
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.testing.processes import Child

PROGRAM = Path(__file__).with_name("engine_program.py")
HASHES = hashes_of("hot", 8)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    """For tests that leave no state."""
    made = ForkedSidecar(tmp_path_factory.mktemp("shared"))
    yield made
    assert l2(made)["slots_free"] == SLOTS
    assert made.stop() == 0


def engine(sidecar: ForkedSidecar, what: str, name: str, count: int) -> Child:
    """A client in its own process, ready."""
    argv = [sys.executable, str(PROGRAM), sidecar.socket, what, name, str(count)]
    child = Child(argv, ready=lambda line: line == "ready")
    child.wait_ready()
    return child


def l2(sidecar: ForkedSidecar) -> dict[str, int]:
    numbers: dict[str, int] = sidecar.stats()["l2"]
    return numbers


def test_two_processes_share_blocks(sidecar: ForkedSidecar) -> None:
    with engine(sidecar, "save", "hot", 8), Client(sidecar.socket, NAMESPACE) as client:
        assert get(client, HASHES) == ([content(name) for name in HASHES], ["l2"] * 8)
        # This process saves blocks, and a third process loads and leases them.
        put(client, hashes_of("mine", 4))
        assert client.sync(10.0)
        with engine(sidecar, "hold", "mine", 4):
            assert l2(sidecar)["slots_leased"] == 4


def test_every_lease_of_a_killed_engine_is_released(sidecar: ForkedSidecar) -> None:
    with Client(sidecar.socket, NAMESPACE) as client:
        put(client, HASHES)
        assert client.sync(10.0)
        child = engine(sidecar, "hold", "hot", 8)
        numbers = l2(sidecar)
        assert (numbers["slots_leased"], numbers["slots_filling"]) == (8, 8)
        child.kill()
        wait_until(lambda: l2(sidecar)["slots_filling"] == 0, "filling slots are free again")
        numbers = l2(sidecar)
        assert (numbers["slots_leased"], numbers["slots_free"]) == (0, SLOTS - 8)
        # Without its leases every block can be evicted: the whole slab is available.
        assert put(client, hashes_of("all", SLOTS)) == SLOTS
    assert sidecar.stop() == 0


def test_a_live_client_keeps_its_leases_whatever_it_does(sidecar: ForkedSidecar) -> None:
    """Garbage, silence, a half-closed socket: only the end of the process releases a lease."""
    garbage, deaf, half = (
        RawClient(sidecar.socket),
        RawClient(sidecar.socket),
        RawClient(sidecar.socket),
    )
    for number, raw in enumerate((garbage, deaf, half)):
        assert len(raw.save(1, hashes_of(f"raw {number}", 4))) == 4
    garbage.sock.sendall(b"\xff" * 1000)
    half.sock.shutdown(socket.SHUT_WR)
    # A client that never reads: its answers fill the socket, and then it is not read either.
    deaf.sock.settimeout(1.0)
    endless = b"".join(pack(MessageType.MATCH, number + 2, HASHES * 8) for number in range(10_000))
    with pytest.raises(TimeoutError):
        deaf.sock.sendall(endless)
    time.sleep(1.5)  # longer than a pusher's poll
    assert l2(sidecar)["slots_filling"] == 12
    with Client(sidecar.socket, NAMESPACE) as client:  # other clients are not affected
        assert put(client, HASHES) == 8
        assert match(client, HASHES) == ["l2"] * 8
        for left, raw in zip((8, 4, 0), (garbage, deaf, half), strict=True):
            raw.sock.close()
            time.sleep(0.2)
            assert l2(sidecar)["slots_filling"] == left + 4, "its process may still copy"
            raw.end()
            wait_until(lambda left=left: l2(sidecar)["slots_filling"] == left, f"{left} filling")
    assert sidecar.stop() == 0


@pytest.mark.parametrize(
    "message",
    [
        pack(99),
        pack(MessageType.WELCOME),
        pack(MessageType.MATCH, 1),
        pack(MessageType.MATCH, -1, []),
        pack(MessageType.MATCH, 1, "hash"),
        pack(MessageType.MATCH, 1, [b""]),
        pack(MessageType.MATCH, 1, [bytes(65)]),
        pack(MessageType.MATCH, 1, [b"x"] * (MAX_HASHES + 1)),
        pack(MessageType.LOAD, 7, HASHES),
        pack(MessageType.COMMIT, 1, 0),
        pack(MessageType.COMMIT, 7),
        pack(MessageType.COMMIT, 7, 1 << 63),
        pack(MessageType.COMMIT, 8, 0),
        pack(MessageType.RELEASE, 1),
        pack("match", 1),
        pack({}),
        pack(),
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
    ],
)
def test_a_malformed_message_ends_reading_only(shared: ForkedSidecar, message: bytes) -> None:
    raw = RawClient(shared.socket)
    slots = raw.save(7, HASHES)
    raw.request(MessageType.LOAD, 8, HASHES)
    raw.sock.sendall(message)
    raw.sock.sendall(pack(MessageType.COMMIT, 7, len(slots)))  # no further message is read
    time.sleep(0.1)
    assert l2(shared)["slots_filling"] == len(slots)
    raw.end()
    wait_until(lambda: l2(shared)["slots_free"] == SLOTS, "all slots are free")


def test_a_commit_of_other_assignments_publishes_nothing(sidecar: ForkedSidecar) -> None:
    raw = RawClient(sidecar.socket)
    for number, wrong in enumerate((0, 7, 9)):
        assert len(raw.save(number, HASHES)) == 8
        raw.sock.sendall(pack(MessageType.COMMIT, number, wrong))
        assert raw.request(MessageType.PING, 5) == [MessageType.PONG, 5]
        assert l2(sidecar)["slots_free"] == SLOTS
    assert len(raw.save(9, HASHES)) == 8
    raw.sock.sendall(pack(MessageType.COMMIT, 9, 8))
    assert raw.request(MessageType.MATCH, 10, HASHES)[4] == ["l2"] * 8
    raw.end()


def test_tenants_share_nothing(tmp_path: Path) -> None:
    tokens = {"secret of a": "team-a", "other secret of a": "team-a", "secret of b": "team-b"}
    sidecar = ForkedSidecar(tmp_path, {"server": {"auth_tokens": tokens}})
    clients = [Client(sidecar.socket, NAMESPACE, auth_token=token) for token in tokens]
    first, same, other = clients
    assert put(first, HASHES, "team-a") == 8
    assert first.sync(10.0)
    assert match(same, HASHES) == ["l2"] * 8
    assert match(other, HASHES) == []
    assert get(other, HASHES) == ([], [])
    assert put(other, HASHES, "team-b") == 8
    assert get(same, HASHES)[0] == [content(name, "team-a") for name in HASHES]
    assert get(other, HASHES)[0] == [content(name, "team-b") for name in HASHES]
    for wrong in (None, "", "secret", "secret of a "):
        with pytest.raises(ConfigError, match="token"):
            Client(sidecar.socket, NAMESPACE, auth_token=wrong)
    with pytest.raises(ConfigError, match="token"):
        sidecar.stats()
    assert sidecar.stats("secret of b")["l2"]["slots"] == SLOTS
    for client in clients:
        client.close()
    assert sidecar.stop() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m2"},
        {"revision": "b"},
        {"layout": "TLKHD"},
        {"quantisation": "q"},
        {"tp_size": 2},
        {"dtype": "bfloat16", "block_tokens": 8},
    ],
)
def test_namespaces_share_nothing(sidecar: ForkedSidecar, change: dict[str, Any]) -> None:
    other = replace(NAMESPACE, **change)
    assert other.block_bytes == NAMESPACE.block_bytes
    with Client(sidecar.socket, NAMESPACE) as client, Client(sidecar.socket, other) as stranger:
        put(client, HASHES)
        assert client.sync(10.0)
        assert match(stranger, HASHES) == []
        assert get(stranger, HASHES) == ([], [])


def about(**change: Any) -> bytes:
    told = {
        "version": PROTOCOL_VERSION,
        "namespace": asdict(NAMESPACE),
        "digest": NAMESPACE.digest,
        "token": None,
        "client": "raw",
        "pid": 1,
    }
    return pack(MessageType.HELLO, {**told, **change})


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (about(version=PROTOCOL_VERSION + 1), "protocol"),
        (about(digest="0" * 32), "does not match its namespace"),
        (about(namespace={**asdict(NAMESPACE), "revision": "x"}), "does not match its namespace"),
        (about(namespace={**asdict(NAMESPACE), "layers": "2"}), "layers"),
        (about(namespace={**asdict(NAMESPACE), "layers": 0}), "layers"),
        (about(namespace={**asdict(NAMESPACE), "unknown": 1}), "fields"),
        (about(namespace=None), "fields"),
        (pack(MessageType.HELLO, None), "HELLO"),
        (pack(MessageType.MATCH, 1, []), "HELLO"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "exceeds the maximum"),
    ],
)
def test_a_bad_hello_is_rejected_in_one_line(
    shared: ForkedSidecar, first: bytes, words: str
) -> None:
    raw = RawClient(shared.socket, first)
    kind, text, retryable = raw.welcome
    assert (kind, retryable) == (MessageType.REJECTED, False)
    assert words in text
    assert "\n" not in text
    assert raw.sock.recv(1) == b""
    raw.end()


def test_a_client_above_the_maximum_may_retry(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, {"limits": {"max_clients": 2, "handshake_timeout": "200ms"}})
    # A client without a HELLO does not keep its place.
    mute = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mute.connect(sidecar.socket)
    first = Client(sidecar.socket, NAMESPACE, connect_timeout_s=10.0)
    second = Client(sidecar.socket, NAMESPACE, connect_timeout_s=10.0)
    third = Client(sidecar.socket, NAMESPACE)
    assert not third.connected
    assert "2 clients" in third.match(HASHES).fault
    first.close()
    wait_until(lambda: third.connected, "the third has its place")
    second.close()
    third.close()
    mute.close()
    assert sidecar.stop() == 0


def test_a_clean_end_with_leased_clients(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, disk(tmp_path / "disk"))
    client = Client(sidecar.socket, NAMESPACE)
    put(client, HASHES)
    held = until_done(client, client.load(HASHES))
    save = until_done(client, client.save(hashes_of("open", 4)))
    assert sidecar.stop() == 0
    assert not os.path.exists(sidecar.socket)
    wait_until(lambda: not client.connected, "the client has noticed")
    client.commit(save)
    client.release(held)
    # Committed blocks were written before the end.
    sidecar.start()
    wait_until(lambda: client.connected, "the client is back")
    assert get(client, HASHES) == ([content(name) for name in HASHES], ["disk"] * 8)
    assert match(client, hashes_of("open", 4)) == []
    client.close()
    assert sidecar.stop() == 0


def test_blocks_of_more_than_one_size_share_a_slab(sidecar: ForkedSidecar) -> None:
    small = replace(NAMESPACE, layers=1)
    assert small.block_bytes < SLOT_BYTES
    with Client(sidecar.socket, NAMESPACE) as client, Client(sidecar.socket, small) as other:
        assert put(client, HASHES) == 8
        assert put(other, HASHES) == 8
        assert get(client, HASHES)[0] == [content(name) for name in HASHES]


def test_stop_gives_no_slot_to_another_client(tmp_path: Path) -> None:
    store = Store(Slab.create(SLOTS, SLOT_BYTES))
    listener = listen(str(tmp_path / "socket"))
    hot = SocketServer(
        store, listener, tenants=Tenants({}), max_clients=4, handshake_timeout_s=10.0, stats=dict
    )
    hot.start()
    other = store.session(NAMESPACE)  # like a connection that is ended last
    with Client(str(tmp_path / "socket"), NAMESPACE) as client:
        assert put(client, HASHES) == 8
        until_done(client, client.load(HASHES))
        hot.stop()
        assert store.stats()["l2"]["slots_leased"] == 0
        assert other.save(hashes_of("late", 2)).slot_assignments == [], (
            "an engine may still read that slot"
        )
    store.close()
