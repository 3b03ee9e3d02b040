"""The file of the sidecar's socket: removed by its owner only, and watched while it listens."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_rig import HOST, Server, valkey_binary
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    ForkedSidecar,
    content,
    get,
    hashes_of,
    match,
    put,
    wait_until,
)

from kvstore.errors import ConfigError
from kvstore.ipc.client import Client
from kvstore.service.ipc.sockets import listen

HASHES = hashes_of("file", 8)
PAIRS = 6
"""Sidecars that are replaced while they write their last blocks to a server that hangs."""
STARTERS = 8
ROUNDS = 20


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path, stderr=tmp_path / "log")
    yield made
    made.kill()


def listens(path: str) -> bool:
    """Whether a process accepts connections at the path."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


@pytest.mark.slow
def test_a_sidecar_that_ends_leaves_the_socket_of_the_next_one(tmp_path: Path) -> None:
    """Six times with a hung server below: the old sidecar writes for as long as it may, and the
    next one has taken the path long before."""
    with Valkey(tmp_path / "valkey") as server:
        folders = [tmp_path / str(number) for number in range(PAIRS)]
        for folder in folders:
            folder.mkdir()
        overrides = {
            "tiers": [{"kind": "redis", "host": HOST, "port": server.port, "timeout": "60s"}],
            "limits": {"shutdown_drain_timeout": "4s", "tier_timeout": "1h"},
        }
        old = [ForkedSidecar(folder, overrides) for folder in folders]
        for each in old:
            with Client(each.socket, NAMESPACE) as client:
                match(client, HASHES)
        server.freeze()
        for each in old:
            with Client(each.socket, NAMESPACE) as client:
                assert put(client, HASHES) == len(HASHES)
                assert client.sync(LIMIT_S)
        ends = [threading.Thread(target=each.stop) for each in old]
        for end in ends:
            end.start()
        for each in old:
            wait_until(lambda each=each: not listens(each.socket), "it has stopped listening")
        new = [ForkedSidecar(folder) for folder in folders]
        assert all(end.is_alive() for end in ends), "an old sidecar has ended too early"
        for end in ends:
            end.join(LIMIT_S)
        reached = 0
        for each in new:
            with Client(each.socket, NAMESPACE) as client:
                if client.connected:
                    put(client, HASHES)
                    reached += get(client, HASHES)[0] == [content(name) for name in HASHES]
        for each in new:
            each.kill()
        assert reached == PAIRS, f"{reached} of {PAIRS} can be reached"


class Valkey(contextlib.AbstractContextManager["Server"]):
    def __init__(self, directory: Path) -> None:
        self._server = Server(directory, valkey_binary())

    def __enter__(self) -> Server:
        return self._server

    def __exit__(self, *exc: object) -> None:
        self._server.stop()


def test_a_listener_removes_its_own_file_only(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    first = listen(path)
    os.unlink(path)
    second = listen(path)
    first.close()
    assert listens(path), "the file of the second one is gone"
    second.close()
    assert not os.path.exists(path)
    second.close()


def test_one_of_several_that_start_at_once_listens(tmp_path: Path) -> None:
    """All find a file without a listener. The winner's file must not be removed by another."""
    for number in range(ROUNDS):
        path = str(tmp_path / f"{number}")
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(path)
        barrier = threading.Barrier(STARTERS)
        winners: list[object] = []
        errors: list[str] = []

        def start(path: str = path, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                winners.append(listen(path))  # noqa: B023 - joined in this round
            except ConfigError as error:
                errors.append(str(error))  # noqa: B023

        threads = [threading.Thread(target=start) for _ in range(STARTERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert len(winners) == 1, f"{len(winners)} listen at one path"
        assert all("already listens" in error for error in errors)
        assert listens(path)
        winners[0].close()  # type: ignore[attr-defined]


def test_a_removed_file_is_made_again(sidecar: ForkedSidecar) -> None:
    """Connected clients keep their connection, new ones find the same blocks."""
    with Client(sidecar.socket, NAMESPACE) as client:
        put(client, HASHES)
        assert client.sync(LIMIT_S)
        for number in (1, 2):
            os.unlink(sidecar.socket)
            wait_until(lambda: listens(sidecar.socket), "the sidecar listens at its path again")
            assert sidecar.stats()["service"]["socket_file_lost"] == number
            with Client(sidecar.socket, NAMESPACE) as late:
                assert get(late, HASHES)[0] == [content(name) for name in HASHES]
        assert client.connected
        assert client.stats()["connections"] == 1
    assert sidecar.stats()["service"]["socket_file_own"] == 1
    assert sidecar.stop() == 0
    assert not os.path.exists(sidecar.socket)


def test_the_file_of_another_listener_is_left_to_it(sidecar: ForkedSidecar, tmp_path: Path) -> None:
    with Client(sidecar.socket, NAMESPACE) as client:
        put(client, HASHES)
        os.unlink(sidecar.socket)
        with socket.socket(socket.AF_UNIX) as other:
            # As quick as the sidecar's look is rare. If it looked in between, take it again.
            while True:
                with contextlib.suppress(OSError):
                    other.bind(sidecar.socket)
                    other.listen()
                    break
                os.unlink(sidecar.socket)
            log = tmp_path / "log"
            wait_until(
                lambda: "new clients cannot reach" in log.read_text(), "the sidecar has noticed"
            )
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{sidecar.url}/readyz", timeout=LIMIT_S)
            taken = os.stat(sidecar.socket).st_ino
            # The sidecar serves those that are connected.
            assert get(client, HASHES)[0] == [content(name) for name in HASHES]
            assert sidecar.stop() == 0
            assert os.stat(sidecar.socket).st_ino == taken
        os.unlink(sidecar.socket)
