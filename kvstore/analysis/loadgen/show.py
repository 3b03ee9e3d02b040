"""Prints and plots the result of a load run: a table, its failures, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.analysis.loadgen.endpoint import Outcome
from kvstore.analysis.loadgen.summary import HIT_FRACTION, NO_SPLIT, cached_fraction


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    console = Console(highlight=False)
    console.print(f"{report['model']} at {report['url']}, seed {report['seed']}", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("workload", no_wrap=True)
    times = ("TTFT p50", "p99", "hits", "misses")
    for name in ("sent", "hit", *times, "req/s", "in/s", "out/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report["rows"]:
        rate = row["token_hit_rate"]
        table.add_row(
            row["workload"],
            str(row["requests"]),
            "?" if rate is None else f"{rate:.1%}",
            _ms(row["ttft_ms"], "p50"),
            _ms(row["ttft_ms"], "p99"),
            _ms(row["ttft_hit_ms"], "p50"),
            _ms(row["ttft_miss_ms"], "p50"),
            f"{row['requests_per_s']:,.1f}",
            f"{row['prompt_tokens_per_s']:,.0f}",
            f"{row['completion_tokens_per_s']:,.0f}",
        )
    console.print(table)
    share = f"{HIT_FRACTION:.0%}"
    console.print(
        f"hit: cached tokens / prompt tokens. TTFT in milliseconds; hits (at least {share} of the "
        "prompt cached) and misses at p50. in/s, out/s: prompt and output tokens per second."
    )
    if not report["split"]:
        console.print(NO_SPLIT, markup=False)
    for line in notes(report):
        console.print(line, markup=False)


def notes(report: dict[str, Any]) -> list[str]:
    """Return what went wrong, one line each."""
    lines = [
        f"{fault['count']} requests failed: {kind}: {fault['first']}"
        for kind, fault in report["faults"].items()
    ]
    if report["skipped"]:
        lines.append(
            f"{report['skipped']} requests were not sent after a failure or the time limit"
        )
    if report["late_sessions"]:
        lines.append(
            f"{report['late_sessions']} sessions started late: raise --concurrency, or lower "
            "--rate if the server is slower"
        )
    lines += [f"aborted: {why}" for why in report["aborted"]]
    return lines


def _ms(spread: dict[str, float] | None, key: str) -> str:
    return "" if spread is None else f"{spread[key]:,.0f}"


def plot(outcomes: Sequence[Outcome], title: str, path: Path, *, split: bool) -> None:
    """Plot time to first token: its distribution, and over the cached fraction of the prompt."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), dpi=150)
    points = [
        (cached_fraction(outcome.usage), outcome.ttft_s * 1e3, outcome.workload)
        for outcome in outcomes
        if outcome.usage is not None and outcome.ttft_s is not None and not outcome.fault
    ]
    groups = {"all": [ms for _, ms, _ in points]}
    if split:
        groups = {
            "hits": [ms for share, ms, _ in points if share >= HIT_FRACTION],
            "misses": [ms for share, ms, _ in points if share < HIT_FRACTION],
        }
    for label, times in groups.items():
        if times:
            left.ecdf(times, label=f"{label} ({len(times)})")
    left.set_xlabel("time to first token, ms")
    left.set_ylabel("fraction of requests")
    for workload in dict.fromkeys(name for _, _, name in points):
        chosen = [(100 * share, ms) for share, ms, name in points if name == workload]
        right.scatter(*zip(*chosen, strict=True), s=14, alpha=0.7, label=workload)
    right.set_xlabel("percent of the prompt cached" if split else "cached tokens: not reported")
    right.set_ylabel("time to first token, ms")
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
        if points:
            axes.legend()
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
