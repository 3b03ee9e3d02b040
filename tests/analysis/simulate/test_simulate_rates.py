"""Hit rates equal published ones to the digit: the shared traces, and four workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main
from kvstore.cli.bench import hitrate

DATA = Path(__file__).parents[2] / "data"
TRACES = Path(__file__).parents[4] / "shared" / "traces"
MOONCAKE = "mooncake_conversation_trace.jsonl"
COUNTED = json.loads((DATA / "trace_hitrates.json").read_text())[MOONCAKE]
WORKLOADS = json.loads((DATA / "hitrate.json").read_text())["rows"]


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def shared(name: str) -> str:
    if not (TRACES / name).exists():
        pytest.skip(f"../shared/traces/{name} is missing")
    return str(TRACES / name)


def to_the_digit(figures: dict[str, Any], counted: dict[str, float]) -> bool:
    found = (figures["token_hit_rate"], figures["token_hit_rate_second_half"])
    return [round(rate, 2) for rate in found] == [counted["all"], counted["second_half"]]


def test_an_infinite_cache_to_the_digit(capsys: pytest.CaptureFixture[str]) -> None:
    figures = simulate(capsys, shared(MOONCAKE), "--block-tokens", "512", "--infinite")
    assert figures["requests"] == COUNTED["requests"]
    assert to_the_digit(figures, COUNTED["infinite"])
    assert (figures["evictions"], figures["regret"]) == (0, 0)


def test_finite_caches_to_the_digit(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ",".join(COUNTED["lru"])
    rows = simulate(capsys, shared(MOONCAKE), "--sweep", sizes, "--eviction", "lru")["sweep"]
    assert [row["tiers"]["l2"]["capacity_blocks"] for row in rows] == list(map(int, COUNTED["lru"]))
    for row, (size, counted) in zip(rows, COUNTED["lru"].items(), strict=True):
        assert to_the_digit(row, counted), size
        best = COUNTED["offline_optimal"].get(size)
        if best is not None:
            assert row["offline_optimal_hit_rate_second_half"] == pytest.approx(
                best["second_half"], abs=0.05
            )


def test_the_radix_tree_hits_as_much_as_a_level_of_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = simulate(capsys, shared(MOONCAKE), "--l1-blocks", "4096", "--no-offline-optimal")
    assert to_the_digit(figures, COUNTED["lru"]["4096"])
    assert figures["tiers"]["l1"]["evictions"] == 259_054


@pytest.mark.parametrize(("name", "half"), [("lmcache_agents.jsonl", 84), ("ragpulse.jsonl", 31.5)])
def test_traces_with_their_block_lengths(
    name: str, half: float, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = simulate(capsys, shared(name), "--infinite", "--no-offline-optimal")
    assert figures["token_hit_rate_second_half"] == pytest.approx(half, abs=0.5)


def test_four_workloads_to_the_digit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = hitrate.Draw(hitrate.SEED)
    for expected, prompts_of in zip(WORKLOADS, hitrate.WORKLOADS.values(), strict=True):
        prompts = prompts_of(draw)
        trace = tmp_path / "prompts.jsonl"
        trace.write_text("".join(json.dumps({"token_ids": each}) + "\n" for each in prompts))
        found = {}
        for size in (16, 64):
            figures = simulate(
                capsys,
                str(trace),
                "--infinite",
                "--block-tokens",
                str(size),
                "--no-offline-optimal",
            )
            found[f"block{size}"] = figures["token_hit_rate"]
        tokens = str(sum(map(len, prompts)))
        figures = simulate(
            capsys,
            str(trace),
            *(
                "--l1-blocks",
                tokens,
                "--page-tokens",
                "1",
                "--block-tokens",
                "1",
                "--no-offline-optimal",
            ),
        )
        found["radix"] = figures["token_hit_rate"]
        assert figures["requests"] == expected["requests"]
        assert {name: round(rate, 1) for name, rate in found.items()} == {
            name: expected[name] for name in found
        }, expected["workload"]
