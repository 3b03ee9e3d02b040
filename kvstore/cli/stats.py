"""`kvstore stats`: what a running sidecar holds and has done, once or again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.errors import ConfigError, TierUnavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

MIN_EVERY_S: Final = 0.1

Numbers = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("stats")(stats)


def stats(
    socket: Annotated[str | None, typer.Option(help="The sidecar's Unix socket.")] = None,
    url: Annotated[str | None, typer.Option(help="Its HTTP side, http://host:port.")] = None,
    token: Annotated[str | None, typer.Option(help="A token, where it asks for one.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Again and again, with what changes a second.")
    ] = False,
    every: Annotated[float, typer.Option(help="With --watch: seconds between two looks.")] = 2.0,
    times: Annotated[
        int, typer.Option(help="With --watch: end after so many looks; 0: at Ctrl-C.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything, as JSON; with --watch a line each time.")
    ] = False,
) -> None:
    """Show a sidecar's occupancy and counters.

    --watch goes on through a restart of the sidecar.
    """
    if socket and url:
        raise ConfigError("give --socket or --url, not both")
    if every < MIN_EVERY_S or times < 0:
        raise ConfigError(f"--every {every:g} --times {times}; from {MIN_EVERY_S:g} and 0 on")
    ask = _asker(socket, url, token)
    if watch:
        (_watch_json if as_json else _watch)(ask, every, times)
        return
    numbers = ask()
    if as_json:
        print(json.dumps(numbers))
    else:
        from rich.console import Console

        Console().print(view(numbers))


def _asker(socket: str | None, url: str | None, token: str | None) -> Callable[[], Numbers]:
    """What asks the sidecar once. Raises TierUnavailable: there is none."""
    if url:
        from kvstore.cli.common.sidecar_http import ask

        return lambda: ask(url, "/v1/stats", token=token)
    from kvstore.config.settings import Settings
    from kvstore.ipc.sidecar_connection import ask_stats

    path = socket or Settings.load().server.socket
    return lambda: ask_stats(path, token)


def _watch_json(ask: Callable[[], Numbers], every_s: float, times: int) -> None:
    """A line of JSON for each look; {"error": ...} where nobody answers."""
    number = 0
    while not times or number < times:
        if number:
            time.sleep(every_s)
        number += 1
        try:
            numbers = ask()
        except TierUnavailable as error:
            numbers = {"error": str(error)}
        print(json.dumps({"at": round(time.time(), 3), **numbers}), flush=True)


def _watch(ask: Callable[[], Numbers], every_s: float, times: int) -> None:
    """One view that is drawn anew. Raises TierUnavailable: nobody answers the first time."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    numbers, before_s, number = ask(), time.monotonic(), 1
    with Live(view(numbers), console=Console(), auto_refresh=False) as live:
        while not times or number < times:
            time.sleep(every_s)
            number += 1
            old = numbers
            try:
                numbers, now_s = ask(), time.monotonic()
            except TierUnavailable as error:
                live.update(Group(view(old), Text(str(error), style="red")), refresh=True)
                continue
            rates = Text(f"a second: {changes(old, numbers, now_s - before_s)}")
            before_s = now_s
            live.update(Group(view(numbers), rates), refresh=True)


def changes(old: Numbers, new: Numbers, seconds: float) -> str:
    """What moved between two looks, by the second. A counter that fell was of another sidecar, and
    counts from zero."""
    from kvstore.config.units import format_bytes

    def rate(*path: str) -> float:
        first, second = (_at(numbers, path) for numbers in (old, new))
        return (second - (first if second >= first else 0)) / seconds

    parts = [f"{rate('hits', 'l2'):.1f} blocks hit in l2", f"{rate('l2', 'admitted'):.1f} saved"]
    parts.append(f"{rate('l2', 'evictions'):.1f} evicted")
    for name in new["tiers"]:
        read, write = (rate("tiers", name, f"{verb}_bytes") for verb in ("read", "write"))
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
    """A table for people, and some lines."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kvstore.config.units import format_bytes

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
    lines: list[str] = []
    for name, tier in numbers["tiers"].items():
        for digest, codec in tier.get("codec", {}).items():
            lines.append(
                f"  {name}, namespace {digest}: {codec['name']}, {codec['ratio']:.2f} times "
                f"smaller, {_rate(codec['encode_rate'])} encoded, {_rate(codec['decode_rate'])} "
                f"decoded; the tier reads {_rate(codec['read_rate'])}"
            )
    clients = numbers.get("service", {}).get("clients", {})
    lines.append(
        f"{l2['slots_free']} slots free, {l2['slots_filling']} filling, "
        f"{l2['slots_leased']} leased, {l2['slots_pinned']} pinned; {len(clients)} clients"
    )
    for digest, space in numbers.get("namespaces", {}).items():
        lines.append(
            f"  namespace {digest}: {space['model']}, {space['dtype']}, blocks of {space['tokens']}"
        )
    for number, client in clients.items():
        lines.append(f"  client {number}: {client['about']}, {client['tickets']} tickets")
    return Group(table, *(Text(line) for line in lines))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s" if bytes_per_s else "as yet unmeasured"
