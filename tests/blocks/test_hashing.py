"""Hashes: vLLM's vectors, a simple encoder for comparison, and feeds of every size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.blocks import hashing
from kvstore.blocks.hashing import BlockHasher, MMItem, check_algorithm, hash_tokens
from kvstore.errors import ConfigError

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "hash_vectors.json").read_text())[
    "vectors"
]
SUPPORTED = [vector for vector in VECTORS if vector["algo"] in hashing.ALGORITHMS]

DIGESTS: dict[str, Callable[[bytes], bytes]] = {
    "sha256_cbor": lambda data: hashlib.sha256(data).digest(),
    "xxhash_cbor": lambda data: xxhash.xxh3_128(data).digest(),
}

# Every width of a CBOR integer and its two edges.
EDGES = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1]
TOKENS = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1), st.integers(0, 300))


def plain_cbor(value: Any) -> bytes:
    """Canonical CBOR by recursion, straight from RFC 8949's table of major types."""

    def head(major: int, size: int) -> bytes:
        for mark, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
            if size < 24:
                return bytes([major * 32 + size])
            if size < 256**width:
                return bytes([major * 32 + mark]) + size.to_bytes(width, "big")
        raise AssertionError(size)

    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return head(0, value) if value >= 0 else head(1, -1 - value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    return head(4, len(value)) + b"".join(map(plain_cbor, value))


def plain_hashes(
    tokens: list[int],
    algo: str,
    block_tokens: int,
    seed: str,
    cache_salt: str | None,
    lora: tuple[str, str] | None,
    mm: list[MMItem],
) -> list[bytes]:
    digest = DIGESTS[algo]
    parent = digest(plain_cbor(seed))
    hashes = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        end = start + block_tokens
        extra: list[list[Any]] = []
        if lora:
            extra.append(["lora", *lora])
        extra += [
            ["mm", item.identifier, item.offset - start]
            for item in sorted(mm, key=lambda item: item.offset)
            if item.offset < end and item.offset + item.length > start
        ]
        if cache_salt and start == 0:
            extra.append(["cache_salt", cache_salt])
        parent = digest(plain_cbor([parent, tokens[start:end], extra or None]))
        hashes.append(parent)
    return hashes


def hasher_of(vector: dict[str, Any]) -> BlockHasher:
    return BlockHasher(
        vector["algo"],
        vector["block_tokens"],
        seed=vector["hash_seed"],
        cache_salt=vector["cache_salt"],
        lora=tuple(vector["lora"]) if vector["lora"] else None,
        mm=[MMItem(*item) for item in vector["mm"] or ()],
    )


@pytest.mark.parametrize("numpy", [False, True], ids=["python", "numpy"])
@pytest.mark.parametrize(
    "vector", SUPPORTED, ids=lambda v: f"{v['algo']}-{v['hash_seed']}-{v['name']}"
)
def test_vectors_of_vllm(vector: dict[str, Any], numpy: bool) -> None:
    hasher = hasher_of(vector)
    assert hasher.none_hash.hex() == vector["none_hash"]
    # The long way round for numpy: what is fed at once must pass the limit of small feeds.
    tokens = vector["tokens"] + [7] * (hashing.SMALL_FEED_TOKENS if numpy else 0)
    fed = [block.hex() for block in hasher.feed(tokens)]
    assert fed[: len(vector["hashes"])] == vector["hashes"]
    assert numpy or fed == vector["hashes"]


@pytest.mark.parametrize(
    "vector", SUPPORTED, ids=lambda v: f"{v['algo']}-{v['hash_seed']}-{v['name']}"
)
def test_encoding_of_the_first_block(vector: dict[str, Any]) -> None:
    extra = vector["extra_keys"][0]
    block = vector["tokens"][: vector["block_tokens"]]
    encoded = plain_cbor([bytes.fromhex(vector["none_hash"]), block, extra])
    assert encoded.hex() == vector["cbor_first_block"]
    assert DIGESTS[vector["algo"]](encoded) == hasher_of(vector).feed(vector["tokens"])[0]


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(TOKENS, max_size=120),
    repeats=st.sampled_from([1, 1, 9]),
    algo=st.sampled_from(hashing.ALGORITHMS),
    block_tokens=st.sampled_from([1, 3, 16, 24, 32, 300]),
    seed=st.text(max_size=5),
    cache_salt=st.none() | st.text(max_size=30),
    lora=st.none() | st.tuples(st.text(max_size=30), st.text(max_size=30)),
    mm=st.lists(
        st.builds(MMItem, st.text(max_size=8), st.integers(0, 200), st.integers(1, 120)),
        max_size=4,
    ),
    cuts=st.lists(st.integers(0, 1100), max_size=6),
    as_array=st.booleans(),
)
@example([5] * 100, 9, "sha256_cbor", 16, "", "salt", ("a", "b"), [], [1, 170, 500], True)
def test_any_split_equals_the_plain_encoder(
    tokens: list[int],
    repeats: int,
    algo: str,
    block_tokens: int,
    seed: str,
    cache_salt: str | None,
    lora: tuple[str, str] | None,
    mm: list[MMItem],
    cuts: list[int],
    as_array: bool,
) -> None:
    tokens = tokens * repeats
    expected = plain_hashes(tokens, algo, block_tokens, seed, cache_salt, lora, mm)
    hasher = BlockHasher(algo, block_tokens, seed=seed, cache_salt=cache_salt, lora=lora, mm=mm)
    fed = []
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(tokens)), len(tokens)]
    for start, end in pairwise(bounds):
        piece = tokens[start:end]
        fed += hasher.feed(np.array(piece, dtype=np.int64) if as_array else piece)
    assert fed == expected
    assert hasher.hashes == expected
    once = hash_tokens(
        tokens, algo, block_tokens, seed=seed, cache_salt=cache_salt, lora=lora, mm=mm
    )
    assert once == expected


def test_a_prompt_longer_than_a_tile_is_hashed_whole() -> None:
    tokens = [token * 7919 % 130_000 for token in range(2 * hashing.TILE_TOKENS + 22)]
    mm = [MMItem("image", 8_000, 9_000), MMItem("other", 9_100, 5)]
    expected = plain_hashes(tokens, "sha256_cbor", 16, "vllm-none-hash", "s", None, mm)
    assert hash_tokens(np.array(tokens, dtype=np.int32), cache_salt="s", mm=mm) == expected


def test_every_width_and_its_edges_by_numpy_and_by_python() -> None:
    tokens = [token for edge in EDGES for token in (edge, max(0, edge - 1))] * 16
    assert len(tokens) > hashing.SMALL_FEED_TOKENS
    expected = plain_hashes(tokens, "sha256_cbor", 16, "vllm-none-hash", None, None, [])
    assert hash_tokens(tokens) == expected
    hasher = BlockHasher()
    for start in range(0, len(tokens), 100):
        hasher.feed(tokens[start : start + 100])
    assert hasher.hashes == expected


def test_single_tokens_hash_as_a_prompt_does() -> None:
    hasher = BlockHasher()
    fed = [block for token in range(100) for block in hasher.feed([token])]
    hasher.hashes.clear()  # of a list that is the caller's own
    assert fed == hash_tokens(range(100)) == hasher.hashes
    assert len(fed) == 6


def test_salt_adapter_item_and_seed_each_give_other_hashes() -> None:
    tokens = range(32)
    base = hash_tokens(tokens)
    others = [
        hash_tokens(tokens, cache_salt="a"),
        hash_tokens(tokens, cache_salt="b"),
        hash_tokens(tokens, lora=("a", "b")),
        hash_tokens(tokens, lora=("cache_salt", "a")),
        hash_tokens(tokens, seed="a"),
        hash_tokens(tokens, mm=[MMItem("a", 0, 1)]),
        hash_tokens(tokens, block_tokens=32),
    ]
    names = [block for hashes in [base, *others] for block in hashes]
    assert len(set(names)) == len(names)
    assert hash_tokens(tokens, cache_salt="") == base


@pytest.mark.parametrize("count", [3, hashing.SMALL_FEED_TOKENS + 3], ids=["small", "large"])
@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, 1.5, "7", None])
def test_an_invalid_id_is_one_line_and_adds_no_token(count: int, bad: Any) -> None:
    hasher = BlockHasher(block_tokens=2)
    hasher.feed([1])
    with pytest.raises(
        ValueError, match=r"token id .* not an integer in 0\.\.4294967295"
    ) as caught:
        hasher.feed([5] * count + [bad])
    assert "\n" not in str(caught.value)
    assert hasher.feed([2]) == hash_tokens([1, 2], block_tokens=2)


@pytest.mark.parametrize(
    "array",
    [np.array([0.5]), np.array([[1, 2]]), np.array([-1]), np.array([2**32]), np.array(["1"])],
)
@pytest.mark.parametrize("repeats", [1, hashing.SMALL_FEED_TOKENS])
def test_an_invalid_array_is_rejected(array: np.ndarray[Any, Any], repeats: int) -> None:
    with pytest.raises(ValueError, match="token id"):
        BlockHasher().feed(np.repeat(array, repeats, axis=0))


def test_empty_feeds_add_no_block() -> None:
    hasher = BlockHasher()
    assert hasher.feed([]) == hasher.feed(np.array([])) == hasher.hashes == []


def test_a_strided_array_hashes_as_its_values_do() -> None:
    tokens = np.arange(2_000, dtype=np.int64)
    assert hash_tokens(tokens[::2]) == hash_tokens(tokens[::2].tolist())


@pytest.mark.parametrize("name", ["sha256", "xxhash"])
def test_pickled_algorithms_are_rejected_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"pickles.*{name}_cbor"):
        check_algorithm(name)
    with pytest.raises(ConfigError, match="pickles"):
        BlockHasher(name)


def test_an_unknown_algorithm_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean sha256_cbor"):
        check_algorithm("sha256-cbor")
    with pytest.raises(ConfigError, match="sha256_cbor, xxhash_cbor"):
        check_algorithm("ÿ")


@pytest.mark.parametrize(
    "options",
    [
        {"block_tokens": 0},
        {"block_tokens": hashing.MAX_BLOCK_TOKENS + 1},
        {"cache_salt": "\udcff"},
        {"lora": ("a", "\udcff")},
        {"mm": [MMItem("a", -1, 3)]},
        {"mm": [MMItem("a", 1, 0)]},
    ],
)
def test_options_that_cannot_be_hashed_are_a_config_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BlockHasher(**options)
