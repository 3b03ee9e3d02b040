"""The effective configuration: every value, and its source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from kvstore.cli.common.config_keys import MASK, SECRET_KEYS, sections, spelled, toml
from kvstore.config.settings import Settings, TierSettings, read_sources, validate
from kvstore.config.units import spell_bytes, without_login
from kvstore.errors import ConfigError

DEFAULT: Final = "default"
_SECRET_WORDS: Final = re.compile(r"(?i)passw|secret|token|credential|url|key$")
"""Keys that may be secret, in a tier that is not part of kvstore."""


@dataclass(frozen=True)
class Entry:
    """One value, with secrets masked. origin: default, file, environment or flag."""

    key: str
    value: Any
    origin: str
    field: FieldInfo | None

    @property
    def text(self) -> str:
        """The value as TOML."""
        if isinstance(self.value, Mapping):
            return "{" + ", ".join(self._pairs(self.value)) + "}"
        return spelled(self.field, self.value)

    def _pairs(self, table: Mapping[str, Any]) -> Iterator[str]:
        for name, value in table.items():
            shown = toml(spell_bytes(value) if isinstance(value, int) else value)
            yield f"{toml(name)} = {shown}"


@dataclass(frozen=True)
class Table:
    """A section, or one tier."""

    name: str
    entries: Sequence[Entry]


def effective(file: str | Path | None, overrides: Mapping[str, Any]) -> list[Table]:
    """Return the configuration a sidecar would run with. Raises ConfigError as `Settings.load`."""
    given_by = read_sources(file, overrides)
    settings = Settings.load(file, overrides)
    tables = []
    for name, model in sections().items():
        trees = {source: _table(tree.get(name)) for source, tree in given_by.items()}
        tables.append(Table(name, _entries(model, getattr(settings, name), trees)))
    lists = [(source, tree["tiers"]) for source, tree in given_by.items() if "tiers" in tree]
    source, given = lists[-1] if lists else (DEFAULT, ())
    for index, (tier, table) in enumerate(zip(settings.tiers, given, strict=True)):
        tables.append(Table("tiers", _tier_entries(tier, {source: table}, index)))
    return tables


def as_toml(tables: Sequence[Table]) -> Iterator[str]:
    """Yield the lines of a complete configuration file, each value with its source."""
    for table in tables:
        yield f"[[{table.name}]]" if table.name == "tiers" else f"[{table.name}]"
        lines = [f"{entry.key} = {entry.text}" for entry in table.entries]
        width = min(44, max(map(len, lines), default=0))
        for line, entry in zip(lines, table.entries, strict=True):
            yield f"{line:<{width}}  # {entry.origin}"
        yield ""


def as_json(tables: Sequence[Table]) -> dict[str, Any]:
    """Return the configuration for JSON: every value as {"value": ..., "from": ...}."""
    report: dict[str, Any] = {"tiers": []}
    for table in tables:
        plain = {e.key: {"value": e.value, "from": e.origin} for e in table.entries}
        if table.name == "tiers":
            report["tiers"].append(plain)
        else:
            report[table.name] = plain
    return report


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _entries(
    model: type[BaseModel], values: BaseModel, trees: Mapping[str, Mapping[str, Any]]
) -> list[Entry]:
    """Return one table's values. trees: the table as given by each source."""
    entries = []
    for name, field in model.model_fields.items():
        value = getattr(values, name)
        if value is not None:  # Unset: TOML has no null.
            entries.append(Entry(name, _shown(name, value), _origin(name, trees), field))
    return entries


def _tier_entries(
    tier: TierSettings, trees: Mapping[str, Mapping[str, Any]], index: int
) -> list[Entry]:
    """Return the common keys of a tier, and those of its module."""
    from kvstore.store.assembly import tier_module

    common = _entries(TierSettings, tier, trees)
    own = dict(tier.model_extra or {})
    try:
        config = tier_module(tier.kind).Config
    except ConfigError:  # Its library is not installed; show the keys as they are.
        return common + [
            Entry(key, _shown(key, value, guess=True), _origin(key, trees), None)
            for key, value in own.items()
        ]
    part = validate(config, {"name": tier.label, **own}, f"tiers.{index}")
    return common + [e for e in _entries(config, part, trees) if e.key != "name"]


def _origin(name: str, trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the source that wins. For a table with keys from several sources: all of them."""
    named = [source for source, tree in trees.items() if name in tree]
    if not named:
        return DEFAULT
    if all(isinstance(trees[source][name], Mapping) for source in named):
        return ", ".join(named)
    return named[-1]


def _shown(name: str, value: Any, *, guess: bool = False) -> Any:
    """Return a value without secrets."""
    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else ""
    if name in SECRET_KEYS or (guess and _SECRET_WORDS.search(name)):
        if isinstance(value, Mapping):
            # Show which tenants have tokens, but not the tokens.
            return {f"{MASK} {n}": tenant for n, tenant in enumerate(value.values(), 1)}
        return MASK if value else ""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [_shown(name, each) for each in value]
    return without_login(value) if isinstance(value, str) else value
