"""The client: no operation blocks, every operation ends and nothing leaks if the sidecar fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    SLOT_BYTES,
    SLOTS,
    ForkedSidecar,
    content,
    disk,
    fill,
    get,
    hashes_of,
    match,
    put,
    until_done,
    wait_until,
)

from kvstore.errors import ConfigError
from kvstore.interface import LookupStatus
from kvstore.ipc import protocol
from kvstore.ipc.client import Client
from kvstore.shm.slab import Slab

HANG_S = 1.0
"""Response timeout for tests with a hung sidecar. A healthy one answers much faster."""

HASHES = hashes_of("client", 8)
Connect = Callable[..., Client]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Creates clients of the test's socket and closes them."""
    made: list[Client] = []

    def make(**more: Any) -> Client:
        more.setdefault("namespace", NAMESPACE)
        path = tmp_path / "kv.sock"
        more.setdefault("connect_timeout_s", LIMIT_S if path.exists() else 0.0)
        client = Client(str(path), **more)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path, disk(tmp_path / "disk"))
    yield made
    with suppress(ProcessLookupError):
        made.resume()
    made.kill()


def slots_in_use(sidecar: ForkedSidecar) -> int:
    l2 = sidecar.stats()["l2"]
    return int(l2["slots_filling"] + l2["slots_leased"])


def slabs_mapped() -> int:
    """Slabs mapped into this process."""
    return Path("/proc/self/maps").read_text().count("kvstore-slab")


def check_no_slot_in_use(sidecar: ForkedSidecar) -> None:
    wait_until(lambda: slots_in_use(sidecar) == 0, "no slot leased or filling")


def test_without_a_sidecar_everything_is_a_miss_at_once(connect: Connect) -> None:
    client = connect()
    found = client.match(HASHES)
    load, save = client.load(HASHES), client.save(HASHES)
    assert found.status is LookupStatus.MISS
    assert load.done
    assert save.done
    assert save.dropped == len(HASHES)
    assert all("no sidecar" in operation.fault for operation in (found, load, save))
    assert client.poll() == [found, load, save]
    assert client.slab is None
    assert client.slab_of(load).slots == 0
    client.release(load)
    client.commit(save)
    assert client.stats()["open_operations"] == 0
    assert not client.sync(0.1)


def test_a_client_connects_to_a_sidecar_that_starts_later(tmp_path: Path, connect: Connect) -> None:
    client = connect()
    sidecar = ForkedSidecar(tmp_path)
    wait_until(lambda: client.connected, "the client has connected")
    assert put(client, HASHES) == len(HASHES)
    assert get(client, HASHES)[0] == [content(name) for name in HASHES]
    sidecar.kill()


def test_save_and_load_and_invalid_calls(sidecar: ForkedSidecar, connect: Connect) -> None:
    client = connect()
    assert match(client, HASHES) == []
    assert put(client, HASHES) == len(HASHES)
    assert put(client, HASHES) == 0  # already cached
    assert match(client, [*HASHES, bytes(32)]) == ["l2"] * len(HASHES)
    assert get(client, HASHES) == ([content(name) for name in HASHES], ["l2"] * len(HASHES))
    load = until_done(client, client.load(HASHES))
    client.release(load)
    with pytest.raises(AssertionError, match="already committed or released"):
        client.release(load)
    save = until_done(client, client.save(hashes_of("other", 3)))
    client.release(save)
    with pytest.raises(AssertionError, match="already committed or released"):
        client.commit(save)
    client.close()
    closed = client.match(HASHES)
    assert closed.done
    assert closed.fault == "the client is closed"
    check_no_slot_in_use(sidecar)


def test_every_client_sees_an_acknowledged_commit(sidecar: ForkedSidecar, connect: Connect) -> None:
    one, other = connect(), connect()
    for round_ in range(20):
        hashes = hashes_of(f"round {round_}", 2)
        put(one, hashes)
        assert one.sync(5.0)
        assert match(other, hashes) == ["l2"] * 2


def test_killed_mid_load(sidecar: ForkedSidecar, connect: Connect) -> None:
    mapped = slabs_mapped()
    client = connect(response_timeout_s=60.0)
    put(client, HASHES)
    assert client.sync(5.0)
    # On disk before the kill, so that they are found afterwards.
    wait_until(lambda: sidecar.stats()["tiers"]["disk"]["blocks"] == len(HASHES), "on disk")
    loaded = until_done(client, client.load(HASHES))
    sidecar.suspend()
    load, save = client.load(HASHES), client.save(hashes_of("more", 4))
    assert not load.done
    sidecar.kill()
    for operation in (load, save):
        until_done(client, operation)
        assert operation.fault
    # The old mapping stays while an operation has slots of it.
    assert client.slab is not client.slab_of(loaded)
    old = client.slab_of(loaded)
    assert [bytes(old.view(slot)) for slot in loaded.slots] == [content(name) for name in HASHES]
    sidecar.start()
    wait_until(lambda: client.connected, "the client has reconnected")
    assert [bytes(old.view(slot)) for slot in loaded.slots] == [content(name) for name in HASHES]
    assert slabs_mapped() == mapped + 2
    for operation in (loaded, load, save):
        client.release(operation)
    del old
    wait_until(lambda: slabs_mapped() == mapped + 1, "the old slab is unmapped")
    assert get(client, HASHES) == ([content(name) for name in HASHES], ["disk"] * len(HASHES))
    assert client.stats()["connections"] == 2
    check_no_slot_in_use(sidecar)


def test_a_hung_sidecar_does_not_block_the_client(sidecar: ForkedSidecar, connect: Connect) -> None:
    client = connect(response_timeout_s=HANG_S)
    put(client, HASHES)
    assert client.sync(5.0)
    sidecar.suspend()
    assert client.match(HASHES).done, "the shared index still answers"
    waiting = [client.match(()), client.load(HASHES), client.save(hashes_of("more", 4))]
    for operation in waiting:
        until_done(client, operation)
        assert "no response" in operation.fault
    # Until the sidecar responds again, no operation waits.
    after = [client.match(HASHES), client.load(HASHES), client.save(HASHES)]
    assert all(operation.done and "no response" in operation.fault for operation in after)
    for operation in (*waiting[1:], *after[1:]):
        client.release(operation)
    sidecar.resume()
    wait_until(lambda: client.connected, "it responds again")
    assert client.stats()["connections"] == 1
    assert get(client, HASHES)[0] == [content(name) for name in HASHES]
    check_no_slot_in_use(sidecar)
    assert client.stats()["open_operations"] == 0


def test_a_late_slot_assignment_is_never_published(
    sidecar: ForkedSidecar, connect: Connect
) -> None:
    """A save times out, the client commits it empty, and then the slot assignments arrive."""
    client = connect(response_timeout_s=HANG_S)
    late = hashes_of("late", 4)
    sidecar.suspend()
    save = until_done(client, client.save(late))
    assert save.slot_assignments == []
    client.commit(save)
    sidecar.resume()
    wait_until(lambda: client.connected, "it responds again")
    assert client.sync(5.0)
    assert match(client, late) == []
    assert put(client, late) == len(late)
    check_no_slot_in_use(sidecar)


def test_silence_without_a_request_is_not_a_timeout(
    sidecar: ForkedSidecar, connect: Connect
) -> None:
    """An open save that is done does not wait for the sidecar."""
    client = connect(response_timeout_s=HANG_S)
    save = until_done(client, client.save(HASHES))
    threading.Event().wait(3 * HANG_S)
    assert client.connected
    assert client.stats()["timeouts"] == 0
    fill(client, save)
    client.commit(save)
    assert match(client, HASHES) == ["l2"] * len(HASHES)


def test_operations_never_wait_for_a_full_socket(sidecar: ForkedSidecar, connect: Connect) -> None:
    """A stopped sidecar reads nothing. Requests beyond the socket's buffer are queued, up to a
    limit."""
    client = connect(response_timeout_s=600.0)
    put(client, HASHES)
    sidecar.suspend()
    long_prefix = [*HASHES, *hashes_of("long", 500)]
    operations = [client.load(long_prefix) for _ in range(200)]
    assert not any(operation.done for operation in operations)
    assert client.stats()["outbound_bytes"] > 0
    operations += [client.load(HASHES) for _ in range(protocol.MAX_OPERATIONS - len(operations))]
    rejected = client.load(HASHES)
    assert rejected.done
    assert "too many open operations" in rejected.fault
    for operation in (*operations, rejected):
        client.release(operation)
    sidecar.resume()
    assert client.sync(LIMIT_S)
    [ours] = sidecar.stats()["service"]["clients"].values()
    assert ours["operations_in_flight"] == 0
    check_no_slot_in_use(sidecar)


@pytest.mark.parametrize(
    ("namespace", "words"),
    [
        (replace(NAMESPACE, layers=64), "slot"),
        (replace(NAMESPACE, model="x" * protocol.MAX_HELLO_BYTES), "HELLO has"),
    ],
)
def test_a_rejected_hello_is_a_config_error(
    sidecar: ForkedSidecar, connect: Connect, namespace: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        connect(namespace=namespace)


def test_close_releases_every_slot(sidecar: ForkedSidecar, connect: Connect) -> None:
    client = connect()
    put(client, HASHES)
    until_done(client, client.load(HASHES))
    until_done(client, client.save(hashes_of("open", 5)))
    assert slots_in_use(sidecar) == len(HASHES) + 5
    client.close()
    client.close()
    check_no_slot_in_use(sidecar)
    assert sidecar.stop() == 0


def test_a_slow_tier_is_not_a_timeout(tmp_path: Path, connect: Connect) -> None:
    """A sidecar that answers pings counts as responsive, however long a load takes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "kv.sock"))
    listener.listen()
    slab = Slab.create(4, SLOT_BYTES)

    def serve() -> None:
        sock, _ = listener.accept()
        receiver = protocol.Receiver(sock)
        receiver.read()
        welcome(sock, slab)
        pings = 0
        while (message := receiver.read()) is not None:
            if message[0] != protocol.MessageType.PING:
                continue
            pings += 1
            sock.sendall(protocol.pack(protocol.MessageType.PONG, message[1]))
            if pings == 4:  # one ping per half timeout: twice the timeout has passed
                sock.sendall(protocol.pack(protocol.MessageType.UPDATE, 1, True, "", ["disk"], [3]))
        sock.close()

    threading.Thread(target=serve, daemon=True).start()
    client = connect(response_timeout_s=HANG_S)
    load = until_done(client, client.load(HASHES[:1]))
    assert (load.slots, load.tiers, load.fault) == ([3], ["disk"], "")
    assert client.stats()["timeouts"] == 0
    client.release(load)
    client.close()
    listener.close()


def welcome(sock: socket.socket, slab: Slab) -> None:
    about = {"version": protocol.PROTOCOL_VERSION, "slots": slab.slots, "slot_bytes": SLOT_BYTES}
    message = protocol.pack(protocol.MessageType.WELCOME, {**about, "session": 1})
    socket.send_fds(sock, [message], [slab.fd])


class FakeSidecar:
    """Listens at the sidecar's path, sends WELCOME with a slab, and then the given bytes."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path / "kv.sock"))
        self._listener.listen(8)
        self._slab = Slab.create(4, SLOT_BYTES)
        self._data = data
        self._open: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            self._open.append(sock)
            sock.recv(1 << 16)
            welcome(sock, self._slab)
            sock.recv(1 << 16)
            sock.sendall(self._data)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        protocol.pack(protocol.MessageType.UPDATE, 1, True, "", ["l2"], [SLOTS]),
        protocol.pack(protocol.MessageType.UPDATE, 1, True, "", ["l2", "l2"], [0]),
        protocol.pack(protocol.MessageType.UPDATE, 1),
        protocol.pack(protocol.MessageType.UPDATE, [], True, "", [], []),
    ],
    ids=["not a message", "slot past the slab", "uneven", "short", "not a number"],
)
def test_an_invalid_message_ends_the_connection(
    tmp_path: Path, connect: Connect, data: bytes
) -> None:
    FakeSidecar(tmp_path, data)
    client = connect(response_timeout_s=60.0)
    load = until_done(client, client.load(HASHES))
    assert load.fault
    assert load.slots == []
    client.release(load)
