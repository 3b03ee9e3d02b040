"""`kvstore clear`: empty a tier of a running sidecar."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Final
from urllib.parse import quote

import typer

LIMIT_S: Final = 60.0
"""Deleting what a large tier holds takes a while."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("clear")(clear)


def clear(
    tier: Annotated[str, typer.Argument(help="l2, a tier's name, or all.")],
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask; needed where nobody can answer.")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="The sidecar's HTTP side, http://host:port.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="The admin token, where it asks for one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Empty a tier. What engines use now, and what is pinned, stays; what is lost is recomputed.

    Exits with 1 when it was not confirmed.
    """
    from kvstore.cli.common.sidecar_http import address, ask
    from kvstore.errors import ConfigError

    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("clear deletes blocks; give --yes where nobody can be asked")
        if not typer.confirm(f"Delete every block in {tier}?", err=True):
            raise typer.Exit(1)
    path = f"/v1/clear?tier={quote(tier)}"
    answer = ask(address(url), path, {}, token=token, limit_s=LIMIT_S)
    print(json.dumps(answer) if as_json else f"{answer['cleared']}: cleared")
