"""Options that `kvstore simulate` and `kvstore plan` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BlockTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens per block. Default: as in the trace; 512 for hash_ids without a block_size, "
        "16 for Qwen-Bailian, token ids and text. A multiple of the trace's own size joins its "
        "blocks.",
        show_default=False,
    ),
]
L1Blocks = Annotated[
    int | None, typer.Option(help="Size of the engine's prefix cache (a radix tree), in blocks.")
]
L1Size = Annotated[
    str | None, typer.Option(help="Size of the engine's prefix cache, such as 20GiB.")
]
PageTokens = Annotated[
    int | None,
    typer.Option(help="Tokens per page of L1, for token ids or text. Default: a page is a block."),
]
L2Blocks = Annotated[int | None, typer.Option(help="Size of L2, in blocks.")]
L2Size = Annotated[str | None, typer.Option(help="Size of L2, such as 64GiB, or infinite.")]
Infinite = Annotated[bool, typer.Option("--infinite", help="Use an L2 that never evicts.")]
L3Blocks = Annotated[int | None, typer.Option(help="Size of the tier below L2, in blocks.")]
L3Size = Annotated[
    str | None, typer.Option(help="Size of the tier below L2, such as 2TiB, or infinite.")
]
BytesPerToken = Annotated[
    int,
    typer.Option(
        help="KV bytes per token. Default: Llama-3-8B in bfloat16. Run `kvstore plan` for your "
        "model."
    ),
]
Eviction = Annotated[
    str,
    typer.Option(
        help="Eviction policy of L2: lru, lfu, s3fifo, gdsf or auto. A comma-separated list "
        "compares them."
    ),
]
L3Eviction = Annotated[
    str | None, typer.Option(help="Eviction policy of the tier below L2. Default: that of L2.")
]
Write = Annotated[
    str,
    typer.Option(
        help="Write policy: write_through, selective or write_back. A comma-separated list "
        "compares them."
    ),
]
SelectiveHits = Annotated[
    int, typer.Option(help="Hits after which the selective policy writes a block to the tier.")
]
LoadPolicy = Annotated[
    str,
    typer.Option(
        help="Loads from the tier below L2: always (every cached block), never "
        "(it computes all tokens that L1 does not have), or a prefetch policy: best_effort, "
        "wait_complete, timeout, adaptive. A comma-separated list compares them."
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        help="Maximum requests computed concurrently (no batching slowdown is modelled). "
        "0: unlimited."
    ),
]
PrefillRate = Annotated[
    str,
    typer.Option(
        help="Prefill speed in tokens per second, or a file with measured times: "
        '{"points": [{"tokens": 1024, "seconds": 0.07}, ...]}.'
    ),
]
L2Bandwidth = Annotated[
    str, typer.Option(help="Bandwidth from L2 to the device, such as 20GB (per second).")
]
L3Bandwidth = Annotated[
    str, typer.Option(help="Bandwidth from the tier below to L2, such as 3GB (per second).")
]
L3Latency = Annotated[str, typer.Option(help="Latency of the tier below L2, such as 1ms.")]
GpuHour = Annotated[float, typer.Option(help="Price of one GPU per hour, in dollars.")]
TokenizerPath = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="tokenizer.json or its folder, for text. Default: 4 bytes of UTF-8 are one token.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

BYTES_PER_TOKEN = 131_072
PREFILL_RATE = "15000"
"""Llama-3-8B on one GPU of the A100 class."""
L2_BANDWIDTH = "20GB"
"""From pinned host memory. PCIe 4.0 x16 transfers up to 25 GB/s."""
L3_BANDWIDTH = "3GB"
"""A fast NVMe drive reads 3 to 7 GB/s."""
L3_LATENCY = "1ms"
