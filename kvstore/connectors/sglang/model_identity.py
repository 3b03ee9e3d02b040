"""Which model and which weights a server computes with, as words: of SGLang's own arguments.

Reads attributes of its ServerArgs only, so it needs no sglang.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any, Final

from kvstore.connectors.common.weights_digest import fingerprint
from kvstore.connectors.sglang.settings import BackendSettings

CHANGES_KV: Final = ("dtype", "quantization", "json_model_override_args")
"""Arguments that make other KV of the same weights."""


def model_of(settings: BackendSettings, storage_config: Any) -> str:
    """What the model is called, the same on every node: of a local folder, its last part."""
    name = settings.model or str(storage_config.model_name or "")
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".")) else name


def revision_of(settings: BackendSettings, server_args: Any | None) -> str:
    """The user's word for it; else the hub's commit or the files' fingerprint, with a digest of
    the arguments that change what is computed with them. "" without server_args."""
    if settings.revision or server_args is None:
        return settings.revision
    told = "\n".join(f"{name}={getattr(server_args, name, None)}" for name in CHANGES_KV)
    return f"{_weights(server_args)}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def _weights(server_args: Any) -> str:
    if str(getattr(server_args, "load_format", "auto")) == "dummy":
        return "dummy"
    path = str(server_args.model_path)
    if os.path.exists(path):
        return fingerprint(Path(path))
    named = str(getattr(server_args, "revision", None) or "main")
    return _cached_commit(path, named)[:16]


def _cached_commit(repository: str, revision: str) -> str:
    """The commit of a hub's model whose files lie in the local cache; `revision` where they do
    not."""
    try:
        hub = importlib.import_module("huggingface_hub")
        config = hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    except (ImportError, ValueError):  # no such library, or a name that is none of the hub's
        return revision
    return Path(config).parent.name if isinstance(config, str) else revision
