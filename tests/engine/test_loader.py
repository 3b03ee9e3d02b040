"""Model folders, GGUF files, random models: accepted, rejected, and the digest."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import gguf
import naive_model as naive
import numpy as np
import pytest
import torch
from end_to_end_rig import Baseline, CachedEngine, PromptRequest, check_slots_free, make_store
from safetensors.torch import save_file

from kvstore.engine.gguf_file import GGUFFile
from kvstore.engine.hf_folder import HFFolder, config_from_hf
from kvstore.engine.loader import LoadedModel, load_model, random_model
from kvstore.engine.runner import Runner, StepRow
from kvstore.errors import ConfigError

torch.set_num_threads(1)
PAGE = 8
Q = gguf.GGMLQuantizationType


def last_logits(loaded: LoadedModel, tokens: np.ndarray) -> np.ndarray:
    runner = Runner(loaded, 16, PAGE)
    pages = np.arange(16, dtype=np.int32)
    runner.step([StepRow(tokens[:10], 0, pages)])
    return runner.step([StepRow(tokens[10:], 10, pages)])[0].numpy()


def some_tokens(count: int = 40) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 280, count).astype(np.int32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = naive.raw_config("llama")
    return naive.write_folder(tmp_path / "model", raw, naive.make_weights(raw, seed=1))


def rewrite(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    file = folder / "config.json"
    raw = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def revision(loaded: LoadedModel) -> str:
    return loaded.namespace(16).revision


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "llama-tied-biased"])
def test_a_gguf_file_runs_like_its_folder(case: str, tmp_path: Path) -> None:
    raw = naive.raw_config(case)
    weights = naive.make_weights(raw, seed=2)
    loaded = load_model(naive.write_gguf(tmp_path / "m.gguf", raw, weights), device="cpu")
    expected = naive.forward(raw, weights, some_tokens())[0][-1]
    np.testing.assert_allclose(last_logits(loaded, some_tokens()), expected, atol=1e-4, rtol=1e-4)


def test_a_gguf_file_carries_llama3_scaling_as_divisors(tmp_path: Path) -> None:
    raw = naive.raw_config("llama-llama3")
    weights = naive.make_weights(raw, seed=2)
    plain = {**raw, "rope_scaling": None}
    divisors = np.array(
        [naive.angle_per_position(plain, i) / naive.angle_per_position(raw, i) for i in range(8)]
    )
    assert divisors.min() == 1.0
    assert divisors.max() > 1.0
    file = naive.write_gguf(tmp_path / "m.gguf", raw, weights, divisors=divisors)
    expected = naive.forward(raw, weights, some_tokens())[0][-1]
    got = last_logits(load_model(file, device="cpu"), some_tokens())
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_1])
def test_quantised_weights_are_decoded(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    raw = naive.raw_config("qwen2")
    weights = naive.make_weights(raw, seed=2)
    file = naive.write_gguf(tmp_path / "m.gguf", raw, weights, kind=kind)
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind).astype(np.float32)
        if array.ndim == 2
        else array
        for name, array in weights.items()
    }
    expected = naive.forward(raw, rounded, some_tokens())[0][-1]
    got = last_logits(load_model(file, device="cpu"), some_tokens())
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q2_K, Q.Q3_K])
def test_k_quantisations_are_decoded(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    per, each = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 100, (3, 2 * each), dtype=np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    writer.add_tensor("x", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw, tensor = GGUFFile(tmp_path / "t.gguf").read("x")
    assert tensor.shape == (3, 2 * per)
    assert raw.tobytes() == stored.tobytes()
    np.testing.assert_array_equal(tensor.numpy(), gguf.quants.dequantize(stored, kind))


def test_metadata_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    raw = naive.raw_config("llama")
    file = tmp_path / "m.gguf"
    tokens = {"token_list": [f"t{i}é" for i in range(280)], "token_types": [1] * 280}
    naive.write_gguf(file, raw, naive.make_weights(raw, 1), kind=Q.Q8_0, tokenizer=tokens)
    ours, theirs = GGUFFile(file), gguf.GGUFReader(str(file))
    for name, entry in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.fields[name] == entry.contents(), name
    for entry in theirs.tensors:
        info = ours.tensors[entry.name]
        assert (info.offset, info.nbytes) == (entry.data_offset, entry.n_bytes)
        assert list(info.shape) == list(reversed(entry.shape.tolist()))


def test_shards_and_folder_names_do_not_matter_to_the_namespace(
    folder: Path, tmp_path: Path
) -> None:
    raw = naive.raw_config("llama")
    weights = naive.make_weights(raw, seed=1)
    whole = load_model(folder, device="cpu")
    split = load_model(naive.write_folder(tmp_path / "other", raw, weights, shards=3), device="cpu")
    assert split.namespace(16) == whole.namespace(16)
    assert (whole.name, split.name) == ("model", "other")
    np.testing.assert_array_equal(
        last_logits(whole, some_tokens()), last_logits(split, some_tokens())
    )


def test_a_change_that_affects_kv_changes_the_namespace(folder: Path, tmp_path: Path) -> None:
    raw = naive.raw_config("llama")
    weights = naive.make_weights(raw, seed=1)
    loaded = load_model(folder, device="cpu")
    digests = {loaded.namespace(16).digest, loaded.namespace(32).digest}
    digests.add(load_model(folder, device="cpu", dtype="bfloat16").namespace(16).digest)
    nudged = {name: array.copy() for name, array in weights.items()}
    nudged["model.layers.1.mlp.down_proj.weight"][-1, -1] += 1e-3
    naive.write_folder(tmp_path / "nudged", raw, nudged)
    digests.add(load_model(tmp_path / "nudged", device="cpu").namespace(16).digest)
    rewrite(folder, rope_theta=999.0)
    digests.add(load_model(folder, device="cpu").namespace(16).digest)
    file = naive.write_gguf(tmp_path / "m.gguf", raw, weights)
    digests.add(load_model(file, device="cpu").namespace(16).digest)
    assert len(digests) == 6


def test_a_change_that_does_not_affect_kv_keeps_the_namespace(folder: Path) -> None:
    before = load_model(folder, device="cpu").namespace(16)
    rewrite(folder, eos_token_id=[5, 6], max_position_embeddings=256, torch_dtype="float16")
    loaded = load_model(folder, device="cpu")
    assert loaded.namespace(16) == before
    assert loaded.config.eos_ids == (5, 6)
    assert (before.layers, before.kv_heads, before.head_dim) == (2, 2, 16)
    assert before.dtype == "float32"


def change_in_place(file: Path, start: int, nbytes: int) -> None:
    """Change float32 weights. The file keeps its size and its time."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(start)
        values = np.frombuffer(opened.read(nbytes), np.float32)
        opened.seek(start)
        opened.write((-4 * values).tobytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def place_of(file: Path, name: str) -> int:
    """Position of a tensor in a safetensors file."""
    data = file.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + header_bytes])[name]
    return 8 + header_bytes + int(entry["data_offsets"][0])


def test_three_kibibytes_of_a_projection_changed_in_place(folder: Path, tmp_path: Path) -> None:
    """Over a store with blocks of the old weights, an engine of the new ones computes all."""
    prompts = [PromptRequest(tuple(some_tokens(70)[at:].tolist())) for at in (0, 3)]

    def run() -> tuple[list[int], list[list[int]]]:
        """Cached tokens, and outputs, which are those of an engine without a store."""
        loaded = load_model(folder, device="cpu")
        engine, cold = CachedEngine(loaded, store), Baseline(loaded)
        outputs = [engine.run([prompt])[0] for prompt in prompts]
        engine.close()
        assert [output.tokens for output in outputs] == [cold.tokens(each) for each in prompts]
        return [sum(each.cached.values()) for each in outputs], [each.tokens for each in outputs]

    store = make_store(tmp_path / "disk", load_model(folder, device="cpu"))
    assert run()[0] == [0, 0]
    cached, old = run()
    assert cached == [64, 64]
    file = folder / "model.safetensors"
    change_in_place(file, place_of(file, "model.layers.0.self_attn.k_proj.weight"), 3072)
    cached, new = run()
    assert cached == [0, 0]
    assert new != old
    check_slots_free(store)
    store.close()


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_file_that_changes_while_it_is_read(folder: Path, tmp_path: Path, kind: str) -> None:
    """The digest is of the bytes that are used: neither is read from the mapped file again."""
    name = "model.layers.0.self_attn.v_proj.weight"
    if kind == "folder":
        source: HFFolder | GGUFFile = HFFolder(folder)
        file = folder / "model.safetensors"
        start, stored = place_of(file, name), name
    else:
        raw = naive.raw_config("llama")
        file = naive.write_gguf(tmp_path / "m.gguf", raw, naive.make_weights(raw, seed=1))
        source = GGUFFile(file)
        stored = source.name_of(name)
        start = source.tensors[stored].offset
    digested, used = source.read(stored)
    before = digested.tobytes(), used.numpy().tobytes()
    change_in_place(file, start, 3072)
    assert (digested.tobytes(), used.numpy().tobytes()) == before
    assert source.read(stored)[0].tobytes() != before[0], "the file is mapped"


def test_stored_half_precision_is_widened(tmp_path: Path) -> None:
    raw = naive.raw_config("llama")
    weights = naive.make_weights(raw, seed=1)
    folder = naive.write_folder(tmp_path, raw, weights, dtype=torch.bfloat16)
    rounded = {
        name: torch.from_numpy(array).bfloat16().float().numpy() for name, array in weights.items()
    }
    expected = naive.forward(raw, rounded, some_tokens())[0][-1]
    got = last_logits(load_model(folder, device="cpu"), some_tokens())
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


def test_a_stored_head_of_tied_embeddings_is_not_read(tmp_path: Path) -> None:
    raw = naive.raw_config("qwen2")
    weights = naive.make_weights(raw, seed=1)
    stored = {**weights, "lm_head.weight": np.zeros((280, 64), np.float32)}
    loaded = load_model(naive.write_folder(tmp_path, raw, stored), device="cpu")
    expected = naive.forward(raw, weights, some_tokens())[0][-1]
    np.testing.assert_allclose(last_logits(loaded, some_tokens()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not supported; use one of llama, qwen"),
        ({"model_type": None}, "architecture 'missing' is not supported"),
        ({"hidden_size": None}, "missing entry 'hidden_size'"),
        ({"hidden_size": "wide"}, "an entry has an invalid value"),
        ({"num_attention_heads": 0, "head_dim": None}, "an entry has an invalid value"),
        ({"hidden_act": "gelu"}, r"hidden_act must be 'silu' \(got 'gelu'\)"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial rotary positions are not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not supported here"),
        ({"num_hidden_layers": 3}, "missing tensor 'model.layers.2.self_attn.q_proj.weight'"),
        ({"num_hidden_layers": 1}, "unexpected tensor 'model.layers.1.*' in a llama model"),
        ({"intermediate_size": 97}, r"gate_proj.weight' must have shape \(97, 64\) .*\(96, 64\)"),
        ({"model_type": "qwen3"}, "missing tensor '.*self_attn.q_norm.weight'"),
        ({"attention_bias": True}, "missing tensor '.*self_attn.o_proj.bias'"),
    ],
)
def test_an_invalid_config_is_rejected_in_one_line(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    rewrite(folder, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_rejected(folder: Path, tmp_path: Path) -> None:
    def rejected(path: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            load_model(path, device="cpu")
        assert "\n" not in str(caught.value)

    rejected(
        tmp_path / "absent", "no model at .*absent'; give a Hugging Face model folder or a .gguf"
    )
    (tmp_path / "empty").mkdir()
    rejected(tmp_path / "empty", r"has no config\.json")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    rejected(folder, r"has no weights: \*\.safetensors files are required")
    (folder / "model.safetensors").write_bytes(weights[:1000])
    rejected(folder, "cannot read .* as safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../../elsewhere.safetensors"}})
    )
    rejected(folder, r"has no elsewhere\.safetensors, which is in model\.safetensors\.index\.json")
    (folder / "model.safetensors.index.json").write_text("[]")
    rejected(folder, "is not a JSON object")
    (folder / "config.json").write_text("{")
    rejected(folder, "cannot read .* as JSON")


def test_integer_weights_are_rejected(folder: Path) -> None:
    raw = naive.raw_config("llama")
    weights = naive.make_weights(raw, seed=1)
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' has dtype torch\.int8"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu'; use 'cpu' or 'cuda'"),
        ({"device": "meta"}, "device 'meta' is not supported"),
        ({"dtype": "fp8"}, "dtype 'fp8' is not supported; use one of float32, bfloat16, float16"),
    ],
)
def test_an_unknown_device_or_dtype_is_rejected(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        random_model(1, **{"device": "cpu", **wrong})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_an_absent_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match="device 'cuda' is not available"):
        random_model(1, device="cuda")
    assert random_model(1, layers=1, hidden=64).model.device == torch.device("cpu")


def small_gguf(path: Path, **options: Any) -> Path:
    raw = {**naive.raw_config("qwen3"), "num_hidden_layers": 1, "vocab_size": 32}
    return naive.write_gguf(path, raw, naive.make_weights(raw, 1), **options)


def test_an_unsupported_gguf_file_is_rejected(tmp_path: Path) -> None:
    def rejected(path: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            load_model(path, device="cpu")
        assert "\n" not in str(caught.value)

    (tmp_path / "text").write_text("not a model, though it is long enough to be one")
    rejected(tmp_path / "text", "its first four bytes are not 'GGUF'")
    (tmp_path / "short").write_bytes(b"GGUF")
    rejected(tmp_path / "short", "it is too short")
    missing = small_gguf(tmp_path / "missing.gguf", skip=("blk.0.ffn_up.weight",))
    rejected(missing, r"missing tensor 'blk\.0\.ffn_up\.weight'")
    whole = small_gguf(tmp_path / "whole.gguf", kind=Q.Q8_0).read_bytes()
    other = whole.replace(b"qwen3", b"qwen9")
    (tmp_path / "other").write_bytes(other)
    rejected(tmp_path / "other", "architecture 'qwen9' is not supported; use one of llama, qwen2")
    at = re.search(rb"blk\.0\.ffn_up\.weight\x02\0\0\0.{16}", whole, re.DOTALL)
    assert at is not None
    for kind, message in (
        (250, "'blk.0.ffn_up.weight' has the unknown quantisation 250"),
        (9, "has quantisation Q8_1, which is not supported; use Q4_0, Q4_1"),
    ):
        changed = bytearray(whole)
        changed[at.end() : at.end() + 4] = kind.to_bytes(4, "little")
        (tmp_path / "kind").write_bytes(changed)
        rejected(tmp_path / "kind", message)


def test_a_corrupt_gguf_file_only_raises_config_error(tmp_path: Path) -> None:
    whole = small_gguf(tmp_path / "whole.gguf").read_bytes()
    header = whole.index(b"blk.0") + 2000
    rng = random.Random(1)
    file = tmp_path / "corrupt.gguf"
    errors: list[str] = []
    for case in range(300):
        if case % 3 == 0:
            corrupt = whole[: rng.randrange(len(whole) if case % 2 else header)]
        else:
            changed = bytearray(whole)
            for _ in range(rng.choice((1, 1, 4))):
                changed[rng.randrange(header)] = rng.randrange(256)
            corrupt = bytes(changed)
        file.write_bytes(corrupt)
        try:
            GGUFFile(file).config()
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert not any("\n" in error for error in errors)


def test_random_models_are_determined_by_their_seed() -> None:
    def make(seed: int, **options: Any) -> LoadedModel:
        return random_model(seed, **{"layers": 2, "hidden": 64, "device": "cpu", **options})

    first, again, other = make(1), make(1), make(2)
    np.testing.assert_array_equal(
        last_logits(first, some_tokens()), last_logits(again, some_tokens())
    )
    assert revision(first) == revision(again)
    assert len({revision(m) for m in (first, other, make(1, layers=3), make(1, kv_heads=4))}) == 4
    assert first.tokenizer is not None
    assert first.config.eos_ids == (256,)
    assert make(1, vocab=100).tokenizer is None
    assert make(1, dtype="bfloat16").namespace(16).dtype == "bfloat16"
    assert make(1, tied_embeddings=True).config.tied_embeddings


def test_a_config_without_weights_gives_a_shape() -> None:
    raw = {key: value for key, value in naive.BASE.items() if key != "head_dim"}
    config = config_from_hf({**raw, "model_type": "qwen2", "num_key_value_heads": None})
    assert (config.head_dim, config.kv_heads, config.qkv_bias) == (16, 4, True)
    assert (config.eos_ids, config.bos_id) == ((2,), 1)
