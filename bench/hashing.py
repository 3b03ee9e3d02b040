"""Compares the speed of block hashes with vLLM's method and with hashlib alone.

vLLM calls a general CBOR encoder and SHA-256 once per block. Both methods, and the lower bound
(SHA-256 of prepared messages of the same lengths), take turns in one process, so that other load
on the machine affects all of them. The printed ratio is the median of the rounds' ratios.

    python bench/hashing.py [--tokens 32768] [--block-tokens 16] [--rounds 15] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.blocks.hashing import BlockHasher, hash_tokens

VOCABULARY = 128_256
"""Llama 3's vocabulary: half of the ids take three bytes of CBOR, half five."""


def prompt(tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return ids spread evenly over the vocabulary; their encodings are longer than a text's."""
    return np.random.default_rng(0).integers(0, VOCABULARY, tokens, dtype=np.int32)


def as_vllm(ids: list[int], block_tokens: int) -> list[bytes]:
    """Hash with one general encoder call and one hash per block."""
    import cbor2

    parent = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
    hashes = []
    for start in range(0, len(ids) - len(ids) % block_tokens, block_tokens):
        block = tuple(ids[start : start + block_tokens])
        parent = hashlib.sha256(cbor2.dumps((parent, block, None), canonical=True)).digest()
        hashes.append(parent)
    return hashes


def floor_messages(ids: list[int], block_tokens: int) -> list[bytes]:
    """Return messages with the lengths of the blocks' encodings."""
    import cbor2

    return [
        cbor2.dumps((bytes(32), ids[start : start + block_tokens], None), canonical=True)
        for start in range(0, len(ids) - len(ids) % block_tokens, block_tokens)
    ]


def hash_all(messages: list[bytes]) -> None:
    for message in messages:
        hashlib.sha256(message).digest()


def feed_singly(ids: list[int], block_tokens: int) -> list[bytes]:
    """Hash token by token, as decoding does."""
    hasher = BlockHasher(block_tokens=block_tokens)
    for token in ids:
        hasher.feed((token,))
    return hasher.hashes


def measure(methods: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each method in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of the prompt")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens per block")
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    array, size = prompt(options.tokens), options.block_tokens
    ids = array.tolist()
    messages = floor_messages(ids, size)
    hashes = as_vllm(ids, size)
    assert hash_tokens(array, block_tokens=size) == hashes, "the methods give different hashes"
    methods: dict[str, Callable[[], object]] = {
        "vllm": lambda: as_vllm(ids, size),
        "kvstore (array)": lambda: hash_tokens(array, block_tokens=size),
        "kvstore (list)": lambda: hash_tokens(ids, block_tokens=size),
        "kvstore (token by token)": lambda: feed_singly(ids, size),
        "hashlib alone": lambda: hash_all(messages),
    }
    seconds = measure(methods, options.rounds)
    rows = []
    for name, times in seconds.items():
        ratios = [ours / own for ours, own in zip(seconds["vllm"], times, strict=True)]
        rows.append(
            {
                "method": name,
                "us_per_block": round(min(times) / len(hashes) * 1e6, 3),
                "ms_per_prompt": round(min(times) * 1e3, 3),
                "speed_over_vllm": round(statistics.median(ratios), 2),
            }
        )
    if options.json:
        print(json.dumps({"tokens": options.tokens, "block_tokens": size, "rows": rows}))
        return
    print(f"{options.tokens} tokens, blocks of {size}; best of {options.rounds}, median ratio")
    for row in rows:
        print(
            f"{row['method']:<26}{row['us_per_block']:>8} us/block{row['ms_per_prompt']:>9} ms"
            f"{row['speed_over_vllm']:>7} x vLLM"
        )


if __name__ == "__main__":
    main()
