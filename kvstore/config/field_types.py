"""Types of configuration fields that accept text with a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from kvstore.config.units import parse_bytes, parse_ms
from kvstore.errors import ConfigError


def _in_units(parse: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator that keeps the key's path in the message of an error of `parse`."""

    def validate(value: Any) -> Any:
        try:
            return parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(validate)


def _also_text(number: str, pattern: str) -> WithJsonSchema:
    """Return the JSON Schema of a number, or of text with a unit."""
    text = {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]+)?\s*{pattern}\s*$"}
    return WithJsonSchema({"anyOf": [{"type": number, "minimum": 0}, text]})


Bytes = Annotated[
    int,
    _in_units(lambda v: parse_bytes(v) if isinstance(v, str) else v),
    _also_text("integer", "([KkMmGgTtPp]?[Ii]?[Bb])?"),
]
"""Size: an int of bytes, or text with a unit."""
Milliseconds = Annotated[float, _in_units(parse_ms), _also_text("number", "([Uu]s|ms|[smhd])?")]
"""Duration: a number of milliseconds, or text with a unit."""
