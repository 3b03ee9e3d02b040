"""Offline-optimal eviction compared with brute force, and with rates computed independently."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_rig import AGENTS, MOONCAKE, RAG, conformance, rates, trace

from kvstore.analysis.simulate.optimal import optimal_hit_rates
from kvstore.analysis.simulate.traces import TraceRequest
from kvstore.cache.eviction import EVICTION_POLICIES

RUNS = ((0,), (0, 1), (0, 1, 2), (0, 3), (4,), (4, 5))
"""Paths of a tree, so that a block always has the same blocks in front."""


def request(run: tuple[int, ...]) -> TraceRequest:
    return TraceRequest(run, tuple(range(len(run) + 1)), len(run))


def most_hits(requests: list[tuple[int, ...]], capacity: int) -> int:
    """Return the block hits of the best choice of what to keep after each request."""
    best = {frozenset[int](): 0}
    for run in requests:
        after: dict[frozenset[int], int] = {}
        for cached, hits in best.items():
            hits += next((n for n, key in enumerate(run) if key not in cached), len(run))
            there = cached | set(run)
            for kept in itertools.combinations(sorted(there), min(capacity, len(there))):
                after[frozenset(kept)] = max(hits, after.get(frozenset(kept), 0))
        best = after
    return max(best.values())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(RUNS), min_size=1, max_size=8), st.integers(1, 4))
def test_no_choice_hits_more(requests: list[tuple[int, ...]], capacity: int) -> None:
    whole, _ = optimal_hit_rates([request(run) for run in requests], capacity)
    blocks = sum(map(len, requests))
    assert round(whole * blocks / 100) == most_hits(requests, capacity)


def test_rates_are_those_computed_independently() -> None:
    requests = trace(MOONCAKE)
    for capacity, counted in conformance()[MOONCAKE]["offline_optimal"].items():
        _, half = optimal_hit_rates(requests, int(capacity))
        assert half == pytest.approx(counted["second_half"], abs=0.2)


@pytest.mark.parametrize(("name", "capacity"), [(AGENTS, 128), (RAG, 32)])
def test_no_policy_beats_it(name: str, capacity: int) -> None:
    requests = trace(name)
    best = optimal_hit_rates(requests, capacity)
    for policy in EVICTION_POLICIES:
        got = rates(requests, capacity, policy)
        assert got[0] <= best[0], policy
    assert rates(requests, None, "lru") >= best
