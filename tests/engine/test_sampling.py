"""Sampling: greedy ties, top-k and top-p, seeds, and the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine.sampling import Sampler, SamplingParams, sample
from kvstore.errors import ConfigError

torch.set_num_threads(1)


def logits_of(seed: int, vocab: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, vocab).astype(np.float32)


def test_greedy_takes_the_lowest_of_equal_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    greedy = SamplingParams()
    assert sample(logits, [Sampler(greedy), Sampler(greedy)]) == [1, 0]
    assert Sampler(greedy).draw(logits[0].numpy()) == 1


def test_a_seed_fixes_the_tokens_in_any_batch() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    steps = [logits_of(step) for step in range(20)]
    alone = Sampler(params)
    expected = [alone.draw(logits) for logits in steps]
    watched = Sampler(params)
    others = [Sampler(SamplingParams(temperature=2.0, seed=9)), Sampler(SamplingParams())]
    got = []
    for step, logits in enumerate(steps):
        rows = [logits_of(1000 + step), logits, logits_of(2000 + step)]
        batch = torch.from_numpy(np.stack(rows))
        got.append(sample(batch, [others[0], watched, others[1]])[1])
    assert got == expected
    other = Sampler(SamplingParams(temperature=1.0, seed=6))
    assert [other.draw(logits) for logits in steps] != expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(1e-300, 100.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 60),
)
def test_only_tokens_within_top_k_and_top_p_are_sampled(
    seed: int, temperature: float, top_p: float, top_k: int
) -> None:
    logits = logits_of(seed)
    order = sorted(range(50), key=lambda token: (-logits[token], token))
    allowed = order[:top_k] if top_k else order
    weights = [np.exp((float(logits[t]) - float(logits.max())) / temperature) for t in allowed]
    mass, kept = 0.0, 0
    while mass < top_p * sum(weights) * (1 - 1e-9) or not kept:
        mass += weights[kept]
        kept += 1
    sampler = Sampler(SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed))
    # One more token is allowed, because rounding decides whether p is reached.
    assert {sampler.draw(logits) for _ in range(30)} <= set(allowed[: kept + 1])


def test_top_k_of_one_and_a_tiny_temperature_are_greedy() -> None:
    logits = logits_of(3)
    best = int(logits.argmax())
    for params in (
        SamplingParams(temperature=100.0, top_k=1),
        SamplingParams(temperature=1e-300),
        SamplingParams(temperature=1.0, top_p=1e-9),
    ):
        assert {Sampler(params).draw(logits) for _ in range(20)} == {best}


@pytest.mark.parametrize("cut", [{}, {"top_k": 4}, {"top_p": 0.7}])
def test_token_frequencies_match_their_probabilities(cut: dict) -> None:
    logits = np.array([2.0, 0.0, 1.0, 1.5, -1.0, 0.5], dtype=np.float32)
    probabilities = np.exp(logits.astype(np.float64) / 0.8)
    order = np.argsort(-probabilities)
    keep = 6
    if "top_k" in cut:
        keep = 4
    if "top_p" in cut:
        keep = 2  # 0.48 and 0.26 of the mass
    probabilities[order[keep:]] = 0.0
    probabilities /= probabilities.sum()
    sampler = Sampler(SamplingParams(temperature=0.8, seed=1, **cut))
    draws = 4000
    counts = np.bincount([sampler.draw(logits) for _ in range(draws)], minlength=6)
    spread = 4 * np.sqrt(probabilities * (1 - probabilities) * draws)
    assert np.all(np.abs(counts - probabilities * draws) <= spread)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 to 100 \(got -0.1\)"),
        ({"temperature": float("nan")}, r"temperature must be .*\(got nan\)"),
        ({"top_p": 0.0}, r"top_p must be .*\(got 0.0\)"),
        ({"top_p": 1.5}, r"top_p must be .*\(got 1.5\)"),
        ({"top_k": -1}, r"top_k must be .*\(got -1\)"),
    ],
)
def test_values_out_of_range_are_rejected(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**wrong)
