"""KV and weights computed from a model's config, and the plans made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.analysis.planning.budget import most_at_once
from kvstore.analysis.planning.spans import attention_kind, spans_of
from kvstore.analysis.planning.weights import parameters, weight_bytes
from kvstore.blocks.model_geometry import namespace_from_hf
from kvstore.cli import main

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}
QWEN: dict[str, Any] = LLAMA | {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152_064,
}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "sliding_window": 1024,
    },
}


def spans(config: dict[str, Any]) -> tuple[int, int, int]:
    found = spans_of(config, namespace_from_hf(config, model="m"))
    return found.full_layers, found.window_layers, found.window_tokens


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, (32, 0, 0)),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, (32, 0, 0)),
        (LLAMA | {"model_type": "mistral", "sliding_window": 4096}, (0, 32, 4096)),
        (QWEN | {"sliding_window": 32_768, "use_sliding_window": False}, (28, 0, 0)),
        (
            QWEN | {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 21},
            (21, 7, 512),
        ),
        (LLAMA | {"model_type": "gemma2", "num_hidden_layers": 43}, (21, 22, 4096)),
        (GEMMA3, (5, 29, 1024)),
        (
            LLAMA
            | {
                "num_hidden_layers": 2,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (1, 1, 8),
        ),
    ],
)
def test_layers_with_a_sliding_window(
    config: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    assert spans(config) == expected


def test_bytes_of_a_context_with_windows() -> None:
    found = spans_of(GEMMA3, namespace_from_hf(GEMMA3, model="m"))
    layer = 4 * 2 * 256 * 2
    assert found.bytes_per_token == 5 * layer
    assert found.bytes_at(1000) == 34 * 1000 * layer
    assert found.bytes_at(10_000) == (5 * 10_000 + 29 * 1024) * layer
    assert found.window_bytes == 29 * 1024 * layer


@pytest.mark.parametrize(
    ("change", "kind"),
    [({}, "gqa"), ({"num_key_value_heads": 32}, "mha"), ({"num_key_value_heads": 1}, "mqa")],
)
def test_kinds_of_attention(change: dict[str, int], kind: str) -> None:
    config = LLAMA | change
    assert attention_kind(config, namespace_from_hf(config, model="m")) == kind


@pytest.mark.parametrize(("config", "billions"), [(LLAMA, 8.03), (QWEN, 7.62)])
def test_parameters_as_published(config: dict[str, Any], billions: float) -> None:
    namespace = namespace_from_hf(config, model="m", tp_size=2)
    assert parameters(config, namespace) / 1e9 == pytest.approx(billions, rel=0.002)
    assert weight_bytes(config, namespace) == 2 * parameters(config, namespace)
    quantised = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert weight_bytes(quantised, namespace) == parameters(config, namespace) // 2


def test_the_most_requests_at_a_time() -> None:
    assert most_at_once([], []) == 0
    assert most_at_once([0, 1, 2, 10], [1.5, 5, 5, 1]) == 2
    assert most_at_once([3, 0, 1], [1, 9, 9]) == 3


def plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str, config: Any = LLAMA
) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), *options, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_request_that_begins_as_another_ends_runs_after_it() -> None:
    assert most_at_once([0.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 1


def test_the_budget_at_the_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu-memory", "80GiB", "--concurrency", "40", "--context", "8192"]
    budget = plan(tmp_path, capsys, *options)["budget"]
    assert budget["kv_bytes"] == (
        int(80 * 2**30 * 0.9) - budget["weight_bytes"] - budget["activation_bytes"]
    )
    assert budget["peak_kv_bytes"] == 40 * 2**30
    assert budget["left_bytes"] == budget["kv_bytes"] - 40 * 2**30
    assert budget["requests_max"] == budget["kv_bytes"] // 2**30
    full = plan(tmp_path, capsys, *options, "--weights", "70GiB")["budget"]
    assert (full["left_bytes"], full["requests_max"]) == (0, 1)


def write_trace(path: Path) -> str:
    """Forty requests on each of two prompts of 20 blocks, in turns."""
    rows = [
        {
            "timestamp": 1000 * n,
            "input_length": 21 * 512,
            "output_length": 30,
            "hash_ids": [*range(100 * (n % 2), 100 * (n % 2) + 20), 1000 + n],
        }
        for n in range(80)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_a_trace_would_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    options = ["--trace", trace, "--l2", "8GiB", "--l3", "64GiB", "--gpu-hour", "3.6"]
    report = plan(tmp_path, capsys, *options)
    expected = report["expected"]
    # All but the first on each prompt hit 20 of 21 blocks.
    assert expected["token_hit_rate"] == pytest.approx(100 * 78 * 20 / (80 * 21))
    saved = 78 * 20 * 512 / 15_000
    assert expected["gpu_seconds_saved"] == pytest.approx(saved)
    tokens = 80 * 21 * 512
    assert expected["usd_saved_per_million_tokens"] == pytest.approx(saved * 1e-3 / tokens * 1e6)
    assert expected["prefill_load"] == pytest.approx(tokens / 15_000 / 79)
    assert expected["prefill_load_with_cache"] == pytest.approx((tokens / 15_000 - saved) / 79)
    assert report["working_set"] == {
        "blocks": 120,
        "bytes": 120 * 512 * 131_072,
        "reused_blocks": 40,
        "reused_bytes": 40 * 512 * 131_072,
    }
    rates = [row["token_hit_rate"] for row in report["by_size"]]
    assert rates == sorted(rates)
    assert report["by_size"][-1]["l2_bytes"] is None
    policies = report["policies"]
    most = max(row["gpu_seconds_saved"] for row in policies["writes"])
    good = [row for row in policies["writes"] if row["gpu_seconds_saved"] >= most * 0.99]
    least = min(row["bytes_written"] for row in good)
    assert least < max(row["bytes_written"] for row in good)
    (chosen,) = (row for row in policies["writes"] if row["policy"] == policies["write"])
    assert chosen["bytes_written"] == least
    assert {policies["eviction"], policies["write"], policies["load_policy"]} <= {
        row["policy"] for kind in ("evictions", "writes", "load_policies") for row in policies[kind]
    }
    assert main(["plan", str(tmp_path), *options, "--gpu-memory", "80GiB"]) == 0
    assert "left for cached prefixes" in capsys.readouterr().out


def test_what_is_saved_net_of_what_the_tiers_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    options = ["--trace", trace, "--l2", "8GiB", "--l3", "64GiB", "--gpu-hour", "3.6"]
    prices = ["--l2-gb-month", "2", "--l3-gb-month", "0.1"]
    expected = plan(tmp_path, capsys, *options, *prices)["expected"]
    month = 2 * (8 << 30) / 1e9 + 0.1 * (64 << 30) / 1e9
    assert expected["usd_tiers_per_month"] == pytest.approx(month)
    # The trace lasts 79 seconds; a year has twelve months of 730 hours.
    cost = month * 79 / (730 * 3600) / (80 * 21 * 512 / 1e6)
    assert expected["usd_tiers_per_million_tokens"] == pytest.approx(cost)
    net = expected["usd_saved_per_million_tokens"] - cost
    assert expected["usd_net_per_million_tokens"] == pytest.approx(net)
    assert main(["plan", str(tmp_path), *options, *prices]) == 0
    assert f"${month:.2f} per month" in capsys.readouterr().out


def test_where_tiers_are_too_slow_it_says_never(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    slow = ["--l2-bandwidth", "1MB", "--l3-bandwidth", "1MB"]
    report = plan(tmp_path, capsys, "--trace", trace, "--l2", "8GiB", *slow)
    assert report["policies"]["load_policy"] == "never"
    report = plan(tmp_path, capsys, "--trace", trace, "--l2", "8GiB")
    assert report["policies"]["load_policy"] != "never"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--traffic", "speed=3"], "unknown name 'speed'"),
        (["--traffic", "rate=0"], "rate must be above 0"),
        (["--traffic", "turns=x"], "turns must be a number (got 'x')"),
        (["--traffic", "rate=1", "--trace", "x"], "not both"),
        (["--gpu-memory", "80GX"], "80GX"),
        (["--engines", "0"], "--engines"),
        (["--gpu-hour", "nan"], "--gpu-hour"),
        (["--gpu-memory", "80GiB", "--concurrency", "0"], "--concurrency"),
        (["--l3-gb-month", "-1"], "--l3-gb-month"),
        (["--gpu-utilisation", "1.5"], "1.5"),
    ],
)
def test_an_invalid_option_of_a_plan_is_one_line(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["plan", str(tmp_path), *options]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said
