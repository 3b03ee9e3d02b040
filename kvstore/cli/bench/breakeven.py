"""`kvstore bench breakeven`: the prefix length above which loading beats computing, per tier."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from kvstore.analysis.breakeven.loads import Loads
    from kvstore.blocks.key import Namespace
    from kvstore.config.settings import TierSettings
    from kvstore.prefetch.costs import CostModel, PrefillCurve

SHOWN: Final = tuple(1024 << power for power in range(8))
"""Lengths for which the saved time is reported: 1k to 128k tokens."""
L2: Final = "l2"


def register(app: typer.Typer) -> None:
    app.command("breakeven")(breakeven)


def breakeven(
    model: Annotated[
        str,
        typer.Option(
            help="Model to prefill: auto, smollm2, random, a Hugging Face folder or a .gguf file."
        ),
    ] = "auto",
    prefill_rate: Annotated[
        str | None,
        typer.Option(
            help="Prefill speed in tokens per second, or a file with measured times. Default: "
            "measured with --model."
        ),
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="config.json of the model to evaluate the tiers for.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths to prefill, in tokens.")
    ] = "128,256,512,1024,2048",
    load_lengths: Annotated[
        str,
        typer.Option(
            help="Prefix lengths to load, in tokens. Lengths that do not fit in --l2 are left out."
        ),
    ] = "256,512,1024,2048,4096,8192",
    block_tokens: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file with the [[tiers]] to measure.")
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(help="Existing directory in which to create a disk tier, without --config."),
    ] = None,
    redis: Annotated[str | None, typer.Option(help="URL of a Redis to measure.")] = None,
    tiers: Annotated[
        str | None, typer.Option(help="Names of the tiers to measure. Default: all.")
    ] = None,
    l2: Annotated[str, typer.Option(help="Size of L2 while measuring, such as 1GiB.")] = "1GiB",
    repeats: Annotated[
        int, typer.Option(help="Number of times to repeat each measurement. The fastest counts.")
    ] = 3,
    threads: Annotated[
        int | None, typer.Option(help="Number of torch's CPU threads. Default: half of the cores.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Write a plot to this file, such as out.png.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write a self-contained HTML page to this file.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object. --prefill-rate can read it."),
    ] = False,
) -> None:
    """Measure the break-even length of each tier, and the time saved for 1k to 128k tokens."""
    from kvstore.config.units import parse_bytes
    from kvstore.prefetch.costs import CostModel

    prompts, runs = _numbers("--lengths", lengths), _numbers("--load-lengths", load_lengths)
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1 (got {repeats})")
    if disk is not None and not disk.is_dir():
        raise ConfigError(f"--disk: {str(disk)!r} is not an existing directory")
    if plot_path is not None or page is not None:
        import matplotlib  # noqa: F401 - fail before the measurement, not after it
    with tempfile.TemporaryDirectory(prefix="kvstore-breakeven-", dir=disk) as folder:
        below = _tiers(config, redis, folder, tiers, parse_bytes(l2))
        curve, namespace, name, source = _prefill(
            model, prefill_rate, model_config, prompts, block_tokens, repeats, threads
        )
        loads = _loads(namespace, runs, below, tiers, parse_bytes(l2), repeats)
    costs = CostModel(
        curve, tuple(each.speed() for each in loads), namespace.block_bytes, namespace.block_tokens
    )
    report = _report(costs, namespace, loads, name, source)
    _write(report, costs, plot_path, page)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} must be numbers of tokens, such as 256,1024 (got {text!r})")
    return [int(word) for word in words]


def _tiers(
    config: Path | None, redis: str | None, folder: str, chosen: str | None, memory: int
) -> list[TierSettings]:
    """Return the tiers to measure below L2: those of the configuration, or a new disk tier."""
    from kvstore.config.settings import Settings
    from kvstore.store.assembly import check_settings, disk_table

    tables: list[dict[str, Any]] = []
    if config is None:
        tables.append(disk_table(folder, max(1 << 30, 4 * memory), "auto"))
    if redis is not None:
        tables.append({"kind": "redis", "url": redis})
    settings = Settings.load(config, {"tiers": tables} if tables else {})
    check_settings(settings)
    found = {tier.label: tier for tier in settings.tiers}
    if chosen is None:
        return list(found.values())
    names = [name.strip() for name in chosen.split(",")]
    for name in names:
        if name not in (L2, *found):
            raise ConfigError(f"--tiers: no tier {name!r}; use one of {', '.join((L2, *found))}")
    return [found[name] for name in names if name != L2]


def _prefill(
    model: str,
    rate: str | None,
    config: Path | None,
    lengths: Sequence[int],
    block_tokens: int,
    repeats: int,
    threads: int | None,
) -> tuple[PrefillCurve, Namespace, str, str]:
    """Return (prefill curve, namespace of the blocks, model name, source of the curve)."""
    from kvstore.analysis.breakeven import prefill
    from kvstore.blocks.model_geometry import namespace_from_hf
    from kvstore.cli.plan import read_config
    from kvstore.prefetch.costs import PrefillCurve

    given = None if rate is None else PrefillCurve.read(rate)
    namespace, name = None, ""
    if config is not None:
        name = config.stem if config.is_dir() or config.stem != "config" else config.parent.name
        namespace = namespace_from_hf(
            read_config(config), model=str(config), block_tokens=block_tokens
        )
    if given is not None and namespace is not None:
        return given, namespace, name, f"given: {rate}"
    loaded = prefill.load(model)
    if given is not None:
        return given, loaded.namespace(block_tokens), loaded.name, f"given: {rate}"
    with _bar("prefill", len(set(lengths))) as step:
        points = prefill.measure(
            loaded,
            lengths,
            repeats=repeats,
            page_tokens=block_tokens,
            threads=threads or max(1, (os.cpu_count() or 1) // 2),
            on_done=step,
        )
    own = namespace or loaded.namespace(block_tokens)
    return PrefillCurve(tuple(points)), own, name or loaded.name, f"measured with {loaded.name}"


def _loads(
    namespace: Namespace,
    lengths: Sequence[int],
    below: Sequence[TierSettings],
    chosen: str | None,
    memory: int,
    repeats: int,
) -> list[Loads]:
    from kvstore.analysis.breakeven.loads import block_lengths, measure
    from kvstore.store.assembly import open_tier

    runs = block_lengths(lengths, namespace, memory)
    found = []
    if chosen is None or L2 in [name.strip() for name in chosen.split(",")]:
        with _bar(L2, len(runs)) as step:
            found.append(measure(namespace, runs, None, repeats=repeats, on_done=step))
    for tier in below:
        with _bar(tier.label, len(runs)) as step:
            found.append(
                measure(
                    namespace,
                    runs,
                    lambda tier=tier: open_tier(tier),  # type: ignore[misc]
                    codec=tier.codec,
                    repeats=repeats,
                    on_done=step,
                )
            )
    return found


class _bar:
    """A progress bar on stderr. Entering it returns a function that advances it."""

    def __init__(self, what: str, steps: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._progress = Progress(console=console, disable=not console.is_terminal)
        self._what, self._steps = what, steps

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        task = self._progress.add_task(self._what, total=self._steps)
        return lambda: self._progress.advance(task)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _report(
    costs: CostModel, namespace: Namespace, loads: Sequence[Loads], name: str, source: str
) -> dict[str, Any]:
    from kvstore.prefetch.costs import bandwidth_to_pay

    longest = max(tokens for tokens, _ in costs.prefill.points)
    per_s = longest / costs.compute_s(0, longest)
    computed = {str(n): round(1e3 * costs.compute_s(0, n), 3) for n in SHOWN}
    rows = []
    for load, speed in zip(loads, costs.tiers, strict=True):
        runs = {n: n // costs.block_tokens for n in SHOWN}
        loading = {n: costs.load_s(speed.name, blocks) for n, blocks in runs.items()}
        both = {n: costs.split([speed.name] * blocks).seconds for n, blocks in runs.items()}
        rows.append(
            {
                "name": speed.name,
                "bytes_per_s": round(speed.bytes_per_s),
                "match_ms": round(1e3 * speed.match_s, 3),
                "points": [
                    {"tokens": blocks * costs.block_tokens, "seconds": round(seconds, 6)}
                    for blocks, seconds in load.points
                ],
                "break_even_tokens": costs.break_even_tokens(speed.name),
                "ttft_saved_ms": _saved_ms(costs, loading),
                "ttft_saved_both_ends_ms": _saved_ms(costs, both),
            }
        )
    return {
        "model": name,
        "bytes_per_token": namespace.bytes_per_token,
        "block_tokens": namespace.block_tokens,
        "dtype": namespace.dtype,
        "prefill_source": source,
        "prefill_measured": source.startswith("measured"),
        "prefill_tokens_per_s": round(per_s, 1),
        "needed_bytes_per_s": round(bandwidth_to_pay(namespace.bytes_per_token, per_s)),
        "points": [{"tokens": n, "seconds": round(s, 6)} for n, s in costs.prefill.points],
        "measured_tokens": max(b for load in loads for b, _ in load.points) * costs.block_tokens,
        "ttft_computed_ms": computed,
        "tiers": rows,
    }


def _saved_ms(costs: CostModel, seconds: dict[int, float]) -> dict[str, float]:
    """Return the time saved compared with computing, by prefix length."""
    return {
        str(n): round(1e3 * (costs.compute_s(0, n) - took_s), 3) for n, took_s in seconds.items()
    }


def _write(
    report: dict[str, Any], costs: CostModel, plot_path: Path | None, page_path: Path | None
) -> None:
    if plot_path is not None:
        from kvstore.analysis.breakeven.plot import plot

        plot(report, costs, plot_path)
    if page_path is not None:
        from kvstore.analysis.breakeven.plot import page

        page(report, costs, page_path)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{report['model']}: {report['bytes_per_token']:,} bytes of KV per token, prefill "
        f"{report['prefill_tokens_per_s']:,.0f} tokens/s ({report['prefill_source']}). A tier pays "
        f"for long prefixes if it reads faster than "
        f"{report['needed_bytes_per_s'] / 1e9:,.2f} GB/s.",
        markup=False,
    )
    tiers = Table()
    for name in ("tier", "GB/s", "latency, ms", "break-even, tokens"):
        tiers.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    for tier in report["tiers"]:
        even = tier["break_even_tokens"]
        rate, first = f"{tier['bytes_per_s'] / 1e9:,.2f}", f"{tier['match_ms']:,.1f}"
        tiers.add_row(tier["name"], rate, first, "never" if even is None else f"{even:,}")
    console.print(tiers)
    console.print(_saved(report, "TTFT saved by loading, ms", "ttft_saved_ms"))
    both = "TTFT saved by loading and computing in parallel, ms"
    console.print(_saved(report, both, "ttft_saved_both_ends_ms"))
    prefill = max(point["tokens"] for point in report["points"])
    prefills = f", prefill up to {prefill:,}" if report["prefill_measured"] else ""
    console.print(
        f"Loads were measured up to {report['measured_tokens']:,} tokens{prefills}. Figures beyond "
        "that are extrapolated.",
        markup=False,
    )


def _saved(report: dict[str, Any], title: str, key: str) -> Table:
    """Return a table of milliseconds saved, one row per length."""
    from rich.table import Table

    table = Table(title=title)
    for name in ("prefix", "computed", *(tier["name"] for tier in report["tiers"])):
        table.add_column(name, justify="right", no_wrap=True)
    for length, computed in report["ttft_computed_ms"].items():
        cells = [f"{tier[key][length]:,.0f}" for tier in report["tiers"]]
        table.add_row(f"{int(length) // 1024}k", f"{computed:,.0f}", *cells)
    return table
