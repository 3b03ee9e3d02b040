"""Prefetch policies by name."""

from __future__ import annotations

import difflib
from typing import Final

from kvstore.errors import ConfigError
from kvstore.prefetch.adaptive import Adaptive
from kvstore.prefetch.policy import (
    DEFAULT_BASE_WAIT_MS,
    DEFAULT_MAX_WAIT_MS,
    DEFAULT_PER_1K_TOKENS_MS,
    BestEffort,
    PrefetchPolicy,
    Timeout,
    WaitComplete,
)

PREFETCH_POLICIES: Final = ("best_effort", "wait_complete", "timeout", "adaptive")


def prefetch_policy(
    name: str,
    *,
    base_wait_ms: float = DEFAULT_BASE_WAIT_MS,
    per_1k_tokens_ms: float = DEFAULT_PER_1K_TOKENS_MS,
    max_wait_ms: float = DEFAULT_MAX_WAIT_MS,
) -> PrefetchPolicy:
    """The policy of this name; times in milliseconds.

    Raises ConfigError: unknown name (suggests the closest one), or a time that is negative or not
    finite.
    """
    times = {"base_wait": base_wait_ms, "per_1k_tokens": per_1k_tokens_ms, "max_wait": max_wait_ms}
    for key, value in times.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"prefetch.{key} must be at least 0 ms and finite (got {value} ms)")
    if name == "best_effort":
        return BestEffort(max_wait_ms)
    if name == "wait_complete":
        return WaitComplete(max_wait_ms)
    timeout = Timeout(base_wait_ms, per_1k_tokens_ms, max_wait_ms)
    if name == "timeout":
        return timeout
    if name == "adaptive":
        return Adaptive(max_wait_ms, timeout)
    near = difflib.get_close_matches(name, PREFETCH_POLICIES, n=1, cutoff=0.0)[0]
    raise ConfigError(f"unknown prefetch policy {name!r}: did you mean {near!r}?")
