"""`kvstore demo` as a user runs it, with the random model and short prompts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.cli.demo.prompts import PROMPTS_MAX, make_prompts
from kvstore.cli.demo.run import STEPS, Row, check
from kvstore.errors import ConfigError

SMALL = ("--model", "random", "--prompts", "1", "--prompt-tokens", "200", "--max-tokens", "4")
LIMIT_S = 240.0


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """Start the demo with its temporary directory inside `folder`.

    A shell without job control starts background commands with SIGINT ignored, and children inherit
    that. The demo is started as from a terminal, also if the tests run in the background.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "kvstore", "demo", *SMALL, *flags],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def left_running(folder: Path) -> list[str]:
    """Return command lines that name the folder: children of a demo that has ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


def test_shows_every_step_as_json(tmp_path: Path) -> None:
    process = start(tmp_path, "--json")
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    document = json.loads(output)
    assert list(document) == ["rows"]
    rows = document["rows"]
    fields = ["step", "engine", "prompt_tokens", "cached_tokens", "tier", "ttft_ms", "identical"]
    assert all(list(row) == fields for row in rows)
    assert [row["step"] for row in rows] == [step.name for step in STEPS]
    assert rows[0]["step"] == "cold"
    assert [row["tier"] for row in rows] == ["none", "l1", "l2", "disk", "disk"]
    assert [row["engine"] for row in rows] == ["A", "A", "B", "B", "B"]
    full = (rows[0]["prompt_tokens"] - 1) // 16 * 16
    assert [row["cached_tokens"] for row in rows] == [0, full, full, full, full]
    assert all(row["identical"] is True for row in rows)
    assert all(row["ttft_ms"] > 0 for row in rows)
    assert "killing the sidecar" in errors, "progress goes to stderr"
    assert list(tmp_path.iterdir()) == []
    assert left_running(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    process = start(tmp_path)
    end_s = time.monotonic() + LIMIT_S
    while not left_running(tmp_path):
        assert process.poll() is None
        assert time.monotonic() < end_s
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
    assert left_running(tmp_path) == []


ROW = Row("second engine", "B", 2000, 1968, "l2", 10.0, identical=True)
STEP = next(step for step in STEPS if step.name == ROW.step)


def test_a_row_that_passes() -> None:
    assert check(STEP, ROW, 2) == ""
    assert check(STEP, replace(ROW, tier="l1+l2"), 2) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"identical": False}, "differs"),
        ({"cached_tokens": 1000}, "1000 of 2000"),
        ({"tier": "l1"}, "from l1"),
        ({"tier": "none", "cached_tokens": 0}, "from none"),
    ],
    ids=str,
)
def test_a_row_that_fails(change: dict[str, object], text: str) -> None:
    assert text in check(STEP, replace(ROW, **change), 2)


def test_prompts_are_long_and_begin_differently() -> None:
    prompts = make_prompts(PROMPTS_MAX, 5000)
    assert all(5000 - 200 < len(prompt) < 5000 + 200 for prompt in prompts)
    assert len({prompt[:16] for prompt in prompts}) == PROMPTS_MAX


@pytest.mark.parametrize(("count", "chars"), [(0, 100), (PROMPTS_MAX + 1, 100), (1, 0), (1, 10**9)])
def test_prompts_that_cannot_be_made(count: int, chars: int) -> None:
    with pytest.raises(ConfigError):
        make_prompts(count, chars)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--model", "gpt-5"], "unknown demo model 'gpt-5'"),
        (["--prompts", "9"], "--prompts must be 1 to 4 (got 9)"),
        (["--prompt-tokens", "100000"], "(got 100000)"),
        (["--max-tokens", "0"], "--max-tokens must"),
    ],
    ids=str,
)
def test_an_invalid_option_is_one_line(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert text in captured.err
