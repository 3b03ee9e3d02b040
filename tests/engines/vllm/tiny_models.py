"""Tiny models with random weights, written by hand: enough for vLLM to compute real KV on a CPU.

Run by the Python that has torch and safetensors: `python tiny_models.py FOLDER [FAMILY] [SEED]`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

VOCABULARY = 512
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, INNER = 256, 4, 2, 64, 4, 512
LATENT, ROTATED = 512, 64
"""Sizes of deepseek_v2: the only ones that vLLM's MLA on a CPU supports."""


def config_of(family: str) -> dict[str, object]:
    """A config.json of this family: llama, qwen3, gemma3_text or deepseek_v2 (MLA)."""
    names = {
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
    }
    config: dict[str, object] = {
        "architectures": [names[family]],
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    if family == "gemma3_text":
        config |= {
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "sliding_window": 64,
            "query_pre_attn_scalar": HEAD_DIM,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": 10000.0,
        }
    else:
        config |= {"hidden_act": "silu", "attention_bias": False, "rope_theta": 10000.0}
    if family == "deepseek_v2":
        config |= {
            "num_key_value_heads": HEADS,
            "q_lora_rank": None,
            "kv_lora_rank": LATENT,
            "qk_nope_head_dim": HEAD_DIM,
            "qk_rope_head_dim": ROTATED,
            "v_head_dim": HEAD_DIM,
            "n_routed_experts": 4,
            "first_k_dense_replace": LAYERS,  # no layer has experts
        }
    return config


def write_model(folder: Path, family: str, seed: int) -> None:
    """Config, weights and a tokenizer of words t4, t5, ... in `folder`."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.08) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * std

    weights = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, std=1.0)}
    # Gemma's norms are 1 + weight.
    one = torch.zeros if family == "gemma3_text" else torch.ones
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        if family == "deepseek_v2":
            per_head = HEAD_DIM + ROTATED
            weights[f"{at}self_attn.q_proj.weight"] = normal(HEADS * per_head, HIDDEN)
            weights[f"{at}self_attn.kv_a_proj_with_mqa.weight"] = normal(LATENT + ROTATED, HIDDEN)
            weights[f"{at}self_attn.kv_a_layernorm.weight"] = one(LATENT)
            weights[f"{at}self_attn.kv_b_proj.weight"] = normal(HEADS * 2 * HEAD_DIM, LATENT)
        else:
            weights[f"{at}self_attn.q_proj.weight"] = normal(HEADS * HEAD_DIM, HIDDEN)
            weights[f"{at}self_attn.k_proj.weight"] = normal(KV_HEADS * HEAD_DIM, HIDDEN)
            weights[f"{at}self_attn.v_proj.weight"] = normal(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{at}self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        if family in ("qwen3", "gemma3_text"):
            weights[f"{at}self_attn.q_norm.weight"] = one(HEAD_DIM)
            weights[f"{at}self_attn.k_norm.weight"] = one(HEAD_DIM)
        for name in ("gate", "up"):
            weights[f"{at}mlp.{name}_proj.weight"] = normal(INNER, HIDDEN)
        weights[f"{at}mlp.down_proj.weight"] = normal(HIDDEN, INNER)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if family == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            weights[f"{at}{name}.weight"] = one(HIDDEN)
    weights["model.norm.weight"] = one(HIDDEN)
    weights["lm_head.weight"] = normal(VOCABULARY, HIDDEN)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(family), indent=1))
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(special))
    write_tokenizer(folder)


def change_weights(folder: Path, tensor: str, nbytes: int) -> None:
    """Change `nbytes` of one float32 tensor in place. The file keeps its size and its time."""
    import numpy as np

    file = folder / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        start, end = json.loads(opened.read(header_bytes))[tensor]["data_offsets"]
        assert end - start >= nbytes
        place = 8 + header_bytes + start
        opened.seek(place)
        values = np.frombuffer(opened.read(nbytes), np.float32)
        opened.seek(place)
        opened.write((-4 * values).tobytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def write_adapter(folder: Path, seed: int, rank: int = 8) -> None:
    """A LoRA adapter of the models above, strong enough to change their output."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            weights[f"{at}lora_A.weight"] = torch.randn(rank, HIDDEN, generator=random) * 0.1
            weights[f"{at}lora_B.weight"] = torch.randn(width, rank, generator=random) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


AUDIO_TOKEN = 4
"""The token of the audio model that stands for a sound."""


def write_hearing_model(folder: Path, seed: int) -> None:
    """A Qwen2-Audio: a Whisper encoder and a Qwen2. (vLLM's vision models import torchvision, which
    has no CPU build here.)"""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2AudioConfig, Qwen2AudioEncoderConfig, Qwen2Config
    from transformers import Qwen2AudioForConditionalGeneration as Qwen2Audio

    torch.manual_seed(seed)
    sound = Qwen2AudioEncoderConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=128,
        num_mel_bins=128, initializer_range=0.2,
    )  # fmt: skip
    text = Qwen2Config(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=VOCABULARY,
        max_position_embeddings=4096, initializer_range=0.1,
    )  # fmt: skip
    config = Qwen2AudioConfig(
        audio_config=sound, text_config=text, audio_token_index=AUDIO_TOKEN, initializer_range=0.1
    )
    Qwen2Audio(config).save_pretrained(folder)
    # This release of transformers has one "model" too many.
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace(".model.model.", ".model."): each for name, each in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, {AUDIO_TOKEN: "<|AUDIO|>", 5: "<|audio_bos|>", 6: "<|audio_eos|>"})
    hearing = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "processor_class": "Qwen2AudioProcessor",
        "return_attention_mask": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(hearing))


def write_tokenizer(folder: Path, special_words: Mapping[int, str] | None = None) -> None:
    """Words t4, t5, ..., except these."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    others = special_words or {}
    words |= {f"t{number}": number for number in range(4, VOCABULARY) if number not in others}
    words |= {word: number for number, word in others.items()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in others.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    where, *rest = sys.argv[1:]
    write_model(Path(where), rest[0] if rest else "llama", int(rest[1]) if len(rest) > 1 else 1234)
