"""The sidecar's own KV events: names, counts, and a second sidecar that follows the first."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidecar_rig import NAMESPACE, SLOTS, ForkedSidecar

import kvstore
from kvstore.blocks.key import Key
from kvstore.cache.event_queue import L2EventBatch
from kvstore.errors import ConfigError
from kvstore.events.codec import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    decode,
    encode,
    short_name,
)
from kvstore.events.engine_index import EngineIndex
from kvstore.events.publisher import BlockNames, name_of
from kvstore.testing.processes import free_port

LIMIT_S = 30.0


def key(number: int, space: str = "space") -> Key:
    return Key("team", space, number.to_bytes(32, "big"))


def test_names_are_the_ones_of_vllm() -> None:
    assert name_of(key(7)) == (7, 0)
    unit = key(7).hash + (3).to_bytes(4, "big")
    assert name_of(Key("team", "space", unit)) == (7, 3)
    assert name_of(Key("team", "space", bytes(15) + b"\x09" + bytes(3) + b"\x01")) == (9, 1)


def test_a_name_of_two_ranks_is_stored_until_the_last_is_removed() -> None:
    names = BlockNames()
    assert names.events(L2EventBatch([(key(1), True)], is_snapshot=False)) == [
        BlockStored((1,), medium="CPU", group_idx=0)
    ]
    assert names.events(L2EventBatch([(key(1, "other"), True)], is_snapshot=False)) == []
    assert names.events(L2EventBatch([(key(1), False)], is_snapshot=False)) == []
    assert names.events(L2EventBatch([(key(2), True), (key(2), False)], is_snapshot=False)) == []
    assert names.events(L2EventBatch([(key(1, "other"), False)], is_snapshot=False)) == [
        BlockRemoved((1,), "CPU", 0)
    ]
    assert len(names) == 0
    names.events(L2EventBatch([(key(1), True)], is_snapshot=False))
    assert names.events(L2EventBatch([(key(2), True)], is_snapshot=True)) == [
        AllBlocksCleared(),
        BlockStored((2,), medium="CPU", group_idx=0),
    ]


steps = st.lists(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab")), max_size=6))


@given(steps)
def test_an_index_of_the_events_equals_the_contents(told: list[list[tuple[int, str]]]) -> None:
    """Each step toggles some blocks, of two namespaces."""
    names, index = BlockNames(), EngineIndex()
    there: set[Key] = set()
    for number, step in enumerate(told):
        changes = []
        for block, space in step:
            each = key(block, space)
            changes.append((each, each not in there))
            there ^= {each}
        batch = Batch(0.0, tuple(names.events(L2EventBatch(changes, is_snapshot=False))))
        index.apply("node", number, decode(encode(batch)))
    for block in range(6):
        held = any(key(block, space) in there for space in "ab")
        assert index.prefix_lengths([block]) == ({"node": {"CPU": 1}} if held else {})


def wait_until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.02)


def save(socket: str, numbers: range) -> None:
    client = kvstore.connect(socket, NAMESPACE)
    ticket = client.save([number.to_bytes(32, "big") for number in numbers])
    wait_until(lambda: client.poll(0.1) is not None and ticket.done)
    client.commit(ticket)
    assert client.sync(LIMIT_S)
    client.close()


def test_an_index_follows_a_sidecar(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    from kvstore.events.zmq import Subscriber

    port = free_port()
    here = f"tcp://127.0.0.1:{port}"
    sidecar = ForkedSidecar(tmp_path, {"server": {"kv_events_publish": f"tcp://*:{port}"}})
    index = EngineIndex()
    listener = Subscriber([here], index)
    saved = 0

    def heard() -> bool:  # events before the subscription are lost
        nonlocal saved
        save(sidecar.socket, range(saved, saved + 4))
        saved += 4
        time.sleep(0.1)
        return index.prefix_lengths(list(range(saved - 4, saved))) == {here: {"CPU": 4}}

    wait_until(heard)
    newest = range(1000, 1000 + SLOTS // 2)
    for numbers in (range(500, 500 + SLOTS // 2), newest):
        save(sidecar.socket, numbers)
    wait_until(lambda: index.prefix_lengths([newest[0]]) == {here: {"CPU": 1}})
    wait_until(lambda: index.prefix_lengths([saved - 1]) == {})
    wait_until(
        lambda: index.snapshot()["blocks"] <= sidecar.stats()["l2_events"]["blocks"] <= SLOTS
    )
    assert short_name(newest[0].to_bytes(32, "big")) == newest[0]
    assert sidecar.stop() == 0
    listener.close()


def test_wrong_settings_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    for server, said in (
        ({"kv_events_publish": "nonsense"}, "nonsense"),
        ({"kv_events_replay": "tcp://*:0"}, "requires server.kv_events_publish"),
    ):
        with pytest.raises(ConfigError, match=said):
            serve_with(tmp_path, server)


def serve_with(folder: Path, server: dict[str, str]) -> None:
    from kvstore.config.settings import Settings
    from kvstore.service.main import serve

    overrides = {
        "l2": {"bytes": "1MiB", "slot_bytes": "4KiB"},
        "server": {"socket": str(folder / "kv.sock"), "port": 0, **server},
    }
    serve(Settings.load(None, overrides, environment=False), lambda line: None)
