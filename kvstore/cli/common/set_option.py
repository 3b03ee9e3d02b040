"""`--set KEY=VALUE`: any key of the configuration, from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from kvstore.config.settings import merged
from kvstore.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key, as limits.clients=8; again for more."
    ),
]


def assigned(assignments: Iterable[str] | None) -> dict[str, Any]:
    """The tree that KEY=VALUE words say. A value is one of TOML, or else text as it stands.

    Raises ConfigError: a word that is none.
    """
    tree: dict[str, Any] = {}
    for word in assignments or ():
        path, equals, text = word.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(f"--set {word!r}: KEY=VALUE is right, as in limits.clients=8")
        value: Any = _value(text)
        for name in reversed(names):
            value = {name: value}
        tree = merged(tree, value)
    return tree


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
