"""vLLM: one flag that gives it a store below its own prefix cache.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector",
      "kv_connector_module_path": "kvstore.connectors.vllm", "kv_role": "kv_both"}'

Two ways in. `KVStoreConnector` moves blocks between vLLM's KV and the slab of the node's sidecar:
one L2 for every engine, and the only way on CPU. `KVStoreTier` is a secondary tier of vLLM's own
offloading, which keeps L2 and does the device's copies itself. docs/vllm.md says which to choose.

Only `connector`, `stats`, `tier` and `tier_metrics` import vllm; what they decide is in the other
modules, which do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvstore.connectors.vllm.settings import check_version

if TYPE_CHECKING:
    from kvstore.connectors.vllm.connector.connector import KVStoreConnector as KVStoreConnector
    from kvstore.connectors.vllm.tier.tier import KVStoreTier as KVStoreTier

__all__ = ["KVStoreConnector", "KVStoreTier"]

_LAZY = {"KVStoreConnector": "connector", "KVStoreTier": "tier"}


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # First of all: in another release the modules' own imports may fail, and would not say why.
    check_version(importlib.import_module("vllm").__version__)
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
