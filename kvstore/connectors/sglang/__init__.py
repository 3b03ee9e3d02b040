"""SGLang: kvstore as a storage backend below HiCache's host memory.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvstore", "interface_v1": 1,
      "module_path": "kvstore.connectors.sglang", "class_name": "KVStoreBackend",
      "socket": "/run/kvstore.sock"}'

HiCache keeps pages in host memory (its own L2) and hands them, a batch at a time, to a backend
that outlives it. Here that is the node's sidecar, shared by every rank and every server of the
node, with disk, Redis or S3 below it. docs/sglang.md is the recipe.

What calls what: `backend` (SGLang's interface, and the only module here that imports sglang) →
`shelf` (the pages of one pool in one namespace) → `desk` (one store's verbs for several threads)
and `copies` (bytes between a slot and the host pool's addresses). `describe` reads a host pool,
`hits` knows SGLang's rules about side pools.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.connectors.sglang.backend import KVStoreBackend as KVStoreBackend

__all__ = ["KVStoreBackend"]

_LAZY = {"KVStoreBackend": "backend"}


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
