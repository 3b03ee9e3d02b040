"""`kvstore bench hitrate` gives the published figures to the digit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvstore.cli.bench import hitrate

EXPECTED = json.loads((Path(__file__).parent.parent / "data" / "hitrate.json").read_text())["rows"]
RATES = ("radix", "block16", "block64")


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    hitrate.register(app)
    return app


def test_the_published_table_to_the_digit(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["hitrate", "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["rows"]
    assert [set(row) for row in rows] == [{"workload", *RATES}] * len(EXPECTED)
    assert [row["workload"] for row in rows] == [row["workload"] for row in EXPECTED]
    for row, expected in zip(rows, EXPECTED, strict=True):
        found = {rate: f"{row[rate]:.1%}" for rate in RATES}
        assert found == {rate: f"{expected[rate]}%" for rate in RATES}, row["workload"]


def test_the_printed_table_has_the_same_figures(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["hitrate"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for expected in EXPECTED:
        line = next(ln for ln in result.stdout.splitlines() if expected["workload"] in ln)
        assert [f"{expected[rate]}%" in line for rate in RATES] == [True] * len(RATES)


def test_the_workloads_have_the_published_number_of_requests() -> None:
    draw = hitrate.Draw(hitrate.SEED)
    counts = {name: len(prompts_of(draw)) for name, prompts_of in hitrate.WORKLOADS.items()}
    assert counts == {row["workload"]: row["requests"] for row in EXPECTED}


def test_the_last_token_of_a_prompt_never_hits() -> None:
    prompt = list(range(32))
    assert hitrate.radix_hit_tokens([prompt, prompt]) == 31
    assert hitrate.block_hit_tokens([prompt, prompt], 16) == 16


def test_blocks_stop_at_the_first_absent_one() -> None:
    first = list(range(100))
    second = [*range(16), 999, *range(17, 100)]
    assert hitrate.block_hit_tokens([first, second], 16) == 16
    assert hitrate.radix_hit_tokens([first, second]) == 16
