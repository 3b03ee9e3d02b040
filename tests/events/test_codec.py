"""KV events: recorded messages of vLLM, both encodings, the index, and the sockets."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, FrameInvalid
from kvstore.events.codec import (
    MAX_EVENTS,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    decode,
    encode,
    short_name,
)
from kvstore.events.engine_index import MAX_MEDIA, EngineIndex

DATA = json.loads((Path(__file__).parents[1] / "data" / "vllm_kv_events.json").read_text())
LIMIT_S = 30.0

names = st.integers(0, 2**64 - 1) | st.binary(min_size=32, max_size=32)
small = st.none() | st.integers(0, 9)
words = st.none() | st.text(max_size=5)
stored = st.builds(
    BlockStored,
    block_hashes=st.lists(names, max_size=4).map(tuple),
    parent_block_hash=st.none() | names,
    token_ids=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    block_size=st.integers(0, 64),
    lora_id=small,
    medium=words,
    lora_name=words,
    group_idx=small,
    kv_cache_spec_kind=words,
    kv_cache_spec_sliding_window=small,
    locality=words,
    ownership=words,
    session_id=words,
)
removed = st.builds(
    BlockRemoved,
    block_hashes=st.lists(names, max_size=4).map(tuple),
    medium=words,
    group_idx=small,
)
batches = st.builds(
    Batch,
    time_s=st.floats(0, 1e10),
    events=st.lists(stored | removed | st.just(AllBlocksCleared()), max_size=4).map(tuple),
    data_parallel_rank=small,
)


@pytest.mark.parametrize("message", DATA, ids=lambda message: f"batch {message['seq']}")
def test_recorded_messages_of_vllm_round_trip(message: dict[str, Any]) -> None:
    sent = msgpack.packb(message["decoded"])
    batch = decode(sent)
    (event,) = batch.events
    told = message["decoded"][1][0]
    assert isinstance(event, BlockStored)
    assert list(event.block_hashes) == told["block_hashes"]
    assert (event.block_size, event.medium, event.group_idx) == (32, "GPU", 0)
    assert len(event.token_ids) == 32 * len(event.block_hashes)
    assert encode(batch).startswith(bytes.fromhex(message["raw_first_bytes"]))


def test_the_older_arrays_decode_to_the_same_events() -> None:
    older = [
        1.5,
        [
            ["BlockStored", [1, 2], 7, [5, 6], 1, None, "GPU"],
            ["BlockStored", [3], None, [8], 1, None, "CPU", "lora", None, 2],
            ["BlockRemoved", [1], "GPU"],
            ["AllBlocksCleared"],
        ],
    ]
    assert decode(msgpack.packb(older)) == Batch(
        1.5,
        (
            BlockStored((1, 2), 7, (5, 6), 1, None, "GPU"),
            BlockStored((3,), None, (8,), 1, None, "CPU", "lora", group_idx=2),
            BlockRemoved((1,), "GPU"),
            AllBlocksCleared(),
        ),
    )


@given(batches)
def test_batches_round_trip(batch: Batch) -> None:
    assert decode(encode(batch)) == batch


def test_unknown_fields_and_kinds_are_ignored() -> None:
    newer = [0, [{"type": "BlockMoved", "x": 1}, {"type": "BlockRemoved", "block_hashes": [1],
                                                  "medium": None, "colour": "red"}], 3]  # fmt: skip
    assert decode(msgpack.packb(newer)) == Batch(0.0, (BlockRemoved((1,)),), 3)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb({"a": 1}),
        msgpack.packb([1.0]),
        msgpack.packb(["x", []]),
        msgpack.packb([1.0, [], "rank"]),
        msgpack.packb([1.0, [7]]),
        msgpack.packb([1.0, [[]]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved"}]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": "ab"}]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": [1.5]}]]),
        msgpack.packb([1.0, [{"type": "BlockStored", "block_hashes": [1], "medium": ["GPU"]}]]),
        msgpack.packb([1.0, [{"type": "BlockStored", "block_hashes": [1], "group_idx": "0"}]]),
        msgpack.packb([1.0, [["BlockStored", [1], 2.5]]]),
        msgpack.packb([1.0, [["BlockRemoved"]]]),
        msgpack.packb([1.0, [["AllBlocksCleared"]] * (MAX_EVENTS + 1)]),
        b"\x92\x01\x91\x81\x80\x01",  # [1, [{{}: 1}]]
    ],
)
def test_an_invalid_batch_is_one_line(payload: bytes) -> None:
    with pytest.raises(FrameInvalid) as caught:
        decode(payload)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=64))
def test_random_bytes_raise_only_frame_invalid(payload: bytes) -> None:
    try:
        decode(payload)
    except FrameInvalid:
        return


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
anything = st.recursive(
    scalars | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=8,
)
kinds = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])
field_names = sorted({each.name for each in fields(BlockStored)})
maps = st.builds(
    lambda kind, right, wrong: {"type": kind, "block_hashes": [1], **right, **wrong},
    kinds,
    stored.map(lambda event: dict(vars(event))),
    st.dictionaries(st.sampled_from(field_names) | st.just("type"), anything, max_size=2),
)
arrays = st.builds(lambda kind, rest: [kind, *rest], kinds | anything, st.lists(anything))


@given(st.lists(maps | arrays | anything, max_size=3), anything)
def test_random_events_raise_only_frame_invalid(told: list[Any], rank: Any) -> None:
    index = EngineIndex()
    for parts in ([1.0, told], [1.0, told, rank]):
        try:
            read = decode(msgpack.packb(parts))
        except FrameInvalid:
            continue
        index.apply("a", 0, read)
        index.snapshot()


def test_both_forms_of_a_name_are_equal() -> None:
    assert short_name(bytes(24) + (9).to_bytes(8, "big")) == short_name(9) == 9


# The index.


def batch(*events: Any) -> Batch:
    return Batch(0.0, events)


def test_blocks_stay_indexed_until_they_are_removed() -> None:
    index = EngineIndex()
    index.apply("a", 5, batch(BlockStored((1, 2, 3)), BlockStored((1,), medium="CPU")))
    index.apply("b", 0, batch(BlockStored((1, 9))))
    assert index.prefix_lengths([1, 2, 3, 4]) == {"a": {"GPU": 3, "CPU": 1}, "b": {"GPU": 1}}
    index.apply("a", 6, batch(BlockRemoved((2,), "GPU")))
    assert index.prefix_lengths([1, 2, 3]) == {"a": {"GPU": 1, "CPU": 1}, "b": {"GPU": 1}}
    index.apply("a", 7, batch(AllBlocksCleared()))
    assert index.prefix_lengths([1, 2, 3]) == {"b": {"GPU": 1}}
    index.remove_engine("b")
    assert index.prefix_lengths([1]) == {}
    assert index.snapshot()["blocks"] == 0


def test_groups_are_separate() -> None:
    index = EngineIndex()
    index.apply("a", 0, batch(BlockStored((1,), group_idx=1)))
    assert index.prefix_lengths([1]) == {}
    assert index.prefix_lengths([1], group=1) == {"a": {"GPU": 1}}


def test_a_gap_clears_the_engines_blocks() -> None:
    index = EngineIndex()
    index.apply("a", 0, batch(BlockStored((1,))))
    index.apply("a", 2, batch(BlockStored((2,))))
    assert index.prefix_lengths([1]) == {}
    assert index.prefix_lengths([2]) == {"a": {"GPU": 1}}
    assert index.snapshot()["gaps"] == 1


def test_the_index_is_bounded() -> None:
    index = EngineIndex(max_blocks=2)
    index.apply("a", 0, batch(BlockStored((1, 2, 3))))
    assert index.snapshot()["blocks"] == 2
    assert index.snapshot()["not_indexed"] == 1
    index.apply("a", 1, batch(BlockRemoved((1, 7))))
    index.apply("b", 0, batch(BlockStored((3,))))
    assert index.snapshot()["blocks"] == 2


def test_media_are_bounded() -> None:
    index = EngineIndex()
    for number in range(MAX_MEDIA + 3):
        index.apply("a", 2 * number, batch(BlockStored((1,), medium=f"m{number}")))
        index.apply("a", 2 * number + 1, batch(BlockRemoved((1,), medium=f"n{number}")))
    assert index.snapshot()["blocks"] == MAX_MEDIA
    assert index.snapshot()["not_indexed"] == 3


events = st.lists(
    st.tuples(st.sampled_from("ab"), stored | removed | st.just(AllBlocksCleared())), max_size=20
)


@given(events)
def test_the_index_equals_a_set_of_triples(told: list[tuple[str, Any]]) -> None:
    index, model = EngineIndex(), set()
    numbers = {"a": 0, "b": 0}
    for engine, event in told:
        index.apply(engine, numbers[engine], batch(event))
        numbers[engine] += 1
        if isinstance(event, AllBlocksCleared):
            model = {each for each in model if each[0] != engine}
            continue
        these = {
            (engine, event.medium or "GPU", short_name(name), event.group_idx or 0)
            for name in event.block_hashes
        }
        model = model | these if isinstance(event, BlockStored) else model - these
    assert index.snapshot()["blocks"] == len(model)
    for engine, medium, name, group in model:
        assert index.prefix_lengths([name], group)[engine][medium] == 1


# The sockets.

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")


def wait_until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.005)


def test_events_of_engines_reach_the_index() -> None:
    from kvstore.events.zmq import Publisher, Subscriber

    index = EngineIndex()
    engines = [Publisher("tcp://127.0.0.1:*", topic="kv") for _ in range(2)]
    listener = Subscriber([engine.endpoint for engine in engines], index, topic="kv")
    for number, engine in enumerate(engines):
        # A subscription takes a moment. Until then nothing is sent to it.
        def heard(engine: Publisher = engine, number: int = number) -> bool:
            engine.publish(batch(BlockStored((100 + number,))))
            return engine.endpoint in index.prefix_lengths([100 + number])

        wait_until(heard)
    engines[0].publish(batch(AllBlocksCleared()))
    wait_until(lambda: index.prefix_lengths([100]) == {})
    assert index.prefix_lengths([101]) == {engines[1].endpoint: {"GPU": 1}}
    listener.close()
    for engine in engines:
        engine.close()


def test_a_disconnected_engine_has_no_blocks() -> None:
    """And a new engine at its endpoint is indexed."""
    from kvstore.events.zmq import Publisher, Subscriber

    index = EngineIndex()
    first, other = (Publisher("tcp://127.0.0.1:*") for _ in range(2))
    endpoint = first.endpoint
    listener = Subscriber([endpoint, other.endpoint], index)

    def held(engine: Publisher, name: int) -> bool:
        engine.publish(batch(BlockStored((name,))))
        return engine.endpoint in index.prefix_lengths([name])

    wait_until(lambda: held(first, 1))
    wait_until(lambda: held(other, 1))
    first.close()
    wait_until(lambda: endpoint not in index.prefix_lengths([1]))
    assert index.snapshot()["engines"] == {other.endpoint: {"GPU": 1}}
    again = Publisher(endpoint)
    wait_until(lambda: held(again, 2))
    assert index.prefix_lengths([1]) == {other.endpoint: {"GPU": 1}}
    listener.close()
    for engine in (again, other):
        engine.close()


MALFORMED = [
    [1.0, [{}, 1]],
    [1.0, [[{}, 1]]],
    [1.0, [{"type": {}}, {"type": "BlockStored"}]],
    [1.0, [{"type": "BlockStored", "block_hashes": [1], "medium": {}}]],
]


def test_invalid_messages_are_skipped() -> None:
    from kvstore.events.zmq import Subscriber

    index = EngineIndex()
    context = zmq.Context()
    raw = context.socket(zmq.PUB)
    raw.bind("tcp://127.0.0.1:*")
    endpoint = raw.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\x00")
    listener = Subscriber([endpoint], index)
    number = 0

    def heard() -> bool:
        nonlocal number
        raw.send_multipart([b"kv", b"short", b"x"])
        raw.send_multipart([b"kv"])
        for rubbish in (b"\xc1", b"\x92\x01\x91\x81\x80\x01", *map(msgpack.packb, MALFORMED)):
            raw.send_multipart([b"kv", number.to_bytes(8, "big"), rubbish])
        good = encode(batch(BlockStored((1,))))
        raw.send_multipart([b"kv", number.to_bytes(8, "big"), good])
        number += 1
        return bool(index.prefix_lengths([1]))

    wait_until(heard)
    listener.close()
    raw.close(linger=0)
    context.term()


def test_an_error_in_one_message_does_not_end_the_subscriber() -> None:
    from kvstore.events.zmq import Publisher, Subscriber

    class Faulty(EngineIndex):
        errors = 0

        def apply(self, engine: str, number: int, batch: Batch) -> None:
            super().apply(engine, number, batch)
            if batch.data_parallel_rank == 7:
                self.errors += 1
                raise RuntimeError("an internal error")

    index = Faulty()
    engine = Publisher("tcp://127.0.0.1:*")
    listener = Subscriber([engine.endpoint], index)

    def failed() -> bool:
        engine.publish(Batch(0.0, (BlockStored((1,)),), 7))
        return index.errors > 0

    wait_until(failed)
    engine.publish(batch(BlockStored((2,))))
    wait_until(lambda: bool(index.prefix_lengths([2])))
    assert index.prefix_lengths([1]) == {}
    listener.close()
    engine.close()


def test_lost_batches_can_be_requested() -> None:
    from kvstore.events.zmq import Publisher

    engine = Publisher("tcp://127.0.0.1:*", topic="kv", replay="tcp://127.0.0.1:*")
    sent = [batch(BlockStored((number,))) for number in range(4)]
    for each in sent:
        engine.publish(each)
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(engine.replay_endpoint)
    asking.send_multipart([b"", (2).to_bytes(8, "big")])
    found = []
    while asking.poll(LIMIT_S * 1000):
        *_, number, payload = asking.recv_multipart()
        if number == (-1).to_bytes(8, "big", signed=True):
            break
        found.append((int.from_bytes(number, "big"), decode(payload)))
    assert found == [(2, sent[2]), (3, sent[3])]
    asking.close(linger=0)
    context.term()
    engine.close()


def test_an_invalid_endpoint_is_one_line() -> None:
    from kvstore.events.zmq import Publisher, Subscriber

    with pytest.raises(ConfigError, match="nonsense"):
        Subscriber(["nonsense"], EngineIndex())
    with pytest.raises(ConfigError, match="nonsense"):
        Publisher("nonsense")


def test_a_sidecar_indexes_what_engines_publish(tmp_path: Path) -> None:
    from sidecar_rig import ForkedSidecar

    from kvstore.events.zmq import Publisher

    engine = Publisher("tcp://127.0.0.1:*", topic="kv")
    names = [bytes([n]) * 32 for n in range(3)]
    sidecar = ForkedSidecar(tmp_path, {"server": {"kv_events": [engine.endpoint]}})

    def ask(body: Any) -> Any:
        request = urllib.request.Request(
            f"{sidecar.url}/v1/engines", json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)

    body = {"hashes": [name.hex() for name in names]}

    def heard() -> bool:
        engine.publish(batch(BlockStored(tuple(short_name(name) for name in names[:2]))))
        return bool(ask(body)["prefix_blocks"])

    wait_until(heard)
    assert ask(body) == {"prefix_blocks": {engine.endpoint: {"GPU": 2}}}
    assert ask({**body, "group": 1}) == {"prefix_blocks": {}}
    for wrong in ({}, {"hashes": [], "colour": 1}, {"hashes": [], "group": -1}):
        with pytest.raises(urllib.error.HTTPError, match="422"):
            ask(wrong)
    assert sidecar.stats()["engines"]["blocks"] == 2
    assert sidecar.stop() == 0
    engine.close()
