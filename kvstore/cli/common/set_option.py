"""`--set KEY=VALUE`: sets any configuration key from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from kvstore.config.renamed import refuse_key
from kvstore.config.settings import merge
from kvstore.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any configuration key, such as limits.max_clients=8. Repeatable.",
    ),
]


def assigned(assignments: Iterable[str] | None) -> dict[str, Any]:
    """Return the configuration tree of KEY=VALUE words. A value is TOML, or else plain text.

    Raises ConfigError: a word is not KEY=VALUE.
    """
    tree: dict[str, Any] = {}
    for word in assignments or ():
        path, equals, text = word.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(
                f"--set must be KEY=VALUE, such as limits.max_clients=8 (got {word!r})"
            )
        refuse_key(path.strip())
        value: Any = _value(text)
        for name in reversed(names):
            value = {name: value}
        tree = merge(tree, value)
    return tree


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
