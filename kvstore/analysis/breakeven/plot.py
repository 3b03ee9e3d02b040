"""Plots computing and loading times over prompt length, as an image or an HTML page."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any, Final

from kvstore.prefetch.costs import CostModel

GRID_POINTS: Final = 60


def plot(report: dict[str, Any], model: CostModel, path: Path) -> None:
    """Write the plot to a file, in the format of its suffix."""
    figure = _figure(report, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _figure(report: dict[str, Any], model: CostModel) -> Any:
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    lengths = [int(n) for n in report["ttft_computed_ms"]]
    smallest = min([model.block_tokens, *(p["tokens"] for p in report["points"])])
    size = model.block_tokens
    grid = size * np.unique(np.geomspace(smallest, max(lengths), GRID_POINTS).astype(int) // size)
    grid = grid[grid > 0]
    axes.plot(grid, [1e3 * model.compute_s(0, int(n)) for n in grid], "k", label="computed")
    measured = report["points"] if report["prefill_measured"] else []
    axes.plot(
        [p["tokens"] for p in measured], [1e3 * p["seconds"] for p in measured], "k.", markersize=7
    )
    for number, tier in enumerate(report["tiers"]):
        colour = f"C{number}"
        even = tier["break_even_tokens"]
        words = "never pays" if even is None else f"pays from {even:,} tokens"
        loads = [1e3 * model.load_s(tier["name"], int(n) // size) for n in grid]
        axes.plot(grid, loads, color=colour, label=f"{tier['name']}: {words}")
        points = tier["points"]
        axes.plot(
            [p["tokens"] for p in points],
            [1e3 * p["seconds"] for p in points],
            ".",
            color=colour,
            markersize=7,
        )
        if even is not None and even >= smallest:
            axes.axvline(even, color=colour, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.set_xlabel("tokens of the prefix (dots: measured)")
    axes.set_ylabel("milliseconds")
    axes.set_title(title_of(report))
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    return figure


def title_of(report: dict[str, Any]) -> str:
    """Return a one-line title of the comparison."""
    return f"{report['model']}, {report['bytes_per_token']:,} bytes of KV per token"


def page(report: dict[str, Any], model: CostModel, path: Path) -> None:
    """Write a self-contained HTML page: the plot as SVG, the figures as a table."""
    image = io.StringIO()
    _figure(report, model).savefig(image, format="svg")
    svg = image.getvalue()
    lengths = list(report["ttft_computed_ms"])
    head = "".join(f"<th>{int(n):,}</th>" for n in lengths)
    computed = "".join(f"<td>{report['ttft_computed_ms'][n]:,.1f}</td>" for n in lengths)
    rows = [f"<tr><th>computed, ms</th><td></td><td></td>{computed}</tr>"]
    for tier in report["tiers"]:
        even = tier["break_even_tokens"]
        cells = "".join(f"<td>{tier['ttft_saved_ms'][n]:,.1f}</td>" for n in lengths)
        rows.append(
            f"<tr><th>{html.escape(tier['name'])}, ms saved</th>"
            f"<td>{tier['bytes_per_s'] / 1e9:,.2f}</td>"
            f"<td>{'never' if even is None else f'{even:,}'}</td>{cells}</tr>"
        )
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvstore: does loading pay?</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #ccc; text-align: right; }}
th:first-child {{ text-align: left; }}
svg {{ max-width: 100%; height: auto; }}
</style></head><body>
<h1>From which length on is loading faster than computing?</h1>
<p>{html.escape(title_of(report))}; prefill {report["prefill_tokens_per_s"]:,.0f} tokens/s
({html.escape(report["prefill_source"])}). A tier pays for long prefixes if it reads faster than
{report["needed_bytes_per_s"] / 1e9:,.3g} GB/s.</p>
{svg[svg.index("<svg") :]}
<table><tr><th></th><th>GB/s</th><th>break-even, tokens</th>{head}</tr>
{"".join(rows)}</table>
<p>Loads were measured up to {report["measured_tokens"]:,} tokens. Beyond that, and for prefixes
longer than the measured prompts, the figures are extrapolated.</p>
</body></html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
