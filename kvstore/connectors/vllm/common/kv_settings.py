"""Settings of vLLM that change the KV of the same weights and that nothing else identifies.

Only settings that differ from vLLM's defaults are part of the namespace. So engines that set none
of them share blocks with engines of earlier releases of kvstore. docs/vllm_arguments.md lists every
argument of vLLM and the reason why it is part of the namespace, is rejected, or has no effect.
The module reads attributes of vLLM's configuration objects only. It does not import vllm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from kvstore.connectors.vllm.common.drafter import drafter_settings
from kvstore.connectors.vllm.common.weights_id import (
    MULTIMODAL_FIELDS,
    config_digest,
    depends_on_context_len,
)

PLAIN_KV: Final = ("auto", "float16", "bfloat16")
"""Values of kv_cache_dtype whose KV is not quantised."""
SAME_FILES: Final = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "dummy",
)
"""Load formats that read the same files of a folder, or none."""
ROUNDING_BACKENDS: Final = ("gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend")
"""Keys that vLLM adds to additional_config for arguments that only select a kernel."""

DEFAULTS: Final[Mapping[str, tuple[object, ...]]] = {
    "model_config.model_impl": ("auto", "vllm"),
    "model_config.model_class_overrides": ({},),
    "model_config.code_revision": (None,),
    "model_config.quantization_config": (None,),
    "model_config.multimodal_config.mm_encoder_fp8_scale_path": (None,),
    "load_config.load_format": SAME_FILES,
    "load_config.ignore_patterns": (["original/**/*"],),
    "load_config.model_loader_extra_config": ({},),
    "cache_config.kv_cache_dtype_skip_layers": ([],),
    "cache_config.kv_sharing_fast_prefill": (False,),
    "cache_config.swa_bounded_replay": (True,),
    "attention_config.use_prefill_query_quantization": (False,),
    "attention_config.indexer_kv_dtype": ("auto",),
    "attention_config.indexer_sparse_logits": (False,),
    "attention_config.hisparse_config": (None,),
    "kernel_config.moe_backend": ("auto",),
    "kernel_config.linear_backend": ("auto",),
    "kernel_config.linear_backend_per_quant": (None,),
    "parallel_config.all2all_backend": ("allgather_reducescatter",),
    "parallel_config.worker_cls": ("auto", ""),
    "parallel_config.worker_extension_cls": ("",),
    "lora_config.lora_dtype": ("auto", ""),
    "lora_config.target_modules": (None,),
    "lora_config.enable_tower_connector_lora": (False,),
    "lora_config.enable_mixed_moe_lora_format": (False,),
    "lora_config.enable_moe_shared_loras": (False,),
    "compilation_config.custom_ops": ([],),
    "compilation_config.backend": ("",),
    "compilation_config.inductor_passes": ({},),
    "ec_transfer_config.ec_connector": (None,),
    "additional_config": ({},),
}
"""Settings that are part of the namespace, and their values that are not."""
DEFAULTS_OF_QUANTISED_KV: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_config.backend": (None,),
    "attention_config.backend_per_kind": ({},),
    "attention_config.flash_attn_version": (None,),
    "attention_config.use_trtllm_attention": (None,),
    "attention_config.disable_flashinfer_q_quantization": (False,),
    "attention_config.mla_prefill_backend": (None,),
    "attention_config.sparse_mla_force_mqa": (False,),
}
"""The same, for quantised KV only: some attention kernels then quantise the queries too. With other
KV they differ in rounding only."""
DEFAULTS_OF_STATES: Final[Mapping[str, tuple[object, ...]]] = {
    "cache_config.mamba_cache_dtype": ("auto",),
    "cache_config.mamba_ssm_cache_dtype": ("auto",),
    "cache_config.use_replayssm": (False,),
    "mamba_config.enable_stochastic_rounding": (False,),
    "mamba_config.stochastic_rounding_philox_rounds": (0,),
}
"""The same, for models with Mamba layers."""
DEFAULTS_OF_THE_TIER: Final[Mapping[str, tuple[object, ...]]] = {
    **{f"model_config.multimodal_config.{name}": (None, {}, "evs") for name in MULTIMODAL_FIELDS},
    "parallel_config.cp_kv_cache_interleave_size": (1,),
}
"""The same, for the tier only: the connector's namespace has these otherwise, or rejects them."""


def kv_settings(vllm_config: Any, revision: str) -> dict[str, object]:
    """Settings that are part of the namespace, by name. Empty with vLLM's defaults.

    revision: of the weights, as the user set it.

    Raises ConfigError: a drafter whose weights cannot be identified.
    """
    found = _differing(vllm_config, DEFAULTS)
    if str(vllm_config.cache_config.cache_dtype) not in PLAIN_KV:
        found |= _differing(vllm_config, DEFAULTS_OF_QUANTISED_KV)
    drafter = drafter_settings(vllm_config, revision)
    return {**found, "drafter": drafter} if drafter else found


def tier_settings(vllm_config: Any, kv_cache_config: Any, revision: str) -> dict[str, object]:
    """`kv_settings`, and what vLLM does not tell a tier about the model.

    Raises ConfigError: a drafter whose weights cannot be identified.
    """
    model = vllm_config.model_config
    found = kv_settings(vllm_config, revision)
    found |= _differing(vllm_config, DEFAULTS_OF_THE_TIER)
    if any("Mamba" in type(spec).__name__ for spec in specs_of(kv_cache_config)):
        found |= _differing(vllm_config, DEFAULTS_OF_STATES)
    own = getattr(model.hf_config, "quantization_config", None) or {}
    method = str(own.get("quant_method", "")) if isinstance(own, Mapping) else ""
    quantisation = str(model.quantization or "")
    if quantisation and not (method and quantisation.startswith(method)):
        found["quantization"] = quantisation
    overridden = model.hf_overrides or model.hf_config_path or model.config_format != "auto"
    if overridden or depends_on_context_len(model):
        found["config"] = config_digest(model)
    return found


def specs_of(kv_cache_config: Any) -> list[Any]:
    """The KV cache specs of all groups, layer by layer where they differ within a group."""
    specs: list[Any] = []
    for group in kv_cache_config.kv_cache_groups:
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        specs += by_layer.values() if by_layer else [group.kv_cache_spec]
    return specs


def settings_digest(settings: Mapping[str, object]) -> str:
    """8 hex digits over these settings."""
    text = json.dumps(settings, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def compute_dtype(vllm_config: Any, kv_dtype: str) -> str:
    """The dtype in which the model computes, if it is not the KV's; else ""."""
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return "" if dtype == kv_dtype else dtype


def _differing(vllm_config: Any, defaults: Mapping[str, Collection[object]]) -> dict[str, object]:
    """Those of these settings that are not among their defaults. A configuration that is None, as
    of LoRA, has none of its settings."""
    found = {}
    for path, ignored in defaults.items():
        value = vllm_config
        for name in path.split("."):
            value = getattr(value, name, None)
        if path in READERS:
            value = READERS[path](value, vllm_config)
        if value is not None and value not in ignored:
            found[path] = value
    return found


def _plain(value: Any) -> object:
    """A value of vLLM's as JSON: the same text in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(map(str, value)) if not isinstance(value, tuple) else list(value)
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else str(value)


def _switched_off(custom_ops: Any, _: Any) -> list[str]:
    """Kernels that the user switched off. vLLM adds all other entries by itself."""
    return sorted(op for op in custom_ops or () if op.startswith("-"))


def _foreign(name: Any, _: Any) -> object:
    """The name of a class or function outside vLLM, which may compute anything; else ""."""
    text = name if isinstance(name, str) else getattr(name, "__qualname__", str(name))
    return text if "." in text and not text.startswith("vllm.") else ""


def _lora_dtype(dtype: Any, vllm_config: Any) -> str:
    """The dtype of adapters, if it is not the model's; else ""."""
    return "" if dtype == vllm_config.model_config.dtype or dtype is None else str(dtype)


def _own_keys(additional: Any, _: Any) -> object:
    if not isinstance(additional, Mapping):
        return additional
    return {name: value for name, value in additional.items() if name not in ROUNDING_BACKENDS}


def _scales(path: Any, _: Any) -> str | None:
    """A digest of a file of scales."""
    if path is None:
        return None
    file = Path(path)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else str(path)


READERS: Final[Mapping[str, Callable[[Any, Any], object]]] = {
    "compilation_config.custom_ops": _switched_off,
    "compilation_config.backend": _foreign,
    "parallel_config.worker_cls": _foreign,
    "lora_config.lora_dtype": _lora_dtype,
    "additional_config": _own_keys,
    "model_config.multimodal_config.mm_encoder_fp8_scale_path": _scales,
}
"""How the value of a setting is read before it is compared with its defaults."""
