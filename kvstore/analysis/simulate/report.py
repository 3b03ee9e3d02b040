"""Prints and plots the figures of replays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

Figures = dict[str, Any]

PLOT_SUFFIXES = (".png", ".svg", ".html")


def show(found: Sequence[Figures]) -> None:
    """Print one replay in full, or several as a table with one line each."""
    if len(found) == 1:
        _show_one(found[0])
    else:
        _show_many(found)


def _show_one(figures: Figures) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvstore.config.units import format_bytes

    console = Console()
    console.print(
        f"{figures['requests']:,} requests, {figures['input_tokens']:,} prompt tokens "
        f"({figures['format']}, blocks of {figures['block_tokens']} tokens, "
        f"{format_bytes(figures['bytes_per_token'])} a token)",
        highlight=False,
    )
    table = Table()
    table.add_column("tier")
    for column in ("blocks", "hit rate", "second half", "evictions", "read", "written"):
        table.add_column(column, justify="right")
    for name, tier in figures["tiers"].items():
        table.add_row(
            name,
            _count(tier["capacity_blocks"]),
            f"{tier['token_hit_rate']:.2f}%",
            f"{tier['token_hit_rate_second_half']:.2f}%",
            f"{tier['evictions']:,}",
            format_bytes(tier["bytes_read"]),
            format_bytes(tier["bytes_written"]),
        )
    rates = (figures["token_hit_rate"], figures["token_hit_rate_second_half"])
    table.add_row("all", "", *(f"{rate:.2f}%" for rate in rates), f"{figures['evictions']:,}")
    if "offline_optimal_hit_rate" in figures:
        best = ("offline_optimal_hit_rate", "offline_optimal_hit_rate_second_half")
        table.add_row("offline optimal", "", *(f"{figures[name]:.2f}%" for name in best))
        regret = ("regret", "regret_second_half")
        table.add_row("regret", "", *(f"{figures[name]:.2f}" for name in regret))
    console.print(table)
    for name, what in (("ttft_s", "TTFT"), ("ttft_cold_s", "TTFT without cache")):
        spread = ", ".join(f"{key} {value * 1e3:,.0f}" for key, value in figures[name].items())
        console.print(f"{what}, ms: {spread}", highlight=False)
    saved, spent = figures["gpu_seconds_saved"], figures["gpu_seconds"]
    line = f"GPU seconds of prefill: {spent:,.1f} ({saved:,.1f} saved)"
    if "usd_saved" in figures:
        line += f" (${figures['usd_saved']:,.2f})"
    console.print(line, highlight=False)


def _show_many(found: Sequence[Figures]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    names = ("L2 blocks", "eviction", "write", "load policy")
    figures = (
        "hit rate",
        "second half",
        "regret",
        "TTFT p50, ms",
        "mean",
        "GPU s saved",
        "L3 read",
    )
    for column in names:
        table.add_column(column, justify="right" if column == "L2 blocks" else "left")
    for column in figures:
        table.add_column(column, justify="right")
    for row in found:
        table.add_row(
            _count(row["tiers"].get("l2", {}).get("capacity_blocks", 0)),
            row["eviction"],
            row["write"],
            row["load_policy"],
            f"{row['token_hit_rate']:.2f}%",
            f"{row['token_hit_rate_second_half']:.2f}%",
            f"{row['regret']:.2f}" if "regret" in row else "",
            f"{row['ttft_s']['p50'] * 1e3:,.0f}",
            f"{row['ttft_s']['mean'] * 1e3:,.0f}",
            f"{row['gpu_seconds_saved']:,.1f}",
            _size(row["bytes_read"].get("l3")),
        )
    Console().print(table)


def check_plot_path(path: Path) -> None:
    """Raise ConfigError if the suffix of the file is not one that can be plotted."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(
            f"--plot must be a file that ends in {', '.join(PLOT_SUFFIXES)} (got {str(path)!r})"
        )


def plot(found: Sequence[Figures], path: Path) -> None:
    """Plot hit rate and mean time to first token over the size of L2, one line per policy.

    Raises ConfigError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[Figures]] = {}
    for row in found:
        lines.setdefault(_label(row, found), []).append(row)
    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for label, rows in lines.items():
        rows.sort(key=_l2)
        sizes = [_l2(row) for row in rows]
        rates.plot(sizes, [row["token_hit_rate"] for row in rows], marker="o", label=label)
        times.plot(sizes, [row["ttft_s"]["mean"] * 1e3 for row in rows], marker="o", label=label)
    best = {_l2(row): row["offline_optimal_hit_rate"] for row in found if "regret" in row}
    if best:
        sizes = sorted(best)
        rates.plot(sizes, [best[size] for size in sizes], "k--", label="offline optimal")
    times.axhline(
        found[0]["ttft_cold_s"]["mean"] * 1e3, color="grey", linestyle=":", label="without cache"
    )
    for axes, title in ((rates, "prompt tokens that hit, %"), (times, "mean TTFT, ms")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"blocks of {found[0]['block_tokens']} tokens in L2")
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    try:
        if path.suffix == ".html":
            path.write_text(_page(figure, found))
        else:
            figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _page(figure: Any, found: Sequence[Figures]) -> str:
    """Return one self-contained HTML page with the plot and its figures."""
    import html
    import io

    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    drawing = svg.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    columns = (
        "L2 blocks",
        "eviction",
        "write",
        "load policy",
        "hit rate, %",
        "offline optimal, %",
        "mean TTFT, ms",
    )
    rows = [
        (
            _count(row["tiers"].get("l2", {}).get("capacity_blocks", 0)),
            row["eviction"],
            row["write"],
            row["load_policy"],
            f"{row['token_hit_rate']:.2f}",
            f"{row['offline_optimal_hit_rate']:.2f}" if "regret" in row else "",
            f"{row['ttft_s']['mean'] * 1e3:,.1f}",
        )
        for row in found
    ]
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    title = html.escape(f"{found[0]['trace']}: {found[0]['requests']:,} requests")
    style = "body{font-family:sans-serif}td,th{padding:2px 10px;text-align:right}"
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"<h1>{title}</h1>{drawing}<table><tr>{head}</tr>{body}</table>\n"
    )


def _label(row: Figures, found: Sequence[Figures]) -> str:
    """Return the legend of a row's line: the policies that differ between rows."""
    differ = [
        name for name in ("eviction", "write", "load_policy") if len({r[name] for r in found}) > 1
    ]
    return ", ".join(str(row[name]) for name in differ or ["eviction"])


def _l2(row: Figures) -> float:
    """Return the capacity of L2 in blocks. If L2 never evicts, the blocks that it has."""
    level = row["tiers"].get("l2")
    if level is None:
        return 1.0
    return float(level["capacity_blocks"] or level["blocks"])


def _count(blocks: int | None) -> str:
    return "infinite" if blocks is None else f"{blocks:,}"


def _size(nbytes: int | None) -> str:
    from kvstore.config.units import format_bytes

    return "" if nbytes is None else format_bytes(nbytes)
