"""Eviction policies: each orders exactly the resident keys; an example of the strength of each; and
their hit rates on real traces, compared with independently counted rates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_rig import AGENTS, MOONCAKE, RAG, conformance, rates, trace

from kvstore.analysis.simulate.formats import read_trace
from kvstore.analysis.simulate.levels import Level
from kvstore.analysis.simulate.traces import TraceRequest
from kvstore.cache.eviction import EVICTION_POLICIES, check_eviction, eviction_policy
from kvstore.errors import ConfigError

FIXED = ("lru", "lfu", "s3fifo", "gdsf")

steps = st.lists(
    st.one_of(
        st.tuples(st.just("lookup"), st.lists(st.integers(0, 11), max_size=6, unique=True)),
        st.tuples(st.just("use"), st.integers(0, 11)),
        st.tuples(st.just("remove"), st.integers(0, 11)),
        st.tuples(st.just("evict"), st.integers(0, 3)),
    ),
    max_size=80,
)


def test_every_policy_name() -> None:
    assert set(EVICTION_POLICIES) == {*FIXED, "auto"}
    for name in EVICTION_POLICIES:
        assert eviction_policy(check_eviction(name), 8).name == name
    with pytest.raises(ConfigError, match="'lru'"):
        check_eviction("lru2")


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(1, 8), program=steps)
def test_a_policy_orders_exactly_the_resident_keys(
    name: str, capacity: int, program: list[tuple[str, object]]
) -> None:
    """Also if its owner removes other keys than the first, or has more keys than its capacity."""
    policy = eviction_policy(name, capacity)
    resident: set[int] = set()
    for step, what in program:
        if step == "lookup":
            assert isinstance(what, list)
            policy.on_lookup(what)
        elif step == "use":
            assert isinstance(what, int)
            if what in resident:
                policy.on_access(what)
            else:
                policy.on_insert(what, 1 + what)
                resident.add(what)
        elif step == "remove" and what in resident:
            assert isinstance(what, int)
            policy.on_remove(what)
            resident.remove(what)
        elif step == "evict":
            assert isinstance(what, int)
            for _ in range(min(what, len(resident))):
                first = next(iter(policy.eviction_order()))
                policy.on_remove(first)
                resident.remove(first)
        order = list(policy.eviction_order())
        assert len(order) == len(set(order))
        assert set(order) == resident
        assert policy.stats()["resident"] == len(resident)
        assert list(policy.eviction_order()) == order, "reading changes the order"


def test_an_invalid_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"input_length": 9, "hash_ids": [1]}\n{"hash_ids": [1]}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: "):
        read_trace(file)
    file.write_text('{"input_length": 9, "hash_ids": [4, 5], "block_size": 6}\n')
    assert read_trace(file) == [TraceRequest((4, 5), (0, 6, 9), 9)]


def runs(level: Level, *requests: Iterable[int]) -> list[int]:
    """Look up and use prompts, one after the other; the length of the cached prefix of each."""
    hits = []
    for request in requests:
        run = list(request)
        hits.append(level.lookup(run))
        for key in reversed(run):
            level.use(key)
        level.trim()
    return hits


@pytest.mark.parametrize("name", ["lfu", "gdsf", "s3fifo"])
def test_frequently_used_keys_outlive_a_scan(name: str) -> None:
    """LRU evicts them."""
    often = [range(4)] * 30
    scan = [range(100 + 4 * n, 104 + 4 * n) for n in range(200)]
    for each in (name, "lru"):
        level = Level(16, each)
        mixed = [run for pair in zip(scan[:100], often * 4, strict=False) for run in pair]
        runs(level, *often, *mixed)
        runs(level, *scan[100:104])
        assert runs(level, range(4)) == [0 if each == "lru" else 4], each


def test_lfu_evicts_keys_that_were_popular_long_ago() -> None:
    level = Level(8, "lfu")
    runs(level, *[range(8)] * 15)
    for generation in range(1, 40):
        runs(level, *[range(100 * generation, 100 * generation + 8)] * 3)
    assert runs(level, range(8)) == [0], "it never ages"
    assert runs(level, range(3900, 3908))[0] > 0


def test_lru_matches_independently_counted_rates() -> None:
    requests = trace(MOONCAKE)
    expected = conformance()[MOONCAKE]
    assert rates(requests, None, "lru") == pytest.approx(
        (expected["infinite"]["all"], expected["infinite"]["second_half"]), abs=0.01
    )
    for capacity, counted in expected["lru"].items():
        got = rates(requests, int(capacity), "lru")
        assert got == pytest.approx((counted["all"], counted["second_half"]), abs=0.2), capacity


@pytest.mark.parametrize(
    ("name", "capacity"),
    [(MOONCAKE, 4096), (AGENTS, 128), (AGENTS, 256), (RAG, 512)],
)
def test_auto_is_at_most_half_a_point_below_the_best(name: str, capacity: int) -> None:
    """Of the whole trace and of its second half; docs/decisions/0009 has more sizes."""
    requests = trace(name)
    fixed = {policy: rates(requests, capacity, policy) for policy in FIXED}
    auto = rates(requests, capacity, "auto")
    for part in (0, 1):
        best = max(hits[part] for hits in fixed.values())
        assert auto[part] >= best - 0.5, (fixed, auto)
