"""Identifies the model and the weights of a server by SGLang's own arguments.

The module reads attributes of ServerArgs only. It does not import sglang.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any, Final

from kvstore.connectors.common.weights_digest import fingerprint
from kvstore.connectors.sglang.settings import BackendSettings

KV_ARGUMENTS: Final = ("dtype", "quantization", "json_model_override_args")
"""Arguments that change the KV of the same weights."""


def model_of(settings: BackendSettings, storage_config: Any) -> str:
    """Id of the model, the same on every node. For a local folder: the last part of its path."""
    name = settings.model or str(storage_config.model_name or "")
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".")) else name


def revision_of(settings: BackendSettings, server_args: Any | None) -> str:
    """The revision that the user set; else the commit on the hub or the fingerprint of the files,
    with a digest of the arguments that change the KV. "" without server_args."""
    if settings.revision or server_args is None:
        return settings.revision
    arguments = "\n".join(f"{name}={getattr(server_args, name, None)}" for name in KV_ARGUMENTS)
    return f"{_weights(server_args)}-{hashlib.sha256(arguments.encode()).hexdigest()[:8]}"


def _weights(server_args: Any) -> str:
    if str(getattr(server_args, "load_format", "auto")) == "dummy":
        return "dummy"
    path = str(server_args.model_path)
    if os.path.exists(path):
        return fingerprint(Path(path))
    named = str(getattr(server_args, "revision", None) or "main")
    return _cached_commit(path, named)[:16]


def _cached_commit(repository: str, revision: str) -> str:
    """The commit of a model on the hub, if its files are in the local cache; else `revision`."""
    try:
        hub = importlib.import_module("huggingface_hub")
        config = hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    except (ImportError, ValueError):  # no such library, or not a name on the hub
        return revision
    return Path(config).parent.name if isinstance(config, str) else revision
