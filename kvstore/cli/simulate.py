"""`kvstore simulate`: what a trace would have hit, and what that would have saved."""

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
            help="A trace, - for stdin; told by its content: Mooncake's or Qwen-Bailian's JSONL "
            "(hash_ids), vLLM KV events (JSON or msgpack), token ids or text, one request a line."
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
    prefetch: trace_options.Prefetch = "always",
    engines: trace_options.Engines = 0,
    prefill_rate: trace_options.PrefillRate = trace_options.PREFILL_RATE,
    l2_speed: trace_options.L2Speed = trace_options.L2_SPEED,
    l3_speed: trace_options.L3Speed = trace_options.L3_SPEED,
    l3_latency: trace_options.L3Latency = trace_options.L3_LATENCY,
    gpu_hour: trace_options.GpuHour = 0.0,
    tokenizer: trace_options.TokenizerPath = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Sizes of L2 to compare: 1024,4096 (blocks) or 64GiB,1TiB,infinite."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the comparison: a file .png, .svg or .html.")
    ] = None,
    optimum: Annotated[
        bool, typer.Option(help="Find what the best order of eviction would have hit as well.")
    ] = True,
    as_json: trace_options.AsJson = False,
) -> None:
    """Replay a trace through the real caches and policies, without KV, in virtual time.

    Hit rates, regret and offline_optimal_hit_rate are percent of prompt tokens. A request hits its
    longest run of leading blocks that are held. second_half counts the requests from the middle on,
    the caches warmed by the first half. bytes_read and bytes_written are by tier, evictions are of
    all tiers together; "tiers" has them each. The optimum knows the future, and has as many blocks
    as all tiers together.

    Times, in seconds, are those of the cost model: prefill at the given rate, loads at the given
    speeds, decode not counted. The figures that stand there by default are those of Llama-3-8B on
    one fast GPU over PCIe 4.0 and an NVMe drive.
    """
    from kvstore.analysis.simulate import options
    from kvstore.analysis.simulate.formats import open_trace
    from kvstore.analysis.simulate.report import check_picture, draw, show
    from kvstore.analysis.simulate.run import Shape
    from kvstore.analysis.simulate.sweep import REPLAYS_MAX, Sweep
    from kvstore.analysis.simulate.waits import LOADING
    from kvstore.cache.eviction import EVICTION_POLICIES
    from kvstore.cache.write_policy import WRITE_POLICIES

    if picture is not None:
        check_picture(picture)
    l2_given = [infinite, l2 is not None, l2_blocks is not None, sweep is not None]
    if sum(l2_given) > 1:
        raise ConfigError("--l2, --l2-blocks, --infinite and --sweep are sizes of L2; give one")
    if not any([*l2_given, l1, l1_blocks, l3, l3_blocks]):
        raise ConfigError("no cache to replay; give L2 a size (--l2-blocks 4096) or --infinite")
    for name, value in {"--bytes-per-token": bytes_per_token, "--page-tokens": page_tokens}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if not 0 <= engines <= options.ENGINES_MAX or not 0 <= gpu_hour < float("inf"):
        raise ConfigError(
            f"--engines from 0 to {options.ENGINES_MAX} and --gpu-hour from 0 on are right"
        )
    policies = product(
        options.names(eviction, EVICTION_POLICIES, "eviction policy"),
        options.names(write, WRITE_POLICIES, "write policy"),
        options.names(prefetch, LOADING, "prefetch policy"),
    )
    if l3_eviction is not None:
        options.names(l3_eviction, EVICTION_POLICIES, "eviction policy")
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
            raise ConfigError(f"{opened.name} has no token ids, which --page-tokens is for")
        size = opened.block_tokens
        block_bytes = size * bytes_per_token
        l1_size = options.size_of("--l1", l1_blocks, l1, block_bytes)
        if l1_size is None:
            raise ConfigError("L1 is a pool of pages, which has an end; give --l1 a size")
        costs = options.Speeds(prefill_rate, l2_speed, l3_speed, l3_latency).model(
            block_bytes=block_bytes, block_tokens=size
        )
        base = Shape(
            costs,
            bytes_per_token,
            l1_pages=l1_size if page_tokens is None else max(1, l1_size * size // page_tokens),
            page_tokens=page_tokens,
            l3_blocks=options.size_of("--l3", l3_blocks, l3, block_bytes),
            selective_hits=selective_hits,
            engines=engines,
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
                prefetch=waits,
            )
            for (evicts, writes, waits), blocks in product(policies, sizes)
        ]
        if len(shapes) > REPLAYS_MAX:
            raise ConfigError(f"{len(shapes)} replays at once; {REPLAYS_MAX} are the most")
        found = Sweep(shapes, optimum=optimum).run(opened, report)
    if gpu_hour:
        for figures in found:
            figures["usd_saved"] = figures["gpu_seconds_saved"] * gpu_hour / 3600
    if picture is not None:
        draw(found, picture)
    if as_json:
        print(json.dumps(found[0] if len(found) == 1 and sweep is None else _swept(found)))
    else:
        show(found)


def _swept(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {"trace": found[0]["trace"], "requests": found[0]["requests"], "sweep": found}
