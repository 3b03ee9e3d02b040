"""Finds all errors of a configuration file, not only the first."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.config.settings import (
    Settings,
    TierSettings,
    read_sources,
    validate,
    validation_errors,
)
from kvstore.errors import ConfigError
from kvstore.store.assembly import config_errors, tier_module


def find_errors(file: Path) -> list[str]:
    """Return every error of a file, one line each.

    An empty list means that a sidecar would start with it, as far as that is known without opening
    anything. The environment is ignored.
    """
    try:
        tree = read_sources(file, environment=False)["file"]
    except ConfigError as error:
        return [str(error)]
    found = validation_errors(Settings, tree)
    lines = [line for _, line in found]
    kept = copy.deepcopy(tree)
    for path, _ in found:
        _remove(kept, path)
    valid, own = _tiers(tree.get("tiers"), kept.get("tiers"))
    kept["tiers"] = list(valid.values())
    lines += own
    settings = validate(Settings, kept)
    # Removed keys are reported already. The defaults in their place are not what the user meant.
    left_out = [".".join(map(str, path)) + "." for path, _ in found if path[0] != "tiers"]
    lines += [
        _numbered(keys[0], line, list(valid))
        for keys, line in config_errors(settings)
        if not any(key.startswith(f"{seen}.") for key in left_out for seen in keys)
    ]
    return list(dict.fromkeys(lines))


def _numbered(key: str, line: str, numbers: list[int]) -> str:
    """Number a line about a tier as in the file. numbers: file positions of the checked tiers."""
    table, _, index = key.partition(".")
    return line.replace(key, f"{table}.{numbers[int(index)]}", 1) if table == "tiers" else line


def _tiers(given: Any, kept: Any) -> tuple[dict[int, Mapping[str, Any]], list[str]]:
    """Return the tiers whose own keys are valid, by position, and the errors of the others."""
    valid: dict[int, Mapping[str, Any]] = {}
    lines: list[str] = []
    if not isinstance(given, list):
        return valid, lines
    for index, table in enumerate(given):
        if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str):
            continue  # Reported already.
        wrong = _own_errors(table, f"tiers.{index}")
        lines += wrong
        cleaned = kept[index] if isinstance(kept, list) and index < len(kept) else None
        if not wrong and isinstance(cleaned, Mapping) and "kind" in cleaned:
            valid[index] = cleaned
    return valid, lines


def _own_errors(table: Mapping[str, Any], where: str) -> list[str]:
    """Return the errors in the keys of a tier's own module."""
    try:
        config = tier_module(table["kind"]).Config
    except ConfigError as error:
        return [f"{where}: {error}"]
    common = set(TierSettings.model_fields) - {"name"}
    own = {key: value for key, value in table.items() if key not in common}
    return [line for _, line in validation_errors(config, own, where)]


def _remove(tree: Any, path: tuple[str | int, ...]) -> None:
    """Remove the value at `path`, or its innermost existing parent."""
    here = tree
    for step, after in itertools.pairwise(path):
        inner = _at(here, step)
        if not isinstance(inner, dict | list) or _at(inner, after) is None:
            _take_out(here, step)
            return
        here = inner
    if path:
        _take_out(here, path[-1])


def _at(here: Any, step: str | int) -> Any:
    if isinstance(here, dict):
        return here.get(step)
    return here[step] if isinstance(step, int) and step < len(here) else None


def _take_out(here: Any, step: str | int) -> None:
    """Remove one value. A list keeps its length, so its other members keep their numbers."""
    if isinstance(here, list) and isinstance(step, int):
        here[step] = {}
    elif isinstance(here, dict):
        here.pop(step, None)
