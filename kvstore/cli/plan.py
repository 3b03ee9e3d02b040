"""`kvstore plan`: what a model's KV takes, what a node's tiers hold of it, and what that saves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.common import trace_options
from kvstore.errors import ConfigError
from kvstore.tiers.base import PAGE_BYTES

if TYPE_CHECKING:
    from kvstore.analysis.planning.spans import Spans
    from kvstore.blocks.key import Namespace

PREFIXES = {"2k": 2_048, "8k": 8_192, "32k": 32_768}
"""Prompt lengths, in tokens, that the plan counts."""
BLOCK_TOKENS = 16
MAX_CONFIG_BYTES = 1 << 24


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    config: Annotated[Path, typer.Argument(help="A model's config.json, or the folder it is in.")],
    ram: Annotated[str, typer.Option(help="Size of L2, such as 200GiB.")] = "0",
    disk: Annotated[str, typer.Option(help="Size of the disk tier, such as 2TiB.")] = "0",
    block_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a block; 16, or those of the trace's blocks.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="The KV cache's dtype where it is not the model's.")
    ] = None,
    tp_size: Annotated[
        int, typer.Option(help="Tensor-parallel ranks; bytes are those of one.")
    ] = 1,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Of one GPU, such as 80GiB: says what its KV budget is.")
    ] = None,
    gpu_utilisation: Annotated[float, typer.Option(help="Part of it that the engine takes.")] = 0.9,
    weights: Annotated[
        str | None, typer.Option(help="Bytes of the whole model's weights; else counted.")
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens of a step, for what activations take.")
    ] = 8192,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Requests running at the peak, on one engine; else by the traffic."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of each of them; else by the traffic, or 8,192.")
    ] = None,
    engines: Annotated[int, typer.Option(help="Engines that share the traffic and the tiers.")] = 1,
    decode_rate: Annotated[
        float, typer.Option(help="Tokens a second of one request, for how long it runs.")
    ] = 30.0,
    trace: Annotated[
        str | None, typer.Option(help="Requests, in a format that kvstore simulate takes.")
    ] = None,
    traffic: Annotated[
        str | None,
        typer.Option(
            help="Requests to make up: rate=2,prefix=1000,prefixes=10,turns=4,turn=200,output=250,"
            "gap=30s (requests a second; tokens and number of shared first prompts; turns of a "
            "conversation, tokens of each and of its answer; time between)."
        ),
    ] = None,
    prefill_rate: trace_options.PrefillRate = trace_options.PREFILL_RATE,
    l2_speed: trace_options.L2Speed = trace_options.L2_SPEED,
    l3_speed: trace_options.L3Speed = trace_options.L3_SPEED,
    l3_latency: trace_options.L3Latency = trace_options.L3_LATENCY,
    gpu_hour: trace_options.GpuHour = 0.0,
    ram_gb_month: Annotated[
        float, typer.Option(help="Price of 1 GB of RAM for a month, in dollars.")
    ] = 0.0,
    disk_gb_month: Annotated[
        float, typer.Option(help="Price of 1 GB of disk for a month, in dollars.")
    ] = 0.0,
    tokenizer: trace_options.TokenizerPath = None,
    as_json: trace_options.AsJson = False,
) -> None:
    """Print bytes per token, what the tiers hold, and with traffic what that would save.

    The model has two terms: prefill, of which hits spare a part, and decode, which no cache
    changes. So what is saved is prefill, and time to first token less what loading takes. With
    --gpu-memory: the KV that fits beside weights and activations when most requests run. With
    --trace or --traffic: working set, hit rate by the size of L2, times, GPU time and money saved,
    and which policies suit, from replaying the first requests as kvstore simulate does: up to
    20,000 of them and 100,000 blocks, made up ones in blocks of 128 tokens.
    """
    from kvstore.analysis.planning.report import gpu_budget, outlook, requests_of
    from kvstore.analysis.planning.spans import attention_kind, spans_of
    from kvstore.analysis.simulate import options
    from kvstore.blocks.model_geometry import namespace_from_hf
    from kvstore.config.units import parse_bytes

    parsed = read_config(config)
    namespace = namespace_from_hf(
        parsed,
        model=str(config),
        dtype=dtype,
        block_tokens=block_tokens or BLOCK_TOKENS if block_tokens != 0 else 0,
        tp_size=tp_size,
    )
    spans = spans_of(parsed, namespace)
    sizes = {"ram": parse_bytes(ram), "disk": parse_bytes(disk)}
    report: dict[str, Any] = {
        "dtype": namespace.dtype,
        "attention": attention_kind(parsed, namespace),
        "bytes_per_token": spans.bytes_per_token,
        "block_tokens": namespace.block_tokens,
        "block_bytes": spans.bytes_per_token * namespace.block_tokens,
        "window": {
            "layers": spans.window_layers,
            "tokens": spans.window_tokens,
            "bytes": spans.window_bytes if spans.full_layers else 0,
        },
        "rows": [tier_row(namespace, spans, tier, size) for tier, size in sizes.items() if size],
    }
    if trace is not None and traffic is not None:
        raise ConfigError("--trace and --traffic are two descriptions of one traffic; give one")
    figures = (decode_rate, gpu_hour, ram_gb_month, disk_gb_month)
    if not 1 <= engines <= options.ENGINES_MAX or not decode_rate > 0:
        raise ConfigError(
            f"--engines from 1 to {options.ENGINES_MAX} and --decode-rate above 0 are right"
        )
    if not all(0 <= figure < math.inf for figure in figures):
        raise ConfigError(
            "--decode-rate, --gpu-hour, --ram-gb-month and --disk-gb-month are numbers from 0 on"
        )
    if not 0 < gpu_utilisation <= 1:
        raise ConfigError(f"--gpu-utilisation is {gpu_utilisation}; above 0 and up to 1 is right")
    costs = options.Speeds(prefill_rate, l2_speed, l3_speed, l3_latency)
    with options.progress_bar() as progress:
        requests = requests_of(trace, traffic, block_tokens, tokenizer, progress)
        if gpu_memory is not None:
            report["budget"] = gpu_budget(
                parsed,
                namespace,
                spans,
                requests,
                costs,
                gpu_bytes=parse_bytes(gpu_memory),
                utilisation=gpu_utilisation,
                weights=None if weights is None else parse_bytes(weights),
                batch_tokens=batch_tokens,
                concurrency=concurrency,
                context=context,
                engines=engines,
                decode_rate=decode_rate,
            )
        if requests is not None:
            report |= outlook(
                requests,
                namespace,
                spans,
                costs,
                sizes=sizes,
                left_bytes=report.get("budget", {}).get("left_bytes", 0),
                engines=engines,
                gpu_hour=gpu_hour,
                gb_month={"ram": ram_gb_month, "disk": disk_gb_month},
                report=progress,
            )
    if as_json:
        print(json.dumps(report))
    else:
        from kvstore.analysis.planning.tables import show

        show(report)


def tier_row(namespace: Namespace, spans: Spans, tier: str, size_bytes: int) -> dict[str, Any]:
    """What fits in one tier, in whole blocks: slots in ram, frames with a header page on disk.

    Frames are counted as if no codec shrank them: how far it does depends on the text. A prefix
    takes the last window of the layers that have one besides.
    """
    nbytes = spans.bytes_per_token * namespace.block_tokens
    header = PAGE_BYTES if tier == "disk" else 0
    block = -(-nbytes // PAGE_BYTES) * PAGE_BYTES + header
    blocks = size_bytes // block
    row: dict[str, Any] = {
        "tier": tier,
        "bytes": size_bytes,
        "blocks": blocks,
        "tokens": blocks * namespace.block_tokens,
    }
    for label, tokens in PREFIXES.items():
        prefix = -(-tokens // namespace.block_tokens)
        if spans.window_layers:
            row[f"prefixes_{label}"] = size_bytes // (spans.bytes_at(tokens) + prefix * header)
        else:
            row[f"prefixes_{label}"] = blocks // prefix
    return row


def read_config(path: Path) -> dict[str, Any]:
    """The parsed config.json at `path` or in the folder `path`; ConfigError if there is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{str(file)!r} is larger than any config.json")
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(file)!r} holds no JSON object; is this a model's config.json?")
    return config
