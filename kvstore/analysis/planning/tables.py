"""Prints `kvstore plan`'s report as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.config.units import format_bytes

Report = dict[str, Any]


def show(report: Report) -> None:
    """Print all sections of the report."""
    console = Console()
    _model(console, report)
    if report["rows"]:
        _tiers(console, report)
    if "budget" in report:
        _budget(console, report["budget"])
    if "traffic" in report:
        _traffic(console, report)
        _expected(console, report["expected"], report["policies"])


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False)


def _model(console: Console, report: Report) -> None:
    _say(
        console,
        f"{report['bytes_per_token']:,} bytes per token ({report['dtype']}, "
        f"{report['attention']}); {format_bytes(report['block_bytes'])} per block of "
        f"{report['block_tokens']} tokens",
    )
    window = report["window"]
    if window["layers"] and window["bytes"]:
        _say(
            console,
            f"plus {format_bytes(window['bytes'])} for the last {window['tokens']:,} tokens of a "
            f"context, in the {window['layers']} sliding-window layers",
        )
    elif window["layers"]:
        _say(console, f"nothing beyond the last {window['tokens']:,} tokens of a context")


def _tiers(console: Console, report: Report) -> None:
    labels = [key for key in report["rows"][0] if key.startswith("prefixes_")]
    table = Table()
    table.add_column("tier")
    prefixes = (f"{label.removeprefix('prefixes_')} prefixes" for label in labels)
    for column in ("size", "blocks", "tokens", *prefixes):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        counts = (f"{row[count]:,}" for count in ("blocks", "tokens", *labels))
        table.add_row(row["tier"], format_bytes(row["bytes"]), *counts)
    console.print(table)


def _budget(console: Console, budget: Report) -> None:
    _say(
        console,
        f"GPU of {format_bytes(budget['gpu_bytes'])}: weights "
        f"{format_bytes(budget['weight_bytes'])}, activations "
        f"{format_bytes(budget['activation_bytes'])}, {format_bytes(budget['kv_bytes'])} for KV",
    )
    _say(
        console,
        f"at the peak, {budget['peak_requests']:,} requests of {budget['peak_context']:,} tokens "
        f"use {format_bytes(budget['peak_kv_bytes'])}: {format_bytes(budget['left_bytes'])} "
        f"({budget['left_tokens']:,} tokens) left for cached prefixes",
    )
    if budget["requests_max"] < budget["peak_requests"]:
        _say(console, f"only {budget['requests_max']:,} of them fit at once; the others wait")


def _traffic(console: Console, report: Report) -> None:
    traffic, working = report["traffic"], report["working_set"]
    _say(
        console,
        f"{traffic['requests']:,} requests in {traffic['seconds']:,.0f} s, "
        f"{traffic['input_tokens']:,} prompt tokens; working set {format_bytes(working['bytes'])}, "
        f"{format_bytes(working['reused_bytes'])} of it reused",
    )
    table = Table()
    columns = ("L2", "hit rate", "second half", "TTFT p50, ms", "mean", "GPU s saved")
    for column in (*columns, "$ saved per million tokens"):
        table.add_column(column, justify="right")
    for row in report["by_size"]:
        table.add_row(
            "unlimited" if row["l2_bytes"] is None else format_bytes(row["l2_bytes"]),
            f"{row['token_hit_rate']:.1f}%",
            f"{row['token_hit_rate_second_half']:.1f}%",
            f"{row['ttft_p50_s'] * 1e3:,.0f}",
            f"{row['ttft_mean_s'] * 1e3:,.0f}",
            f"{row['gpu_seconds_saved']:,.0f}",
            f"{row['usd_saved_per_million_tokens']:.4f}",
        )
    console.print(table)


def _expected(console: Console, expected: Report, policies: Report) -> None:
    tiers = ", ".join(
        f"{name} {rate:.1f}%" for name, rate in expected["token_hit_rate_by_tier"].items()
    )
    saved = expected["ttft_saved_s"]
    _say(
        console,
        f"with L2 of {format_bytes(expected['l2_bytes'])}: {expected['token_hit_rate']:.1f}% of "
        f"prompt tokens hit ({tiers}); TTFT shorter by {saved['mean'] * 1e3:,.0f} ms (mean), "
        f"{saved['p50'] * 1e3:,.0f} ms (p50), {saved['p99'] * 1e3:,.0f} ms (p99)",
    )
    _say(
        console,
        f"prefill uses {expected['prefill_load']:.0%} of the engines' time without the tiers, "
        f"{expected['prefill_load_with_cache']:.0%} with them; "
        f"{expected['gpu_hours_saved_per_day']:,.1f} GPU hours saved per day",
    )
    if expected["usd_per_million_tokens"]:
        _say(
            console,
            f"prefill costs ${expected['usd_per_million_tokens']:.4f} per million prompt tokens; "
            f"hits save ${expected['usd_saved_per_million_tokens']:.4f} of it. A million tokens "
            f"that hit save ${expected['usd_per_million_tokens_hit']:.4f}",
        )
    if expected["usd_tiers_per_month"] and expected["usd_net_per_million_tokens"] is not None:
        _say(
            console,
            f"the tiers cost ${expected['usd_tiers_per_month']:,.2f} per month, "
            f"${expected['usd_tiers_per_million_tokens']:.4f} per million prompt tokens of this "
            f"traffic: net saving ${expected['usd_net_per_million_tokens']:.4f}",
        )
    chosen = [f"{kind} {policies[kind]}" for kind in ("eviction", "write") if kind in policies]
    _say(console, f"policies: {', '.join(chosen)}, load {policies['load_policy']}")
    if policies["load_policy"] == "never":
        _say(console, "loading is slower than computing: these tiers do not pay")
