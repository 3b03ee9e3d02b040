"""Reads the engine's configuration from the calls that create a tier.

vLLM passes a tier the model's name, the KV's dtype and geometry. The KV depends on more: the dtype
that computes, overrides of the model's configuration, a drafter. Decision 0019 compares the
alternatives.
"""

from __future__ import annotations

import inspect
from typing import Any

from kvstore.errors import ConfigError


def engine_config(engine_id: str) -> tuple[Any, Any]:
    """vLLM's VllmConfig and KVCacheConfig of the engine whose offloading creates the caller.

    engine_id: of vLLM's OffloadingConfig. The innermost call of this engine counts: a
    MultiConnector has a separate configuration for each connector.

    Raises ConfigError: no caller has them, so this release of vLLM creates tiers in another way.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found, kv_cache_config = (
            frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config")
        )
        transfer = getattr(found, "kv_transfer_config", None)
        if kv_cache_config is not None and getattr(transfer, "engine_id", None) == engine_id:
            return found, kv_cache_config
        frame = frame.f_back
    raise ConfigError(
        "KVStoreTier cannot read the engine's configuration: this release of vLLM creates tiers in "
        "another way; use KVStoreConnector"
    )
