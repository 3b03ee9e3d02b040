"""Which weights vLLM computes with, as a word: two that differ must not share blocks.

A model on the hub has a commit; a local folder has `connectors.weights.fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

from kvstore.connectors.weights import WEIGHT_FILES, fingerprint

STATIC_ROPES: Final = ("default", "linear", "llama3", "yarn", "mrope")
"""Kinds of RoPE whose angles do not depend on the longest context an engine is started with."""
NOT_THE_MODEL: Final = ("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype")
"""Fields of a config that say where it came from, or what the namespace says itself."""


def revision_of(vllm_config: Any) -> str:
    """The commit or the files' fingerprint, and a digest of the model's configuration.

    The configuration is what vLLM made of it: with overrides, which may change the KV.
    """
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if load_format.endswith("dummy"):
        weights = "dummy"
    elif os.path.exists(model.model):
        weights = fingerprint(Path(model.model))
    else:
        commit = getattr(model.hf_config, "_commit_hash", None)
        weights = str(commit or model.revision or "main")[:16]
    return f"{weights}-{config_digest(model)}"


def fingerprint_of_name(name: str) -> tuple[str, str]:
    """(id, revision) of a model of which only the name is known: a local folder (or file) is known
    by its files, anything else has no revision here ("")."""
    path = Path(name)
    if not path.exists():
        return name, ""
    if path.is_dir() and not any(file.name.endswith(WEIGHT_FILES) for file in path.iterdir()):
        return path.name, ""
    config = path / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.exists() else b"").hexdigest()[:8]
    return path.name, f"{fingerprint(path)}-{digest}"


def config_digest(model_config: Any) -> str:
    """8 hex digits over the model's configuration, and over the context where KV depends on it."""
    told = model_config.hf_config.to_dict()
    fields: dict[str, Any] = {k: v for k, v in told.items() if k not in NOT_THE_MODEL}
    if _rope_kind(model_config) not in STATIC_ROPES:
        fields["max_model_len"] = model_config.max_model_len
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _rope_kind(model_config: Any) -> str:
    text = getattr(model_config, "hf_text_config", model_config.hf_config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        return "default"
    return str(rope.get("rope_type", rope.get("type", "default")))
