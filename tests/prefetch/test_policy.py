"""Prefetch policies: when each stops waiting, and their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.prefetch.factory import PREFETCH_POLICIES, prefetch_policy
from kvstore.prefetch.policy import (
    BestEffort,
    PrefetchPolicy,
    Timeout,
    WaitComplete,
    WaitDecision,
)


def decide(
    policy: PrefetchPolicy,
    elapsed_ms: float,
    *,
    wanted: int = 1024,
    ready: int = 0,
    done: bool = False,
    can_start: bool = False,
) -> WaitDecision:
    return policy.decide(
        elapsed_ms=elapsed_ms,
        tokens_wanted=wanted,
        tokens_ready=ready,
        done=done,
        can_start=can_start,
    )


@given(
    name=st.sampled_from(PREFETCH_POLICIES),
    max_wait_ms=st.floats(0, 1e4),
    wanted=st.integers(0, 1 << 20),
    ready=st.integers(0, 1 << 20),
    can_start=st.booleans(),
)
def test_no_policy_waits_past_its_max_wait_or_when_done(
    name: str, max_wait_ms: float, wanted: int, ready: int, can_start: bool
) -> None:
    policy = prefetch_policy(name, base_wait_ms=1e9, per_1k_tokens_ms=1e9, max_wait_ms=max_wait_ms)
    state = {"wanted": wanted, "ready": ready, "can_start": can_start}
    assert policy.max_wait_ms == max_wait_ms
    assert decide(policy, max_wait_ms, **state) is WaitDecision.GO  # type: ignore[arg-type]
    assert decide(policy, 0.0, done=True, **state) is WaitDecision.GO  # type: ignore[arg-type]


def test_best_effort_waits_only_while_the_engine_cannot_start() -> None:
    policy = BestEffort(max_wait_ms=100)
    assert decide(policy, 99, can_start=False) is WaitDecision.WAIT
    assert decide(policy, 0, can_start=True) is WaitDecision.GO


def test_wait_complete_waits_even_if_the_engine_can_start() -> None:
    policy = WaitComplete(max_wait_ms=100)
    assert decide(policy, 99, can_start=True) is WaitDecision.WAIT
    assert decide(policy, 100, can_start=True) is WaitDecision.GO


@pytest.mark.parametrize(
    ("wanted", "last_ms"), [(0, 50), (512, 100), (1024, 150), (4096, 450), (1 << 20, 600)]
)
def test_timeout_grows_with_the_tokens_up_to_the_max_wait(wanted: int, last_ms: float) -> None:
    policy = Timeout(base_wait_ms=50, per_1k_tokens_ms=100, max_wait_ms=600)
    assert decide(policy, last_ms - 1, wanted=wanted, can_start=True) is WaitDecision.WAIT
    assert decide(policy, last_ms, wanted=wanted, can_start=True) is WaitDecision.GO


def test_names() -> None:
    assert [prefetch_policy(name).name for name in PREFETCH_POLICIES] == list(PREFETCH_POLICIES)
    with pytest.raises(ConfigError, match=r"'best-effort': did you mean 'best_effort'\?"):
        prefetch_policy("best-effort")


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_invalid_times(value: float) -> None:
    for name in PREFETCH_POLICIES:
        with pytest.raises(ConfigError, match=r"prefetch\.max_wait must be"):
            prefetch_policy(name, max_wait_ms=value)
