"""`kvstore bench breakeven`: real loads from real tiers, and the arithmetic."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.analysis.breakeven import loads, prefill
from kvstore.analysis.breakeven.loads import LoadFailed, Loads, block_lengths, kv_like
from kvstore.blocks.key import DTYPE_BYTES, Namespace
from kvstore.cli import main
from kvstore.engine.loader import random_model
from kvstore.errors import ConfigError
from kvstore.prefetch.costs import CostModel, PrefillCurve
from kvstore.tiers import disk
from kvstore.tiers.memory import MemoryTier

Capture = pytest.CaptureFixture[str]
SPACE = Namespace(model="m", layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=16)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "torch_dtype": "bfloat16",
}
BLOCK_BYTES = 4 * 2 * 2 * 64 * 2 * 16


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "some-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder / "config.json"


def bench(capfd: Capture, *options: str) -> tuple[int, Any, str]:
    code = main(["bench", "breakeven", "--json", *options])
    out, err = capfd.readouterr()
    return code, json.loads(out) if out else None, err


QUICK = ["--load-lengths", "64,128,256", "--l2", "16MiB", "--repeats", "1"]


def test_tiers_are_evaluated_for_a_real_models_figures(
    config: Path, capfd: Capture, tmp_path: Path
) -> None:
    png, page = tmp_path / "a" / "p.png", tmp_path / "b" / "p.html"
    options = ["--model-config", str(config), "--prefill-rate", "50000", *QUICK]
    plots = ["--plot", str(png), "--html", str(page)]
    code, report, _ = bench(capfd, *options, *plots, "--disk", str(tmp_path))
    assert code == 0
    assert (report["model"], report["bytes_per_token"]) == ("some-llama", BLOCK_BYTES // 16)
    assert report["needed_bytes_per_s"] == BLOCK_BYTES // 16 * 50_000
    assert report["prefill_measured"] is False
    assert [tier["name"] for tier in report["tiers"]] == ["l2", "disk"]
    for tier in report["tiers"]:
        assert [point["tokens"] for point in tier["points"]] == [64, 128, 256]
        for length, saved in tier["ttft_saved_ms"].items():
            loading = tier["match_ms"] + int(length) * BLOCK_BYTES / 16 / tier["bytes_per_s"] * 1e3
            assert saved == pytest.approx(int(length) / 50.0 - loading, rel=0.01, abs=0.01)
            # Both in parallel are faster than either alone.
            assert tier["ttft_saved_both_ends_ms"][length] >= max(0.0, saved) - 0.001
        even = tier["break_even_tokens"]
        if even is not None and even <= 1024:
            assert tier["ttft_saved_ms"]["1024"] > 0
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<svg" in text
    assert not re.search(r"(?:src|href)=\"(?!#)", text.replace("xlink:href", "href"))
    assert list(tmp_path.glob("kvstore-breakeven-*")) == []


def test_prefill_is_measured_on_the_engine_and_read_again(capfd: Capture, tmp_path: Path) -> None:
    options = ["--model", "random", "--lengths", "16,48", "--threads", "1", *QUICK]
    code, report, _ = bench(capfd, *options, "--tiers", "l2")
    assert code == 0
    assert report["prefill_measured"] is True
    assert [point["tokens"] for point in report["points"]] == [16, 48]
    assert [tier["name"] for tier in report["tiers"]] == ["l2"]
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    again = PrefillCurve.read(str(file))
    assert [tokens for tokens, _ in again.points] == [16, 48]
    assert again.cold_s(48) == pytest.approx(report["points"][1]["seconds"])


def test_configured_tiers_are_measured_and_left_clean(
    config: Path, capfd: Capture, tmp_path: Path
) -> None:
    from redis_rig import Server, valkey_binary

    server = Server(tmp_path / "valkey", valkey_binary())
    try:
        file = tmp_path / "tiers.toml"
        file.write_text(
            f'[[tiers]]\nkind = "disk"\nname = "ssd"\ndirectory = "{tmp_path}/d"\n'
            'capacity = "64MiB"\n'
        )
        options = ["--model-config", str(config), "--prefill-rate", "9000", *QUICK]
        link = ["--config", str(file), "--redis", f"redis://{server.address}"]
        code, report, err = bench(capfd, *options, *link[2:])
        assert code == 0, err
        assert [tier["name"] for tier in report["tiers"]] == ["l2", "disk", "redis"]
        assert server.client().dbsize() == 0
        code, report, err = bench(capfd, *options, *link[:2], "--tiers", "ssd")
        assert code == 0, err
        assert [tier["name"] for tier in report["tiers"]] == ["ssd"]
    finally:
        server.stop()
    tier = disk.open(disk.Config(directory=str(tmp_path / "d"), capacity=64 << 20))
    assert tier.stats()["blocks"] == 0
    tier.close()


def test_a_table_is_printed(config: Path, capfd: Capture) -> None:
    options = ["--model-config", str(config), "--prefill-rate", "9000", *QUICK, "--tiers", "l2"]
    assert main(["bench", "breakeven", *options]) == 0
    out = capfd.readouterr().out
    assert "some-llama: 2,048 bytes of KV per token" in out
    assert "128k" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lengths", "1,x"], ["--lengths", "256,1024"]),
        (["--load-lengths", "0"], ["--load-lengths"]),
        (["--repeats", "0"], ["--repeats must", "(got 0)"]),
        (["--tiers", "tape"], ["'tape'", "l2, disk"]),
        (["--prefill-rate", "fast"], ["'fast'", "tokens per second"]),
        (["--prefill-rate", "-1"], ["-1"]),
        (["--l2", "1MiB", "--prefill-rate", "9000"], ["--l2 must be at least"]),
        (["--model-config", "/none.json"], ["/none.json"]),
        (["--model", "/none"], ["/none"]),
        (["--disk", "/none"], ["/none"]),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], words: list[str], config: Path, capfd: Capture
) -> None:
    given = ["--model-config", str(config)] if "--l2" in options else []
    code, report, err = bench(capfd, *given, *options)
    assert (code, report, err.count("\n")) == (2, None, 1), err
    assert [word for word in words if word not in err] == []


# ---- parts ----


@given(
    st.floats(0, 0.1),
    st.floats(1e-5, 1e-2),
    st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True),
)
def test_a_line_is_found_again(start_s: float, block_s: float, blocks: list[int]) -> None:
    points = tuple((n, start_s + n * block_s) for n in sorted(blocks))
    speed = Loads("t", 1000, points).speed()
    for n, seconds in points:
        assert speed.seconds(1000 * n, n) == pytest.approx(seconds, rel=1e-6)


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=5))
def test_noise_gives_a_speed_all_the_same(seconds: list[float]) -> None:
    points = tuple((16 * (n + 1), each) for n, each in enumerate(seconds))
    speed = Loads("t", 4096, points).speed()
    assert speed.bytes_per_s > 0
    assert speed.match_s >= 0
    costs = CostModel(PrefillCurve.at_rate(1000.0), (speed,), 4096, 16)
    even = costs.break_even_tokens("t")
    assert even is None or costs.load_s("t", even // 16) < costs.compute_s(0, even)


def measured(tier: MemoryTier | None, lengths: list[int]) -> Loads:
    steps: list[int] = []
    make = None if tier is None else lambda: tier
    found = loads.measure(SPACE, lengths, make, repeats=2, on_done=lambda: steps.append(1))
    assert len(steps) == len(lengths)
    return found


def test_a_tier_is_read_for_every_length_and_emptied_afterwards() -> None:
    class Counting(MemoryTier):
        def __init__(self) -> None:
            super().__init__(1 << 30, name="memory")
            self.reads = 0
            self.left = -1

        def read(self, key: Any, header: memoryview, payload: memoryview) -> int:
            self.reads += 1
            return super().read(key, header, payload)

        def close(self) -> None:
            self.left = sum(1 for _ in self.keys())
            super().close()

    tier = Counting()
    found = measured(tier, [8, 4])
    assert [blocks for blocks, _ in found.points] == [4, 8]
    assert tier.reads == 2 * (4 + 8)
    assert tier.left == 0


def test_l2_itself_needs_no_tier() -> None:
    found = measured(None, [4, 8])
    assert found.name == "l2"
    assert found.block_bytes == SPACE.block_bytes


def test_a_tier_that_loses_blocks_fails_the_measurement() -> None:
    with pytest.raises(LoadFailed, match=r"of [48] blocks"):
        measured(MemoryTier(4 * SPACE.block_bytes), [4, 8])


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_synthetic_kv_has_a_blocks_length_and_varies(dtype: str) -> None:
    space = Namespace(**{**loads._fields(SPACE), "dtype": dtype})
    made = kv_like(space)
    assert len(made) == space.block_bytes
    assert len(set(made[:4096].tolist())) > 50


def test_only_lengths_that_fit_are_loaded() -> None:
    memory = (loads.SPARE_SLOTS + 10) * SPACE.block_bytes
    assert block_lengths([16, 64, 160, 176], SPACE, memory) == [1, 4, 10]
    with pytest.raises(ConfigError, match="two lengths"):
        block_lengths([16, 176], SPACE, memory)


def test_a_prompt_longer_than_the_models_context_is_rejected() -> None:
    torch.set_num_threads(1)
    loaded = random_model(0, layers=1, hidden=32, heads=2, kv_heads=1, max_positions=64)
    with pytest.raises(ConfigError, match="at most 63"):
        prefill.measure(loaded, [64], repeats=1, page_tokens=16, threads=1, on_done=lambda: None)
