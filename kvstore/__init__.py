"""kvstore: KV-cache offload for LLM inference, so that no prefix is computed twice.

This module is the public API. `open` runs a store inside this process; `connect` joins the store
of the node's sidecar. `Namespace` and `hash_tokens` name blocks. The other names are the contracts
that the author of a connector, a tier or a codec implements, and the errors they raise.
`kvstore.testing` has the conformance suites. `kvstore.connectors.vllm` and
`kvstore.connectors.sglang` are what these engines load. Every other module is private by
convention: it may move or change in any release.

Names are loaded on first use, so that `import kvstore` takes a moment only and needs none of the
libraries that some parts use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvstore.version import __version__

if TYPE_CHECKING:
    from kvstore.blocks.hashing import BlockHasher as BlockHasher
    from kvstore.blocks.hashing import MMItem as MMItem
    from kvstore.blocks.hashing import hash_tokens as hash_tokens
    from kvstore.blocks.key import Key as Key
    from kvstore.blocks.key import Namespace as Namespace
    from kvstore.codecs.base import Codec as Codec
    from kvstore.errors import ChecksumMismatch as ChecksumMismatch
    from kvstore.errors import ConfigError as ConfigError
    from kvstore.errors import FrameInvalid as FrameInvalid
    from kvstore.errors import FrameTooLarge as FrameTooLarge
    from kvstore.errors import FrameUnsupported as FrameUnsupported
    from kvstore.errors import KVStoreError as KVStoreError
    from kvstore.errors import NamespaceMismatch as NamespaceMismatch
    from kvstore.errors import StoreClosed as StoreClosed
    from kvstore.errors import TierError as TierError
    from kvstore.errors import TierFull as TierFull
    from kvstore.errors import TierUnavailable as TierUnavailable
    from kvstore.interface import BlockStore as BlockStore
    from kvstore.interface import Load as Load
    from kvstore.interface import LookupStatus as LookupStatus
    from kvstore.interface import Match as Match
    from kvstore.interface import Operation as Operation
    from kvstore.interface import Save as Save
    from kvstore.interface import SlabView as SlabView
    from kvstore.store.assembly import connect as connect
    from kvstore.store.assembly import open as open
    from kvstore.tiers.base import ErrorClass as ErrorClass
    from kvstore.tiers.base import Tier as Tier

_HOMES = {
    "kvstore.blocks.hashing": ("BlockHasher", "MMItem", "hash_tokens"),
    "kvstore.blocks.key": ("Key", "Namespace"),
    "kvstore.codecs.base": ("Codec",),
    "kvstore.errors": (
        "ChecksumMismatch",
        "ConfigError",
        "FrameInvalid",
        "FrameTooLarge",
        "FrameUnsupported",
        "KVStoreError",
        "NamespaceMismatch",
        "StoreClosed",
        "TierError",
        "TierFull",
        "TierUnavailable",
    ),
    "kvstore.interface": (
        "BlockStore",
        "Load",
        "LookupStatus",
        "Match",
        "Operation",
        "Save",
        "SlabView",
    ),
    "kvstore.store.assembly": ("connect", "open"),
    "kvstore.tiers.base": ("ErrorClass", "Tier"),
}
_LAZY = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
