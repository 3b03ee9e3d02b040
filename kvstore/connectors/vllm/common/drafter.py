"""Identifies the drafter of speculative decoding, whose KV is in the same blocks as the model's.

The module reads attributes of vLLM's configuration objects only. It does not import vllm.
"""

from __future__ import annotations

from typing import Any, Final

from kvstore.connectors.vllm.common.weights_id import config_digest, model_id, weights_of
from kvstore.errors import ConfigError

WITHOUT_KV: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods whose drafter has no KV."""
KV_FIELDS: Final = (
    "method",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "code_revision",
    "index_share_for_mtp_iteration",
    "parallel_drafting",
    "use_heterogeneous_vocab",
)
"""Fields of vLLM's SpeculativeConfig that change the drafter's KV, or for which tokens there is
any."""


def drafter_settings(vllm_config: Any, revision: str) -> dict[str, object]:
    """What the drafter's KV depends on. Empty without a drafter that has KV.

    revision: of the weights, as the user set it. It stands for a drafter that has no identity.

    Raises ConfigError: the drafter's weights cannot be identified.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or speculative.method in WITHOUT_KV:
        return {}
    draft, model = speculative.draft_model_config, vllm_config.model_config
    return {
        **{name: getattr(speculative, name, None) for name in KV_FIELDS},
        "model": model_id(draft),
        "weights": _weights(draft, model, speculative, vllm_config, revision),
        "config": config_digest(draft),
        "dtype": str(draft.dtype).removeprefix("torch."),
        "ranks": speculative.draft_parallel_config.tensor_parallel_size,
    }


def _weights(draft: Any, model: Any, speculative: Any, vllm_config: Any, revision: str) -> str:
    if (draft.model, draft.revision) == (model.model, model.revision):
        return "model"  # such as the layers for MTP in the model's own files
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    try:
        return weights_of(draft, load)
    except ConfigError:
        if not revision:
            raise
        return "revision"
