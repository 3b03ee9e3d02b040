"""Policies: every wait ends, every name is known or corrected, an order is an order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.key import Key
from kvstore.cache.eviction import check_eviction, eviction_policy
from kvstore.cache.write_policy import WRITE_POLICIES, write_policy
from kvstore.errors import ConfigError
from kvstore.prefetch.policy import (
    PREFETCH_POLICIES,
    BestEffort,
    PrefetchPolicy,
    Timeout,
    Verdict,
    WaitComplete,
    prefetch_policy,
)

KEYS = [Key("t", "n", bytes([n])) for n in range(6)]


def ask(
    policy: PrefetchPolicy,
    elapsed_ms: float,
    *,
    wanted: int = 1024,
    ready: int = 0,
    done: bool = False,
    can_start: bool = False,
) -> Verdict:
    return policy.verdict(
        elapsed_ms=elapsed_ms,
        tokens_wanted=wanted,
        tokens_ready=ready,
        done=done,
        can_start=can_start,
    )


@given(
    name=st.sampled_from(PREFETCH_POLICIES),
    cap_ms=st.floats(0, 1e4),
    wanted=st.integers(0, 1 << 20),
    ready=st.integers(0, 1 << 20),
    can_start=st.booleans(),
)
def test_no_policy_waits_past_its_cap_or_for_nothing(
    name: str, cap_ms: float, wanted: int, ready: int, can_start: bool
) -> None:
    policy = prefetch_policy(name, base_ms=1e9, per_ki_token_ms=1e9, cap_ms=cap_ms)
    state = {"wanted": wanted, "ready": ready, "can_start": can_start}
    assert policy.cap_ms == cap_ms
    assert ask(policy, cap_ms, **state) is Verdict.GO  # type: ignore[arg-type]
    assert ask(policy, 0.0, done=True, **state) is Verdict.GO  # type: ignore[arg-type]


def test_best_effort_waits_only_while_the_engine_could_not_start() -> None:
    policy = BestEffort(cap_ms=100)
    assert ask(policy, 99, can_start=False) is Verdict.WAIT
    assert ask(policy, 0, can_start=True) is Verdict.GO


def test_wait_complete_waits_whatever_the_engine_could() -> None:
    policy = WaitComplete(cap_ms=100)
    assert ask(policy, 99, can_start=True) is Verdict.WAIT
    assert ask(policy, 100, can_start=True) is Verdict.GO


@pytest.mark.parametrize(
    ("wanted", "last_ms"), [(0, 50), (512, 100), (1024, 150), (4096, 450), (1 << 20, 600)]
)
def test_timeout_grows_with_the_tokens_up_to_the_cap(wanted: int, last_ms: float) -> None:
    policy = Timeout(base_ms=50, per_ki_token_ms=100, cap_ms=600)
    assert ask(policy, last_ms - 1, wanted=wanted, can_start=True) is Verdict.WAIT
    assert ask(policy, last_ms, wanted=wanted, can_start=True) is Verdict.GO


def test_names_make_what_they_say() -> None:
    assert [prefetch_policy(name).name for name in PREFETCH_POLICIES] == list(PREFETCH_POLICIES)
    assert [write_policy(name).name for name in WRITE_POLICIES] == list(WRITE_POLICIES)
    assert eviction_policy("lru", 6).name == "lru"


@pytest.mark.parametrize(
    ("make", "wrong", "right"),
    [
        (prefetch_policy, "best-effort", "best_effort"),
        (write_policy, "writeback", "write_back"),
        (check_eviction, "LRU", "lru"),
    ],
)
def test_an_unknown_name_is_corrected(make: object, wrong: str, right: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError) as caught:
        make(wrong)
    assert repr(wrong) in str(caught.value)
    assert repr(right) in str(caught.value)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_times_are_times(value: float) -> None:
    for name in PREFETCH_POLICIES:
        with pytest.raises(ConfigError):
            prefetch_policy(name, cap_ms=value)


def test_each_write_policy_writes_at_its_own_moment() -> None:
    moments = {
        name: (policy.on_commit, policy.on_hit(2), policy.on_hit(3), policy.on_evict)
        for name in WRITE_POLICIES
        for policy in [write_policy(name, selective_hits=3)]
    }
    assert moments == {
        "write_through": (True, False, False, False),
        "selective": (False, False, True, False),
        "write_back": (False, False, False, True),
    }
    with pytest.raises(ConfigError):
        write_policy("selective", selective_hits=0)


@given(st.lists(st.tuples(st.sampled_from("itr"), st.sampled_from(KEYS)), max_size=60))
def test_lru_yields_the_least_recently_used_first(events: list[tuple[str, Key]]) -> None:
    policy = eviction_policy("lru", 6)
    order: list[Key] = []
    for event, key in events:
        if event == "i" and key not in order:
            policy.inserted(key)
            order.append(key)
        elif event == "t" and key in order:
            policy.touched(key)
            order.remove(key)
            order.append(key)
        elif event == "r" and key in order:
            policy.removed(key)
            order.remove(key)
        assert list(policy.victims()) == order
