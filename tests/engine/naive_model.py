"""Reference model for comparison: float64 numpy, whole sequences, one head at a time.

It shares no code with the engine: rotary positions are complex products, attention is a full
matrix with its upper triangle masked. Also writes the model folders and files that the tests load.
"""

from __future__ import annotations

import cmath
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 280,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
}

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama-llama3": {"rope_scaling": LLAMA3_SCALING},
    "llama-linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-newer-rope": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    },
    "llama-one-group": {"num_key_value_heads": 1},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "num_key_value_heads": 4},
}

Weights = dict[str, np.ndarray]


def raw_config(case: str) -> dict[str, Any]:
    return {**BASE, **CASES[case]}


def head_dim(raw: dict[str, Any]) -> int:
    return int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])


def make_weights(raw: dict[str, Any], seed: int) -> Weights:
    """Return random float32 weights under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    hidden, inner = raw["hidden_size"], raw["intermediate_size"]
    q = raw["num_attention_heads"] * head_dim(raw)
    kv = raw["num_key_value_heads"] * head_dim(raw)
    qkv_bias = raw.get("attention_bias", raw["model_type"] == "qwen2")
    weights: Weights = {}

    def matrix(name: str, rows: int, columns: int, bias: bool) -> None:
        weights[name + ".weight"] = rng.normal(0, 2 / math.sqrt(columns), (rows, columns))
        if bias:
            weights[name + ".bias"] = rng.normal(0, 0.5, rows)

    def norm(name: str, width: int) -> None:
        weights[name + ".weight"] = rng.normal(1, 0.2, width)

    weights["model.embed_tokens.weight"] = rng.normal(0, 1, (raw["vocab_size"], hidden))
    for index in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        norm(layer + "input_layernorm", hidden)
        norm(layer + "post_attention_layernorm", hidden)
        matrix(layer + "self_attn.q_proj", q, hidden, qkv_bias)
        matrix(layer + "self_attn.k_proj", kv, hidden, qkv_bias)
        matrix(layer + "self_attn.v_proj", kv, hidden, qkv_bias)
        matrix(layer + "self_attn.o_proj", hidden, q, bool(raw.get("attention_bias")))
        if raw["model_type"] == "qwen3":
            norm(layer + "self_attn.q_norm", head_dim(raw))
            norm(layer + "self_attn.k_norm", head_dim(raw))
        matrix(layer + "mlp.gate_proj", inner, hidden, bool(raw.get("mlp_bias")))
        matrix(layer + "mlp.up_proj", inner, hidden, bool(raw.get("mlp_bias")))
        matrix(layer + "mlp.down_proj", hidden, inner, bool(raw.get("mlp_bias")))
    norm("model.norm", hidden)
    if not raw["tie_word_embeddings"]:
        weights["lm_head.weight"] = rng.normal(
            0, 2 / math.sqrt(hidden), (raw["vocab_size"], hidden)
        )
    return {name: array.astype(np.float32) for name, array in weights.items()}


def write_folder(
    folder: Path, raw: dict[str, Any], weights: Weights, *, shards: int = 1, dtype: Any = None
) -> Path:
    """Write a Hugging Face model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, folder / file)
        where.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def paired(array: np.ndarray, width: int) -> np.ndarray:
    """Return rows of q or k in the order of llama's GGUF files: a head's halves interleaved."""
    out = np.empty_like(array)
    for head in range(len(array) // width):
        for i in range(width // 2):
            out[head * width + 2 * i] = array[head * width + i]
            out[head * width + 2 * i + 1] = array[head * width + width // 2 + i]
    return out


def write_gguf(
    path: Path,
    raw: dict[str, Any],
    weights: Weights,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: dict[str, Any] | None = None,
    skip: tuple[str, ...] = (),
    divisors: np.ndarray | None = None,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does: matrices in `kind`, vectors in float32."""
    family = raw["model_type"]
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(head_dim(raw))
    writer.add_value_length(head_dim(raw))
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    for name, value in (tokenizer or {}).items():
        getattr(writer, f"add_{name}")(value)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    for name, array in weights.items():
        stored = gguf_name(name)
        if stored in skip:
            continue
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = paired(array, head_dim(raw))
        if array.ndim == 2:
            data = gguf.quants.quantize(array, kind)
            writer.add_tensor(stored, data, raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def angle_per_position(raw: dict[str, Any], pair: int) -> float:
    """Return the rotation of this pair of dimensions per position, in radians."""
    newer = raw.get("rope_parameters") or {}
    scaling = newer or raw.get("rope_scaling") or {}
    theta = newer.get("rope_theta", raw["rope_theta"])
    angle = theta ** (-2.0 * pair / head_dim(raw))
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return angle / scaling["factor"]
    if kind == "llama3":
        wavelength = 2 * math.pi / angle
        old = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if wavelength < old / high:
            return angle
        if wavelength > old / low:
            return angle / scaling["factor"]
        smooth = (old / wavelength - low) / (high - low)
        return (1 - smooth) * angle / scaling["factor"] + smooth * angle
    return angle


def turn(vector: np.ndarray, position: int, raw: dict[str, Any]) -> np.ndarray:
    """Return one head's vector rotated: each pair (i, i + d/2) as one complex number."""
    half = len(vector) // 2
    out = vector.copy()
    for i in range(half):
        turned = complex(vector[i], vector[i + half]) * cmath.exp(
            1j * position * angle_per_position(raw, i)
        )
        out[i], out[i + half] = turned.real, turned.imag
    return out


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def forward(
    raw: dict[str, Any], weights: Weights, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [tokens, vocab] and KV [layers, 2, tokens, kv_heads, head_dim]."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    eps, width = raw["rms_norm_eps"], head_dim(raw)
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    count = len(tokens)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    x = w["model.embed_tokens.weight"][tokens]
    cached = np.zeros((raw["num_hidden_layers"], 2, count, kv_heads, width))
    for index in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        h = rms(x, w[layer + "input_layernorm.weight"], eps)
        q = linear(layer + "self_attn.q_proj", h).reshape(count, heads, width)
        k = linear(layer + "self_attn.k_proj", h).reshape(count, kv_heads, width)
        v = linear(layer + "self_attn.v_proj", h).reshape(count, kv_heads, width)
        if raw["model_type"] == "qwen3":
            q = rms(q, w[layer + "self_attn.q_norm.weight"], eps)
            k = rms(k, w[layer + "self_attn.k_norm.weight"], eps)
        q = np.array([[turn(q[t, n], t, raw) for n in range(heads)] for t in range(count)])
        k = np.array([[turn(k[t, n], t, raw) for n in range(kv_heads)] for t in range(count)])
        cached[index] = k, v
        mixed = np.zeros((count, heads, width))
        for n in range(heads):
            shared = n // (heads // kv_heads)
            scores = q[:, n] @ k[:, shared].T / math.sqrt(width)
            scores[np.triu_indices(count, 1)] = -np.inf
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, n] = scores / scores.sum(axis=1, keepdims=True) @ v[:, shared]
        x = x + linear(layer + "self_attn.o_proj", mixed.reshape(count, -1))
        h = rms(x, w[layer + "post_attention_layernorm.weight"], eps)
        gate = linear(layer + "mlp.gate_proj", h)
        inner = gate / (1 + np.exp(-gate)) * linear(layer + "mlp.up_proj", h)
        x = x + linear(layer + "mlp.down_proj", inner)
    x = rms(x, w["model.norm.weight"], eps)
    head = w["model.embed_tokens.weight" if raw["tie_word_embeddings"] else "lm_head.weight"]
    return x @ head.T, cached
