"""Everything that is wrong with a configuration file, not only what is wrong first."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.config.settings import Settings, TierSettings, mistakes, sources, validated
from kvstore.errors import ConfigError
from kvstore.store.assembly import faults, tier_module


def wrong_with(file: Path) -> list[str]:
    """Every mistake of a file, a line each; none: a sidecar would start with it, as far as that
    can be told without making or asking anything. The environment is not looked at."""
    try:
        tree = sources(file, environment=False)["file"]
    except ConfigError as error:
        return [str(error)]
    found = mistakes(Settings, tree)
    lines = [line for _, line in found]
    kept = copy.deepcopy(tree)
    for path, _ in found:
        _remove(kept, path)
    right, own = _tiers(tree.get("tiers"), kept.get("tiers"))
    kept["tiers"] = list(right.values())
    lines += own
    settings = validated(Settings, kept)
    # What was left out above is wrong already, and what stands in for it is not what was meant.
    left_out = [".".join(map(str, path)) + "." for path, _ in found if path[0] != "tiers"]
    lines += [
        _numbered(keys[0], line, list(right))
        for keys, line in faults(settings)
        if not any(key.startswith(f"{seen}.") for key in left_out for seen in keys)
    ]
    return list(dict.fromkeys(lines))


def _numbered(key: str, line: str, numbers: list[int]) -> str:
    """A line about a tier, with its number in the file; numbers: of those that were looked at."""
    table, _, index = key.partition(".")
    return line.replace(key, f"{table}.{numbers[int(index)]}", 1) if table == "tiers" else line


def _tiers(given: Any, kept: Any) -> tuple[dict[int, Mapping[str, Any]], list[str]]:
    """The tiers whose own parts are right too, by their number, and what is wrong with those of the
    others."""
    right: dict[int, Mapping[str, Any]] = {}
    lines: list[str] = []
    if not isinstance(given, list):
        return right, lines
    for index, table in enumerate(given):
        if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str):
            continue  # told already
        wrong = _own_part(table, f"tiers.{index}")
        lines += wrong
        stands = kept[index] if isinstance(kept, list) and index < len(kept) else None
        if not wrong and isinstance(stands, Mapping) and "kind" in stands:
            right[index] = stands
    return right, lines


def _own_part(table: Mapping[str, Any], where: str) -> list[str]:
    """What is wrong with the keys that belong to a tier's own module."""
    try:
        config = tier_module(table["kind"]).Config
    except ConfigError as error:
        return [f"{where}: {error}"]
    common = set(TierSettings.model_fields) - {"name"}
    own = {key: value for key, value in table.items() if key not in common}
    return [line for _, line in mistakes(config, own, where)]


def _remove(tree: Any, path: tuple[str | int, ...]) -> None:
    """Take out what stands at `path`, or the innermost thing on the way there."""
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
    """A list keeps its length, so that its other members keep their numbers."""
    if isinstance(here, list) and isinstance(step, int):
        here[step] = {}
    elif isinstance(here, dict):
        here.pop(step, None)
