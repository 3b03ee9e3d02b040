"""LoRA: against merged weights in the reference, several adapters in a batch, no shared KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import naive_model as naive
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvstore.engine.loader import load_model, random_model
from kvstore.engine.lora import load_adapter, random_adapter
from kvstore.engine.runner import Runner, StepRow
from kvstore.errors import ConfigError

torch.set_num_threads(1)
PAGE = 8
NAMES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def make_adapter(
    folder: Path, weights: naive.Weights, seed: int, *, only: str = "", **settings: Any
) -> naive.Weights:
    """Write a PEFT adapter; return the weights with it merged in."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **settings}
    scale = config["lora_alpha"] / (2.0 if config.get("use_rslora") else 4.0)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged = dict(weights)
    tensors = {}
    for layer in range(2):
        for block, names in NAMES.items():
            for name in names:
                if only and name != only:
                    continue
                stem = f"model.layers.{layer}.{block}.{name}"
                wide, narrow = weights[stem + ".weight"].shape
                a = rng.normal(0, narrow**-0.5, (4, narrow)).astype(np.float32)
                b = rng.normal(0, 0.5, (wide, 4)).astype(np.float32)
                merged[stem + ".weight"] = weights[stem + ".weight"] + scale * b @ a
                for side, array in (("A", a), ("B", b)):
                    tensors[f"base_model.model.{stem}.lora_{side}.weight"] = torch.from_numpy(array)
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


@pytest.mark.parametrize("case", ["llama", "qwen3"])
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_rows_of_several_adapters_in_one_step(case: str, form: str, tmp_path: Path) -> None:
    raw = naive.raw_config(case)
    weights = naive.make_weights(raw, seed=1)
    if form == "folder":
        loaded = load_model(naive.write_folder(tmp_path / "m", raw, weights), device="cpu")
    else:
        loaded = load_model(naive.write_gguf(tmp_path / "m.gguf", raw, weights), device="cpu")
    runner = Runner(loaded, 64, PAGE)
    expected_of = {"": weights}
    for seed, name in enumerate(("red", "blue")):
        expected_of[name] = make_adapter(tmp_path / name, weights, seed, use_rslora=name == "blue")
        runner.add_lora(name, load_adapter(tmp_path / name, loaded.config))
    rng = np.random.default_rng(2)
    rows, expected = [], []
    for index, name in enumerate(("red", "red", "", "blue", "red", "blue", "")):
        tokens = rng.integers(0, 280, int(rng.integers(2, 30))).astype(np.int32)
        pages = np.arange(index * 4, index * 4 + 4, dtype=np.int32)
        expected.append(naive.forward(raw, expected_of[name], tokens)[0][-1])
        cut = len(tokens) - 1 if index % 2 else len(tokens) // 2
        runner.step([StepRow(tokens[:cut], 0, pages, name)])
        rows.append(StepRow(tokens[cut:], cut, pages, name))
    got = runner.step(rows).numpy()
    np.testing.assert_allclose(got, np.array(expected), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_each_matrix_is_added_to_its_own_columns(name: str, tmp_path: Path) -> None:
    raw = naive.raw_config("qwen2")
    weights = naive.make_weights(raw, seed=1)
    loaded = load_model(naive.write_folder(tmp_path / "m", raw, weights), device="cpu")
    merged = make_adapter(tmp_path / "a", weights, 3, only=name)
    runner = Runner(loaded, 8, PAGE)
    runner.add_lora("a", load_adapter(tmp_path / "a", loaded.config))
    tokens = np.arange(20, 45, dtype=np.int32)
    pages = np.arange(4, dtype=np.int32)
    expected = naive.forward(raw, merged, tokens)[0][-1]
    assert np.abs(expected - naive.forward(raw, weights, tokens)[0][-1]).max() > 0.01
    got = runner.step([StepRow(tokens, 0, pages, "a")])[0].numpy()
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=2e-4)


def test_kv_of_one_adapter_is_wrong_for_another() -> None:
    """A cache hit across adapters would change the output: they must never share blocks."""
    loaded = random_model(1, layers=2, hidden=64, device="cpu")
    tokens = np.random.default_rng(0).integers(0, 512, 40).astype(np.int32)
    pages = np.arange(8, dtype=np.int32)

    def answer(prefix_lora: str, lora: str) -> torch.Tensor:
        runner = Runner(loaded, 8, PAGE)
        runner.add_lora("a", random_adapter(1, loaded.config))
        runner.add_lora("b", random_adapter(2, loaded.config))
        runner.step([StepRow(tokens[:32], 0, pages, prefix_lora)])
        return runner.step([StepRow(tokens[32:], 32, pages, lora)])[0]

    for lora in ("", "a", "b"):
        right = answer(lora, lora)
        for other in {"", "a", "b"} - {lora}:
            wrong = answer(other, lora)
            assert (wrong - right).abs().max() > 0.5
            assert wrong.argmax() != right.argmax()


def test_a_random_adapter_is_determined_by_its_seed() -> None:
    config = random_model(1, layers=2, hidden=64, device="cpu").config
    assert random_adapter(1, config).digest == random_adapter(1, config).digest
    assert random_adapter(1, config).digest != random_adapter(2, config).digest
    assert random_adapter(1, config).digest != random_adapter(1, config, scale=2.0).digest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "all"}, r"bias must be 'none' \(got 'all'\)"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is not supported"),
        ({"peft_type": "IA3"}, r"peft_type must be 'LORA' \(got 'IA3'\)"),
        ({"r": 0}, r"r must be 1 to 1024 \(got 0\)"),
        ({"r": "4"}, r"r must be .*\(got '4'\)"),
        ({"r": 8}, "layer 0 down_proj .*does not fit this model of 2 layers"),
    ],
)
def test_an_invalid_adapter_is_rejected(settings: dict, message: str, tmp_path: Path) -> None:
    raw = naive.raw_config("llama")
    weights = naive.make_weights(raw, seed=1)
    config = load_model(naive.write_folder(tmp_path / "m", raw, weights), device="cpu").config
    make_adapter(tmp_path / "a", weights, 1)
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises(ConfigError, match=message):
        load_adapter(tmp_path / "a", config)


def test_a_folder_without_an_adapter_is_rejected(tmp_path: Path) -> None:
    config = random_model(1, layers=2, hidden=64, device="cpu").config
    with pytest.raises(ConfigError, match=r"cannot read .*adapter_config\.json"):
        load_adapter(tmp_path, config)
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        load_adapter(tmp_path, config)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"cannot read .* as safetensors"):
        load_adapter(tmp_path, config)
    save_file(
        {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(ConfigError, match=r"'base_model\.model\.lm_head\.lora_A\.weight'"):
        load_adapter(tmp_path, config)
    save_file(
        {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(ConfigError, match="layer 0 q_proj does not fit"):
        load_adapter(tmp_path, config)
