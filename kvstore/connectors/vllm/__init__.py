"""vLLM integration: one flag gives vLLM a store below its own prefix cache.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector",
      "kv_connector_module_path": "kvstore.connectors.vllm", "kv_role": "kv_both"}'

There are two integrations. `KVStoreConnector` copies blocks between vLLM's KV and the slab of the
node's sidecar: all engines share one L2, and it is the only integration for CPU. `KVStoreTier` is a
secondary tier of vLLM's own offloading, which keeps L2 and runs the device copies itself.
docs/vllm.md explains which to choose.

`connector` and `tier` have the two integrations, `common` has the modules they share. Only
`connector.py`, `tier.py` and the two `metrics.py` import vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvstore.connectors.vllm.common.settings import check_version

if TYPE_CHECKING:
    from kvstore.connectors.vllm.connector.connector import KVStoreConnector as KVStoreConnector
    from kvstore.connectors.vllm.tier.tier import KVStoreTier as KVStoreTier

__all__ = ["KVStoreConnector", "KVStoreTier"]

_MODULES = {"KVStoreConnector": "connector.connector", "KVStoreTier": "tier.tier"}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Checked first: in another release the imports of these modules may fail without saying why.
    check_version(importlib.import_module("vllm").__version__)
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
