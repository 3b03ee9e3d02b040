"""`kvstore ls`: lists the cached blocks of a running sidecar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer

TIMEOUT_S: Final = 60.0
"""Listing a large tier takes time."""
HASH_SHOWN: Final = 16
"""Digits of a hash or namespace in the table. --json has all of them."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ls")(ls)


def ls(
    tier: Annotated[
        str | None, typer.Option(help="List only this tier: l2, or a tier's name.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="List only this tenant's blocks.")] = None,
    namespace: Annotated[
        str | None, typer.Option(help="List only blocks of this namespace (its digest).")
    ] = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="List single blocks, the most recently used first.")
    ] = False,
    prefixes: Annotated[
        bool,
        typer.Option(
            "--prefixes", help="List recently looked-up prefixes and the tiers of their blocks."
        ),
    ] = False,
    limit: Annotated[int, typer.Option(help="Maximum number of lines, up to 10000.")] = 100,
    url: Annotated[
        str | None, typer.Option(help="URL of the sidecar's HTTP server, http://host:port.")
    ] = None,
    auth_token: Annotated[
        str | None,
        typer.Option(help="The admin auth token, or a tenant's auth token for its blocks."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the blocks of a sidecar by tier, tenant and namespace, or single blocks or prefixes.

    Exits with 1 if a tier could not be listed.
    """
    from kvstore.cli.common.sidecar_http import request_json, sidecar_url
    from kvstore.errors import ConfigError

    if prefixes:
        if blocks or tier is not None:
            raise ConfigError("--prefixes covers all tiers; omit --blocks and --tier")
        shown = request_json(
            sidecar_url(url), "/v1/dashboard", auth_token=auth_token, timeout_s=TIMEOUT_S
        )["prefixes"]
        _prefixes(list(_flat(shown["chains"])), tenant, namespace, limit, as_json)
        return
    filters = {"tier": tier, "tenant": tenant, "namespace": namespace, "limit": limit}
    words = {name: value for name, value in filters.items() if value is not None}
    query = urlencode({**words, "blocks": str(blocks).lower()})
    answer = request_json(
        sidecar_url(url), f"/v1/ls?{query}", auth_token=auth_token, timeout_s=TIMEOUT_S
    )
    if as_json:
        print(json.dumps(answer))
    else:
        _show(answer, blocks)
    if answer["unlisted"]:
        raise typer.Exit(1)


def _flat(chains: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield chains of blocks depth-first: each before the chains that branch off it."""
    for chain in chains:
        yield {name: value for name, value in chain.items() if name not in ("children", "more")}
        yield from _flat(chain["children"])


def _prefixes(
    chains: list[dict[str, Any]],
    tenant: str | None,
    namespace: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Print prefixes: depth, length, number of lookups, and tiers of the blocks."""
    from rich.console import Console
    from rich.table import Table

    wanted = [
        chain
        for chain in chains
        if tenant in (None, chain["tenant"]) and namespace in (None, chain["namespace"])
    ]
    if as_json:
        left_off = max(0, len(wanted) - limit)
        print(json.dumps({"prefixes": wanted[:limit], "left_off": left_off}))
        return
    table = Table("tenant", "namespace", "after", "blocks", "lookups", "cached", "last hash")
    for chain in wanted[:limit]:
        cached = ", ".join(f"{count} {name}" for name, count in chain["cached"].items())
        table.add_row(
            chain["tenant"],
            chain["namespace"][:HASH_SHOWN],
            str(chain["depth"]),
            str(chain["blocks"]),
            str(chain["lookups"]),
            cached or "gone",
            chain["hash"][:HASH_SHOWN],
        )
    console = Console()
    console.print(table if wanted else "no lookups yet")
    if len(wanted) > limit:
        console.print(f"and {len(wanted) - limit:,} more prefixes")


def _show(answer: dict[str, Any], blocks: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvstore.config.units import format_bytes

    console = Console()
    rows = answer["blocks"] if blocks else answer["groups"]
    if blocks:
        table = Table("tier", "tenant", "namespace", "hash", "size", "hits", "state")
        for row in rows:
            states = [name for name in ("pinned", "leased", "dirty") if row.get(name)]
            table.add_row(
                row["tier"],
                row["tenant"],
                row["namespace"][:HASH_SHOWN],
                row["hash"][:HASH_SHOWN],
                format_bytes(row["bytes"]),
                str(row.get("hits", "")),
                ", ".join(states),
            )
    else:
        table = Table("tier", "tenant", "namespace", "model", "blocks", "size")
        for row in rows:
            table.add_row(
                row["tier"],
                row["tenant"],
                row["namespace"][:HASH_SHOWN],
                row["model"],
                f"{row['blocks']:,}",
                format_bytes(row["bytes"]),
            )
    if rows:
        console.print(table)
    else:
        console.print("no blocks")
    if answer["left_off"]:
        console.print(f"and {answer['left_off']:,} more blocks")
    for name, reason in answer["unlisted"].items():
        console.print(f"{name} could not be listed: {reason}", markup=False)
