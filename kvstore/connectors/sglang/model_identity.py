"""Identifies the model and the weights of a server by SGLang's own arguments.

The module reads attributes of ServerArgs only. It does not import sglang.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvstore.connectors.common.weights_digest import (
    FILE_FORMATS,
    has_weights,
    is_commit,
    loaded_commit_id,
    loaded_weights_id,
)
from kvstore.connectors.sglang.argument_lines import argument_lines
from kvstore.connectors.sglang.server_arguments import set_arguments
from kvstore.connectors.sglang.settings import BackendSettings
from kvstore.errors import ConfigError

KV_ARGUMENTS: Final = ("dtype", "quantization", "json_model_override_args")
"""Arguments that are in the digest of every server, also by their defaults."""
CONFIG_FILES: Final = ("config.json",)
"""Files of the model's folder that change the KV of the same weights."""
ARGUMENT_DTYPES: Final = {"half": "float16", "float": "float32"}
"""Other names of dtypes in --dtype."""
UNKNOWN_WEIGHTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "load_format": (
        "remote",
        "remote_instance",
        "presharded",
        "expert_pack",
        "private",
        "flash_rl",
    ),
    "weight_cache_mode": ("client",),
    "delete_ckpt_after_loading": (True,),
}
"""Values with which the weights are not the files of the model's folder, or no longer are."""


def model_of(settings: BackendSettings, storage_config: Any) -> str:
    """Id of the model, the same on every node. For a local folder: the last part of its path."""
    name = settings.model or str(storage_config.model_name or "")
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".")) else name


def revision_of(settings: BackendSettings, server_args: Any | None) -> str:
    """The revision that the user set; else the commit on the hub or the fingerprint of the files.
    With it, a digest of the arguments that change the KV. "" without server_args.

    Raises ConfigError: weights that cannot be identified, or a file that cannot be read.
    """
    if server_args is None:
        return settings.revision
    _refuse_unknown_weights(settings, server_args)
    lines = argument_lines(server_args, partial(_weights_id, settings, server_args))
    if settings.revision:
        given = set_arguments(server_args)
        lines += [f"{name}={given[name]}" for name in KV_ARGUMENTS if name in given]
        return f"{settings.revision}-{_digest(lines)[:16]}" if lines else settings.revision
    always = [f"{name}={getattr(server_args, name, None)}" for name in KV_ARGUMENTS]
    digest = _digest(always + lines)
    return f"{_weights(server_args)}-{digest[:16] if lines else digest[:8]}"


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _refuse_unknown_weights(settings: BackendSettings, server_args: Any) -> None:
    """Raises ConfigError: without `revision`, weights that are not the files of the model."""
    for name, values in UNKNOWN_WEIGHTS.items():
        value = getattr(server_args, name, None)
        if value in values and not settings.revision:
            raise ConfigError(
                f'kvstore cannot identify the weights with {name} = {value!r}; set "revision" in '
                "--hicache-storage-backend-extra-config to a string that changes with the weights"
            )


def _weights_id(
    settings: BackendSettings, server_args: Any, path: str, revision: str | None
) -> str:
    """Identity of the weights of a draft model or an adapter; their names if they have none and the
    user's revision stands for them.

    Raises ConfigError: they have none.
    """
    download_dir = getattr(server_args, "download_dir", None)
    about = SimpleNamespace(model_path=path, revision=revision, download_dir=download_dir)
    try:
        if Path(path).exists() and not has_weights(Path(path)):
            raise ConfigError(
                f'{path!r} has no weights that kvstore can identify; set "revision" in '
                "--hicache-storage-backend-extra-config to a string that changes with them"
            )
        return _weights(about)
    except ConfigError:
        if not settings.revision:
            raise
        return f"{path}@{revision}"


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
