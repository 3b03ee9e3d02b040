"""How a client lets go of a lost sidecar's slab, and what it does when it cannot have a new one."""

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

HASHES = hashes_of("link", 4)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path)
    yield made
    made.kill()


@contextmanager
def no_more_threads() -> Iterator[None]:
    """The system starts no thread of this process: none has room for such a stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_no_verb_unmaps_a_lost_slab(sidecar: ForkedSidecar) -> None:
    """Unmapping takes seconds for a large slab: neither the engine nor the next link waits."""
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
        timer = threading.Timer(LIMIT_S / 4, go.set)  # lets a release that waits come back, late
        timer.start()
        client.release(save)
        assert not go.is_set(), "release waited for the unmapping"
        wait_until(lambda: bool(unmapping), "the slab is being unmapped")
        assert threading.current_thread() not in unmapping
        sidecar.start()
        wait_until(lambda: client.connected, "the next link is there meanwhile")
        assert put(client, HASHES) == len(HASHES)
        assert not go.is_set()
        timer.cancel()
        go.set()
        wait_until(lambda: not unmapping[0].is_alive(), "the old link's thread has ended")
    assert sidecar.stop() == 0


def test_a_slab_lost_while_nothing_is_out_is_let_go_of(sidecar: ForkedSidecar) -> None:
    gone = threading.Event()
    with Client(sidecar.socket, NAMESPACE) as client:
        slab = client.slab
        assert isinstance(slab, Slab)
        slab.before_unmapping(gone.set)
        sidecar.kill()
        assert gone.wait(LIMIT_S)


def test_close_has_unmapped_every_slab(sidecar: ForkedSidecar) -> None:
    gone: list[int] = []
    client = Client(sidecar.socket, NAMESPACE)
    until_done(client, client.save(HASHES))
    for number in range(2):
        slab = client.slab
        assert isinstance(slab, Slab)
        slab.before_unmapping(lambda number=number: gone.append(number))
        if not number:
            sidecar.kill()
            sidecar.start()
            wait_until(lambda: client.connected, "the client is back")
    assert gone == [], "a ticket names slots of the first, and the second is in use"
    client.close()
    assert sorted(gone) == [0, 1]
    assert sidecar.stats()["l2"]["slots_free"] == SLOTS


def test_a_client_without_a_thread_to_spare_dials_again(sidecar: ForkedSidecar) -> None:
    with Client(sidecar.socket, NAMESPACE) as client:
        with no_more_threads():
            sidecar.kill()
            sidecar.start()
            wait_until(lambda: "no thread" in client.stats()["away"], "it cannot have a link")
            assert client.match(HASHES).done
        wait_until(lambda: client.connected, "it has one when it can")
        assert put(client, HASHES) == len(HASHES)
    assert sidecar.stop() == 0


def test_a_close_behind_a_backlog_gives_the_leases_back(sidecar: ForkedSidecar) -> None:
    """The sidecar hangs with its socket full: BYE waits in this process, and must still arrive."""
    with Client(sidecar.socket, NAMESPACE) as client:
        wait_until(lambda: client.connected, "joined")
        save = until_done(client, client.save(HASHES))
        assert len(save.grants) == len(HASHES)
        sidecar.suspend()
        client.match(hashes_of("more than a socket holds", 60_000))
    sidecar.resume()
    wait_until(lambda: sidecar.stats()["l2"]["slots_free"] == SLOTS, "every slot is free again")
    assert sidecar.stop() == 0
