"""`kvstore doctor sidecar`: what a running sidecar's counters say about a low hit rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from kvstore.cli.doctor.report import Finding, note, ok, report, wrong

LOW_RATE: Final = 0.2
FULL_SHARE: Final = 0.9
CHURN: Final = 1.0
"""Evictions per block held, above which the cache has been turned over completely."""
DROPPED_SHARE: Final = 0.05


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def sidecar(
        socket: Annotated[str | None, typer.Option(help="The sidecar's Unix socket.")] = None,
        url: Annotated[str | None, typer.Option(help="Its HTTP side, http://host:port.")] = None,
        token: Annotated[str | None, typer.Option(help="A token, where it asks for one.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
    ) -> None:
        """Check a running sidecar: hit rate, size, drops, tiers, and engines that cannot share."""
        from kvstore.config.settings import Settings
        from kvstore.errors import ConfigError

        if socket and url:
            raise ConfigError("give --socket or --url, not both")
        if url:
            from kvstore.cli.common.sidecar_http import ask

            numbers = ask(url, "/v1/stats", token=token)
        else:
            from kvstore.ipc.sidecar_connection import ask_stats

            numbers = ask_stats(socket or Settings.load().server.socket, token)
        report(diagnose(numbers), as_json=as_json)


def diagnose(numbers: dict[str, Any]) -> Iterator[Finding]:
    """What a sidecar's statistics (`/v1/stats`) say."""
    yield engines(numbers)
    yield hit_rate(numbers)
    yield room(numbers)
    yield saves(numbers)
    for name, tier in numbers["tiers"].items():
        yield tier_state(name, tier)
    yield sharing(numbers.get("namespaces", {}))


def engines(numbers: dict[str, Any]) -> Finding:
    """Whether anybody uses it."""
    count = numbers["sessions"]
    if not count:
        return wrong(
            "engines",
            "none is connected, so nothing is saved or loaded: start engines with this socket "
            "(kvstore doctor vllm checks vLLM's side)",
        )
    return ok("engines", f"{count} connected")


def hit_rate(numbers: dict[str, Any]) -> Finding:
    """Blocks served beside blocks saved: each that was saved had been asked for in vain, or new."""
    hits, saved = sum(numbers["hits"].values()), numbers["l2"]["admitted"]
    if not hits + saved:
        return note("hit rate", "nothing was asked yet")
    rate = hits / (hits + saved)
    by_tier = ", ".join(f"{name} {count:,}" for name, count in numbers["hits"].items())
    text = f"{rate:.1%}: {hits:,} blocks served ({by_tier}), {saved:,} computed and saved"
    if rate >= LOW_RATE:
        return ok("hit rate", text)
    return note(
        "hit rate",
        f"{text}; what the engines' own caches hit is not in it. If prompts should share more, "
        "kvstore doctor log finds what differs in them",
    )


def room(numbers: dict[str, Any]) -> Finding:
    """Whether blocks leave before they can hit again."""
    l2 = numbers["l2"]
    held, evictions = l2["slots_ready"], l2["evictions"]
    if held < FULL_SHARE * l2["slots"] or evictions < CHURN * max(1, held):
        return ok("room in L2", f"{held:,} of {l2['slots']:,} slots hold blocks")
    turns = evictions / max(1, held)
    text = f"full, and turned over {turns:,.1f} times"
    if numbers["tiers"]:
        return note("room in L2", f"{text}; what left it is read from the tiers below, slower")
    return wrong(
        "room in L2",
        f"{text}, with no tier below: blocks are lost before they are used again. Raise --l2, or "
        "add --disk",
    )


def saves(numbers: dict[str, Any]) -> Finding:
    """Blocks that were not kept although engines gave them."""
    l2 = numbers["l2"]
    refused = {name: l2[name] for name in ("busy", "rejected", "over_quota") if l2[name]}
    dropped = {name: l2[name] for name in ("spills_dropped", "spills_failed") if l2[name]}
    lost, given = sum(refused.values()), l2["admitted"] + sum(refused.values())
    if lost > DROPPED_SHARE * max(1, given):
        words = ", ".join(f"{count:,} {name}" for name, count in refused.items())
        return wrong(
            "saves",
            f"of {given:,} blocks given {lost:,} were not taken ({words}): busy means that every "
            "slot was in use (raise --l2), over_quota that a tenant's share was",
        )
    spilled = l2["spills_written"] + sum(dropped.values())
    if sum(dropped.values()) > DROPPED_SHARE * max(1, spilled):
        words = ", ".join(f"{count:,} {name}" for name, count in dropped.items())
        return wrong(
            "saves",
            f"of {spilled:,} writes to tiers below L2 some were lost ({words}): the tier is slower "
            "than blocks come; raise limits.queue_blocks, or write less (--write-policy selective)",
        )
    return ok("saves", f"{l2['admitted']:,} blocks taken, {l2['spills_written']:,} written below")


def tier_state(name: str, tier: dict[str, Any]) -> Finding:
    """Whether a tier answers, rightly and in time."""
    what = f"tier {name}"
    bad = tier["checksum_failures"]
    if tier.get("state", "up") != "up":
        return wrong(what, f"is {tier['state']} and answers nothing; its log line says why")
    if bad:
        return wrong(what, f"{bad:,} blocks were corrupt and are gone; is its medium sound?")
    if tier["faults"] or tier.get("late"):
        return note(
            what,
            f"{tier['faults']:,} faults, {tier.get('late', 0):,} calls past their deadline: each "
            "was a miss; raise limits.tier_deadline_ms if it is only slow",
        )
    return ok(what, f"{tier.get('blocks', 0):,} blocks, {tier['reads']:,} reads")


def sharing(namespaces: dict[str, dict[str, Any]]) -> Finding:
    """Engines of one model whose blocks do not fit one another."""
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for space in namespaces.values():
        by_model[space["model"]].append(space)
    for model, spaces in by_model.items():
        if len(spaces) > 1:
            kinds = ", ".join(f"{each['dtype']} in blocks of {each['tokens']}" for each in spaces)
            return note(
                "sharing",
                f"{model} has {len(spaces)} namespaces ({kinds}), which share nothing: engines "
                "that should share need one dtype, block size, revision and layout; ranks of one "
                "engine have one each, and that is right",
            )
    return ok("sharing", f"{len(by_model)} models, each with one namespace")
