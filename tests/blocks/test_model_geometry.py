"""Geometry from published config.json files (only the fields that matter), against known sizes."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.blocks.model_geometry import MODEL_TYPES, namespace_from_hf
from kvstore.errors import ConfigError


def dense(model_type: str, layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "torch_dtype": "bfloat16",
        **more,
    }


LLAMA_3_8B = dense("llama", 32, 4096, 32, num_key_value_heads=8)
DEEPSEEK_V3 = dense(
    "deepseek_v3",
    61,
    7168,
    128,
    num_key_value_heads=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    quantization_config={"quant_method": "fp8", "fmt": "e4m3"},
)

# name, config, bytes of K and V per token, worked out by hand as layers * heads * 2 * dim * bytes.
KNOWN = [
    ("Llama-3-8B", LLAMA_3_8B, 131_072),
    ("Llama-2-7B", dense("llama", 32, 4096, 32), 524_288),
    ("SmolLM2-135M", dense("llama", 30, 576, 9, num_key_value_heads=3), 23_040),
    ("Mistral-7B", dense("mistral", 32, 4096, 32, num_key_value_heads=8), 131_072),
    (
        "Mistral-Nemo",
        dense("mistral", 40, 5120, 32, num_key_value_heads=8, head_dim=128),
        40 * 8 * 2 * 128 * 2,
    ),
    ("Qwen2-7B", dense("qwen2", 28, 3584, 28, num_key_value_heads=4), 28 * 4 * 2 * 128 * 2),
    (
        "Qwen3-0.6B",
        dense("qwen3", 28, 1024, 16, num_key_value_heads=8, head_dim=128),
        28 * 8 * 2 * 128 * 2,
    ),
    (
        "Gemma-7B",
        dense("gemma", 28, 3072, 16, num_key_value_heads=16, head_dim=256),
        28 * 16 * 2 * 256 * 2,
    ),
    ("Gemma-2-9B", dense("gemma2", 42, 3584, 16, num_key_value_heads=8), 42 * 8 * 2 * 256 * 2),
    (
        "Gemma-3-4B",
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
            },
            "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
        },
        34 * 4 * 2 * 256 * 2,
    ),
    (
        "Gemma-3-27B",
        {
            "model_type": "gemma3",
            "text_config": dense("gemma3_text", 62, 5376, 32, num_key_value_heads=16, head_dim=128),
        },
        62 * 16 * 2 * 128 * 2,
    ),
    (
        "GPT-2",
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768},
        12 * 12 * 2 * 64 * 4,
    ),
    (
        "GPT-NeoX-20B",
        {**dense("gpt_neox", 44, 6144, 64), "torch_dtype": "float16"},
        44 * 64 * 2 * 96 * 2,
    ),
    (
        "DeepSeek-V2-Lite",
        dense("deepseek_v2", 27, 2048, 16, kv_lora_rank=512, qk_rope_head_dim=64),
        27 * 576 * 2,
    ),
    ("DeepSeek-V3", DEEPSEEK_V3, 61 * 576 * 2),
]


@pytest.mark.parametrize(("name", "config", "size"), KNOWN, ids=[known[0] for known in KNOWN])
def test_bytes_per_token_of_known_models(name: str, config: dict[str, Any], size: int) -> None:
    namespace = namespace_from_hf(config, model=name)
    assert namespace.bytes_per_token == size
    assert namespace.block_bytes == 16 * size


def test_every_rank_has_the_whole_latent_of_mla() -> None:
    namespace = namespace_from_hf(DEEPSEEK_V3, model="m", tp_size=8, tp_rank=7)
    assert (namespace.attention, namespace.kv_heads) == ("mla", 1)
    assert (namespace.head_dim, namespace.head_dim_v) == (576, 0)
    assert namespace.bytes_per_token == 61 * 576 * 2
    assert namespace.quantisation == "fp8"


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_ranks_share_the_heads(tp_size: int, heads: int) -> None:
    namespace = namespace_from_hf(LLAMA_3_8B, model="m", tp_size=tp_size, tp_rank=tp_size - 1)
    assert (namespace.kv_heads, namespace.tp_size, namespace.layers) == (heads, tp_size, 32)


@pytest.mark.parametrize(
    ("given", "in_config", "dtype"),
    [
        (None, {}, "bfloat16"),
        (None, {"dtype": "float16"}, "float16"),
        (None, {"torch_dtype": None}, "float32"),
        ("torch.float16", {}, "float16"),
        ("fp8", {}, "fp8_e4m3"),
        ("half", {"dtype": "nonsense"}, "float16"),
    ],
)
def test_dtype(given: str | None, in_config: dict[str, Any], dtype: str) -> None:
    assert namespace_from_hf({**LLAMA_3_8B, **in_config}, model="m", dtype=given).dtype == dtype


def test_every_setting_that_changes_the_bytes_separates_namespaces() -> None:
    awq = {**LLAMA_3_8B, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert namespace_from_hf(awq, model="m").quantisation == "awq-4"
    namespaces = [
        namespace_from_hf(LLAMA_3_8B, model="m"),
        namespace_from_hf(awq, model="m"),
        namespace_from_hf(LLAMA_3_8B, model="n"),
        namespace_from_hf(LLAMA_3_8B, model="m", revision="r"),
        namespace_from_hf(LLAMA_3_8B, model="m", dtype="float16"),
        namespace_from_hf(LLAMA_3_8B, model="m", block_tokens=32),
        namespace_from_hf(LLAMA_3_8B, model="m", tp_size=2),
        namespace_from_hf(LLAMA_3_8B, model="m", tp_size=2, tp_rank=1),
    ]
    assert len({namespace.digest for namespace in namespaces}) == len(namespaces)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_family_names_a_missing_field(model_type: str) -> None:
    with pytest.raises(ConfigError, match=f"{model_type}.*has no '"):
        namespace_from_hf({"model_type": model_type}, model="m")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no 'model_type'"),
        ({"model_type": "bert"}, "unknown model type 'bert': use one of llama"),
        ({"model_type": "deepseek_v4"}, "did you mean deepseek_v"),
        (
            {**LLAMA_3_8B, "num_hidden_layers": "32"},
            "num_hidden_layers must be a positive integer .got '32'",
        ),
        ({**LLAMA_3_8B, "num_hidden_layers": 0}, "positive integer"),
        ({**LLAMA_3_8B, "num_hidden_layers": True}, "positive integer"),
        ({**LLAMA_3_8B, "hidden_size": 4097}, "4097 is not a multiple of num_attention_heads 32"),
        ({**LLAMA_3_8B, "torch_dtype": "int4"}, "unknown KV dtype 'int4'"),
    ],
)
def test_an_invalid_config_is_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        namespace_from_hf(config, model="m")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tp_size", [0, 3])
def test_heads_that_cannot_be_divided_are_rejected(tp_size: int) -> None:
    with pytest.raises(ConfigError, match="tp_size must divide the number of KV heads"):
        namespace_from_hf(LLAMA_3_8B, model="m", tp_size=tp_size)
