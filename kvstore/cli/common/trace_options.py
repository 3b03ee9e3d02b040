"""Options that `kvstore simulate` and `kvstore plan` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BlockTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a block. By default as the trace says; 512 for hash_ids without a "
        "block_size, 16 for Qwen-Bailian's, token ids and text. A multiple of the trace's own "
        "joins its blocks.",
        show_default=False,
    ),
]
L1Blocks = Annotated[
    int | None, typer.Option(help="Blocks of the engine's own prefix cache, a radix tree.")
]
L1Size = Annotated[
    str | None, typer.Option(help="Size of the engine's own prefix cache, such as 20GiB.")
]
PageTokens = Annotated[
    int | None,
    typer.Option(help="With token ids or text: L1 has pages of so many tokens, not blocks."),
]
L2Blocks = Annotated[int | None, typer.Option(help="Blocks of L2.")]
L2Size = Annotated[str | None, typer.Option(help="Size of L2, such as 64GiB, or infinite.")]
Infinite = Annotated[bool, typer.Option("--infinite", help="L2 never evicts.")]
L3Blocks = Annotated[int | None, typer.Option(help="Blocks of the tier below L2.")]
L3Size = Annotated[
    str | None, typer.Option(help="Size of the tier below L2, such as 2TiB, or infinite.")
]
BytesPerToken = Annotated[
    int, typer.Option(help="Of KV. As it stands: Llama-3-8B in bfloat16; kvstore plan says yours.")
]
Eviction = Annotated[
    str, typer.Option(help="lru, lfu, s3fifo, cost or auto; several by commas compare them.")
]
L3Eviction = Annotated[
    str | None, typer.Option(help="Of the tier below, where it is not the same.")
]
Write = Annotated[
    str, typer.Option(help="write_through, selective or write_back; several compare them.")
]
SelectiveHits = Annotated[
    int, typer.Option(help="Hits of a block that send it down under selective.")
]
Prefetch = Annotated[
    str,
    typer.Option(
        help="How a request waits for the tier below: always (for all that is held), never (it "
        "computes all that L1 lacks), or a policy of the store: best_effort, wait_complete, "
        "timeout, adaptive. Several compare them."
    ),
]
Engines = Annotated[
    int, typer.Option(help="Requests computed at a time, each as if alone; 0: any number.")
]
PrefillRate = Annotated[
    str,
    typer.Option(
        help='Tokens a second, or a file: {"points": [{"tokens": 1024, "seconds": 0.07}, ...]}.'
    ),
]
L2Speed = Annotated[str, typer.Option(help="Bytes a second from L2 to the device.")]
L3Speed = Annotated[str, typer.Option(help="Bytes a second from the tier below to L2.")]
L3Latency = Annotated[str, typer.Option(help="Until the tier below answers.")]
GpuHour = Annotated[float, typer.Option(help="Price of an hour of one GPU, in dollars.")]
TokenizerPath = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="For text: a tokenizer.json or its folder. Without one, 4 bytes of UTF-8 are a token.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

BYTES_PER_TOKEN = 131_072
PREFILL_RATE = "15000"
"""Llama-3-8B on one GPU of the A100's class."""
L2_SPEED = "20GB"
"""From pinned host memory; PCIe 4.0 x16 moves up to 25 GB/s."""
L3_SPEED = "3GB"
"""A fast NVMe drive reads 3 to 7 GB/s."""
L3_LATENCY = "1ms"
