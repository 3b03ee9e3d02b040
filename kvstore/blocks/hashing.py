"""Block hashes: chained hashes over tokens, byte-identical to vLLM's.

The hash of full block i is H(canonical CBOR of (parent, token ids, extra keys)). The parent is the
hash of block i-1 (for block 0, H of the seed string's CBOR). The extra keys are None or a list of
tagged lists: ["lora", name, path] in every block, ["mm", identifier, offset of the item from the
block's start] in each block that an item overlaps, ["cache_salt", salt] in block 0. This is the
definition of vLLM 0.32; tests/data/hash_vectors.json has hashes that vLLM made. An incomplete block
at the end has no hash.

CBOR writes an unsigned integer in 1, 2, 3 or 5 bytes, the shortest possible. So the encoding of a
block has no fixed length. A long prompt is encoded at once: numpy puts each token, with its head
byte, at the end of an 8-byte word and drops the unused front of each word. The chain then only
slices the result. Below `SMALL_FEED_TOKENS` plain Python is faster than the numpy calls.
"""

from __future__ import annotations

import array
import difflib
import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import ConfigError

ALGORITHMS = ("sha256_cbor", "xxhash_cbor")
"""Digests of 32 and 16 bytes. The second is xxh3-128: faster, but it does not prevent forgery."""

DEFAULT_SEED = "vllm-none-hash"
"""vLLM's seed string for sha256_cbor if PYTHONHASHSEED is not set. (For xxhash_cbor vLLM then uses
a random seed in every process; only an explicit seed gives equal hashes.)"""

MAX_TOKEN_ID = 2**32 - 1
MAX_BLOCK_TOKENS = 65_536

SMALL_FEED_TOKENS = 160
"""Shorter feeds are encoded without numpy (bench/hashing.py shows where numpy becomes faster)."""

TILE_TOKENS = 4096
"""Tokens encoded at a time. numpy's buffers then stay below the size that malloc maps anew for
every call; the first access to new pages took half as long as the encoding."""

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]

_HASHERS: dict[str, Callable[[bytes], Any]] = {
    "sha256_cbor": hashlib.sha256,
    "xxhash_cbor": xxhash.xxh3_128,
}
_PICKLED = ("sha256", "xxhash")
_NULL = b"\xf6"

# Indexed by the encoded length of an integer minus one (lengths 1, 2, 3 and 5): its head byte at
# the right position, and which of the 8 big-endian bytes of its word are kept.
_HEADS = np.array([0, 0x18 << 8, 0x19 << 16, 0, 0x1A << 32], dtype=np.uint64)
_KEEP = np.array([[byte >= 7 - more for byte in range(8)] for more in range(5)]).view(np.uint64)[
    :, 0
]


class MMItem(NamedTuple):
    """One multimodal item of a prompt: identifier of its content, and its token span."""

    identifier: str
    offset: int
    length: int


def check_algorithm(name: str) -> str:
    """Return `name` if it is one of ALGORITHMS; else ConfigError with a valid name."""
    if name in ALGORITHMS:
        return name
    if name in _PICKLED:
        raise ConfigError(
            f"hash algorithm {name!r} hashes Python pickles, which only the same Python and "
            f"program reproduce; use {name}_cbor (in vLLM: --prefix-caching-hash-algo {name}_cbor)"
        )
    nearest = difflib.get_close_matches(name, ALGORITHMS, n=1, cutoff=0.3)
    hint = f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(ALGORITHMS)}"
    raise ConfigError(f"unknown hash algorithm {name!r}: {hint}")


class BlockHasher:
    """Hashes the full blocks of one prompt while its tokens arrive.

    Feeds of any size give the same hashes; no token is hashed twice. Not thread-safe.

    Args:
        algo: one of ALGORITHMS.
        block_tokens: tokens per block.
        seed: the engine's PYTHONHASHSEED; None: DEFAULT_SEED.
        cache_salt: separates this prompt's blocks from those of other salts; "" or None: no salt.
        lora: (name, path) of the adapter.
        mm: the prompt's multimodal items.

    Raises:
        ConfigError: unknown algorithm, size out of range, or text that is not valid Unicode.
    """

    def __init__(
        self,
        algo: str = "sha256_cbor",
        block_tokens: int = 16,
        *,
        seed: str | None = None,
        cache_salt: str | None = None,
        lora: tuple[str, str] | None = None,
        mm: Sequence[MMItem] = (),
    ) -> None:
        if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise ConfigError(f"block_tokens must be 1 to {MAX_BLOCK_TOKENS} (got {block_tokens})")
        self.algo = check_algorithm(algo)
        self.block_tokens = block_tokens
        self.none_hash = _none_hash(algo, DEFAULT_SEED if seed is None else seed)
        self._parent = self.none_hash
        self._hashes: list[bytes] = []
        self._pending: list[int] = []
        self._array_head = _cbor_head(4, block_tokens)
        self._front_state = _HASHERS[algo](_cbor_head(4, 3) + _cbor_head(2, len(self.none_hash)))
        self._lora_key = _cbor_list(["lora", *lora]) if lora is not None else b""
        self._salt_key = _cbor_list(["cache_salt", cache_salt]) if cache_salt else b""
        self._items = sorted((MMItem(*item) for item in mm), key=lambda item: item.offset)
        self._items_passed = 0
        for item in self._items:
            if item.offset < 0 or item.length < 1:
                raise ConfigError(
                    f"multimodal item {item.identifier!r} must cover at least 1 token from offset "
                    f"0 or later (got {item.length} tokens from {item.offset})"
                )

    @property
    def hashes(self) -> list[bytes]:
        """The hashes of all full blocks so far, as a new list."""
        return list(self._hashes)

    def feed(self, tokens: TokenIds) -> list[bytes]:
        """Add the next tokens of the prompt; return the hashes of the blocks that became full.

        Raises:
            ValueError: an id is not an integer in 0..MAX_TOKEN_ID; then no token was added.
        """
        if len(tokens) < SMALL_FEED_TOKENS:
            return self._feed_small(tokens)
        ids = _as_uint32(tokens)
        if self._pending:
            ids = np.concatenate([np.array(self._pending, dtype=np.uint32), ids])
        full = len(ids) // self.block_tokens
        taken = full * self.block_tokens
        self._pending = ids[taken:].tolist()
        if not full:
            return []
        blocks = ids[:taken].reshape(full, self.block_tokens)
        rows = max(1, TILE_TOKENS // self.block_tokens)
        fresh: list[bytes] = []
        for row in range(0, full, rows):
            body, ends = _encode_blocks(blocks[row : row + rows], self._array_head)
            fresh += self._chain(body, ends)
        return fresh

    def _feed_small(self, tokens: TokenIds) -> list[bytes]:
        pending = self._pending
        pending += _as_ints(tokens)
        size = self.block_tokens
        taken = len(pending) - len(pending) % size
        if not taken:
            return []
        body = bytearray()
        ends = []
        for start in range(0, taken, size):
            body += self._array_head
            for token in pending[start : start + size]:
                body += _cbor_head(0, token)
            body += _NULL
            ends.append(len(body))
        self._pending = pending[taken:]
        return self._chain(bytes(body), ends)

    def _chain(self, body: bytes, ends: Sequence[int]) -> list[bytes]:
        """Hash blocks; `body`: their token arrays, each followed by a null that ends at `ends`."""
        begin, parent = self._front_state.copy, self._parent
        fresh: list[bytes] = []
        start = 0
        # Copying a hash state that includes the front is cheaper than making a new one.
        if not (self._lora_key or self._items or (self._salt_key and not self._hashes)):
            for end in ends:
                state = begin()
                state.update(parent + body[start:end])
                parent = state.digest()
                fresh.append(parent)
                start = end
        else:
            first = len(self._hashes)
            for index, end in enumerate(ends, start=first):
                state = begin()
                state.update(parent + body[start : end - 1] + self._extra_keys(index))
                parent = state.digest()
                fresh.append(parent)
                start = end
        self._parent = parent
        self._hashes += fresh
        return fresh

    def _extra_keys(self, index: int) -> bytes:
        """CBOR of the extra keys of block `index`. Called for every block, in order."""
        start, end = index * self.block_tokens, (index + 1) * self.block_tokens
        keys = [self._lora_key] if self._lora_key else []
        items = self._items
        while self._items_passed < len(items) and _end(items[self._items_passed]) <= start:
            self._items_passed += 1
        for item in items[self._items_passed :]:
            if item.offset >= end:
                break
            if _end(item) > start:
                keys.append(_cbor_list(["mm", item.identifier, item.offset - start]))
        if index == 0 and self._salt_key:
            keys.append(self._salt_key)
        return _cbor_head(4, len(keys)) + b"".join(keys) if keys else _NULL


def hash_tokens(
    tokens: TokenIds,
    algo: str = "sha256_cbor",
    block_tokens: int = 16,
    *,
    seed: str | None = None,
    cache_salt: str | None = None,
    lora: tuple[str, str] | None = None,
    mm: Sequence[MMItem] = (),
) -> list[bytes]:
    """Hash all full blocks of a prompt; see BlockHasher for arguments and errors."""
    hasher = BlockHasher(algo, block_tokens, seed=seed, cache_salt=cache_salt, lora=lora, mm=mm)
    return hasher.feed(tokens)


def _end(item: MMItem) -> int:
    return item.offset + item.length


@lru_cache(maxsize=64)
def _none_hash(algo: str, seed: str) -> bytes:
    digest: bytes = _HASHERS[algo](_cbor_item(seed)).digest()
    return digest


def _encode_blocks(blocks: npt.NDArray[np.uint32], array_head: bytes) -> tuple[bytes, list[int]]:
    """Encode each row of `blocks` [rows, block_tokens] as a CBOR array followed by a null.

    Returns the concatenated bytes, and the offset at which each row's null ends.
    """
    rows, size = blocks.shape
    longer = (blocks >= 24).view(np.uint8) + (blocks >= 256).view(np.uint8)
    wide = (blocks >= 65_536).view(np.uint8)
    longer += wide
    longer += wide
    index = longer.astype(np.intp)
    words = np.empty((rows, size + 2), dtype=np.uint64)
    keep = np.empty((rows, size + 2), dtype=np.uint64)
    # The array's head and the null are in the first and last column, as if they were tokens.
    words[:, 0] = int.from_bytes(array_head, "big")
    keep[:, 0] = _KEEP[len(array_head) - 1]
    words[:, -1] = _NULL[0]
    keep[:, -1] = _KEEP[0]
    np.bitwise_or(_HEADS.take(index), blocks, out=words[:, 1:-1])
    keep[:, 1:-1] = _KEEP.take(index)
    big_endian = words.astype(">u8").view(np.uint8).ravel()
    body = np.compress(keep.view(np.bool_).ravel(), big_endian).tobytes()
    row_bytes = index.sum(axis=1) + (size + len(array_head) + 1)
    return body, np.cumsum(row_bytes).tolist()


def _as_uint32(tokens: TokenIds) -> npt.NDArray[np.uint32]:
    if isinstance(tokens, np.ndarray):
        _check_array(tokens)
        return np.ascontiguousarray(tokens).astype(np.uint32, copy=False)
    try:
        # Faster than numpy for lists, and strict: rejects floats and ids out of range.
        return np.frombuffer(array.array("I", tokens), dtype=np.uint32)
    except (TypeError, OverflowError):
        _as_ints(tokens)
        raise


def _as_ints(tokens: TokenIds) -> list[int]:
    if isinstance(tokens, np.ndarray):
        _check_array(tokens)
        ids: list[int] = tokens.tolist()
        return ids
    for token in tokens:
        if not isinstance(token, int | np.integer) or not 0 <= token <= MAX_TOKEN_ID:
            raise ValueError(f"token id {token!r} is not an integer in 0..{MAX_TOKEN_ID}")
    return list(tokens)


def _check_array(tokens: npt.NDArray[Any]) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        if tokens.size == 0:
            return
        raise ValueError(
            "token ids must be a one-dimensional array of integers "
            f"(got {tokens.dtype} of shape {tokens.shape})"
        )
    if tokens.size:
        for extreme in (int(tokens.min()), int(tokens.max())):
            if not 0 <= extreme <= MAX_TOKEN_ID:
                raise ValueError(f"token id {extreme} is not an integer in 0..{MAX_TOKEN_ID}")


def _cbor_head(major: int, value: int) -> bytes:
    """The shortest CBOR head of this major type (RFC 8949, section 3)."""
    if value < 24:
        return bytes((major << 5 | value,))
    if value < 256:
        return bytes((major << 5 | 24, value))
    if value < 65_536:
        return bytes((major << 5 | 25, value >> 8, value & 255))
    if value < 2**32:
        return bytes((major << 5 | 26,)) + value.to_bytes(4, "big")
    return bytes((major << 5 | 27,)) + value.to_bytes(8, "big")


def _cbor_item(value: str | int) -> bytes:
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    try:
        text = value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{value!r} is not valid Unicode text, so it has no hash") from None
    return _cbor_head(3, len(text)) + text


def _cbor_list(values: Sequence[str | int]) -> bytes:
    return _cbor_head(4, len(values)) + b"".join(_cbor_item(value) for value in values)
