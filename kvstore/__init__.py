"""kvstore: KV-cache offload for LLM inference, so that no prefix is computed twice.

`kvstore.open` runs a store inside this process; `kvstore.connect` joins the one that the node's
sidecar runs. Both are loaded on first use: importing the package costs a moment, and pulls in
none of the libraries that only some of its parts need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.store.assembly import connect as connect
    from kvstore.store.assembly import open as open

__version__ = "0.1.0"
__all__ = ["__version__", "connect", "open"]

_LAZY = {"open": "kvstore.store.assembly", "connect": "kvstore.store.assembly"}


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
