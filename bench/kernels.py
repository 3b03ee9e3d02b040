"""Compares gather and scatter between pages and slots with a plain memcpy, on this CPU.

    python bench/kernels.py [--json]

Every row copies the same bytes in three ways, in turns, and reports the best of several rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kvstore import kernels
from kvstore.kernels import BlockFormat

ROUNDS = 7
COPY_BYTES = 256 << 20
"""Bytes copied per round; far larger than any cache."""


PLANES = BlockFormat("LKTHD", "planes")
INT8 = BlockFormat("LKTHD", "int8")


class Shape(NamedTuple):
    name: str
    layers: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    pages_per_block: int
    form: BlockFormat = BlockFormat()


SHAPES = (
    Shape("Llama-3-8B bf16, page 16", 32, 16, 8, 128, torch.bfloat16, 1),
    Shape("Llama-3-8B bf16, page 1, block 16", 32, 1, 8, 128, torch.bfloat16, 16),
    Shape("SmolLM2-135M fp32, page 16", 30, 16, 3, 64, torch.float32, 1),
    Shape("SmolLM2-135M bf16, page 16, block 64", 30, 16, 3, 64, torch.bfloat16, 4),
    Shape("SmolLM2-135M bf16, page 1, block 16", 30, 1, 3, 64, torch.bfloat16, 16),
    Shape("Llama-3-8B bf16, in byte planes", 32, 16, 8, 128, torch.bfloat16, 1, PLANES),
    Shape("Llama-3-8B bf16, as int8", 32, 16, 8, 128, torch.bfloat16, 1, INT8),
)


def best_seconds(copies: list[Callable[[], object]]) -> list[float]:
    """Return the best time of each copy. The copies take turns, so that noise affects all."""
    best = [float("inf")] * len(copies)
    for _ in range(ROUNDS):
        for index, copy in enumerate(copies):
            start = time.perf_counter()
            copy()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def measure(shape: Shape) -> dict[str, str | float]:
    """Return GB/s of memcpy, gather and scatter (bytes copied, counted once)."""
    elements = shape.page_tokens * shape.kv_heads * shape.head_dim
    block_bytes = shape.layers * 2 * shape.pages_per_block * elements * shape.dtype.itemsize
    blocks = max(1, COPY_BYTES // block_bytes)
    num_pages = blocks * shape.pages_per_block
    pool = torch.zeros(
        (shape.layers, 2, num_pages, shape.page_tokens, shape.kv_heads, shape.head_dim),
        dtype=shape.dtype,
    )
    slab = np.ones(blocks * block_bytes, dtype=np.uint8)
    plain = np.ones(blocks * block_bytes, dtype=np.uint8)
    slots = [memoryview(slab[i * block_bytes : (i + 1) * block_bytes]) for i in range(blocks)]
    table = np.random.default_rng(0).permutation(num_pages).reshape(blocks, -1)
    pages = table.astype(np.int32).tolist()
    copier = kernels.copier_for(pool, shape.form)
    seconds = best_seconds(
        [
            lambda: np.copyto(plain, slab),
            lambda: copier.gather(pages, slots).wait(),
            lambda: copier.scatter(pages, slots).wait(),
        ]
    )
    rates = [round(blocks * block_bytes / second / 1e9, 2) for second in seconds]
    return {"shape": shape.name, **dict(zip(("memcpy", "gather", "scatter"), rates, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(shape) for shape in SHAPES]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'GB/s, one thread':<40}{'memcpy':>8}{'gather':>8}{'scatter':>8}")
    for row in rows:
        print(f"{row['shape']:<40}{row['memcpy']:>8}{row['gather']:>8}{row['scatter']:>8}")


if __name__ == "__main__":
    main()
