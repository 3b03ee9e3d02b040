"""`kvstore version`."""

from __future__ import annotations

import typer

import kvstore


def register(app: typer.Typer) -> None:
    app.command("version")(version)


def version() -> None:
    """Print the version."""
    print(kvstore.__version__)
