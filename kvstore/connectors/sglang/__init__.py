"""SGLang integration: kvstore as a storage backend below HiCache's host memory.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvstore", "interface_v1": 1,
      "module_path": "kvstore.connectors.sglang", "class_name": "KVStoreBackend",
      "socket": "/run/kvstore.sock"}'

HiCache keeps pages in host memory (its own L2) and passes them in batches to a backend that
outlives it. Here the backend is the node's sidecar, with disk, Redis or S3 below it. All ranks and
servers of the node share it. docs/sglang.md has the setup.

Call order: `backend` (SGLang's interface; only it and `weight_watch` import sglang) → `page_pools`
(all host pools of a rank) → `page_pool` (the pages of one host pool in one namespace) →
`shared_client` (one store for several threads) and `copies` (between slots and addresses of the
host pool). `namespace` describes a host pool, `restorable` has SGLang's rules about side pools.
`model_identity` names the weights with the help of `server_arguments`, the table of every argument
of the server; `weight_watch` notices when the weights change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.connectors.sglang.backend import KVStoreBackend as KVStoreBackend

__all__ = ["KVStoreBackend"]

_MODULES = {"KVStoreBackend": "backend"}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
