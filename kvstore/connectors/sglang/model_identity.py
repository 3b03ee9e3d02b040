"""Identifies the model and the weights of a server by SGLang's own arguments.

The module reads attributes of ServerArgs only. It does not import sglang.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any, Final

from kvstore.connectors.common.weights_digest import (
    FILE_FORMATS,
    has_weights,
    is_commit,
    loaded_commit_id,
    loaded_weights_id,
)
from kvstore.connectors.sglang.settings import BackendSettings
from kvstore.errors import ConfigError

KV_ARGUMENTS: Final = ("dtype", "quantization", "json_model_override_args")
"""Arguments that change the KV of the same weights."""
CONFIG_FILES: Final = ("config.json",)
"""Files of the model's folder that change the KV of the same weights."""
ARGUMENT_DTYPES: Final = {"half": "float16", "float": "float32"}
"""Other names of dtypes in --dtype."""


def model_of(settings: BackendSettings, storage_config: Any) -> str:
    """Id of the model, the same on every node. For a local folder: the last part of its path."""
    name = settings.model or str(storage_config.model_name or "")
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".")) else name


def revision_of(settings: BackendSettings, server_args: Any | None) -> str:
    """The revision that the user set; else the commit on the hub or the fingerprint of the files,
    with a digest of the arguments that change the KV. "" without server_args.

    Raises ConfigError: weights that have neither.
    """
    if settings.revision or server_args is None:
        return settings.revision
    arguments = "\n".join(f"{name}={getattr(server_args, name, None)}" for name in KV_ARGUMENTS)
    return f"{_weights(server_args)}-{hashlib.sha256(arguments.encode()).hexdigest()[:8]}"


def compute_dtype(server_args: Any | None) -> str:
    """The dtype in which the model computes: as SGLang resolved it, else the argument. "": neither
    is known."""
    resolved = getattr(getattr(server_args, "_model_config", None), "dtype", None)
    dtype = str(resolved or getattr(server_args, "dtype", None) or "auto").removeprefix("torch.")
    return "" if dtype == "auto" else ARGUMENT_DTYPES.get(dtype, dtype)


def _weights(server_args: Any) -> str:
    load_format = str(getattr(server_args, "load_format", "auto"))
    if load_format == "dummy":
        return "dummy"
    name, path = str(server_args.model_path), Path(server_args.model_path)
    local = path.exists()
    if load_format in FILE_FORMATS and local and has_weights(path):
        return loaded_weights_id(path, CONFIG_FILES)
    named = str(getattr(server_args, "revision", None) or "main")
    download_dir = getattr(server_args, "download_dir", None)
    commit = named if is_commit(named) else _cached_commit(name, named, download_dir)
    if load_format not in FILE_FORMATS or local or not is_commit(commit):
        raise ConfigError(
            f"cannot identify the weights of {name!r} (load_format {load_format!r}, no hub commit, "
            'no local files); set "revision" in --hicache-storage-backend-extra-config to a string '
            "that changes with the weights"
        )
    return loaded_commit_id(name, commit, download_dir, CONFIG_FILES)


def _cached_commit(repository: str, revision: str, download_dir: str | None) -> str:
    """The commit of a model on the hub, if its files are in the local cache; else ""."""
    try:
        hub = importlib.import_module("huggingface_hub")
        config = hub.try_to_load_from_cache(
            repository, "config.json", cache_dir=download_dir, revision=revision
        )
    except (ImportError, ValueError):  # no such library, or not a name on the hub
        return ""
    return Path(config).parent.name if isinstance(config, str) else ""
