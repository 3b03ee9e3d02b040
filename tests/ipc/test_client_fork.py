"""A forked child of a client's process: no operation works there, and closing only lets go."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fork_rig import IGNORE_FORK_WARNING, in_child, in_process
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    SLOT_BYTES,
    SLOTS,
    ForkedSidecar,
    content,
    fill,
    get,
    hashes_of,
    match,
    put,
    until_done,
    wait_until,
)

from kvstore.interface import Load, Save
from kvstore.ipc.client import Client
from kvstore.testing.processes import Child

pytestmark = pytest.mark.filterwarnings(IGNORE_FORK_WARNING)

BLOCKS = 60
"""Blocks of each client: two of them do not fit into the slab together."""
MINE, OTHERS = hashes_of("mine", BLOCKS), hashes_of("others", BLOCKS)
PROGRAM = Path(__file__).with_name("fork_program.py")
ROUNDS = 20

FORKS = [pytest.param(in_child, id="os.fork"), pytest.param(in_process, id="multiprocessing")]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path)
    yield made
    made.kill()


def wrong_blocks(blocks: list[bytes], hashes: list[bytes]) -> int:
    """Number of blocks that are not the blocks of these hashes."""
    return sum(
        block != content(name) for block, name in zip(blocks, hashes[: len(blocks)], strict=True)
    )


def close(client: Client) -> str:
    client.close()
    return "closed"


def use(client: Client, load: Load, save: Save) -> list[Any]:
    """Every operation of the interface, in a child. Returns what each gave."""
    given = [
        client.match(MINE),
        client.load(MINE),
        client.save(OTHERS),
        client.match(()),
    ]
    client.commit(save)
    client.release(load)
    for operation in given[1:3]:
        client.release(operation)
    client.queue_lookup_report(lambda: MINE)
    polled = client.poll(0.1)
    assert client.slab is None
    assert not client.connected
    assert not client.sync(0.1)
    assert not client.is_absent(MINE[0])
    assert client.block_states(MINE[:2]) == [None, None]
    assert client.cached_prefix_len_packed(b"".join(MINE), 32) is None
    assert client.stats()["connected"] is False
    assert "fork" in client.stats()["disconnect_reason"]
    assert "fork" in repr(client)
    assert not polled or all(operation.done for operation in polled)
    client.close()
    return [
        (each.done, "fork" in each.fault, len(getattr(each, "slots", ()) or ())) for each in given
    ]


@pytest.mark.parametrize("fork", FORKS)
def test_a_close_in_a_child_frees_no_lease_of_its_parent(
    sidecar: ForkedSidecar, fork: Callable[[Callable[[], Any]], Any]
) -> None:
    with (
        Client(sidecar.socket, NAMESPACE) as parent,
        Client(sidecar.socket, NAMESPACE) as other,
    ):
        save = until_done(parent, parent.save(MINE))
        assert len(save.slot_assignments) == BLOCKS
        assert fork(lambda: close(parent)) == "closed"
        given = put(other, OTHERS)
        fill(parent, save)
        got, _ = get(other, OTHERS)
        assert wrong_blocks(got, OTHERS) == 0, f"{wrong_blocks(got, OTHERS)} of {len(got)} wrong"
        # The other client got the slots that were free, and no slot of the parent.
        assert given == len(got) == SLOTS - BLOCKS
        parent.commit(save)
        assert parent.sync(LIMIT_S)
        got, _ = get(other, MINE)
        assert (len(got), wrong_blocks(got, MINE)) == (BLOCKS, 0)
    assert sidecar.stop() == 0


@pytest.mark.parametrize("fork", FORKS)
def test_no_operation_works_in_a_child(
    sidecar: ForkedSidecar, fork: Callable[[Callable[[], Any]], Any]
) -> None:
    with Client(sidecar.socket, NAMESPACE) as parent:
        put(parent, MINE)
        load = until_done(parent, parent.load(MINE[:20]))
        save = until_done(parent, parent.save(OTHERS[:4]))
        assert (len(load.slots), len(save.slot_assignments)) == (20, 4)
        assert fork(lambda: use(parent, load, save)) == [[True, True, 0]] * 4
        # The connection works on, with the leases of both operations.
        numbers = sidecar.stats()["l2"]
        assert (numbers["slots_leased"], numbers["slots_filling"]) == (20, 4)
        assert parent.connected
        fill(parent, save)
        parent.commit(save)
        slab = parent.slab_of(load)
        assert wrong_blocks([bytes(slab.view(slot)[:SLOT_BYTES]) for slot in load.slots], MINE) == 0
        parent.release(load)
        assert parent.sync(LIMIT_S)
        got, _ = get(parent, MINE)
        assert (len(got), wrong_blocks(got, MINE)) == (BLOCKS, 0)
        assert match(parent, OTHERS[:4]) == ["l2"] * 4
        assert parent.stats()["connections"] == 1
    assert sidecar.stop() == 0


class Names(Sequence[int]):
    """A data set whose items a worker of the data loader looks up with the inherited client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __len__(self) -> int:
        return BLOCKS

    def __getitem__(self, index: Any) -> int:
        return len(self._client.match([MINE[index]]).tiers)


@pytest.mark.slow
def test_the_workers_of_a_data_loader(sidecar: ForkedSidecar) -> None:
    data = pytest.importorskip("torch.utils.data")
    with Client(sidecar.socket, NAMESPACE) as parent:
        put(parent, MINE)
        load = until_done(parent, parent.load(MINE))
        loader = data.DataLoader(
            Names(parent), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        assert sum(int(batch.sum()) for batch in loader) == 0
        assert sidecar.stats()["l2"]["slots_leased"] == BLOCKS
        slab = parent.slab_of(load)
        assert wrong_blocks([bytes(slab.view(slot)[:SLOT_BYTES]) for slot in load.slots], MINE) == 0
        parent.release(load)
        assert get(parent, MINE)[1] == ["l2"] * BLOCKS
        assert parent.stats()["connections"] == 1
    assert sidecar.stop() == 0


def test_a_slot_of_an_inherited_operation_is_an_error(sidecar: ForkedSidecar) -> None:
    """A write there would go to the memory that all engines share."""

    def write() -> str:
        errors = []
        for view in (parent.slab_of(save).view, slab.view):
            try:
                view(slot)
            except Exception as error:
                errors.append(str(error))
        return " | ".join(errors)

    with Client(sidecar.socket, NAMESPACE) as parent:
        save = until_done(parent, parent.save(MINE[:1]))
        slab = parent.slab_of(save)
        [(_, slot)] = save.slot_assignments
        said = in_child(write)
        assert said.count("fork") == 2, said
        fill(parent, save)
        parent.commit(save)
        assert get(parent, MINE[:1])[0] == [content(MINE[0])]


def test_a_child_may_open_its_own_client(sidecar: ForkedSidecar) -> None:
    def work() -> list[int]:
        parent.close()
        with Client(sidecar.socket, NAMESPACE) as own:
            got, _ = get(own, MINE)
            return [len(got), wrong_blocks(got, MINE), put(own, OTHERS[:2])]

    with Client(sidecar.socket, NAMESPACE) as parent:
        put(parent, MINE)
        assert parent.sync(LIMIT_S)
        assert in_child(lambda: in_child(work)) == [BLOCKS, 0, 2]
        assert match(parent, OTHERS[:2]) == ["l2"] * 2
    assert sidecar.stop() == 0


def test_a_child_does_not_wait_for_a_lock_that_was_taken(sidecar: ForkedSidecar) -> None:
    """The thread that has the lock does not exist in the child."""
    with Client(sidecar.socket, NAMESPACE) as parent:
        put(parent, MINE[:4])
        load = until_done(parent, parent.load(MINE[:4]))
        save = until_done(parent, parent.save(OTHERS[:4]))
        connection = parent._connection
        assert connection is not None
        with parent._lock, connection._out:
            assert in_child(lambda: use(parent, load, save)) == [[True, True, 0]] * 4
        parent.commit(save)
        parent.release(load)


def test_children_of_a_busy_process(sidecar: ForkedSidecar) -> None:
    """Forks at any moment of the operations of other threads."""
    stop = threading.Event()
    with Client(sidecar.socket, NAMESPACE) as parent:
        put(parent, MINE)

        def work() -> None:
            number = wrong = 0
            while not stop.is_set():
                number += 1
                got, _ = get(parent, MINE[number % 50 :][:10])
                wrong += wrong_blocks(got, MINE[number % 50 :][:10]) + (len(got) != 10)
            counted.append((number, wrong))

        counted: list[tuple[int, int]] = []
        busy = threading.Thread(target=work)
        busy.start()
        try:
            for _ in range(ROUNDS):
                assert in_child(lambda: close(parent)) == "closed"
        finally:
            stop.set()
            busy.join(LIMIT_S)
        [(rounds, wrong)] = counted
        assert rounds > ROUNDS
        assert wrong == 0
        assert parent.stats()["connections"] == 1
    assert sidecar.stop() == 0


def test_the_leases_of_a_killed_process_come_back_while_its_child_lives(
    sidecar: ForkedSidecar,
) -> None:
    with Client(sidecar.socket, NAMESPACE) as client:
        argv = [sys.executable, str(PROGRAM), sidecar.socket]
        parent = Child(argv, ready=lambda line: line.startswith("child "))
        child = int(parent.wait_ready().split()[1])
        try:
            assert sidecar.stats()["l2"]["slots_filling"] == 8
            parent.kill()
            wait_until(lambda: sidecar.stats()["l2"]["slots_filling"] == 0, "its slots are free")
            os.kill(child, 0)  # it lives
            assert put(client, MINE) == BLOCKS
        finally:
            os.kill(child, 9)
    assert sidecar.stop() == 0
