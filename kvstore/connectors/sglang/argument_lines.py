"""The part of a namespace's revision that comes from the arguments of SGLang's server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvstore.connectors.common.weights_digest import has_weights
from kvstore.connectors.sglang.server_arguments import (
    CONTENTS,
    VERDICTS,
    WHERE_SET,
    set_arguments,
)
from kvstore.errors import ConfigError

WeightsId = Callable[[str, str | None], str]
"""Identity of the weights at (path or name on the hub, revision on the hub)."""


def argument_lines(server_args: Any, weights_id: WeightsId) -> list[str]:
    """One line for each argument that is set and may change the KV; no lines for defaults.

    Raises ConfigError: a file cannot be read, or `weights_id` raises it.
    """
    lines = []
    for name, value in sorted(set_arguments(server_args).items()):
        # A later release's argument that the table lacks may change the KV.
        verdict = VERDICTS[name].verdict if name in VERDICTS else WHERE_SET
        if verdict == WHERE_SET:
            lines.append(f"{name}={_text(value)}")
        elif verdict == CONTENTS:
            lines.append(f"{name}={_contents(name, value, server_args, weights_id)}")
    return lines


def _text(value: Any) -> str:
    """The same text for the same value in every process."""
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _contents(name: str, value: Any, server_args: Any, weights_id: WeightsId) -> str:
    if name == "lora_paths":
        return _text(sorted((label, weights_id(path, None)) for label, path in _adapters(value)))
    if name == "speculative_draft_model_path":
        return weights_id(value, getattr(server_args, "speculative_draft_model_revision", None))
    path = Path(value)
    if name == "uno_lora_path" or (path.exists() and has_weights(path)):
        return weights_id(value, None)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        flag = name.replace("_", "-")
        raise ConfigError(f"cannot read --{flag} {value!r}: {error.strerror}") from None


def _adapters(value: Any) -> Iterator[tuple[str, str]]:
    """(name, path) of each adapter, in every form that SGLang accepts."""
    if isinstance(value, dict):
        yield from value.items()
        return
    for each in value:
        if isinstance(each, str):
            label, _, path = each.partition("=")
            yield label, path or label
        elif isinstance(each, dict):
            yield str(each.get("lora_name")), str(each["lora_path"])
        else:
            yield str(each.lora_name), str(each.lora_path)
