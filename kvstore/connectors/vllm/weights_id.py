"""Which weights vLLM computes with, as a word: two that differ must not share blocks.

A model on the hub has a commit; a local folder has `connectors.weights.fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.connectors.common.weights_digest import fingerprint, has_weights
from kvstore.errors import ConfigError

STATIC_ROPES: Final = ("default", "linear", "llama3", "yarn", "mrope")
"""Kinds of RoPE whose angles do not depend on the longest context an engine is started with."""
NOT_THE_MODEL: Final = ("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype")
"""Fields of a config that say where it came from, or what the namespace says itself."""
OF_ITEMS: Final = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
)
"""Fields of vLLM's multimodal configuration that change what an image or a sound becomes, and are
in no hash: it names an item by its bytes and by what the request itself says."""
PROCESSOR_FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a folder that say how images and sounds become tensors."""


def revision_of(vllm_config: Any, said: str = "") -> str:
    """Which weights, and a digest of what else decides the KV: the model's configuration as vLLM
    has it, with overrides, and how it prepares images and sounds.

    said: the user's word for the weights; without it their commit or their files' fingerprint.

    Raises ConfigError: weights that are known by neither.
    """
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if said:
        weights = said
    elif load_format.endswith("dummy"):
        weights = "dummy"
    else:
        weights = _weights_of(model, load_format)
    return f"{weights}-{config_digest(model)}"


def _weights_of(model: Any, load_format: str) -> str:
    path = Path(model.model)
    elsewhere = load_format == "tensorizer" or bool(getattr(model, "model_weights", ""))
    if not elsewhere and path.exists() and has_weights(path):
        return fingerprint(path)
    commit = None if elsewhere or path.exists() else _commit_of(model)
    if commit is None:
        raise ConfigError(
            f'set "revision" in kv_connector_extra_config: the weights of {model.model!r} are '
            "neither of the hub nor in a local folder, so nothing tells them from others of that "
            "name; any word that changes with them is right"
        )
    return commit[:16]


def _commit_of(model: Any) -> str | None:
    """The hub's commit of the weights: as vLLM resolved it, or of the configuration, where that is
    of the same repository; or the user's own word."""
    resolved = getattr(model.revision, "resolved", None)
    config_path = getattr(model, "hf_config_path", None) or model.model
    of_config = getattr(model.hf_config, "_commit_hash", None)
    found = resolved or (of_config if config_path == model.model else None) or model.revision
    return str(found) if found else None


def fingerprint_of_name(name: str) -> tuple[str, str]:
    """(id, revision) of a model of which only the name is known: a local folder (or file) is known
    by its files, anything else has no revision here ("")."""
    path = Path(name)
    if not path.exists():
        return name, ""
    if not has_weights(path):
        return path.name, ""
    digest = _digest_of_files(path, ("config.json", *PROCESSOR_FILES))
    return path.name, f"{fingerprint(path)}-{digest}"


def config_digest(model_config: Any) -> str:
    """8 hex digits over the model's configuration, over the context where KV depends on it, and
    over how images and sounds are prepared."""
    told = model_config.hf_config.to_dict()
    fields: dict[str, Any] = {k: v for k, v in told.items() if k not in NOT_THE_MODEL}
    if not _rope_kinds(model_config) <= set(STATIC_ROPES):
        fields["max_model_len"] = model_config.max_model_len
    items = getattr(model_config, "multimodal_config", None)
    if items is not None:
        said = {name: getattr(items, name, None) for name in OF_ITEMS}
        files = _digest_of_files(Path(model_config.model), PROCESSOR_FILES)
        fields["multimodal"] = {**said, "files": files}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _digest_of_files(folder: Path, names: Sequence[str]) -> str:
    """8 hex digits over those that are there; of a file or a name of the hub, over none."""
    digest = hashlib.sha256()
    for name in names:
        file = folder / name
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"{name}:{len(content)};".encode())
            digest.update(content)
    return digest.hexdigest()[:8]


def _rope_kinds(model_config: Any) -> set[str]:
    """Of all layers: some models have one for each kind of layer."""
    text = getattr(model_config, "hf_text_config", model_config.hf_config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        return {"default"}
    nested = [each for each in rope.values() if isinstance(each, dict)]
    return {str(each.get("rope_type", each.get("type", "default"))) for each in nested or [rope]}
