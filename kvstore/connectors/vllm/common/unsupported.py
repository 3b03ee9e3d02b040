"""Configurations of vLLM whose KV must not be stored, in both integrations.

The module reads attributes of vLLM's configuration objects only. It does not import vllm.
"""

from __future__ import annotations

from typing import Any

from kvstore.connectors.vllm.common.kv_settings import specs_of
from kvstore.errors import ConfigError


def check_prefix_caching(model_config: Any) -> None:
    """Raises ConfigError: a model for which vLLM must compute every token of a prompt."""
    if not getattr(model_config, "is_prefix_caching_supported", True):
        raise ConfigError(
            "kvstore does not support this model or pooling (MEAN, CLS, STEP): vLLM must compute "
            "all of a prompt at once; omit --kv-transfer-config"
        )


def check_multimodal(vllm_config: Any) -> None:
    """Raises ConfigError: both caches of vLLM are off. vLLM then identifies images and sounds by a
    counter, so the block hashes do not depend on their content."""
    items = getattr(vllm_config.model_config, "multimodal_config", None)
    if items is None or vllm_config.cache_config.enable_prefix_caching:
        return
    if items.mm_processor_cache_gb == 0:
        raise ConfigError(
            "kvstore does not support mm_processor_cache_gb = 0 without prefix caching: vLLM then "
            "identifies images and sounds by a counter, not by their content; enable one of the "
            "two caches"
        )


def check_causal(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError: the KV of a token depends on later tokens, so no block hash covers it."""
    attention = getattr(vllm_config, "attention_config", None)
    if getattr(vllm_config, "diffusion_config", None) is not None:
        what = "diffusion models (--diffusion-config)"
    elif getattr(attention, "use_non_causal", False) or any(
        getattr(spec, "non_causal", False) for spec in specs_of(kv_cache_config)
    ):
        what = "non-causal attention (prefix-LM)"
    else:
        return
    raise ConfigError(
        f"kvstore does not support {what}: the KV of a token depends on later tokens; omit "
        "--kv-transfer-config"
    )


def check_remote_code(model_config: Any) -> None:
    """Raises ConfigError: the model's code is in another repository than its weights, at an unknown
    revision. Only vLLM's Transformers backend runs such code."""
    if not getattr(model_config, "trust_remote_code", False) or model_config.code_revision:
        return
    classes = (getattr(model_config.hf_config, "auto_map", None) or {}).values()
    elsewhere = [each for each in map(str, classes) if "--" in each]
    if elsewhere and model_config.using_transformers_backend():
        raise ConfigError(
            f"cannot identify the code of {model_config.model!r}, which is in another repository "
            f"({elsewhere[0]}); set --code-revision to a commit of it"
        )


def check_tokens_only(model_config: Any) -> None:
    """Raises ConfigError: prompts may have embeddings.

    vLLM's block hashes do not cover which positions of a mixed prompt are embeddings, and a tier
    does not see prompts.
    """
    if getattr(model_config, "enable_prompt_embeds", False):
        raise ConfigError(
            "KVStoreTier does not support --enable-prompt-embeds: vLLM's block hashes do not cover "
            "which positions of a prompt are embeddings; use KVStoreConnector, which does not "
            "store such prompts"
        )
