"""All configuration keys, read from their models: for `config show`, `schema` and the docs.

A key's meaning is the docstring below it in its model. It is read from the model's source, so
no second list of keys has to be maintained.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from kvstore import tiers
from kvstore.config.field_types import Bytes, Milliseconds
from kvstore.config.settings import (
    ENV_NESTED,
    ENV_PREFIX,
    Settings,
    TierSettings,
)
from kvstore.config.units import spell_bytes, spell_ms

SECRET_KEYS: Final = frozenset({"auth_tokens", "admin_auth_token"})
MASK: Final = "**********"

_BYTES = get_args(Bytes)[1]
_MILLISECONDS = get_args(Milliseconds)[1]


@dataclass(frozen=True)
class ConfigKey:
    """One key. path: from the tree's root, or from a tier's table. unit: kind of value.

    default: as written in a file. None: no default.
    """

    path: str
    unit: str
    default: str | None
    meaning: str
    environment: str
    field: FieldInfo


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field, including fields of base models."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if kind in BaseModel.__mro__ or not issubclass(kind, BaseModel):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for here, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(here, ast.AnnAssign)
                and isinstance(here.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                found[here.target.id] = " ".join(after.value.value.split())
    return found


def sections() -> dict[str, type[BaseModel]]:
    """Return the sections of the configuration in order, without the tiers."""
    fields = Settings.model_fields.items()
    return {
        name: field.annotation
        for name, field in fields
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def tier_models() -> dict[str, type[BaseModel]]:
    """Return the config model of each tier kind whose library is installed."""
    found: dict[str, type[BaseModel]] = {}
    for info in pkgutil.iter_modules(tiers.__path__):
        try:
            module = importlib.import_module(f"{tiers.__name__}.{info.name}")
        except ModuleNotFoundError:
            continue
        if callable(getattr(module, "open", None)) and hasattr(module, "Config"):
            found[info.name] = module.Config
    return found


def config_keys(model: type[BaseModel], path: str = "") -> Iterator[ConfigKey]:
    """Yield the keys of one table."""
    docs = meanings(model)
    for name, field in model.model_fields.items():
        default = None if field.is_required() else _default_of(field)
        variable = ENV_PREFIX + f"{path}.{name}".replace(".", ENV_NESTED).upper() if path else ""
        full = f"{path}.{name}" if path else name
        yield ConfigKey(full, unit_of(field), default, docs.get(name, ""), variable, field)


def _default_of(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "unset" if value is None else spelled(field, value)


def unit_of(field: FieldInfo) -> str:
    """Return the kind of a field's value, in a word or two."""
    kind = str(field.annotation)
    if is_secret(field):
        return "text, secret"
    if _BYTES in field.metadata:
        return "size"
    if _MILLISECONDS in field.metadata:
        return "time"
    if "Mapping" in kind:
        return "table of sizes" if "int" in kind else "table"
    if "tuple" in kind:
        return "text, or a list" if "|" in kind or "Union" in kind else "list"
    words = ((bool, "true or false"), (int, "number"), (float, "number"), (str, "text"))
    return next((word for plain, word in words if plain.__name__ in kind), kind)


def is_secret(field: FieldInfo) -> bool:
    """Return whether a field's value must be masked."""
    return field.annotation is SecretStr


def spelled(field: FieldInfo | None, value: Any) -> str:
    """Return a value as TOML, sizes and times with their units."""
    if isinstance(value, SecretStr):
        return '""' if not value.get_secret_value() else f'"{MASK}"'
    if field is not None and isinstance(value, int | float) and not isinstance(value, bool):
        if _BYTES in field.metadata:
            return f'"{spell_bytes(int(value))}"'
        if _MILLISECONDS in field.metadata:
            return f'"{spell_ms(value)}"'
    return toml(value)


def toml(value: Any) -> str:
    """Return any value of the tree as one line of TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = (f"{_quoted(str(key))} = {toml(each)}" for key, each in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return _quoted("" if value is None else str(value))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'


def common_tier_keys() -> tuple[str, ...]:
    """Return the keys that every tier has."""
    return tuple(TierSettings.model_fields)
