"""`kvstore ls`: what a running sidecar holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer

LIMIT_S: Final = 60.0
"""Listing a large tier takes a while."""
HASH_SHOWN: Final = 16
"""Digits of a hash, and of a namespace, in the table; --json has all of them."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ls")(ls)


def ls(
    tier: Annotated[str | None, typer.Option(help="Only this tier: l2, disk, ...")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's blocks.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Only this namespace's, a digest.")] = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Each block, the most recently used first.")
    ] = False,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="The runs asked for of late, and where they lie.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Lines at most, up to 10000.")] = 100,
    url: Annotated[
        str | None, typer.Option(help="The sidecar's HTTP side, http://host:port.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="The admin token, or a tenant's for its own blocks.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List what a sidecar holds, by tier, tenant and namespace, by block or by prefix.

    Exits with 1 when a tier could not be listed.
    """
    from kvstore.cli.common.sidecar_http import address, ask
    from kvstore.errors import ConfigError

    if prefixes:
        if blocks or tier is not None:
            raise ConfigError("--prefixes lists runs over all tiers; leave --blocks and --tier")
        shown = ask(address(url), "/v1/dashboard", token=token, limit_s=LIMIT_S)["prefixes"]
        _prefixes(list(_flat(shown["chains"])), tenant, namespace, limit, as_json)
        return
    asked = {"tier": tier, "tenant": tenant, "namespace": namespace, "limit": limit}
    words = {name: value for name, value in asked.items() if value is not None}
    query = urlencode({**words, "blocks": str(blocks).lower()})
    answer = ask(address(url), f"/v1/ls?{query}", token=token, limit_s=LIMIT_S)
    if as_json:
        print(json.dumps(answer))
    else:
        _show(answer, blocks)
    if answer["unlisted"]:
        raise typer.Exit(1)


def _flat(chains: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Chains of blocks and those that branch off them, each after what it follows."""
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
    """Print runs: how deep each begins, how long it is, how often it was asked for, where it is."""
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
    table = Table("tenant", "namespace", "after", "blocks", "asks", "held", "last hash")
    for chain in wanted[:limit]:
        held = ", ".join(f"{count} {name}" for name, count in chain["held"].items())
        table.add_row(
            chain["tenant"],
            chain["namespace"][:HASH_SHOWN],
            str(chain["depth"]),
            str(chain["blocks"]),
            str(chain["asks"]),
            held or "gone",
            chain["hash"][:HASH_SHOWN],
        )
    console = Console()
    console.print(table if wanted else "nothing was asked for")
    if len(wanted) > limit:
        console.print(f"and {len(wanted) - limit:,} runs more")


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
        console.print("nothing is held")
    if answer["left_off"]:
        console.print(f"and {answer['left_off']:,} blocks more")
    for name, reason in answer["unlisted"].items():
        console.print(f"{name} is not listed: {reason}", markup=False)
