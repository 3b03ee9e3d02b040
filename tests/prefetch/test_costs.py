"""The cost model, compared with brute force and with the published arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.prefetch import costs
from kvstore.prefetch.costs import CostModel, PrefillCurve, TierSpeed

times = st.floats(1e-6, 1e3)


@st.composite
def curves(draw: st.DrawFn) -> PrefillCurve:
    lengths = sorted(draw(st.sets(st.integers(1, 4096), min_size=1, max_size=6)))
    return PrefillCurve(tuple((length, draw(times)) for length in lengths))


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    names = draw(st.integers(1, 3))
    tiers = tuple(
        TierSpeed(
            f"tier{index}",
            draw(st.floats(1e3, 1e12)),
            draw(st.floats(0, 10)),
            draw(st.floats(0, 0.1)),
        )
        for index in range(names)
    )
    return CostModel(draw(curves()), tiers, draw(st.integers(1, 1 << 22)), draw(st.integers(1, 64)))


@given(curves(), st.lists(st.integers(0, 10_000), min_size=3, max_size=3))
def test_computing_in_parts_takes_as_long_as_in_one(curve: PrefillCurve, cuts: list[int]) -> None:
    low, middle, high = sorted(cuts)
    parts = curve.seconds(low, middle) + curve.seconds(middle, high)
    assert parts == pytest.approx(curve.seconds(low, high), rel=1e-6, abs=1e-9)
    assert curve.seconds(low, high) >= 0
    assert curve.seconds(high, low) == 0


@given(st.floats(1e-9, 1e-2), st.floats(0, 1e-6), st.sets(st.integers(1, 9999), min_size=2))
def test_a_quadratic_curve_is_met_at_its_points_and_beyond(
    linear: float, square: float, lengths: set[int]
) -> None:
    def true_s(tokens: int) -> float:
        return linear * tokens + square * tokens * tokens

    curve = PrefillCurve(tuple((n, true_s(n)) for n in sorted(lengths)))
    for n in lengths:
        assert curve.cold_s(n) == pytest.approx(true_s(n))
    longest = max(lengths)
    # Two lengths that hardly differ do not determine both parts of the curve.
    if longest > 2 * min(lengths):
        assert curve.cold_s(3 * longest) == pytest.approx(true_s(3 * longest), rel=1e-3)


def test_a_noisy_curve_never_falls() -> None:
    curve = PrefillCurve(((10, 1.0), (20, 0.5), (40, 2.0)))
    values = [curve.cold_s(n) for n in range(100)]
    assert values == sorted(values)
    assert curve.cold_s(20) == 1.0


@settings(deadline=None)
@given(models(), st.integers(1, 6000))
def test_break_even_equals_a_search_of_every_length(model: CostModel, limit: int) -> None:
    name = model.tiers[0].name
    size, blocks_max = model.block_tokens, limit // model.block_tokens
    lost = 0
    for blocks in range(1, blocks_max + 1):
        if model.load_s(name, blocks) >= model.compute_s(0, blocks * size):
            lost = blocks
    wanted = None if lost == blocks_max else (lost + 1) * size
    found = model.break_even_tokens(name, limit)
    if found != wanted:
        # Rounding may decide a tie; then both answers must be valid.
        for answer in (found, wanted):
            blocks = blocks_max if answer is None else max(1, answer // size - 1)
            lead = model.compute_s(0, blocks * size) - model.load_s(name, blocks)
            assert abs(lead) <= 1e-9 * model.load_s(name, blocks) + 1e-12


@settings(deadline=None)
@given(models(), st.data())
def test_the_split_is_the_best_of_all_splits(model: CostModel, data: st.DataObject) -> None:
    names = st.sampled_from([tier.name for tier in model.tiers])
    tiers = data.draw(st.lists(names, min_size=1, max_size=30))
    first = data.draw(st.integers(0, 100))
    size = model.block_tokens
    start, stop = first * size, (first + len(tiers)) * size
    end = stop + data.draw(st.integers(0, 500))
    split = model.split(tiers, first, end)

    def seconds(compute: int) -> float:
        loading = [sum(1 for name in tiers[compute:] if name == tier.name) for tier in model.tiers]
        load_s = max(
            model.load_s(tier.name, blocks)
            for tier, blocks in zip(model.tiers, loading, strict=True)
        )
        return max(model.compute_s(start, start + compute * size), load_s) + model.compute_s(
            stop, end
        )

    best = min(seconds(n) for n in range(len(tiers) + 1))
    assert split.seconds == pytest.approx(best)
    assert split.seconds == pytest.approx(seconds(split.compute))
    assert split.load_s == pytest.approx(seconds(0))
    assert split.compute_s == pytest.approx(seconds(len(tiers)))


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1, 1e6))
def test_two_ends_take_at_least_half_of_the_better(tokens: float, rc: float, rl: float) -> None:
    """A model of constant rates with small blocks splits in the same way."""
    both, better = costs.split_load_s(tokens, rc, rl), tokens / max(rc, rl)
    model = CostModel(PrefillCurve.at_rate(rc), (TierSpeed("disk", rl),), 1, 1)
    split = model.split(["disk"] * 4000)
    assert split.seconds == pytest.approx(
        costs.split_load_s(4000, rc, rl), rel=0, abs=1 / min(rc, rl)
    )
    assert better / 2 <= both * (1 + 1e-9)
    assert both <= better * (1 + 1e-9)


def test_the_published_figures() -> None:
    assert costs.bandwidth_to_pay(131_072, 15_000) == pytest.approx(1.966e9, rel=1e-3)
    assert costs.effective_bandwidth(1e9, 1.4, 4, 0.3e9) == pytest.approx(1.2e9)
    assert costs.effective_bandwidth(1e9, 1.4, 8, 0.3e9) == pytest.approx(1.4e9)
    assert costs.hit_rate_to_pay(cold_s=1.2, pure_s=1.0, warm_s=0.2) == pytest.approx(0.2)
    assert costs.hit_rate_to_pay(cold_s=1.0, pure_s=1.0, warm_s=0.2) == 0.0
    assert costs.hit_rate_to_pay(cold_s=1.2, pure_s=1.0, warm_s=1.1) == 1.0
    assert costs.dollars_per_million_tokens(3600, 10**6, 2.5) == pytest.approx(2.5)
    assert costs.gpu_seconds_saved(3.0, 1.0) == 2.0
    # A linear curve and one tier: the break-even bandwidth separates never from always.
    for rate, pays in ((1.9e9, False), (2.1e9, True)):
        tier = TierSpeed("disk", rate, match_s=0.001)
        model = CostModel(PrefillCurve.at_rate(15_000), (tier,), 131_072 * 16, 16)
        assert (model.break_even_tokens("disk") is not None) is pays


def test_forms_of_a_prefill_rate(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "model": "m",
            "points": [{"tokens": 200, "seconds": 3.0}, {"tokens": 100, "seconds": 1, "n": 1}],
        }
    )
    assert PrefillCurve.parse(text, "f").points == ((100, 1.0), (200, 3.0))
    assert PrefillCurve.parse(" 15000\n", "f") == PrefillCurve.at_rate(15_000)
    assert PrefillCurve.at_rate(100).seconds(100, 300) == pytest.approx(2.0)
    file = tmp_path / "rate.json"
    file.write_text(text)
    assert PrefillCurve.read(str(file)) == PrefillCurve.parse(text, "f")
    assert PrefillCurve.read("1e4") == PrefillCurve.at_rate(10_000)
    with pytest.raises(ConfigError, match="nowhere"):
        PrefillCurve.read("/nowhere/rate.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "[]",
        "{}",
        "true",
        "0",
        "-3",
        "NaN",
        "Infinity",
        '{"points": []}',
        '{"points": [1]}',
        '{"points": [{"tokens": 1.5, "seconds": 1}]}',
        '{"points": [{"tokens": true, "seconds": 1}]}',
        '{"points": [{"tokens": 1, "seconds": "1"}]}',
        '{"points": [{"tokens": 0, "seconds": 1}]}',
        '{"points": [{"tokens": 1, "seconds": 0}]}',
        '{"points": [{"tokens": 1, "seconds": 1}, {"tokens": 1, "seconds": 2}]}',
    ],
)
def test_an_invalid_rate_is_one_clear_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PrefillCurve.parse(text, "rate.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("speed", [(0.0, 0.0, 0.0), (math.nan, 0.0, 0.0), (1.0, -1.0, 0.0)])
def test_an_invalid_speed_is_rejected(speed: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="tier 'disk'"):
        TierSpeed("disk", *speed)


def test_an_unknown_tier_is_named() -> None:
    model = CostModel(PrefillCurve.at_rate(1), (TierSpeed("disk", 1.0),), 1, 1)
    with pytest.raises(ConfigError, match="'tape'"):
        model.load_s("tape", 1)
