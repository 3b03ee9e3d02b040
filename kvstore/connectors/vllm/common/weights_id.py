"""Identifies the weights that vLLM computes with: different weights must not share blocks.

A model on the hub has a commit. A local folder has a fingerprint. `weights_digest` has both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.connectors.common.weights_digest import (
    FILE_FORMATS,
    has_weights,
    is_commit,
    loaded_commit_id,
    loaded_weights_id,
)
from kvstore.errors import ConfigError

STATIC_ROPES: Final = ("default", "linear", "llama3", "yarn", "mrope")
"""Kinds of RoPE whose angles do not depend on the maximum context length of the engine."""
IGNORED_CONFIG_FIELDS: Final = (
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
    "torch_dtype",
)
"""Fields of a config that name its source, or repeat what the namespace contains."""
MULTIMODAL_FIELDS: Final = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
)
"""Fields of vLLM's multimodal configuration that change the tensors of an image or a sound. vLLM's
hashes do not cover them, only the bytes of the item and the parameters of the request."""
PROCESSOR_FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder that define how images and sounds become tensors."""


def revision_of(vllm_config: Any, revision: str = "") -> str:
    """Identity of the weights, and a digest of everything else that the KV depends on: the model's
    configuration with overrides, and the preparation of images and sounds.

    revision: set by the user. "": the commit of the weights, or the fingerprint of their files.

    Raises ConfigError: weights that have neither.
    """
    model = vllm_config.model_config
    weights = revision or weights_of(model, vllm_config.load_config)
    return f"{weights}-{config_digest(model)}"


def weights_of(model: Any, load: Any) -> str:
    """Identity of the weights of vLLM's ModelConfig, loaded as its LoadConfig says.

    Raises ConfigError: weights without one.
    """
    load_format = str(getattr(load, "load_format", "auto"))
    if load_format.endswith("dummy"):
        return "dummy"
    path = Path(model.model)
    elsewhere = load_format not in FILE_FORMATS or bool(getattr(model, "model_weights", ""))
    if not elsewhere and path.exists() and has_weights(path):
        return loaded_weights_id(path)
    commit = None if elsewhere or path.exists() else _commit_of(model)
    if commit is None or not is_commit(commit):
        raise ConfigError(
            f"cannot identify the weights of {model.model!r} (load_format {load_format!r}, no hub "
            'commit, no local files); set "revision" in kv_connector_extra_config to a string that '
            "changes with the weights"
        )
    return loaded_commit_id(model.model, commit, getattr(load, "download_dir", None))


def _commit_of(model: Any) -> str | None:
    """The commit of the weights on the hub: as vLLM resolved it, else that of the configuration if
    it is in the same repository, else the revision that the user set."""
    resolved = getattr(model.revision, "resolved", None)
    config_path = getattr(model, "hf_config_path", None) or model.model
    of_config = getattr(model.hf_config, "_commit_hash", None)
    found = resolved or (of_config if config_path == model.model else None) or model.revision
    return str(found) if found else None


def identity_of_name(name: str) -> tuple[str, str]:
    """(id, revision) of a model of which only the name is known. The revision is a fingerprint of a
    local folder or file, and "" for anything else."""
    path = Path(name)
    if not path.exists():
        return name, ""
    if not has_weights(path):
        return path.name, ""
    digest = _digest_of_files(path, ("config.json", *PROCESSOR_FILES))
    return path.name, f"{loaded_weights_id(path)}-{digest}"


def config_digest(model_config: Any) -> str:
    """8 hex digits over the model's configuration, the context length if the KV depends on it, and
    the preparation of images and sounds."""
    config = model_config.hf_config.to_dict()
    fields: dict[str, Any] = {k: v for k, v in config.items() if k not in IGNORED_CONFIG_FIELDS}
    if depends_on_context_len(model_config):
        fields["max_model_len"] = model_config.max_model_len
    items = getattr(model_config, "multimodal_config", None)
    if items is not None:
        options = {name: getattr(items, name, None) for name in MULTIMODAL_FIELDS}
        files = _digest_of_files(Path(model_config.model), PROCESSOR_FILES)
        fields["multimodal"] = {**options, "files": files}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def depends_on_context_len(model_config: Any) -> bool:
    """True if the angles of RoPE, and so the KV, depend on the engine's maximum context length."""
    return not _rope_kinds(model_config) <= set(STATIC_ROPES)


def model_id(model_config: Any, name: str = "") -> str:
    """Id of the model, the same on every node. For a local folder: the last part of its path.

    name: set by the user.
    """
    name = name or str(model_config.model)
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".")) else name


def _digest_of_files(folder: Path, names: Sequence[str]) -> str:
    """8 hex digits over those of these files that the folder has."""
    digest = hashlib.sha256()
    for name in names:
        file = folder / name
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"{name}:{len(content)};".encode())
            digest.update(content)
    return digest.hexdigest()[:8]


def _rope_kinds(model_config: Any) -> set[str]:
    """Kinds of RoPE in all layers: some models have one for each kind of layer."""
    text = getattr(model_config, "hf_text_config", model_config.hf_config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        return {"default"}
    nested = [each for each in rope.values() if isinstance(each, dict)]
    return {str(each.get("rope_type", each.get("type", "default"))) for each in nested or [rope]}
