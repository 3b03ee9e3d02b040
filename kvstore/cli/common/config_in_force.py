"""The configuration in force: every value, and which source it came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from kvstore.cli.common.config_keys import MASK, SECRET_KEYS, sections, spelled, toml
from kvstore.config.settings import Settings, TierSettings, sources, validated
from kvstore.config.units import spell_bytes, without_login
from kvstore.errors import ConfigError

DEFAULT: Final = "default"
_SECRET_WORDS: Final = re.compile(r"(?i)passw|secret|token|credential|url|key$")
"""Keys of somebody else's tier that may hold what nobody should see."""


@dataclass(frozen=True)
class Entry:
    """One value. value: as JSON has it, secrets masked. origin: default, file, environment or
    flag."""

    key: str
    value: Any
    origin: str
    field: FieldInfo | None

    @property
    def text(self) -> str:
        """As a TOML file has it."""
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
    """What a sidecar would run with. Raises ConfigError as `Settings.load` does."""
    said = sources(file, overrides)
    settings = Settings.load(file, overrides)
    tables = []
    for name, model in sections().items():
        trees = {source: _table(tree.get(name)) for source, tree in said.items()}
        tables.append(Table(name, _entries(model, getattr(settings, name), trees)))
    lists = [(source, tree["tiers"]) for source, tree in said.items() if "tiers" in tree]
    source, given = lists[-1] if lists else (DEFAULT, ())
    for index, (tier, table) in enumerate(zip(settings.tiers, given, strict=True)):
        tables.append(Table("tiers", _tier_entries(tier, {source: table}, index)))
    return tables


def as_toml(tables: Sequence[Table]) -> Iterator[str]:
    """Lines of a file that says all of it, each value with its source."""
    for table in tables:
        yield f"[[{table.name}]]" if table.name == "tiers" else f"[{table.name}]"
        lines = [f"{entry.key} = {entry.text}" for entry in table.entries]
        width = min(44, max(map(len, lines), default=0))
        for line, entry in zip(lines, table.entries, strict=True):
            yield f"{line:<{width}}  # {entry.origin}"
        yield ""


def as_json(tables: Sequence[Table]) -> dict[str, Any]:
    """The same as JSON has it: every value as {"value": ..., "from": ...}."""
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
    """One table's values; trees: by source, what it says of this table."""
    entries = []
    for name, field in model.model_fields.items():
        value = getattr(values, name)
        if value is not None:  # unset, which TOML cannot say
            entries.append(Entry(name, _shown(name, value), _origin(name, trees), field))
    return entries


def _tier_entries(
    tier: TierSettings, trees: Mapping[str, Mapping[str, Any]], index: int
) -> list[Entry]:
    """A tier's common keys, and those of its own part."""
    from kvstore.store.assembly import tier_module

    common = _entries(TierSettings, tier, trees)
    own = dict(tier.model_extra or {})
    try:
        config = tier_module(tier.kind).Config
    except ConfigError:  # its library is not here; what is said of it still is
        return common + [
            Entry(key, _shown(key, value, guess=True), _origin(key, trees), None)
            for key, value in own.items()
        ]
    part = validated(config, {"name": tier.label, **own}, f"tiers.{index}")
    return common + [e for e in _entries(config, part, trees) if e.key != "name"]


def _origin(name: str, trees: Mapping[str, Mapping[str, Any]]) -> str:
    """The source that wins; of a table whose keys come from several, all of them."""
    named = [source for source, tree in trees.items() if name in tree]
    if not named:
        return DEFAULT
    if all(isinstance(trees[source][name], Mapping) for source in named):
        return ", ".join(named)
    return named[-1]


def _shown(name: str, value: Any, *, guess: bool = False) -> Any:
    """A value that may be seen."""
    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else ""
    if name in SECRET_KEYS or (guess and _SECRET_WORDS.search(name)):
        if isinstance(value, Mapping):
            # Whose tokens there are may be seen, the tokens not.
            return {f"{MASK} {n}": tenant for n, tenant in enumerate(value.values(), 1)}
        return MASK if value else ""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [_shown(name, each) for each in value]
    return without_login(value) if isinstance(value, str) else value
