"""`kvstore stats`: what a running sidecar holds and has done."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def stats(
        socket: Annotated[str | None, typer.Option(help="The sidecar's Unix socket.")] = None,
        url: Annotated[str | None, typer.Option(help="Its HTTP side, http://host:port.")] = None,
        token: Annotated[str | None, typer.Option(help="A token, where it asks for one.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    ) -> None:
        """Show a sidecar's occupancy and counters."""
        import json

        from kvstore.config import Settings
        from kvstore.errors import ConfigError

        if socket and url:
            raise ConfigError("give --socket or --url, not both")
        if url:
            from kvstore.cli.parts.sidecar import ask

            numbers = ask(url, "/v1/stats", token=token)
        else:
            from kvstore.link import ask_stats

            numbers = ask_stats(socket or Settings.load().server.socket, token)
        if as_json:
            print(json.dumps(numbers))
        else:
            _show(numbers)


def _show(numbers: dict[str, Any]) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    from kvstore.units import format_bytes

    l2 = numbers["l2"]
    table = Table("tier", "holds", "of", "blocks", "hits", "evicted", "queued", "faults")
    slot_bytes = l2["slot_bytes"]
    table.add_row(
        "l2",
        format_bytes(l2["slots_ready"] * slot_bytes),
        format_bytes(l2["slots"] * slot_bytes),
        str(l2["slots_ready"]),
        str(numbers["hits"]["l2"]),
        str(l2["evictions"]),
        "",
        "",
    )
    for name, tier in numbers["tiers"].items():
        table.add_row(
            name,
            format_bytes(int(tier.get("bytes_used", 0))),
            format_bytes(int(tier.get("bytes_capacity", 0))),
            str(tier.get("blocks", "")),
            str(numbers["hits"][name]),
            str(tier.get("evictions", "")),
            str(tier["queued_writes"]),
            str(tier["faults"] + tier["checksum_failures"]),
        )
    console = Console()
    console.print(table)
    for name, tier in numbers["tiers"].items():
        for digest, codec in tier.get("codec", {}).items():
            console.print(
                f"  {name}, namespace {digest}: {codec['name']}, {codec['ratio']:.2f} times "
                f"smaller, {_rate(codec['encode_rate'])} encoded, {_rate(codec['decode_rate'])} "
                f"decoded; the tier reads {_rate(codec['read_rate'])}"
            )
    clients = numbers.get("service", {}).get("clients", {})
    console.print(
        f"{l2['slots_free']} slots free, {l2['slots_filling']} filling, "
        f"{l2['slots_leased']} leased, {l2['slots_pinned']} pinned; {len(clients)} clients"
    )
    for digest, space in numbers.get("namespaces", {}).items():
        console.print(
            f"  namespace {digest}: {space['model']}, {space['dtype']}, blocks of {space['tokens']}"
        )
    for number, client in clients.items():
        console.print(f"  client {number}: {client['about']}, {client['tickets']} tickets")


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s" if bytes_per_s else "as yet unmeasured"
