"""Tokens asked for and handed over: each run counts once, hits never exceed what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError
from kvstore.telemetry.histogram import OTHER, check_route
from kvstore.telemetry.usage_counters import MAX_OPEN, Meters

SPACE = Namespace(model="m", layers=2, kv_heads=1, head_dim=64, dtype="float32", block_tokens=4)
A, B, C, D = b"a", b"b", b"c", b"d"


def only(meters: Meters) -> dict[str, Any]:
    [user] = meters.snapshot()["users"]
    return dict(user)


def test_a_run_that_waits_in_a_queue_is_counted_once() -> None:
    meters = Meters()
    session = meters.session(SPACE, "t", "r")
    for _ in range(5):
        session.asked([A, B, C])
    assert only(meters)["asked"] == 12
    session.loading([A, B])  # the front of it
    session.served(["l2", "disk"])
    session.asked([A, B, C])  # the next request of that prompt
    assert only(meters) == {
        "tenant": "t",
        "route": "r",
        "asked": 24,
        "saved": 0,
        "hits": {"l2": 4, "disk": 4},
    }
    assert meters.snapshot()["read_bytes"] == {"l2": SPACE.block_bytes, "disk": SPACE.block_bytes}


def test_two_prompts_of_one_front_are_two() -> None:
    meters = Meters()
    session = meters.session(SPACE, "t", "r")
    session.asked([A, B])
    session.asked([A, C, D])
    session.loading([A, C])
    session.asked([A, B])  # still waiting
    assert only(meters)["asked"] == 5 * 4
    session.asked([A, C, D])
    assert only(meters)["asked"] == 8 * 4


def test_a_load_that_nobody_asked_for_counts_as_asked() -> None:
    meters = Meters()
    session = meters.session(SPACE, "t", "r")
    session.loading([A, B])
    assert only(meters)["asked"] == 8
    session.asked([])
    session.loading([])
    assert only(meters)["asked"] == 8


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.sampled_from([A, B, C, D]), max_size=5)), max_size=40
    )
)
def test_hits_never_exceed_what_was_asked_for(steps: list[tuple[bool, list[bytes]]]) -> None:
    meters = Meters()
    session = meters.session(SPACE, "t", "r")
    for load, run in steps:
        if load:
            session.loading(run)
            if run:
                session.served(["l2"] * len(run))
        else:
            session.asked(run)
        user = only(meters)
        assert sum(user["hits"].values()) <= user["asked"]


def test_what_a_session_remembers_is_bounded() -> None:
    meters = Meters()
    session = meters.session(SPACE, "t", "r")
    for number in range(3 * MAX_OPEN):
        session.asked([b"one", b"%d" % number])
        session.asked([b"first %d" % number])
    assert sum(len(runs) for runs in session._open.values()) <= 2 * MAX_OPEN


def test_labels_are_bounded() -> None:
    meters = Meters(max_users=3)
    for number in range(10):
        meters.session(SPACE, f"t{number}", "r").asked([A])
    users = [(user["tenant"], user["route"]) for user in meters.snapshot()["users"]]
    apart = [(f"t{number}", "r") for number in range(3)]
    assert users == [*apart, *((f"t{number}", OTHER) for number in (3, 4, 5)), (OTHER, OTHER)]
    assert meters.snapshot()["users"][-1]["asked"] == 4 * 4


def test_a_tenant_of_many_routes_takes_no_other_tenants_numbers() -> None:
    meters = Meters(max_users=4)
    for number in range(50):
        meters.session(SPACE, "loud", f"r{number}").asked([A])
    meters.session(SPACE, "quiet", "chat").asked([A, B])
    asked = {(u["tenant"], u["route"]): u["asked"] for u in meters.snapshot()["users"]}
    assert len(asked) == 6
    assert asked["loud", OTHER] == 46 * 4
    assert asked["quiet", OTHER] == 8


@pytest.mark.parametrize("route", ["", "chat", "team/rag:v2.1", "a" * 64])
def test_routes(route: str) -> None:
    assert check_route(route) == route


@pytest.mark.parametrize("route", ["a b", "a" * 65, 'x"', "ü", None, 7, "a\n"])
def test_what_is_no_route(route: Any) -> None:
    with pytest.raises(ConfigError, match="route"):
        check_route(route)
