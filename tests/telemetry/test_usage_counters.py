"""Tokens looked up and hit: each prefix counts once, and hits never exceed lookups."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError
from kvstore.telemetry.traffic import OTHER, check_traffic_label
from kvstore.telemetry.usage_counters import MAX_OPEN_LOOKUPS, UsageCounters

SPACE = Namespace(model="m", layers=2, kv_heads=1, head_dim=64, dtype="float32", block_tokens=4)
A, B, C, D = b"a", b"b", b"c", b"d"


def only_row(counters: UsageCounters) -> dict[str, Any]:
    [row] = counters.snapshot()["users"]
    return dict(row)


def test_a_prefix_of_a_queued_request_counts_once() -> None:
    counters = UsageCounters()
    session = counters.session(SPACE, "t", "r")
    for _ in range(5):
        session.on_lookup([A, B, C])
    assert only_row(counters)["lookup_tokens"] == 12
    session.on_load_start([A, B])  # the front of it
    session.on_hit(["l2", "disk"])
    session.on_lookup([A, B, C])  # the next request of that prompt
    assert only_row(counters) == {
        "tenant": "t",
        "traffic": "r",
        "lookup_tokens": 24,
        "saved_tokens": 0,
        "hit_tokens": {"l2": 4, "disk": 4},
    }
    assert counters.snapshot()["hit_bytes"] == {"l2": SPACE.block_bytes, "disk": SPACE.block_bytes}


def test_two_prompts_with_one_front_count_twice() -> None:
    counters = UsageCounters()
    session = counters.session(SPACE, "t", "r")
    session.on_lookup([A, B])
    session.on_lookup([A, C, D])
    session.on_load_start([A, C])
    session.on_lookup([A, B])  # still waiting
    assert only_row(counters)["lookup_tokens"] == 5 * 4
    session.on_lookup([A, C, D])
    assert only_row(counters)["lookup_tokens"] == 8 * 4


def test_a_load_without_a_lookup_counts_as_a_lookup() -> None:
    counters = UsageCounters()
    session = counters.session(SPACE, "t", "r")
    session.on_load_start([A, B])
    assert only_row(counters)["lookup_tokens"] == 8
    session.on_lookup([])
    session.on_load_start([])
    assert only_row(counters)["lookup_tokens"] == 8


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.sampled_from([A, B, C, D]), max_size=5)), max_size=40
    )
)
@example([(False, [A]), (True, [A, A])])
def test_hits_never_exceed_lookups(steps: list[tuple[bool, list[bytes]]]) -> None:
    counters = UsageCounters()
    session = counters.session(SPACE, "t", "r")
    for load, prefix in steps:
        if load:
            session.on_load_start(prefix)
            if prefix:
                session.on_hit(["l2"] * len(prefix))
        else:
            session.on_lookup(prefix)
        row = only_row(counters)
        assert sum(row["hit_tokens"].values()) <= row["lookup_tokens"]


def test_open_lookups_of_a_session_are_bounded() -> None:
    counters = UsageCounters()
    session = counters.session(SPACE, "t", "r")
    for number in range(3 * MAX_OPEN_LOOKUPS):
        session.on_lookup([b"one", b"%d" % number])
        session.on_lookup([b"first %d" % number])
    assert sum(len(prefixes) for prefixes in session._open.values()) <= 2 * MAX_OPEN_LOOKUPS


def test_labels_are_bounded() -> None:
    counters = UsageCounters(max_rows=3)
    for number in range(10):
        counters.session(SPACE, f"t{number}", "r").on_lookup([A])
    rows = [(row["tenant"], row["traffic"]) for row in counters.snapshot()["users"]]
    own_rows = [(f"t{number}", "r") for number in range(3)]
    assert rows == [*own_rows, *((f"t{number}", OTHER) for number in (3, 4, 5)), (OTHER, OTHER)]
    assert counters.snapshot()["users"][-1]["lookup_tokens"] == 4 * 4


def test_a_tenant_with_many_labels_does_not_take_another_tenants_row() -> None:
    counters = UsageCounters(max_rows=4)
    for number in range(50):
        counters.session(SPACE, "loud", f"r{number}").on_lookup([A])
    counters.session(SPACE, "quiet", "chat").on_lookup([A, B])
    lookup_tokens = {
        (u["tenant"], u["traffic"]): u["lookup_tokens"] for u in counters.snapshot()["users"]
    }
    assert len(lookup_tokens) == 6
    assert lookup_tokens["loud", OTHER] == 46 * 4
    assert lookup_tokens["quiet", OTHER] == 8


@pytest.mark.parametrize("label", ["", "chat", "team/rag:v2.1", "a" * 64])
def test_valid_traffic_labels(label: str) -> None:
    assert check_traffic_label(label) == label


@pytest.mark.parametrize("label", ["a b", "a" * 65, 'x"', "ü", None, 7, "a\n"])
def test_invalid_traffic_labels(label: Any) -> None:
    with pytest.raises(ConfigError, match="traffic label"):
        check_traffic_label(label)
