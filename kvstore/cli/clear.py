"""`kvstore clear`: deletes the blocks of a tier of a running sidecar."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Final
from urllib.parse import quote

import typer

TIMEOUT_S: Final = 60.0
"""Deleting the blocks of a large tier takes time."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("clear")(clear)


def clear(
    tier: Annotated[str, typer.Argument(help="Tier to clear: l2, a tier's name, or all.")],
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            "-y",
            help="Skip the confirmation. Required when stdin is not a terminal.",
        ),
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="URL of the sidecar's HTTP server, http://host:port.")
    ] = None,
    auth_token: Annotated[
        str | None, typer.Option(help="The sidecar's admin auth token, if it requires one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Delete all blocks of a tier, except leased and pinned ones.

    Exits with 1 if the deletion was not confirmed.
    """
    from kvstore.cli.common.sidecar_http import request_json, sidecar_url
    from kvstore.errors import ConfigError

    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("clear deletes blocks: give --yes when stdin is not a terminal")
        if not typer.confirm(f"Delete all blocks in {tier}?", err=True):
            raise typer.Exit(1)
    path = f"/v1/clear?tier={quote(tier)}"
    answer = request_json(sidecar_url(url), path, {}, auth_token=auth_token, timeout_s=TIMEOUT_S)
    print(json.dumps(answer) if as_json else f"{answer['cleared']}: cleared")
