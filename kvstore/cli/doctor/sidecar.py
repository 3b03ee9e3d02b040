"""`kvstore doctor sidecar`: explains a low hit rate from a running sidecar's counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from kvstore.cli.doctor.report import Finding, fail, ok, report, warn

LOW_RATE: Final = 0.2
FULL_FRACTION: Final = 0.9
CHURN: Final = 1.0
"""Evictions per cached block at which the whole cache has been replaced."""
DROPPED_FRACTION: Final = 0.05


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def sidecar(
        socket: Annotated[
            str | None, typer.Option(help="Path of the sidecar's Unix socket.")
        ] = None,
        url: Annotated[
            str | None, typer.Option(help="URL of the sidecar's HTTP server, http://host:port.")
        ] = None,
        auth_token: Annotated[
            str | None, typer.Option(help="The sidecar's auth token, if it requires one.")
        ] = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print the findings as JSON.")
        ] = False,
    ) -> None:
        """Check a running sidecar: hit rate, size, drops, tiers, and engines that cannot share."""
        from kvstore.config.settings import Settings
        from kvstore.errors import ConfigError

        if socket and url:
            raise ConfigError("give --socket or --url, not both")
        if url:
            from kvstore.cli.common.sidecar_http import request_json

            numbers = request_json(url, "/v1/stats", auth_token=auth_token)
        else:
            from kvstore.ipc.sidecar_connection import request_stats

            numbers = request_stats(socket or Settings.load().server.socket, auth_token)
        report(diagnose(numbers), as_json=as_json)


def diagnose(numbers: dict[str, Any]) -> Iterator[Finding]:
    """Yield findings about a sidecar's statistics (`/v1/stats`)."""
    yield engines(numbers)
    yield hit_rate(numbers)
    yield room(numbers)
    yield saves(numbers)
    for name, tier in numbers["tiers"].items():
        yield tier_state(name, tier)
    yield sharing(numbers.get("namespaces", {}))


def engines(numbers: dict[str, Any]) -> Finding:
    """Check that engines are connected."""
    count = numbers["sessions"]
    if not count:
        return fail(
            "engines",
            "no engine is connected, so nothing is saved or loaded: start engines with this socket "
            "(kvstore doctor vllm checks vLLM's side)",
        )
    return ok("engines", f"{count} connected")


def hit_rate(numbers: dict[str, Any]) -> Finding:
    """Compare hit blocks with saved blocks. A saved block was new, or a lookup had missed it."""
    hits, saved = sum(numbers["hit_blocks"].values()), numbers["l2"]["stored"]
    if not hits + saved:
        return warn("hit rate", "no lookups yet")
    rate = hits / (hits + saved)
    by_tier = ", ".join(f"{name} {count:,}" for name, count in numbers["hit_blocks"].items())
    text = f"{rate:.1%}: {hits:,} blocks hit ({by_tier}), {saved:,} computed and saved"
    if rate >= LOW_RATE:
        return ok("hit rate", text)
    return warn(
        "hit rate",
        f"{text}; hits in the engines' own caches are not counted. If prompts should share more, "
        "kvstore doctor log finds what differs in them",
    )


def room(numbers: dict[str, Any]) -> Finding:
    """Check whether blocks are evicted before they can hit again."""
    l2 = numbers["l2"]
    cached, evictions = l2["slots_ready"], l2["evictions"]
    if cached < FULL_FRACTION * l2["slots"] or evictions < CHURN * max(1, cached):
        return ok("room in L2", f"{cached:,} of {l2['slots']:,} slots have blocks")
    turns = evictions / max(1, cached)
    text = f"full, and its content was replaced {turns:,.1f} times"
    if numbers["tiers"]:
        return warn("room in L2", f"{text}; evicted blocks are read from the slower tiers below")
    return fail(
        "room in L2",
        f"{text}, with no tier below: blocks are lost before they are reused. Raise --l2, or "
        "add --disk",
    )


def saves(numbers: dict[str, Any]) -> Finding:
    """Check whether L2 and the tiers took the blocks that engines saved."""
    l2 = numbers["l2"]
    skipped = {name: l2[name] for name in ("no_slot", "already_cached", "over_quota") if l2[name]}
    dropped = {name: l2[name] for name in ("tier_writes_dropped", "tier_writes_failed") if l2[name]}
    lost, given = sum(skipped.values()), l2["stored"] + sum(skipped.values())
    if lost > DROPPED_FRACTION * max(1, given):
        words = ", ".join(f"{count:,} {name}" for name, count in skipped.items())
        return fail(
            "saves",
            f"{lost:,} of {given:,} saved blocks were not stored ({words}): no_slot means that all "
            "slots were in use (raise --l2), over_quota that a tenant had used its quota",
        )
    writes = l2["tier_writes_written"] + sum(dropped.values())
    if sum(dropped.values()) > DROPPED_FRACTION * max(1, writes):
        words = ", ".join(f"{count:,} {name}" for name, count in dropped.items())
        return fail(
            "saves",
            f"of {writes:,} writes to tiers below L2 some were lost ({words}): the tier is slower "
            "than the saves; raise limits.write_queue_blocks, or write less (--write-policy "
            "selective)",
        )
    return ok(
        "saves",
        f"{l2['stored']:,} blocks stored, {l2['tier_writes_written']:,} written to tiers",
    )


def tier_state(name: str, tier: dict[str, Any]) -> Finding:
    """Check that a tier is up, and has no errors, late calls, corrupt or unsupported blocks."""
    what = f"tier {name}"
    bad = tier["checksum_failures"]
    if tier.get("state", "up") != "up":
        return fail(
            what, f"is {tier['state']} and returns nothing; the sidecar's log has the cause"
        )
    if bad:
        return fail(what, f"{bad:,} blocks were corrupt and were deleted; check the device")
    unknown = tier.get("unsupported_frames", 0)
    if unknown or tier.get("segments_unsupported"):
        return warn(
            what,
            f"{unknown:,} frames and {tier.get('segments_unsupported', 0):,} segments of another "
            "release; each was a miss and was left as it is. Upgrade this sidecar, or run kvstore "
            f"clear {name} if that release will not be used again",
        )
    if tier["errors"] or tier.get("deadline_exceeded"):
        return warn(
            what,
            f"{tier['errors']:,} errors, {tier.get('deadline_exceeded', 0):,} calls past their "
            "deadline; each was a miss. Raise limits.tier_timeout if the tier is only slow",
        )
    return ok(what, f"{tier.get('blocks', 0):,} blocks, {tier['reads']:,} reads")


def sharing(namespaces: dict[str, dict[str, Any]]) -> Finding:
    """Find engines of one model that cannot share blocks."""
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for space in namespaces.values():
        by_model[space["model"]].append(space)
    for model, spaces in by_model.items():
        if len(spaces) > 1:
            kinds = ", ".join(
                f"{each['dtype']} in blocks of {each['block_tokens']}" for each in spaces
            )
            return warn(
                "sharing",
                f"{model} has {len(spaces)} namespaces ({kinds}), which share nothing. To share, "
                "engines need the same dtype, block size, revision and layout. Several ranks of "
                "one engine are normal: each has its namespace",
            )
    return ok("sharing", f"{len(by_model)} models with one namespace each")
