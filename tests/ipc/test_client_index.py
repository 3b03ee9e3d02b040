"""What a client answers from the catalogue is what the sidecar would have said."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import (
    NAMESPACE,
    SLOT_BYTES,
    SLOTS,
    ForkedSidecar,
    content,
    disk,
    get,
    hashes_of,
    match,
    put,
    wait_until,
)

from kvstore.blocks.key import Key
from kvstore.config.settings import merged
from kvstore.ipc import sidecar_connection
from kvstore.ipc.client import Client
from kvstore.service.index_builder import Keeper
from kvstore.shm.shared_index import CatalogView
from kvstore.shm.slab import Slab
from kvstore.store import locator
from kvstore.store.store import Store
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

LIMIT_S = 60.0


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path, disk(tmp_path / "disk"))
    yield made
    made.kill()


def connect(sidecar: ForkedSidecar) -> Client:
    client = Client(sidecar.socket, NAMESPACE, wait_ready_s=LIMIT_S, reply_limit_s=LIMIT_S)
    wait_until(lambda: client.states([b"x" * 32]) == [False], "the catalogue is filled")
    return client


def post(sidecar: ForkedSidecar, path: str) -> Any:
    request = urllib.request.Request(sidecar.url + path, method="POST")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def test_what_commit_acknowledged_the_next_match_sees_without_a_trip(
    sidecar: ForkedSidecar,
) -> None:
    with connect(sidecar) as one, connect(sidecar) as other:
        for number in range(40):
            names = hashes_of(f"turn {number}", 4)
            found = other.match(names)
            assert (found.done, found.tiers) == (True, [])
            put(one, names)
            assert match(one, names) == ["l2"] * 4, "a commit that is still under way is waited for"
            asked = other.stats()["asked"]
            assert other.match(names).tiers == ["l2"] * 4
            assert other.match([*names, b"none" * 8]).tiers == ["l2"] * 4
            assert other.stats()["asked"] == asked
        assert sidecar_connection.SHOWN == locator.L2


def test_a_commit_under_way_leaves_nothing_certain(sidecar: ForkedSidecar) -> None:
    with connect(sidecar) as client:
        sidecar.suspend()
        try:
            save = client.save(hashes_of("late", 2))
            assert client.states([b"z" * 32]) == [False]
            client.commit(save)
            assert client.states([b"z" * 32]) != [False]
            assert not client.match([b"z" * 32]).done
        finally:
            sidecar.resume()
        assert client.sync(LIMIT_S)
        assert client.states([b"z" * 32]) == [False], "it has been handled"


def test_what_left_memory_is_found_on_disk_and_what_left_both_nowhere(
    sidecar: ForkedSidecar,
) -> None:
    names = hashes_of("down", 8)
    with connect(sidecar) as client:
        put(client, names)
        assert post(sidecar, "/v1/flush") == {"flushed": True}
        post(sidecar, "/v1/clear?tier=l2")
        assert match(client, names) == ["disk"] * 8
        assert get(client, names) == ([content(name) for name in names], ["disk"] * 8)
        assert client.match(names).tiers == ["l2"] * 8, "it is back in memory"
        post(sidecar, "/v1/clear?tier=all")
        assert match(client, names) == []
        assert put(client, names) == 8


def test_a_restarted_sidecar_lists_what_its_disk_holds(
    sidecar: ForkedSidecar, tmp_path: Path
) -> None:
    names = hashes_of("again", 8)
    with connect(sidecar) as client:
        put(client, names)
        assert post(sidecar, "/v1/flush") == {"flushed": True}
        sidecar.kill()
        sidecar.start()
        wait_until(lambda: client.connected, "it is back")
        # Listed or not yet: what is there is never said to be nowhere.
        assert match(client, names) == ["disk"] * 8
        wait_until(lambda: client.states([b"x" * 32]) == [False], "listed")
        assert match(client, names) == ["disk"] * 8


def test_evicted_blocks_are_taken_off(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path)
    try:
        with connect(sidecar) as client:
            for number in range(3 * SLOTS):
                put(client, hashes_of("many", number + 1)[-1:])
            assert client.sync(LIMIT_S)
            names = hashes_of("many", 3 * SLOTS)
            there = [bool(client.match([name]).tiers) for name in names]
            assert there == [False] * 2 * SLOTS + [True] * SLOTS
    finally:
        sidecar.kill()


def test_the_order_of_eviction_hears_of_runs_that_were_not_asked_for(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, merged({"l2": {"eviction": "cost"}}, {}))
    try:
        with connect(sidecar) as client:
            assert client.match(hashes_of("run", 5)).done
            put(client, hashes_of("other", 1))
            assert client.sync(LIMIT_S)
            assert sidecar.stats()["l2"]["eviction"]["coming"] == 5
    finally:
        sidecar.kill()


class Foreign(MemoryTier):
    """A tier that others write to."""

    sole_writer = False


@pytest.mark.parametrize(
    ("tiers", "certain"),
    [([], True), ([MemoryTier(1 << 20)], True), ([MemoryTier(1 << 20), Foreign(name="x")], False)],
    ids=["none", "own", "foreign"],
)
def test_absence_is_certain_where_nobody_else_writes(tiers: list[Tier], certain: bool) -> None:
    with Store(Slab.create(SLOTS, SLOT_BYTES), tiers) as store:
        keeper = Keeper(store)
        view = CatalogView(keeper.catalog.fd, keeper.catalog.salt("t", "n"))
        keeper.start()
        if certain:
            wait_until(lambda: view.absent(b"x" * 32), "listed")
        keeper.close()
        assert keeper._started is certain
        assert not view.absent(b"x" * 32)


def test_the_keeper_makes_a_crowded_filter_anew() -> None:
    with Store(Slab.create(8, 4096)) as store:
        keeper = Keeper(store)
        view = CatalogView(keeper.catalog.fd, keeper.catalog.salt("t", "n"))
        keeper.start()
        wait_until(lambda: view.absent(b"x" * 32), "listed")
        gone = hashes_of("gone", keeper.catalog.cells // 6)
        with store.brain.lock:
            for name in gone:
                keeper.catalog.show(Key("t", "n", name))
                keeper.catalog.take_off(Key("t", "n", name))
            assert not view.absent(gone[0])
        wait_until(lambda: view.absent(gone[0]), "made anew")
        keeper.close()
