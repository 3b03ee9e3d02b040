"""Computes percentiles and rates from outcomes, with hits and misses separately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from kvstore.analysis.loadgen.endpoint import Outcome, Usage

PERCENTILES: Final = (50, 90, 99)
HIT_FRACTION: Final = 0.5
"""Minimum fraction of the prompt's tokens that is cached for a request to count as a hit."""
NO_SPLIT: Final = (
    "the server does not report prompt_tokens_details.cached_tokens, so hits cannot be counted "
    "(vLLM reports it with --enable-prompt-tokens-details, SGLang with --enable-cache-report)"
)


def reports_cached(outcomes: Iterable[Outcome]) -> bool:
    """Return whether the server reports cached tokens.

    vLLM omits the field if a prompt has no cached tokens, so one response with the field is enough.
    """
    return any(o.usage is not None and o.usage.cached_tokens is not None for o in outcomes)


def spread(seconds: Sequence[float]) -> dict[str, float | int] | None:
    """Return count, mean and percentiles in milliseconds. None: no values."""
    if not seconds:
        return None
    times = np.asarray(seconds) * 1e3
    row: dict[str, float | int] = {"n": len(seconds), "mean": round(float(times.mean()), 3)}
    for percentile in PERCENTILES:
        row[f"p{percentile}"] = round(float(np.percentile(times, percentile)), 3)
    return row


def faults_of(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """Return the number of failures and the first error text, by kind of fault."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        if outcome.fault:
            row = found.setdefault(outcome.fault, {"count": 0, "first": outcome.detail})
            row["count"] += 1
    return found


def summary(
    name: str, outcomes: Sequence[Outcome], wall_s: float, *, split: bool
) -> dict[str, Any]:
    """Return one row. split: the server reports cached tokens. If not, their figures are None."""
    good = [outcome for outcome in outcomes if not outcome.fault]
    usages = [outcome.usage for outcome in good if outcome.usage is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    made = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens or 0 for usage in usages)
    by_tier: dict[str, int] = {}
    for usage in usages:
        for tier, tokens in usage.cached_by_tier.items():
            by_tier[tier] = by_tier.get(tier, 0) + tokens
    hits, misses = _split(good)
    span = max(wall_s, 1e-9)
    reported = split and prompt > 0
    return {
        "workload": name,
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "cached_tokens": cached if reported else None,
        "cached_tokens_by_tier": by_tier if reported else None,
        "token_hit_rate": round(cached / prompt, 4) if reported else None,
        "ttft_ms": spread([o.ttft_s for o in good if o.ttft_s is not None]),
        "ttft_hit_ms": spread(hits) if reported else None,
        "ttft_miss_ms": spread(misses) if reported else None,
        "latency_ms": spread([outcome.latency_s for outcome in good]),
        "per_token_ms": spread(_per_token(good)),
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(good) / span, 3),
        "prompt_tokens_per_s": round(prompt / span, 1),
        "completion_tokens_per_s": round(made / span, 1),
    }


def cached_fraction(usage: Usage) -> float:
    """Return the fraction of a prompt's tokens that was cached."""
    return (usage.cached_tokens or 0) / max(1, usage.prompt_tokens)


def _split(outcomes: Iterable[Outcome]) -> tuple[list[float], list[float]]:
    """Return the times to first token of hits, and of misses."""
    hits: list[float] = []
    misses: list[float] = []
    for outcome in outcomes:
        if outcome.usage is not None and outcome.ttft_s is not None:
            where = hits if cached_fraction(outcome.usage) >= HIT_FRACTION else misses
            where.append(outcome.ttft_s)
    return hits, misses


def _per_token(outcomes: Iterable[Outcome]) -> list[float]:
    """Return the seconds per token after the first."""
    return [
        (outcome.latency_s - outcome.ttft_s) / (outcome.usage.completion_tokens - 1)
        for outcome in outcomes
        if outcome.ttft_s is not None
        and outcome.usage is not None
        and outcome.usage.completion_tokens > 1
    ]
