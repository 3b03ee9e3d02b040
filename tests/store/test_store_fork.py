"""A forked child of a process with an embedded store: nothing works there, and nothing is sealed,
deleted or written."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_rig import IGNORE_FORK_WARNING, in_child, in_process
from store_rig import SLOT_BYTES, SPACE, fill, hashes, key_of, load, match, save

import kvstore
from kvstore.errors import KVStoreError, StoreClosed
from kvstore.interface import Load, Save
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.testing.processes import Child

pytestmark = pytest.mark.filterwarnings(IGNORE_FORK_WARNING)

PROGRAM = Path(__file__).with_name("fork_program.py")
SLOTS = 64
MINE, OTHERS = hashes(40, "mine"), hashes(60, "others")

FORKS = [pytest.param(in_child, id="os.fork"), pytest.param(in_process, id="multiprocessing")]


def open_store(directory: Path) -> Store:
    return kvstore.open(
        l2=SLOTS * SLOT_BYTES, slot_bytes=SLOT_BYTES, disk=directory, disk_capacity="32MiB"
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "disk") as made:
        yield made


@pytest.mark.parametrize("how", ["close", "exit", "process", "live", "idle"])
def test_what_is_acknowledged_after_a_child_has_closed_survives_a_kill(
    tmp_path: Path, how: str
) -> None:
    directory = tmp_path / "disk"
    argv = [sys.executable, str(PROGRAM), str(directory), how]
    parent = Child(argv, ready=lambda line: line.startswith("child "))
    child = int(parent.wait_ready().split()[1])
    try:
        parent.kill()
        with open_store(directory) as store, store.session(SPACE) as session:
            found = 0
            for label, count in (("before", 20), ("after", 100)):
                for name in hashes(count, label):
                    found += len(match(session, [name]))
                    session.release(load(session, [name]))  # which compares its bytes
            assert found == 120, f"{120 - found} acknowledged blocks are lost"
    finally:
        if how in ("live", "idle"):
            os.kill(child, signal.SIGKILL)


def use(store: Store, session: Session, lease: Load, filling: Save) -> dict[str, Any]:
    """Every operation, in a child. Returns what each gave."""
    given = [session.match(MINE), session.load(MINE), session.save(OTHERS)]
    session.commit(filling)
    session.release(lease)
    session.poll(0.1)
    assert session.slab is None
    calls: dict[str, Callable[[], Any]] = {
        "session": lambda: store.session(SPACE),
        "clear": store.clear,
        "pin": lambda: store.pin(SPACE.digest, MINE),
        "unpin": lambda: store.unpin(SPACE.digest, MINE),
        "namespaces": store.namespaces,
        "stats": store.stats,
        "session stats": session.stats,
        "warm": lambda: store.warmer.warm(1.0),
        "frame": lambda: store.frames.contains([key_of(session, MINE[0])]),
        "slot": lambda: store.slab.view(0),
        "slot of an operation": lambda: session.slab_of(lease).view(lease.slots[0]),
    }
    said = {}
    for name, call in calls.items():
        try:
            said[name] = repr(call())
        except StoreClosed as error:
            said[name] = "StoreClosed" if "fork" in str(error) else str(error)
    said["keys"] = "StoreClosed"
    with contextlib.suppress(KVStoreError):
        said["keys"] = repr(next(iter(store.iter_tier_keys() or ())))
    flushed = store.flush(0.1)
    assert "fork" in repr(store)
    session.close()
    store.close()
    return {
        "operations": [
            (each.done, "fork" in each.fault, len(getattr(each, "slots", ()))) for each in given
        ],
        "flushed": flushed,
        **said,
    }


@pytest.mark.parametrize("fork", FORKS)
def test_no_operation_works_in_a_child(
    store: Store, fork: Callable[[Callable[[], Any]], Any]
) -> None:
    session = store.session(SPACE)
    save(session, MINE)
    lease = load(session, MINE[:10])
    filling = session.save(OTHERS[:4])
    said = fork(lambda: use(store, session, lease, filling))
    assert said.pop("operations") == [[True, True, 0]] * 3
    assert not said.pop("flushed")
    assert set(said.values()) == {"StoreClosed"}, said
    # The parent has everything: its leases, its blocks in L2 and on disk.
    fill(session, filling)
    session.commit(filling)
    session.release(lease)
    session.release(load(session, [*MINE, *OTHERS[:4]]))
    assert store.flush(60.0)
    store.clear("l2")
    for name in [*MINE, *OTHERS[:4]]:
        assert match(session, [name]) == ["disk"]
        session.release(load(session, [name]))


def test_a_child_does_not_write_into_the_blocks_of_its_parent(store: Store) -> None:
    """The slab is shared memory. The child's tables are a copy, so the slots that they give to the
    child's saves are those of the parent's blocks."""

    def write() -> int:
        try:
            operation = session.save(OTHERS)
            fill(session, operation)
            session.commit(operation)
        except KVStoreError:
            return 0
        return len(operation.slot_assignments)

    session = store.session(SPACE)
    save(session, MINE)
    assert store.flush(60.0)
    written = in_child(write)
    operation = session.load(MINE)
    assert len(operation.slots) == len(MINE)
    session.release(load(session, MINE))  # which compares their bytes
    session.release(operation)
    assert written == 0


def test_a_child_does_not_wait_for_a_lock_that_was_taken(store: Store) -> None:
    """The thread that has the lock does not exist in the child."""
    session = store.session(SPACE)
    save(session, MINE)
    lease = load(session, MINE[:10])
    filling = session.save(OTHERS[:4])
    # Re-entrant for this thread, which is the child's only one: so another thread takes it.
    with held_by_another_thread(store.manager.lock):
        said = in_child(lambda: use(store, session, lease, filling))
    assert said["operations"] == [[True, True, 0]] * 3
    session.commit(filling)
    session.release(lease)


@contextlib.contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    taken, go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            go.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60.0)
    try:
        yield
    finally:
        go.set()
        thread.join()


def test_the_memory_of_a_closed_store_is_freed_while_a_child_lives(tmp_path: Path) -> None:
    """Neither the slab nor a deleted segment stays because a child has it open."""

    def open_files() -> list[str]:
        paths = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if _exists(entry)]
        maps = Path("/proc/self/maps").read_text()
        return [p for p in [*paths, *maps.split()] if "kvstore-slab" in p or ".kvseg" in p]

    before = in_child(open_files)  # of other tests in this process
    with open_store(tmp_path / "disk") as store, store.session(SPACE) as session:
        save(session, MINE)
        assert store.flush(60.0)
        assert len(open_files()) > len(before)
        assert in_child(open_files) == before


def _exists(entry: os.DirEntry[str]) -> bool:
    return os.path.lexists(entry.path)
