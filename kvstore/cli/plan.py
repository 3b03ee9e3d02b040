"""`kvstore plan`: the size of a model's KV, how much fits into the tiers, and what that saves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.common import trace_options
from kvstore.errors import ConfigError
from kvstore.tiers.base import IO_ALIGNMENT

if TYPE_CHECKING:
    from kvstore.analysis.planning.spans import Spans
    from kvstore.blocks.key import Namespace

PREFIXES = {"2k": 2_048, "8k": 8_192, "32k": 32_768}
"""Prompt lengths, in tokens, for which the plan counts prefixes."""
BLOCK_TOKENS = 16
MAX_CONFIG_BYTES = 1 << 24


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    config: Annotated[
        Path, typer.Argument(help="config.json of the model, or the folder that has it.")
    ],
    l2: Annotated[str, typer.Option(help="Size of L2, such as 200GiB.")] = "0",
    l3: Annotated[str, typer.Option(help="Size of the tier below L2 (disk), such as 2TiB.")] = "0",
    block_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per block. Default: 16, or as in the trace.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the KV cache. Default: the model's.")
    ] = None,
    tp_size: Annotated[
        int, typer.Option(help="Number of tensor-parallel ranks. Bytes are those of one rank.")
    ] = 1,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Memory of one GPU, such as 80GiB. Prints the KV-cache budget."),
    ] = None,
    gpu_utilisation: Annotated[
        float, typer.Option(help="Fraction of the GPU memory that the engine uses.")
    ] = 0.9,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Size of the whole model's weights, such as 16GB. Default: from config.json."
        ),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(help="Maximum tokens per step, for the size of activations.")
    ] = 8192,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Concurrent requests per engine at the peak. Default: from the traffic."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens per request at the peak. Default: from the traffic, or else 8192."
        ),
    ] = None,
    engines: Annotated[
        int, typer.Option(help="Number of engines that share the traffic and the tiers.")
    ] = 1,
    decode_rate: Annotated[
        float,
        typer.Option(help="Decode speed of one request in tokens per second, for its duration."),
    ] = 30.0,
    trace: Annotated[
        str | None,
        typer.Option(help="Trace of requests, in a format that kvstore simulate reads."),
    ] = None,
    traffic: Annotated[
        str | None,
        typer.Option(
            help="Synthetic traffic: rate=2,prefix=1000,prefixes=10,turns=4,turn=200,output=250,"
            "gap=30s (requests per second; tokens and number of shared first prompts; turns per "
            "conversation; tokens per turn and per answer; time between turns)."
        ),
    ] = None,
    prefill_rate: trace_options.PrefillRate = trace_options.PREFILL_RATE,
    l2_bandwidth: trace_options.L2Bandwidth = trace_options.L2_BANDWIDTH,
    l3_bandwidth: trace_options.L3Bandwidth = trace_options.L3_BANDWIDTH,
    l3_latency: trace_options.L3Latency = trace_options.L3_LATENCY,
    gpu_hour: trace_options.GpuHour = 0.0,
    l2_gb_month: Annotated[
        float, typer.Option(help="Price of 1 GB of L2 (RAM) per month, in dollars.")
    ] = 0.0,
    l3_gb_month: Annotated[
        float, typer.Option(help="Price of 1 GB of the tier below L2 (disk) per month, in dollars.")
    ] = 0.0,
    tokenizer: trace_options.TokenizerPath = None,
    as_json: trace_options.AsJson = False,
) -> None:
    """Print bytes per token, what fits into the tiers and, with traffic, what the tiers save.

    The model has two terms: prefill, which hits shorten, and decode, which no cache changes. So
    only prefill is saved, and time to first token, less the time to load.

    With --gpu-memory, prints the KV that fits beside weights and activations at the peak. With
    --trace or --traffic, prints working set, hit rate by size of L2, times, saved GPU time and
    money, and the best policies. It replays the first requests as kvstore simulate does: up to
    20,000 requests and 100,000 blocks. Synthetic requests have blocks of 128 tokens.
    """
    from kvstore.analysis.planning.report import forecast, gpu_budget, requests_of
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
    sizes = {"l2": parse_bytes(l2), "l3": parse_bytes(l3)}
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
        raise ConfigError("give --trace or --traffic, not both")
    figures = (decode_rate, gpu_hour, l2_gb_month, l3_gb_month)
    if not 1 <= engines <= options.CONCURRENCY_MAX or not decode_rate > 0:
        raise ConfigError(
            f"--engines must be 1 to {options.CONCURRENCY_MAX} (got {engines}), and --decode-rate "
            f"above 0 (got {decode_rate})"
        )
    if not all(0 <= figure < math.inf for figure in figures):
        raise ConfigError(
            "--decode-rate, --gpu-hour, --l2-gb-month and --l3-gb-month must be finite numbers of "
            "at least 0"
        )
    if not 0 < gpu_utilisation <= 1:
        raise ConfigError(
            f"--gpu-utilisation must be above 0 and at most 1 (got {gpu_utilisation})"
        )
    costs = options.Speeds(prefill_rate, l2_bandwidth, l3_bandwidth, l3_latency)
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
            report |= forecast(
                requests,
                namespace,
                spans,
                costs,
                sizes=sizes,
                left_bytes=report.get("budget", {}).get("left_bytes", 0),
                engines=engines,
                gpu_hour=gpu_hour,
                gb_month={"l2": l2_gb_month, "l3": l3_gb_month},
                report=progress,
            )
    if as_json:
        print(json.dumps(report))
    else:
        from kvstore.analysis.planning.tables import show

        show(report)


def tier_row(namespace: Namespace, spans: Spans, tier: str, size_bytes: int) -> dict[str, Any]:
    """Return what fits into one tier, in whole blocks: slots in L2, frames with a header in L3.

    Frames are counted without compression, because its ratio depends on the text. For layers with a
    sliding window, a prefix takes only its last window.
    """
    nbytes = spans.bytes_per_token * namespace.block_tokens
    header = IO_ALIGNMENT if tier == "l3" else 0
    block = -(-nbytes // IO_ALIGNMENT) * IO_ALIGNMENT + header
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
    """Read config.json at `path` or in the folder `path`. Raises ConfigError if it cannot."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{str(file)!r} is larger than {MAX_CONFIG_BYTES} bytes; give a model's config.json"
            )
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(file)!r} is not a JSON object; give a model's config.json")
    return config
