"""The decoder against a plain float64 reference, for every family and option."""

from __future__ import annotations

from pathlib import Path

import naive_model as naive
import numpy as np
import pytest
import torch

from kvstore.engine.loader import load_model, random_model
from kvstore.engine.model_config import ModelConfig
from kvstore.engine.rope import RopeConfig, RopeTable
from kvstore.engine.runner import Runner, StepRow
from kvstore.errors import ConfigError

torch.set_num_threads(1)
PAGE = 8
CPU = torch.device("cpu")


def pages_for(tokens: int, first: int = 0) -> np.ndarray:
    """Return page ids in descending order, so that no test relies on contiguous pages."""
    count = -(-tokens // PAGE)
    return np.arange(first + count, first, -1, dtype=np.int32)


@pytest.mark.parametrize("case", naive.CASES)
def test_logits_and_kv_equal_the_reference(case: str, tmp_path: Path) -> None:
    raw = naive.raw_config(case)
    weights = naive.make_weights(raw, seed=3)
    tokens = np.random.default_rng(4).integers(0, raw["vocab_size"], 75).astype(np.int32)
    logits, cached = naive.forward(raw, weights, tokens)
    loaded = load_model(naive.write_folder(tmp_path, raw, weights), device="cpu")
    runner = Runner(loaded, 20, PAGE)
    pages = pages_for(len(tokens))
    for start, end in ((0, 40), (40, 41), (41, 42), (42, 75)):
        got = runner.step([StepRow(tokens[start:end], start, pages)])
        np.testing.assert_allclose(got[0].numpy(), logits[end - 1], atol=1e-4, rtol=1e-4)
    pool_kv = runner.pool[:, :, pages.astype(np.int64)].flatten(2, 3)[:, :, : len(tokens)]
    np.testing.assert_allclose(pool_kv.numpy(), cached, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_stays_near_float32(family: str) -> None:
    tokens = np.random.default_rng(5).integers(0, 512, 60).astype(np.int32)
    rows = [StepRow(tokens, 0, pages_for(60))]
    logits = []
    for dtype in ("float32", "bfloat16"):
        loaded = random_model(7, family=family, layers=2, hidden=64, dtype=dtype, device="cpu")
        runner = Runner(loaded, 20, PAGE)
        assert runner.pool.dtype == loaded.model.dtype
        logits.append(runner.step(rows)[0])
    wide, narrow = logits
    assert narrow.dtype == torch.float32
    assert (wide - narrow).norm() < 0.1 * wide.norm()


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    raw = naive.raw_config("llama-llama3")
    table = RopeTable(
        RopeConfig(
            theta=1000.0,
            scaling="llama3",
            factor=8.0,
            original_max_positions=64,
        ),
        16,
        4,
        CPU,
    )
    angles = torch.atan2(table.sin[1, 0], table.cos[1, 0]).tolist()
    expected = [naive.angle_per_position(raw, pair) for pair in range(8)]
    assert angles == pytest.approx(expected, rel=1e-5)
    assert angles[0] == pytest.approx(1.0)
    assert angles[-1] == pytest.approx(1000.0 ** (-14 / 16) / 8, rel=1e-5)


def test_interleaved_pairs_are_half_split_ones_reordered() -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 30, 31])
    half = RopeTable(RopeConfig(), 16, 32, CPU)
    inter = RopeTable(RopeConfig(interleaved=True), 16, 32, CPU)
    order = torch.arange(16).view(2, 8).T.reshape(-1)
    expected = half.rotate(x, *half.at(positions))[..., order]
    torch.testing.assert_close(inter.rotate(x[..., order], *inter.at(positions)), expected)
    assert not torch.allclose(inter.rotate(x, *inter.at(positions))[..., order], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "gpt2"}, "architecture 'gpt2' is not supported; use one of llama, qwen2"),
        ({"kv_heads": 3}, r"heads must be a multiple of kv_heads \(3\) \(got 4\)"),
        ({"head_dim": 15}, r"head_dim must be even .*\(got 15\)"),
        ({"layers": 0}, r"layers must be at least 1 \(got 0\)"),
        ({"rope": RopeConfig(divisors=(1.0, 2.0))}, "rope divisors must be 8 for head_dim 16"),
    ],
)
def test_an_invalid_shape_is_rejected(change: dict, message: str) -> None:
    shape = {
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "hidden": 64,
        "intermediate": 96,
        "vocab": 300,
        "max_positions": 64,
    }
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{**shape, **change})


def test_an_unknown_rope_scaling_is_rejected() -> None:
    with pytest.raises(ConfigError, match="rope scaling 'yarn' is not supported"):
        RopeConfig(scaling="yarn")
