"""The client: no verb waits, every ticket ends, nothing leaks, whatever becomes of the sidecar."""

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
from kvstore.interface import Answer
from kvstore.ipc import protocol
from kvstore.ipc.client import Client
from kvstore.shm.slab import Slab

HANG_S = 1.0
"""Reply limit where a sidecar is made to hang: a living one answers in far less."""

HASHES = hashes_of("client", 8)
Connect = Callable[..., Client]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Makes clients of the test's socket and closes them."""
    made: list[Client] = []

    def make(**more: Any) -> Client:
        more.setdefault("namespace", NAMESPACE)
        path = tmp_path / "kv.sock"
        more.setdefault("wait_ready_s", LIMIT_S if path.exists() else 0.0)
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


def slots_held(sidecar: ForkedSidecar) -> int:
    l2 = sidecar.stats()["l2"]
    return int(l2["slots_filling"] + l2["slots_leased"])


def slabs_mapped() -> int:
    """Slabs that lie in this process's memory."""
    return Path("/proc/self/maps").read_text().count("kvstore-slab")


def check_nothing_held(sidecar: ForkedSidecar) -> None:
    wait_until(lambda: slots_held(sidecar) == 0, "no slot leased or filling")


def test_without_a_sidecar_everything_is_a_miss_at_once(connect: Connect) -> None:
    client = connect()
    found = client.match(HASHES)
    load, save = client.load(HASHES), client.save(HASHES)
    assert found.answer is Answer.MISS
    assert load.done
    assert save.done
    assert save.dropped == len(HASHES)
    assert all("no sidecar" in ticket.fault for ticket in (found, load, save))
    assert client.poll() == [found, load, save]
    assert client.slab is None
    assert client.slab_of(load).slots == 0
    client.release(load)
    client.commit(save)
    assert client.stats()["outstanding"] == 0
    assert not client.sync(0.1)


def test_a_sidecar_that_comes_later_is_joined(tmp_path: Path, connect: Connect) -> None:
    client = connect()
    sidecar = ForkedSidecar(tmp_path)
    wait_until(lambda: client.connected, "the client has joined")
    assert put(client, HASHES) == len(HASHES)
    assert get(client, HASHES)[0] == [content(name) for name in HASHES]
    sidecar.kill()


def test_save_load_and_what_is_refused(sidecar: ForkedSidecar, connect: Connect) -> None:
    client = connect()
    assert match(client, HASHES) == []
    assert put(client, HASHES) == len(HASHES)
    assert put(client, HASHES) == 0  # the first writer has won
    assert match(client, [*HASHES, bytes(32)]) == ["l2"] * len(HASHES)
    assert get(client, HASHES) == ([content(name) for name in HASHES], ["l2"] * len(HASHES))
    load = until_done(client, client.load(HASHES))
    client.release(load)
    with pytest.raises(AssertionError, match="twice"):
        client.release(load)
    save = until_done(client, client.save(hashes_of("other", 3)))
    client.release(save)
    with pytest.raises(AssertionError, match="twice"):
        client.commit(save)
    client.close()
    closed = client.match(HASHES)
    assert closed.done
    assert closed.fault == "the client is closed"
    check_nothing_held(sidecar)


def test_what_commit_acknowledged_every_client_sees(
    sidecar: ForkedSidecar, connect: Connect
) -> None:
    one, other = connect(), connect()
    for round_ in range(20):
        hashes = hashes_of(f"round {round_}", 2)
        put(one, hashes)
        assert one.sync(5.0)
        assert match(other, hashes) == ["l2"] * 2


def test_killed_mid_load(sidecar: ForkedSidecar, connect: Connect) -> None:
    mapped = slabs_mapped()
    client = connect(reply_limit_s=60.0)
    put(client, HASHES)
    assert client.sync(5.0)
    # Spilled before the kill, so that they are found afterwards.
    wait_until(lambda: sidecar.stats()["tiers"]["disk"]["blocks"] == len(HASHES), "spilled")
    held = until_done(client, client.load(HASHES))
    sidecar.suspend()
    load, save = client.load(HASHES), client.save(hashes_of("more", 4))
    assert not load.done
    sidecar.kill()
    for ticket in (load, save):
        until_done(client, ticket)
        assert ticket.fault
    # The old mapping stays while a ticket names slots of it.
    assert client.slab is not client.slab_of(held)
    old = client.slab_of(held)
    assert [bytes(old.view(slot)) for slot in held.slots] == [content(name) for name in HASHES]
    sidecar.start()
    wait_until(lambda: client.connected, "the client is back")
    assert [bytes(old.view(slot)) for slot in held.slots] == [content(name) for name in HASHES]
    assert slabs_mapped() == mapped + 2
    for ticket in (held, load, save):
        client.release(ticket)
    del old
    wait_until(lambda: slabs_mapped() == mapped + 1, "the old slab is let go of")
    assert get(client, HASHES) == ([content(name) for name in HASHES], ["disk"] * len(HASHES))
    assert client.stats()["links"] == 2
    check_nothing_held(sidecar)


def test_a_hung_sidecar_is_done_without(sidecar: ForkedSidecar, connect: Connect) -> None:
    client = connect(reply_limit_s=HANG_S)
    put(client, HASHES)
    assert client.sync(5.0)
    sidecar.suspend()
    assert client.match(HASHES).done, "what it shows in memory is there as ever"
    waiting = [client.match(()), client.load(HASHES), client.save(hashes_of("more", 4))]
    for ticket in waiting:
        until_done(client, ticket)
        assert "no answer" in ticket.fault
    # From here on nothing waits, until it speaks again.
    after = [client.match(HASHES), client.load(HASHES), client.save(HASHES)]
    assert all(ticket.done and "silent" in ticket.fault for ticket in after)
    for ticket in (*waiting[1:], *after[1:]):
        client.release(ticket)
    sidecar.resume()
    wait_until(lambda: client.connected, "it speaks again")
    assert client.stats()["links"] == 1
    assert get(client, HASHES)[0] == [content(name) for name in HASHES]
    check_nothing_held(sidecar)
    assert client.stats()["outstanding"] == 0


def test_a_late_grant_is_never_published(sidecar: ForkedSidecar, connect: Connect) -> None:
    """The client gives up a save, commits it as it knows it (empty), and then the grants come."""
    client = connect(reply_limit_s=HANG_S)
    lost = hashes_of("late", 4)
    sidecar.suspend()
    save = until_done(client, client.save(lost))
    assert save.grants == []
    client.commit(save)
    sidecar.resume()
    wait_until(lambda: client.connected, "it speaks again")
    assert client.sync(5.0)
    assert match(client, lost) == []
    assert put(client, lost) == len(lost)
    check_nothing_held(sidecar)


def test_silence_while_nothing_is_asked_is_no_hang(
    sidecar: ForkedSidecar, connect: Connect
) -> None:
    """A save that lies open waits for nobody."""
    client = connect(reply_limit_s=HANG_S)
    save = until_done(client, client.save(HASHES))
    threading.Event().wait(3 * HANG_S)
    assert client.connected
    assert client.stats()["hangs"] == 0
    fill(client, save)
    client.commit(save)
    assert match(client, HASHES) == ["l2"] * len(HASHES)


def test_verbs_never_wait_for_a_full_socket(sidecar: ForkedSidecar, connect: Connect) -> None:
    """A stopped sidecar reads nothing: what does not fit in the socket is queued, up to a bound."""
    client = connect(reply_limit_s=600.0)
    put(client, HASHES)
    sidecar.suspend()
    long_run = [*HASHES, *hashes_of("long", 500)]
    tickets = [client.load(long_run) for _ in range(200)]
    assert not any(ticket.done for ticket in tickets)
    assert client.stats()["outbound_bytes"] > 0
    tickets += [client.load(HASHES) for _ in range(protocol.MAX_TICKETS - len(tickets))]
    over = client.load(HASHES)
    assert over.done
    assert "outstanding already" in over.fault
    for ticket in (*tickets, over):
        client.release(ticket)
    sidecar.resume()
    assert client.sync(LIMIT_S)
    [ours] = sidecar.stats()["service"]["clients"].values()
    assert ours["tickets"] == 0
    check_nothing_held(sidecar)


@pytest.mark.parametrize(
    ("namespace", "words"),
    [
        (replace(NAMESPACE, layers=64), "slot"),
        (replace(NAMESPACE, model="x" * protocol.MAX_HELLO_BYTES), "hello of"),
    ],
)
def test_a_refused_hello_is_a_mistake_of_the_user(
    sidecar: ForkedSidecar, connect: Connect, namespace: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        connect(namespace=namespace)


def test_close_hands_everything_back(sidecar: ForkedSidecar, connect: Connect) -> None:
    client = connect()
    put(client, HASHES)
    until_done(client, client.load(HASHES))
    until_done(client, client.save(hashes_of("open", 5)))
    assert slots_held(sidecar) == len(HASHES) + 5
    client.close()
    client.close()
    check_nothing_held(sidecar)
    assert sidecar.stop() == 0


def test_a_slow_tier_is_no_hang(tmp_path: Path, connect: Connect) -> None:
    """A sidecar that answers pings lives, however long a load takes."""
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
            if message[0] != protocol.Verb.PING:
                continue
            pings += 1
            sock.sendall(protocol.pack(protocol.Verb.PONG, message[1]))
            if pings == 4:  # sent at half the limit of silence each: twice the limit has passed
                sock.sendall(protocol.pack(protocol.Verb.UPDATE, 1, True, "", ["disk"], [3]))
        sock.close()

    threading.Thread(target=serve, daemon=True).start()
    client = connect(reply_limit_s=HANG_S)
    load = until_done(client, client.load(HASHES[:1]))
    assert (load.slots, load.tiers, load.fault) == ([3], ["disk"], "")
    assert client.stats()["hangs"] == 0
    client.release(load)
    client.close()
    listener.close()


def welcome(sock: socket.socket, slab: Slab) -> None:
    about = {"version": protocol.PROTOCOL_VERSION, "slots": slab.slots, "slot_bytes": SLOT_BYTES}
    greeting = protocol.pack(protocol.Verb.WELCOME, {**about, "session": 1})
    socket.send_fds(sock, [greeting], [slab.fd])


class Impostor:
    """Listens where a sidecar would; welcomes with a slab, and then says what it is told to."""

    def __init__(self, path: Path, speech: bytes) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path / "kv.sock"))
        self._listener.listen(8)
        self._slab = Slab.create(4, SLOT_BYTES)
        self._speech = speech
        self._open: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            self._open.append(sock)
            sock.recv(1 << 16)
            welcome(sock, self._slab)
            sock.recv(1 << 16)
            sock.sendall(self._speech)


@pytest.mark.parametrize(
    "speech",
    [
        b"\xff" * 64,
        protocol.pack(protocol.Verb.UPDATE, 1, True, "", ["l2"], [SLOTS]),
        protocol.pack(protocol.Verb.UPDATE, 1, True, "", ["l2", "l2"], [0]),
        protocol.pack(protocol.Verb.UPDATE, 1),
        protocol.pack(protocol.Verb.UPDATE, [], True, "", [], []),
    ],
    ids=["no message", "slot past the slab", "uneven", "short", "no number"],
)
def test_a_sidecar_that_talks_nonsense_is_lost(
    tmp_path: Path, connect: Connect, speech: bytes
) -> None:
    Impostor(tmp_path, speech)
    client = connect(reply_limit_s=60.0)
    load = until_done(client, client.load(HASHES))
    assert load.fault
    assert load.slots == []
    client.release(load)
