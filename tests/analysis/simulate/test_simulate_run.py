"""Tiers, policies and virtual time of a replay, compared with figures computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.analysis.simulate.run import Replay, Shape
from kvstore.analysis.simulate.traces import TraceRequest, ends_of
from kvstore.analysis.simulate.traffic import Traffic, generate
from kvstore.analysis.simulate.waits import WaitModel
from kvstore.cli import main
from kvstore.prefetch.costs import CostModel, PrefillCurve, TierSpeed

# 1,000 tokens/s; blocks of 100 tokens and 100 bytes; L2 reads 1,000 bytes/s, the tier below 400.
COSTS = CostModel(
    PrefillCurve.at_rate(1000), (TierSpeed("l2", 1000.0), TierSpeed("l3", 400.0)), 100, 100
)
SHAPE = Shape(COSTS, 1, min_tokens=0)


def request(*run: int, at: float = 0.0) -> TraceRequest:
    return TraceRequest(run, ends_of(len(run), 100, 100 * len(run)), 100 * len(run), time_s=at)


def replayed(shape: Shape, *requests: TraceRequest) -> dict[str, Any]:
    replay = Replay(shape)
    for request in requests:
        replay.step(request)
    return replay.result(100)


def test_a_hit_in_l2_costs_its_copy() -> None:
    found = replayed(SHAPE, request(1, 2, 3), request(1, 2, 4))
    assert found["token_hit_rate"] == pytest.approx(100 * 200 / 600)
    assert found["ttft_s"]["max"] == pytest.approx(0.3)
    # 200 bytes at 1,000 bytes/s, and 100 tokens at 1,000 tokens/s.
    assert found["ttft_s"]["mean"] == pytest.approx((0.3 + 0.3) / 2)
    assert found["gpu_seconds_saved"] == pytest.approx(0.2)
    assert found["bytes_read"]["l2"] == 200
    assert found["bytes_written"]["l2"] == 400


@pytest.mark.parametrize(
    ("write", "written", "hit_below"),
    [("write_through", 300, 100), ("selective", 0, 0), ("write_back", 300, 100)],
)
def test_the_write_policy_decides_what_is_below(write: str, written: int, hit_below: int) -> None:
    shape = replace(SHAPE, l2_blocks=1, l3_blocks=None, write=write)
    found = replayed(shape, request(1), request(2), request(3), request(1))
    assert found["bytes_written"]["l3"] == written
    assert found["bytes_read"]["l3"] == hit_below


def test_selective_writes_at_the_second_hit() -> None:
    shape = replace(SHAPE, l3_blocks=None, write="selective")
    assert replayed(shape, request(1), request(1))["bytes_written"]["l3"] == 0
    assert replayed(shape, request(1), request(1), request(1))["bytes_written"]["l3"] == 100


@pytest.mark.parametrize(
    ("policy", "hit", "ttft_s"),
    [
        # Four blocks arrive 0.25 s apart; computing them takes 0.4 s.
        ("always", 400, 1.0 + 0.001),
        ("never", 0, 0.4),
        ("wait_complete", 400, 1.0 + 0.001),
        ("best_effort", 0, 0.4),
        # 50 ms, and 100 ms per 1,024 tokens: no block has arrived by then.
        ("timeout", 0, 0.05 + 0.1 * 400 / 1024 + 0.4),
    ],
)
def test_load_policies_in_virtual_time(policy: str, hit: int, ttft_s: float) -> None:
    shape = replace(SHAPE, l2_blocks=0, l3_blocks=None, load_policy=policy)
    replay = Replay(shape)
    replay.step(request(1, 2, 3, 4))
    replay.step(request(1, 2, 3, 4))
    assert replay.counts.hits["l3"][1] == hit
    assert replay.counts.ttft_s[1] == pytest.approx(ttft_s, abs=2e-3)


def test_a_busy_engine_gives_best_effort_its_time() -> None:
    shape = replace(SHAPE, l2_blocks=0, l3_blocks=None, load_policy="best_effort", concurrency=1)
    replay = Replay(shape)
    replay.step(request(1, 2, 3, 4, 5, 6))  # Computes until 0.6 s: two blocks arrive meanwhile.
    replay.step(request(1, 2, 3, 4))
    assert replay.counts.hits["l3"][1] == 200
    assert replay.counts.ttft_s[1] == pytest.approx(0.6 + 0.2, abs=2e-3)


def test_one_load_waits_for_the_one_before_it() -> None:
    shape = replace(SHAPE, l2_blocks=0, l3_blocks=None)
    replay = Replay(shape)
    replay.step(request(1, 2))
    for _ in range(2):
        replay.step(request(1, 2, at=10.0))
    assert list(replay.counts.ttft_s)[1:] == pytest.approx([0.501, 1.001], abs=1e-3)


RUNS = st.lists(st.sampled_from([(0,), (0, 1), (0, 1, 2), (3,), (3, 4), (0, 5, 6)]), max_size=25)


@settings(max_examples=100, deadline=None)
@given(RUNS, st.integers(1, 5), st.integers(0, 3), st.sampled_from(["write_through", "write_back"]))
def test_figures_agree_with_one_another(
    runs: list[tuple[int, ...]], l2: int, l1: int, write: str
) -> None:
    shape = replace(SHAPE, l1_pages=l1, l2_blocks=l2, l3_blocks=None, write=write)
    found = replayed(shape, *(request(*run) for run in runs))
    for tier in found["tiers"].values():
        hit = tier["token_hit_rate"] * found["input_tokens"] / 100
        assert round(hit) == tier["bytes_read"]  # One byte per token.
    together = sum(tier["token_hit_rate"] for tier in found["tiers"].values())
    assert together == pytest.approx(found["token_hit_rate"])
    # Nothing is lost below: all computed and written blocks hit, as in an unlimited cache.
    if write == "write_through" and not l1:
        unlimited = replayed(SHAPE, *(request(*run) for run in runs))
        assert found["token_hit_rate"] == unlimited["token_hit_rate"]


def test_a_sweep_is_plotted_and_agrees_with_single_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for each in generate(Traffic(rate=5), 300, 64):
            row = {"input_length": each.tokens, "block_size": 64, "hash_ids": each.block_ids}
            file.write(json.dumps(row) + "\n")
    for kind in ("png", "svg", "html"):
        plot = tmp_path / f"sweep.{kind}"
        options = ["--sweep", "20,200", "--eviction", "lru,s3fifo", "--plot", str(plot)]
        assert main(["simulate", str(path), *options, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["sweep"]
        assert plot.stat().st_size > 1000
    page = plot.read_text()
    assert "<svg" in page
    assert "src=" not in page
    assert [(row["eviction"], row["capacity_blocks"]) for row in rows] == [
        ("lru", 20),
        ("lru", 200),
        ("s3fifo", 20),
        ("s3fifo", 200),
    ]
    assert main(["simulate", str(path), "--l2-blocks", "20", "--eviction", "s3fifo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows[2]
    assert all(row["regret"] >= 0 for row in rows)


def test_synthetic_traffic_matches_its_description() -> None:
    traffic = Traffic(rate=10, prefix=640, prefixes=3, turns=4, turn=100, output=50, gap=5)
    requests = list(generate(traffic, 4000, 64))
    assert requests == list(generate(traffic, 4000, 64))
    times = [request.time_s for request in requests]
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(10, rel=0.2)
    assert len({request.block_ids[:10] for request in requests}) == 3
    assert Traffic.parse("rate=2, gap=1m") == Traffic(rate=2, gap=60)


def test_only_blocks_of_l2_are_copied_to_the_device() -> None:
    speeds = (TierSpeed("l2", 10.0, block_s=1.0), TierSpeed("l3", 1e9))
    costs = CostModel(PrefillCurve.at_rate(1.0), speeds, 16, 16)
    result = WaitModel("always", costs).load(
        0.0, ["l2", "l3", "l2"], [10, 1000, 20], [16, 32, 48], can_start_s=0.0
    )
    assert (result.blocks, result.load_s) == (3, pytest.approx(2 * 1.0 + 30 / 10.0))
