"""`kvstore stats`: shows a running sidecar's occupancy and counters, once or continuously."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.errors import ConfigError, TierUnavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

MIN_INTERVAL_S: Final = 0.1

Numbers = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("stats")(stats)


def stats(
    socket: Annotated[str | None, typer.Option(help="Path of the sidecar's Unix socket.")] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of the sidecar's HTTP server, http://host:port.")
    ] = None,
    auth_token: Annotated[
        str | None, typer.Option(help="The sidecar's auth token, if it requires one.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh continuously and show rates per second.")
    ] = False,
    interval: Annotated[
        str,
        typer.Option(
            help="With --watch: time between refreshes, such as 500ms. A bare number is seconds."
        ),
    ] = "2s",
    count: Annotated[
        int, typer.Option(help="With --watch: number of refreshes. 0: until Ctrl-C.")
    ] = 0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print all statistics as JSON. With --watch: one line per refresh."
        ),
    ] = False,
) -> None:
    """Show a sidecar's occupancy and counters.

    --watch continues after a restart of the sidecar.
    """
    if socket and url:
        raise ConfigError("give --socket or --url, not both")
    from kvstore.cli.common.durations import seconds_of

    interval_s = seconds_of("--interval", interval)
    if interval_s < MIN_INTERVAL_S:
        raise ConfigError(f"--interval must be at least {MIN_INTERVAL_S:g}s (got {interval!r})")
    if count < 0:
        raise ConfigError(f"--count must be at least 0 (got {count})")
    ask = _reader(socket, url, auth_token)
    if watch:
        (_watch_json if as_json else _watch)(ask, interval_s, count)
        return
    numbers = ask()
    if as_json:
        print(json.dumps(numbers))
    else:
        from rich.console import Console

        Console().print(view(numbers))


def _reader(socket: str | None, url: str | None, auth_token: str | None) -> Callable[[], Numbers]:
    """Return a function that reads the statistics. It raises TierUnavailable without a sidecar."""
    if url:
        from kvstore.cli.common.sidecar_http import request_json

        return lambda: request_json(url, "/v1/stats", auth_token=auth_token)
    from kvstore.config.settings import Settings
    from kvstore.ipc.sidecar_connection import request_stats

    path = socket or Settings.load().server.socket
    return lambda: request_stats(path, auth_token)


def _watch_json(ask: Callable[[], Numbers], interval_s: float, count: int) -> None:
    """Print a line of JSON per refresh. {"error": ...}: the sidecar is unreachable."""
    number = 0
    while not count or number < count:
        if number:
            time.sleep(interval_s)
        number += 1
        try:
            numbers = ask()
        except TierUnavailable as error:
            numbers = {"error": str(error)}
        print(json.dumps({"at": round(time.time(), 3), **numbers}), flush=True)


def _watch(ask: Callable[[], Numbers], interval_s: float, count: int) -> None:
    """Refresh one view. Raises TierUnavailable if the first read fails."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    numbers, before_s, number = ask(), time.monotonic(), 1
    with Live(view(numbers), console=Console(), auto_refresh=False) as live:
        while not count or number < count:
            time.sleep(interval_s)
            number += 1
            old = numbers
            try:
                numbers, now_s = ask(), time.monotonic()
            except TierUnavailable as error:
                live.update(Group(view(old), Text(str(error), style="red")), refresh=True)
                continue
            rates = Text(f"per second: {changes(old, numbers, now_s - before_s)}")
            before_s = now_s
            live.update(Group(view(numbers), rates), refresh=True)


def changes(old: Numbers, new: Numbers, seconds: float) -> str:
    """Return the changes per second between two readings.

    A counter that decreased belongs to a restarted sidecar, and counts from zero.
    """
    from kvstore.config.units import format_bytes

    def rate(*path: str) -> float:
        first, second = (_at(numbers, path) for numbers in (old, new))
        return (second - (first if second >= first else 0)) / seconds

    parts = [
        f"{rate('hit_blocks', 'l2'):.1f} blocks hit in l2",
        f"{rate('l2', 'stored'):.1f} saved",
    ]
    parts.append(f"{rate('l2', 'evictions'):.1f} evicted")
    for name in new["tiers"]:
        read, write = (rate("tiers", name, f"{op}_bytes") for op in ("read", "write"))
        parts.append(
            f"{name} {format_bytes(round(read))} read, {format_bytes(round(write))} written"
        )
    return "; ".join(parts)


def _at(numbers: Numbers, path: tuple[str, ...]) -> float:
    here: Any = numbers
    for name in path:
        here = here.get(name, {}) if isinstance(here, dict) else {}
    return float(here) if isinstance(here, int | float) else 0.0


def view(numbers: Numbers) -> RenderableType:
    """Return a table and some lines for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kvstore.config.units import format_bytes

    l2 = numbers["l2"]
    table = Table("tier", "used", "of", "blocks", "hits", "evicted", "queued", "errors")
    slot_bytes = l2["slot_bytes"]
    table.add_row(
        "l2",
        format_bytes(l2["slots_ready"] * slot_bytes),
        format_bytes(l2["slots"] * slot_bytes),
        str(l2["slots_ready"]),
        str(numbers["hit_blocks"]["l2"]),
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
            str(numbers["hit_blocks"][name]),
            str(tier.get("evictions", "")),
            str(tier["queued_writes"]),
            str(tier["errors"] + tier["checksum_failures"]),
        )
    lines: list[str] = []
    for name, tier in numbers["tiers"].items():
        for digest, codec in tier.get("codec", {}).items():
            lines.append(
                f"  {name}, namespace {digest}: {codec['name']}, ratio {codec['ratio']:.2f}, "
                f"encodes {_rate(codec['encode_rate'])}, decodes {_rate(codec['decode_rate'])}; "
                f"the tier reads {_rate(codec['read_rate'])}"
            )
    clients = numbers.get("service", {}).get("clients", {})
    lines.append(
        f"{l2['slots_free']} slots free, {l2['slots_filling']} filling, "
        f"{l2['slots_leased']} leased, {l2['slots_pinned']} pinned; {len(clients)} clients"
    )
    for digest, space in numbers.get("namespaces", {}).items():
        lines.append(
            f"  namespace {digest}: {space['model']}, {space['dtype']}, "
            f"{space['block_tokens']} tokens per block"
        )
    for number, client in clients.items():
        lines.append(
            f"  client {number}: {client['about']}, "
            f"{client['operations_in_flight']} operations in flight"
        )
    return Group(table, *(Text(line) for line in lines))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s" if bytes_per_s else "(not measured yet)"
