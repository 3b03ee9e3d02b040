"""A client answers from the shared index exactly as the sidecar would."""

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
from kvstore.config.settings import merge
from kvstore.ipc import sidecar_connection
from kvstore.ipc.client import Client
from kvstore.service.ipc.index_builder import IndexBuilder
from kvstore.shm.shared_index import SharedIndexView
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
    client = Client(
        sidecar.socket, NAMESPACE, connect_timeout_s=LIMIT_S, response_timeout_s=LIMIT_S
    )
    wait_until(lambda: client.block_states([b"x" * 32]) == [False], "the index is filled")
    return client


def post(sidecar: ForkedSidecar, path: str) -> Any:
    request = urllib.request.Request(sidecar.url + path, method="POST")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def test_the_next_match_sees_an_acknowledged_commit_without_a_request(
    sidecar: ForkedSidecar,
) -> None:
    with connect(sidecar) as one, connect(sidecar) as other:
        for number in range(40):
            names = hashes_of(f"turn {number}", 4)
            result = other.match(names)
            assert (result.done, result.tiers) == (True, [])
            put(one, names)
            assert match(one, names) == ["l2"] * 4, "match waits for an unacknowledged commit"
            requests = other.stats()["requests"]
            assert other.match(names).tiers == ["l2"] * 4
            assert other.match([*names, b"none" * 8]).tiers == ["l2"] * 4
            assert other.stats()["requests"] == requests
        assert sidecar_connection.L2 == locator.L2


def test_absence_is_not_certain_during_a_commit(sidecar: ForkedSidecar) -> None:
    with connect(sidecar) as client:
        sidecar.suspend()
        try:
            save = client.save(hashes_of("late", 2))
            assert client.block_states([b"z" * 32]) == [False]
            client.commit(save)
            assert client.block_states([b"z" * 32]) != [False]
            assert not client.match([b"z" * 32]).done
        finally:
            sidecar.resume()
        assert client.sync(LIMIT_S)
        assert client.block_states([b"z" * 32]) == [False], "the commit is acknowledged"


def test_a_block_deleted_from_l2_is_found_on_disk_until_deleted_there_too(
    sidecar: ForkedSidecar,
) -> None:
    names = hashes_of("down", 8)
    with connect(sidecar) as client:
        put(client, names)
        assert post(sidecar, "/v1/flush") == {"flushed": True}
        post(sidecar, "/v1/clear?tier=l2")
        assert match(client, names) == ["disk"] * 8
        assert get(client, names) == ([content(name) for name in names], ["disk"] * 8)
        assert client.match(names).tiers == ["l2"] * 8, "it is in L2 again"
        post(sidecar, "/v1/clear?tier=all")
        assert match(client, names) == []
        assert put(client, names) == 8


def test_a_restarted_sidecar_indexes_its_disk_tier(sidecar: ForkedSidecar, tmp_path: Path) -> None:
    names = hashes_of("again", 8)
    with connect(sidecar) as client:
        put(client, names)
        assert post(sidecar, "/v1/flush") == {"flushed": True}
        sidecar.kill()
        sidecar.start()
        wait_until(lambda: client.connected, "reconnected")
        # Before and after the indexing, an existing block is never reported as absent.
        assert match(client, names) == ["disk"] * 8
        wait_until(lambda: client.block_states([b"x" * 32]) == [False], "indexed")
        assert match(client, names) == ["disk"] * 8


def test_evicted_blocks_leave_the_index(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path)
    try:
        with connect(sidecar) as client:
            for number in range(3 * SLOTS):
                put(client, hashes_of("many", number + 1)[-1:])
            assert client.sync(LIMIT_S)
            names = hashes_of("many", 3 * SLOTS)
            hits = [bool(client.match([name]).tiers) for name in names]
            assert hits == [False] * 2 * SLOTS + [True] * SLOTS
    finally:
        sidecar.kill()


def test_the_eviction_policy_learns_of_locally_answered_lookups(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, merge({"l2": {"eviction": "gdsf"}}, {}))
    try:
        with connect(sidecar) as client:
            assert client.match(hashes_of("run", 5)).done
            put(client, hashes_of("other", 1))
            assert client.sync(LIMIT_S)
            assert sidecar.stats()["l2"]["eviction"]["lookup_positions"] == 5
    finally:
        sidecar.kill()


class Foreign(MemoryTier):
    """A tier that other processes write to."""

    sole_writer = False


@pytest.mark.parametrize(
    ("tiers", "certain"),
    [([], True), ([MemoryTier(1 << 20)], True), ([MemoryTier(1 << 20), Foreign(name="x")], False)],
    ids=["none", "own", "foreign"],
)
def test_absence_is_certain_without_foreign_writers(tiers: list[Tier], certain: bool) -> None:
    with Store(Slab.create(SLOTS, SLOT_BYTES), tiers) as store:
        builder = IndexBuilder(store)
        view = SharedIndexView(builder.index.fd, builder.index.seed("t", "n"))
        builder.start()
        if certain:
            wait_until(lambda: view.is_absent(b"x" * 32), "indexed")
        builder.close()
        assert builder._started is certain
        assert not view.is_absent(b"x" * 32)


def test_the_index_builder_rebuilds_a_full_filter() -> None:
    with Store(Slab.create(8, 4096)) as store:
        builder = IndexBuilder(store)
        view = SharedIndexView(builder.index.fd, builder.index.seed("t", "n"))
        builder.start()
        wait_until(lambda: view.is_absent(b"x" * 32), "indexed")
        gone = hashes_of("gone", builder.index.cells // 6)
        with store.manager.lock:
            for name in gone:
                builder.index.insert(Key("t", "n", name))
                builder.index.remove(Key("t", "n", name))
            assert not view.is_absent(gone[0])
        wait_until(lambda: view.is_absent(gone[0]), "the filter is rebuilt")
        builder.close()
