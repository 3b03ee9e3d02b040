"""The namespace of a model from its Hugging Face `config.json`: layers, heads, dtype.

The field names are those of the configuration classes in transformers. A multimodal model (Gemma 3,
Mistral 3) has the fields of its language model under `text_config`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.blocks.key import DTYPE_BYTES, Namespace
from kvstore.errors import ConfigError

_DTYPE_NAMES = {
    "half": "float16",
    "float": "float32",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}

DEFAULT_DTYPE = "float32"
"""The dtype that transformers uses if the config has none (GPT-2's has none)."""


@dataclass(frozen=True)
class _Family:
    """The config fields with the geometry of a model family; "" if the family has no such field."""

    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    hidden: str = "hidden_size"
    head_dim: str = "head_dim"
    mla: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Values that a config may omit because the family's class has them as defaults."""


_GROUPED = _Family()
_FAMILIES: dict[str, _Family] = {
    "llama": _GROUPED,
    "mistral": _GROUPED,
    "mixtral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen2_moe": _GROUPED,
    "qwen3": _GROUPED,
    "qwen3_moe": _GROUPED,
    "gemma": _Family(defaults={"head_dim": 256}),
    "gemma2": _Family(defaults={"head_dim": 256}),
    "gemma3_text": _Family(
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    ),
    "gpt2": _Family(layers="n_layer", heads="n_head", kv_heads="", hidden="n_embd", head_dim=""),
    "gpt_neox": _Family(kv_heads="", head_dim=""),
    "deepseek_v2": _Family(mla=True),
    "deepseek_v3": _Family(mla=True),
}
_FAMILIES["gemma3"] = _FAMILIES["gemma3_text"]

MODEL_TYPES = tuple(_FAMILIES)


def namespace_from_hf(
    config: Mapping[str, Any],
    *,
    model: str,
    revision: str = "",
    dtype: str | None = None,
    block_tokens: int = 16,
    tp_size: int = 1,
    tp_rank: int = 0,
) -> Namespace:
    """The namespace of one rank of a model; `config`: its parsed config.json.

    Args:
        model: the model's id; part of the namespace, so engines that share blocks must agree on it.
        revision: revision of the weights.
        dtype: dtype of the KV cache; None: the config's dtype, or DTYPE_OF_SILENT_CONFIG.
        tp_size: number of ranks that share the KV heads. With fewer heads than ranks, several ranks
            have the same head. Every rank has the whole latent of an MLA model.

    Raises:
        ConfigError: unknown model type or dtype, a field that is missing or not a positive integer,
            or heads that cannot be divided.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    model_type = text.get("model_type") or config.get("model_type")
    family = _family(model_type)
    fields = _Fields(str(model_type), text, family.defaults)
    if family.mla:
        kv_heads = 1
        head_dim = fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim")
    else:
        kv_heads = _heads_of_rank(fields, family, tp_size)
        head_dim = _head_dim(fields, family)
    return Namespace(
        model=model,
        revision=revision,
        dtype=_dtype(dtype, text, config),
        quantisation=_quantisation(text, config),
        layers=fields.size(family.layers),
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=0 if family.mla else None,
        block_tokens=block_tokens,
        attention="mla" if family.mla else "mha",
        tp_size=tp_size,
        tp_rank=tp_rank,
    )


@dataclass(frozen=True)
class _Fields:
    """The sizes in a config; errors name the model type and the field."""

    model_type: str
    values: Mapping[str, Any]
    defaults: Mapping[str, int]

    def has(self, name: str) -> bool:
        return bool(name) and (self.values.get(name) is not None or name in self.defaults)

    def size(self, name: str) -> int:
        value = self.values.get(name)
        if value is None:
            value = self.defaults.get(name)
        if value is None:
            raise ConfigError(f"config of model type {self.model_type!r} has no {name!r}")
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"config of model type {self.model_type!r}: {name} must be a positive integer "
                f"(got {value!r})"
            )
        return value


def _family(model_type: Any) -> _Family:
    if not model_type:
        raise ConfigError("config has no 'model_type': use a model's config.json")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        nearest = difflib.get_close_matches(str(model_type), MODEL_TYPES, n=1, cutoff=0.7)
        hint = f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(MODEL_TYPES)}"
        raise ConfigError(f"unknown model type {model_type!r}: {hint}")
    return family


def _heads_of_rank(fields: _Fields, family: _Family, tp_size: int) -> int:
    # A config older than grouped-query attention has no number of KV heads: it equals the heads.
    name = family.kv_heads if fields.has(family.kv_heads) else family.heads
    heads = fields.size(name)
    if tp_size < 1 or (heads % tp_size and tp_size % heads):
        raise ConfigError(
            f"tp_size must divide the number of KV heads, or be a multiple of it (got tp_size "
            f"{tp_size}, {heads} KV heads)"
        )
    return max(1, heads // tp_size)


def _head_dim(fields: _Fields, family: _Family) -> int:
    if fields.has(family.head_dim):
        return fields.size(family.head_dim)
    hidden, heads = fields.size(family.hidden), fields.size(family.heads)
    if hidden % heads:
        raise ConfigError(
            f"config of model type {fields.model_type!r} has no head_dim, and {family.hidden} "
            f"{hidden} is not a multiple of {family.heads} {heads}"
        )
    return hidden // heads


def _dtype(given: str | None, *configs: Mapping[str, Any]) -> str:
    name = given
    for config in configs:
        name = name or config.get("dtype") or config.get("torch_dtype")
    name = str(name or DEFAULT_DTYPE).removeprefix("torch.")
    name = _DTYPE_NAMES.get(name, name)
    if name not in DTYPE_BYTES:
        raise ConfigError(f"unknown KV dtype {name!r}: use one of {', '.join(DTYPE_BYTES)}")
    return name


def _quantisation(*configs: Mapping[str, Any]) -> str:
    for config in configs:
        spec = config.get("quantization_config")
        if isinstance(spec, Mapping):
            bits = spec.get("bits")
            return f"{spec.get('quant_method', 'unnamed')}{f'-{bits}' if bits else ''}"
    return "none"
