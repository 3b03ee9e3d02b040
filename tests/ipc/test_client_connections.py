"""A client unmaps the slab of a lost sidecar, and reconnects when it cannot start a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    SLOTS,
    ForkedSidecar,
    hashes_of,
    put,
    until_done,
    wait_until,
)

from kvstore.ipc.client import Client
from kvstore.shm.slab import Slab

HASHES = hashes_of("connection", 4)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path)
    yield made
    made.kill()


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Starting a thread fails in this process, because the stack size is too large."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_no_operation_unmaps_a_lost_slab(sidecar: ForkedSidecar) -> None:
    """Unmapping a large slab takes seconds. Neither the engine nor the next connection waits."""
    go = threading.Event()
    unmapping: list[threading.Thread] = []

    def before_unmapping() -> None:
        unmapping.append(threading.current_thread())
        assert go.wait(LIMIT_S)

    with Client(sidecar.socket, NAMESPACE) as client:
        save = until_done(client, client.save(HASHES))
        old = client.slab_of(save)
        assert isinstance(old, Slab)
        old.before_unmapping(before_unmapping)
        sidecar.kill()
        wait_until(lambda: not client.connected, "the client has noticed")
        timer = threading.Timer(LIMIT_S / 4, go.set)  # ends a release that waits, late
        timer.start()
        client.release(save)
        assert not go.is_set(), "release waited for the unmapping"
        wait_until(lambda: bool(unmapping), "the slab is being unmapped")
        assert threading.current_thread() not in unmapping
        sidecar.start()
        wait_until(lambda: client.connected, "the client reconnects meanwhile")
        assert put(client, HASHES) == len(HASHES)
        assert not go.is_set()
        timer.cancel()
        go.set()
        wait_until(lambda: not unmapping[0].is_alive(), "the old connection's thread has ended")
    assert sidecar.stop() == 0


def test_a_lost_slab_without_open_operations_is_unmapped(sidecar: ForkedSidecar) -> None:
    unmapped = threading.Event()
    with Client(sidecar.socket, NAMESPACE) as client:
        slab = client.slab
        assert isinstance(slab, Slab)
        slab.before_unmapping(unmapped.set)
        sidecar.kill()
        assert unmapped.wait(LIMIT_S)


def test_close_has_unmapped_every_slab(sidecar: ForkedSidecar) -> None:
    unmapped: list[int] = []
    client = Client(sidecar.socket, NAMESPACE)
    until_done(client, client.save(HASHES))
    for number in range(2):
        slab = client.slab
        assert isinstance(slab, Slab)
        slab.before_unmapping(lambda number=number: unmapped.append(number))
        if not number:
            sidecar.kill()
            sidecar.start()
            wait_until(lambda: client.connected, "the client has reconnected")
    assert unmapped == [], "an operation has slots of the first, and the second is in use"
    client.close()
    assert sorted(unmapped) == [0, 1]
    assert sidecar.stats()["l2"]["slots_free"] == SLOTS


def test_a_client_that_cannot_start_a_thread_reconnects_later(sidecar: ForkedSidecar) -> None:
    with Client(sidecar.socket, NAMESPACE) as client:
        with no_more_threads():
            sidecar.kill()
            sidecar.start()
            wait_until(
                lambda: "cannot start a thread" in client.stats()["disconnect_reason"],
                "the connection fails",
            )
            assert client.match(HASHES).done
        wait_until(lambda: client.connected, "the client has reconnected")
        assert put(client, HASHES) == len(HASHES)
    assert sidecar.stop() == 0


def test_close_with_a_full_socket_releases_the_leases(sidecar: ForkedSidecar) -> None:
    """The sidecar hangs with its socket full. GOODBYE waits in this process and must arrive."""
    with Client(sidecar.socket, NAMESPACE) as client:
        wait_until(lambda: client.connected, "connected")
        save = until_done(client, client.save(HASHES))
        assert len(save.slot_assignments) == len(HASHES)
        sidecar.suspend()
        client.match(hashes_of("more than a socket holds", 60_000))
    sidecar.resume()
    wait_until(lambda: sidecar.stats()["l2"]["slots_free"] == SLOTS, "every slot is free again")
    assert sidecar.stop() == 0
