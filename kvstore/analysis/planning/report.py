"""The sections of `kvstore plan`'s report that need traffic or the memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.analysis.planning.forecast import (
    REQUESTS_MAX,
    Traffic,
    by_size,
    first_of,
    net_of_tiers,
    working_set,
    worth,
)
from kvstore.analysis.planning.spans import Spans
from kvstore.analysis.simulate.options import Speeds
from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError
from kvstore.prefetch.costs import PrefillCurve

Report = Callable[[str, int, int | None], None]
Figures = dict[str, Any]

CONTEXT_TOKENS: Final = 8192
"""Tokens of a request at the peak, by default."""
SYNTHETIC_BLOCK_TOKENS: Final = 128
"""Tokens per block in the replay of synthetic requests. Shorter blocks hit up to half the
difference in length more tokens per request, and take proportionally longer to replay."""
DEFAULT_L2_BYTES: Final = 64 << 30
"""Size of L2 around which hit rates are shown, by default."""


def requests_of(
    trace: str | None,
    traffic: str | None,
    block_tokens: int | None,
    tokenizer: Path | None,
    report: Report,
) -> Traffic | None:
    """Return the traffic to plan for. None: neither a trace nor a description is given.

    Raises ConfigError: the trace or the description is invalid.
    """
    if trace is not None:
        from kvstore.analysis.simulate.formats import open_trace

        with open_trace(
            trace,
            block_tokens=block_tokens,
            tokenizer=tokenizer,
            progress=lambda read, total: report("trace", read, total),
        ) as opened:
            first = first_of(opened.requests)
            return Traffic(opened.name, opened.format, opened.block_tokens, first)
    if traffic is not None:
        from kvstore.analysis.simulate import traffic as synthetic

        size = block_tokens or SYNTHETIC_BLOCK_TOKENS
        described = synthetic.Traffic.parse(traffic)
        first = first_of(synthetic.generate(described, REQUESTS_MAX, size))
        return Traffic(traffic, "synthetic", size, first)
    return None


def gpu_budget(
    config: Mapping[str, Any],
    namespace: Namespace,
    spans: Spans,
    requests: Traffic | None,
    speeds: Speeds,
    *,
    gpu_bytes: int,
    utilisation: float,
    weights: int | None,
    batch_tokens: int,
    concurrency: int | None,
    context: int | None,
    engines: int,
    decode_rate: float,
) -> Figures:
    """Return the memory of one GPU that is left for cached prefixes at the peak (see `budget`).

    concurrency: None means the maximum number of requests that run at once, divided by the engines.
    Each request runs for its prefill without hits plus its answer at `decode_rate`, and none waits.
    context: None means the 90th percentile of the requests' tokens.
    """
    from kvstore.analysis.planning.budget import budget, most_at_once
    from kvstore.analysis.planning.weights import activation_bytes, weight_bytes

    if any(given is not None and given < 1 for given in (batch_tokens, concurrency, context)):
        raise ConfigError("--batch-tokens, --concurrency and --context must be at least 1")
    if requests is not None:
        prefill = PrefillCurve.read(speeds.prefill_rate)
        lasts = [
            prefill.cold_s(each.tokens) + each.output_tokens / decode_rate for each in requests.all
        ]
        peak = -(-most_at_once([each.time_s for each in requests.all], lasts) // engines)
        lengths = sorted(each.tokens + each.output_tokens for each in requests.all)
        longest = lengths[min(len(lengths) - 1, len(lengths) * 9 // 10)]
    else:
        peak, longest = 1, CONTEXT_TOKENS
    found = budget(
        gpu_bytes,
        (weight_bytes(config, namespace) if weights is None else weights) // namespace.tp_size,
        activation_bytes(config, batch_tokens) // namespace.tp_size,
        spans,
        peak_requests=concurrency or peak,
        peak_context=context or longest,
        utilisation=utilisation,
    )
    return {
        "gpu_bytes": found.gpu_bytes,
        "weight_bytes": found.weight_bytes,
        "activation_bytes": found.activation_bytes,
        "kv_bytes": found.pool_bytes,
        "peak_requests": found.peak_requests,
        "peak_context": found.peak_context,
        "peak_kv_bytes": found.peak_bytes,
        "left_bytes": found.left_bytes,
        "left_tokens": found.left_bytes // spans.bytes_per_token,
        "requests_max": found.requests_max,
    }


def forecast(
    requests: Traffic,
    namespace: Namespace,
    spans: Spans,
    speeds: Speeds,
    *,
    sizes: Mapping[str, int],
    left_bytes: int,
    engines: int,
    gpu_hour: float,
    gb_month: Mapping[str, float],
    report: Report,
) -> Figures:
    """Return working set, hit rate by size of L2, savings and cost of the tiers, and policies.

    gb_month: dollars per 1e9 bytes of each tier and month.
    """
    from kvstore.analysis.planning.choose import choose
    from kvstore.analysis.simulate.run import Shape

    ranks, size = namespace.tp_size, requests.block_tokens
    mean = max(1, requests.input_tokens // len(requests.all))
    # Bytes of all ranks. Layers with a window count as in a prompt of mean length.
    per_token = max(1, ranks * spans.bytes_at(mean) // mean)
    block_bytes = size * per_token
    l2, l3 = (sizes[tier] // block_bytes for tier in ("l2", "l3"))
    around = l2 or max(1, DEFAULT_L2_BYTES // block_bytes)
    shape = Shape(
        speeds.model(block_bytes=block_bytes, block_tokens=size),
        per_token,
        l1_pages=left_bytes * ranks // block_bytes * engines,
        l2_blocks=l2,
        l3_blocks=l3,
    )
    steps = {0, *(max(1, int(around * part)) for part in (0.25, 0.5, 1, 2, 4))}
    ordered: list[int | None] = [*sorted(steps), None]
    rows = by_size(requests, shape, ordered, report)
    by_blocks = {row["tiers"].get("l2", {}).get("capacity_blocks", 0): row for row in rows}
    found: Figures = {
        "traffic": {
            "source": requests.name,
            "format": requests.format,
            "requests": len(requests.all),
            "seconds": requests.seconds,
            "input_tokens": requests.input_tokens,
            "output_tokens": requests.output_tokens,
            "block_tokens": size,
            "bytes_per_token": per_token,
        },
        "working_set": working_set(requests, per_token),
        "by_size": [_row(row, block_bytes, requests, ranks, gpu_hour) for row in rows],
    }
    chosen = l2 if l2 in by_blocks and (l2 or l3 or shape.l1_pages) else around
    figures = by_blocks[chosen]
    policies = choose(requests, _with_l2(shape, chosen), report)
    saving = worth(figures, requests, gpus=ranks, gpu_hour=gpu_hour)
    kept_bytes = {"l2": chosen * block_bytes, "l3": sizes["l3"]}
    month = sum(kept_bytes[tier] / 1e9 * price for tier, price in gb_month.items())
    saving |= net_of_tiers(saving, requests, month)
    saving["prefill_load"] /= engines
    saving["prefill_load_with_cache"] /= engines
    tiers = {name: tier["token_hit_rate"] for name, tier in figures["tiers"].items()}
    return found | {
        "expected": {
            "l2_bytes": chosen * block_bytes,
            "token_hit_rate": figures["token_hit_rate"],
            "token_hit_rate_by_tier": tiers,
            "ttft_s": figures["ttft_s"],
            "ttft_cold_s": figures["ttft_cold_s"],
            **saving,
        },
        "policies": policies,
    }


def _with_l2(shape: Any, blocks: int) -> Any:
    from dataclasses import replace

    return replace(shape, l2_blocks=blocks)


def _row(row: Figures, block_bytes: int, requests: Traffic, ranks: int, gpu_hour: float) -> Figures:
    capacity = row["tiers"].get("l2", {}).get("capacity_blocks", 0)
    value = worth(row, requests, gpus=ranks, gpu_hour=gpu_hour)
    return {
        "l2_blocks": capacity,
        "l2_bytes": None if capacity is None else capacity * block_bytes,
        "token_hit_rate": row["token_hit_rate"],
        "token_hit_rate_second_half": row["token_hit_rate_second_half"],
        "ttft_mean_s": row["ttft_s"]["mean"],
        "ttft_p50_s": row["ttft_s"]["p50"],
        "gpu_seconds_saved": value["gpu_seconds_saved"],
        "usd_saved_per_million_tokens": value["usd_saved_per_million_tokens"],
    }
