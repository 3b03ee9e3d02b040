"""`kvstore simulate`: replays a trace to find its hit rate, and what the hits would save."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.common import trace_options
from kvstore.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="Trace file, or - for stdin: JSONL with hash_ids (Mooncake, Qwen-Bailian), vLLM "
            "KV events (JSON or msgpack), token ids or text, one request per line. The format is "
            "detected."
        ),
    ],
    block_tokens: trace_options.BlockTokens = None,
    l1_blocks: trace_options.L1Blocks = None,
    l1: trace_options.L1Size = None,
    page_tokens: trace_options.PageTokens = None,
    l2_blocks: trace_options.L2Blocks = None,
    l2: trace_options.L2Size = None,
    infinite: trace_options.Infinite = False,
    l3_blocks: trace_options.L3Blocks = None,
    l3: trace_options.L3Size = None,
    bytes_per_token: trace_options.BytesPerToken = trace_options.BYTES_PER_TOKEN,
    eviction: trace_options.Eviction = "lru",
    l3_eviction: trace_options.L3Eviction = None,
    write: trace_options.Write = "write_through",
    selective_hits: trace_options.SelectiveHits = 2,
    load_policy: trace_options.LoadPolicy = "always",
    concurrency: trace_options.Concurrency = 0,
    prefill_rate: trace_options.PrefillRate = trace_options.PREFILL_RATE,
    l2_bandwidth: trace_options.L2Bandwidth = trace_options.L2_BANDWIDTH,
    l3_bandwidth: trace_options.L3Bandwidth = trace_options.L3_BANDWIDTH,
    l3_latency: trace_options.L3Latency = trace_options.L3_LATENCY,
    gpu_hour: trace_options.GpuHour = 0.0,
    tokenizer: trace_options.TokenizerPath = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Sizes of L2 to compare: 1024,4096 (blocks) or 64GiB,1TiB,infinite."),
    ] = None,
    plot_path: Annotated[
        Path | None,
        typer.Option("--plot", help="Write a plot of the comparison: .png, .svg or .html."),
    ] = None,
    offline_optimal: Annotated[
        bool,
        typer.Option(help="Compute the hit rate of the offline-optimal eviction policy (Belady)."),
    ] = True,
    as_json: trace_options.AsJson = False,
) -> None:
    """Replay a trace through the real caches and policies, without KV data, in virtual time.

    Hit rates, regret and offline_optimal_hit_rate are percentages of prompt tokens. A request hits
    its leading blocks up to the first one that is absent. second_half counts only the second half
    of the requests, after the first half has warmed the caches. bytes_read and bytes_written are by
    tier. evictions is the sum of all tiers; "tiers" has each. The offline-optimal policy (Belady)
    knows the future, and has as many blocks as all tiers together.

    Times are in seconds, from a cost model: prefill at the given rate, loads at the given
    bandwidths, no decode. The defaults are those of Llama-3-8B on one fast GPU over PCIe 4.0, with
    an NVMe drive.
    """
    from kvstore.analysis.simulate import options
    from kvstore.analysis.simulate.formats import open_trace
    from kvstore.analysis.simulate.report import check_plot_path, plot, show
    from kvstore.analysis.simulate.run import Shape
    from kvstore.analysis.simulate.sweep import REPLAYS_MAX, Sweep
    from kvstore.analysis.simulate.waits import LOAD_POLICIES
    from kvstore.cache.eviction import EVICTION_POLICIES
    from kvstore.cache.write_policy import WRITE_POLICIES

    if plot_path is not None:
        check_plot_path(plot_path)
    l2_given = [infinite, l2 is not None, l2_blocks is not None, sweep is not None]
    if sum(l2_given) > 1:
        raise ConfigError("give only one of --l2, --l2-blocks, --infinite and --sweep")
    if not any([*l2_given, l1, l1_blocks, l3, l3_blocks]):
        raise ConfigError("no cache to simulate: give --l2-blocks 4096 or --infinite, for example")
    for name, value in {"--bytes-per-token": bytes_per_token, "--page-tokens": page_tokens}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1 (got {value})")
    if not 0 <= concurrency <= options.CONCURRENCY_MAX or not 0 <= gpu_hour < float("inf"):
        raise ConfigError(
            f"--concurrency must be 0 to {options.CONCURRENCY_MAX} (got {concurrency}), and "
            f"--gpu-hour at least 0 (got {gpu_hour})"
        )
    policies = product(
        options.parse_names(eviction, EVICTION_POLICIES, "eviction policy"),
        options.parse_names(write, WRITE_POLICIES, "write policy"),
        options.parse_names(load_policy, LOAD_POLICIES, "load policy"),
    )
    if l3_eviction is not None:
        options.parse_names(l3_eviction, EVICTION_POLICIES, "eviction policy")
    with (
        options.progress_bar() as report,
        open_trace(
            trace,
            block_tokens=block_tokens,
            tokenizer=tokenizer,
            keep_ids=page_tokens is not None,
            progress=lambda read, total: report("replay", read, total),
        ) as opened,
    ):
        if page_tokens is not None and opened.format not in ("token ids", "text"):
            raise ConfigError(
                f"--page-tokens needs a trace with token ids ({opened.name} has none)"
            )
        size = opened.block_tokens
        block_bytes = size * bytes_per_token
        l1_size = options.size_of("--l1", l1_blocks, l1, block_bytes)
        if l1_size is None:
            raise ConfigError("--l1 cannot be infinite: L1 is a pool of pages")
        costs = options.Speeds(prefill_rate, l2_bandwidth, l3_bandwidth, l3_latency).model(
            block_bytes=block_bytes, block_tokens=size
        )
        base = Shape(
            costs,
            bytes_per_token,
            l1_pages=l1_size if page_tokens is None else max(1, l1_size * size // page_tokens),
            page_tokens=page_tokens,
            l3_blocks=options.size_of("--l3", l3_blocks, l3, block_bytes),
            selective_hits=selective_hits,
            concurrency=concurrency,
        )
        sizes = [None if infinite else options.size_of("--l2", l2_blocks, l2, block_bytes)]
        if sweep is not None:
            sizes = [options.blocks_of(each, block_bytes, "--sweep") for each in sweep.split(",")]
        shapes = [
            replace(
                base,
                l2_blocks=blocks,
                eviction=evicts,
                l3_eviction=l3_eviction or evicts,
                write=writes,
                load_policy=waits,
            )
            for (evicts, writes, waits), blocks in product(policies, sizes)
        ]
        if len(shapes) > REPLAYS_MAX:
            raise ConfigError(
                f"too many replays: {len(shapes)}, at most {REPLAYS_MAX} are possible at once"
            )
        found = Sweep(shapes, offline_optimal=offline_optimal).run(opened, report)
    if gpu_hour:
        for figures in found:
            figures["usd_saved"] = figures["gpu_seconds_saved"] * gpu_hour / 3600
    if plot_path is not None:
        plot(found, plot_path)
    if as_json:
        print(json.dumps(found[0] if len(found) == 1 and sweep is None else _swept(found)))
    else:
        show(found)


def _swept(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {"trace": found[0]["trace"], "requests": found[0]["requests"], "sweep": found}
