"""`kvstore version`: prints the version."""

from __future__ import annotations

import json
import platform
from typing import Annotated

import typer

import kvstore


def register(app: typer.Typer) -> None:
    app.command("version")(version)


def version(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, including Python's version.")
    ] = False,
) -> None:
    """Print the version."""
    if as_json:
        print(json.dumps({"version": kvstore.__version__, "python": platform.python_version()}))
    else:
        print(kvstore.__version__)
