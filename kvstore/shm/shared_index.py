"""The shared index: the blocks that the sidecar has, in memory that every client of the node reads.

A request over the socket costs a round trip between two processes and four threads. The most
frequent question, "is this prefix cached?", needs no answer from the L2 manager and no lease. So
the sidecar keeps the answer where a client reads it directly. The memory file has two tables; only
the sidecar writes them:

- The *marks*: exactly the blocks that are READY in L2, in buckets of eight 64-bit marks. The
  publish that makes a block READY inserts its mark, and its eviction removes it, both under the L2
  manager's lock. So every block that `commit` acknowledged is in the index. A mark is one aligned
  word: a reader sees all of it or nothing.
- The *filter*: a Bloom filter over all blocks that have been in L2 or are in a tier. Nothing is
  removed from it. So a block that is not in the filter is certainly not cached. There are two
  filters. When one fills up, the sidecar rebuilds the other from the blocks that are cached now.
  The generation in the header says which one is valid: odd or even; 0: neither, nothing is certain.

A mark is as reliable as any match: the block may be evicted before it is loaded. The client does
not verify bytes here; a load that does not find the block is truncated. If neither table has the
answer, the client asks the sidecar.

A mark and its position are 128 bits of a block's hash, combined with a seed per tenant and
namespace. Hashes are uniform already, and no seed reveals another tenant's blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from kvstore.blocks.key import Key
from kvstore.errors import ConfigError

SEED_BYTES: Final = 16
BUCKET_MARKS: Final = 8
"""Marks per bucket: one cache line. A ninth block gets no mark, so clients ask the sidecar."""
CELLS_PER_BLOCK: Final = 16
"""Filter cells per block. At this size, one absent block in two hundred is not recognised."""
MIN_CELLS: Final = 1 << 16
MIN_CELLS_PER_BLOCK: Final = 8
"""Cells per block below which the filter is rebuilt: one absent block in thirty by then."""
_HEADER: Final = 4096
_MAGIC: Final = b"KVCATLG1"
_FIELDS: Final = struct.Struct("<8sQQ")
_GENERATION: Final = 64 // 8
"""Word of the generation, on a separate cache line."""
_F_ADD_SEALS: Final = 1033
_F_SEALS: Final = 0x1 | 0x2 | 0x4 | 0x10
"""The size is final, and (from Linux 5.1) later mappings of the file are read-only."""


def index_bytes(buckets: int, cells: int) -> int:
    """Bytes of the memory file."""
    return _HEADER + buckets * BUCKET_MARKS * 8 + 2 * cells


class SharedIndex:
    """The sidecar's side. `insert` and `remove` are called under the L2 manager's lock.

    slots: slots of the slab. tier_blocks: approximate number of blocks that the tiers have room
    for. max_filter_bytes: maximum size of the two filters together.
    """

    def __init__(self, slots: int, tier_blocks: int, max_filter_bytes: int) -> None:
        self.buckets = max(BUCKET_MARKS, _next_power_of_two(slots))
        wanted = _next_power_of_two(CELLS_PER_BLOCK * (slots + tier_blocks))
        self.cells = max(MIN_CELLS, min(wanted, _next_power_of_two(max_filter_bytes // 2 + 1) // 2))
        self.nbytes = index_bytes(self.buckets, self.cells)
        self.on_filter_full: Callable[[], None] = _no_op
        """Called when the valid filter must be rebuilt."""
        self.fd = os.memfd_create("kvstore-shared-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        self._map = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # an older kernel: clients are trusted, as with the slab
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEALS)
        _FIELDS.pack_into(self._map, 0, _MAGIC, self.buckets, self.cells)
        whole = memoryview(self._map)
        self._words = whole[: _HEADER + self.buckets * BUCKET_MARKS * 8].cast("Q")
        filters = whole[_HEADER + self.buckets * BUCKET_MARKS * 8 :]
        self._filters = (filters[: self.cells], filters[self.cells :])
        self._filters_to_update: tuple[memoryview, ...] = ()
        self._filter_blocks = self._new_blocks = 0
        self._seeds_of = functools.lru_cache(maxsize=4096)(self._make_seeds)
        self._secret = os.urandom(32)

    def seed(self, tenant: str, namespace: str) -> bytes:
        """The seed with which a client of this tenant and namespace finds its blocks."""
        return struct.pack("<QQ", *self._seeds_of(tenant, namespace))

    def insert(self, key: Key) -> None:
        """The block is READY in L2."""
        mark, position = self._hash_words(key)
        at = _HEADER // 8 + (position & (self.buckets - 1)) * BUCKET_MARKS
        bucket = self._words[at : at + BUCKET_MARKS].tolist()
        if mark not in bucket and 0 in bucket:
            self._words[at + bucket.index(0)] = mark
        if self._filters_to_update:
            self._add_to_filters(mark, position, self._filters_to_update)

    def remove(self, key: Key) -> None:
        """The block is no longer in L2."""
        mark, position = self._hash_words(key)
        at = _HEADER // 8 + (position & (self.buckets - 1)) * BUCKET_MARKS
        bucket = self._words[at : at + BUCKET_MARKS].tolist()
        if mark in bucket:
            self._words[at + bucket.index(mark)] = 0

    def rebuild_filter(self, insert_ready: Callable[[], None], tier_keys: Iterable[Key]) -> None:
        """Rebuild the other filter from the cached blocks, and make it the valid one.

        insert_ready: inserts every READY block again. tier_keys: the keys of the tiers, listed
        after that: a block written to a tier meanwhile was inserted before, so both filters have
        it. Only one rebuild may run at a time.
        """
        generation = self._words[_GENERATION]
        fresh = self._filters[(generation + 1) & 1]
        fresh[:] = bytes(self.cells)
        old = self._filters_to_update
        self._filter_blocks = self._new_blocks = 0
        self._filters_to_update = (fresh, *old)
        try:
            insert_ready()
            for key in tier_keys:
                self._add_to_filters(*self._hash_words(key), (fresh,))
        except BaseException:
            self._filters_to_update = old
            raise
        self._new_blocks = 0
        self._words[_GENERATION] = generation + 1
        self._filters_to_update = (fresh,)

    def close(self) -> None:
        """Close the file. Clients keep their mapping, in which no block is certainly absent."""
        self._filters_to_update = ()
        self._words[_GENERATION] = 0
        os.close(self.fd)

    def _add_to_filters(self, mark: int, position: int, filters: tuple[memoryview, ...]) -> None:
        """Add a block to these filters; the newest filter is the first."""
        cells = [mark + n * position & (self.cells - 1) for n in (1, 2, 3)]
        known = all(filters[0][cell] for cell in cells)
        for each in filters:
            for cell in cells:
                each[cell] = 1
        if not known:
            self._filter_blocks += 1
            self._new_blocks += 1
            limit = self.cells // MIN_CELLS_PER_BLOCK
            if self._filter_blocks >= limit and self._new_blocks >= limit // 2:
                self._new_blocks = 0
                self.on_filter_full()

    def _hash_words(self, key: Key) -> tuple[int, int]:
        return _hash_words(key.hash, self._seeds_of(key.tenant, key.namespace))

    def _make_seeds(self, tenant: str, namespace: str) -> tuple[int, int]:
        name = f"{len(tenant)}:{tenant}{namespace}".encode()
        digest = hashlib.blake2b(name, key=self._secret, digest_size=SEED_BYTES).digest()
        first, second = struct.unpack("<QQ", digest)
        return first, second


class SharedIndexView:
    """The client's side: read-only. Any thread may call it at any time.

    fd: descriptor of the memory file; the caller still closes it. seed: see `SharedIndex.seed`.

    Raises ConfigError: the file is not a shared index, or the seed has the wrong length.
    """

    def __init__(self, fd: int, seed: bytes) -> None:
        size = os.fstat(fd).st_size
        if size < _HEADER or len(seed) != SEED_BYTES:
            raise ConfigError(
                f"shared index: a file of {size} bytes and a seed of {len(seed)} bytes "
                f"(expected at least {_HEADER}, and {SEED_BYTES})"
            )
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        magic, buckets, cells = _FIELDS.unpack_from(mapped)
        fits = buckets & (buckets - 1) == 0 == cells & (cells - 1) and buckets and cells
        if magic != _MAGIC or not fits or size < index_bytes(buckets, cells):
            raise ConfigError(f"the file of {size} bytes is not a shared index")
        self._seeds = struct.unpack("<QQ", seed)
        self._words = memoryview(mapped)[: _HEADER + buckets * BUCKET_MARKS * 8].cast("Q")
        words = np.frombuffer(self._words, np.uint64)
        self._marks = words[_HEADER // 8 :].reshape(buckets, BUCKET_MARKS)
        filters = memoryview(mapped)[_HEADER + buckets * BUCKET_MARKS * 8 :]
        self._filters = (filters[:cells], filters[cells : 2 * cells])
        self._buckets, self._cells = buckets, cells
        self._mark_seed, self._position_seed = (np.uint64(seed) for seed in self._seeds)
        self._mask = np.uint64(buckets - 1)

    def cached_prefix_len(self, hashes: Sequence[bytes]) -> int:
        """Number of leading blocks that are READY in L2."""
        size = len(hashes[0]) if hashes else 0
        if size < SEED_BYTES or size % 8 or len(set(map(len, hashes))) > 1:
            return next(
                (n for n, name in enumerate(hashes) if not self.contains(name)), len(hashes)
            )
        return self.cached_prefix_len_packed(b"".join(hashes), size)

    def cached_prefix_len_packed(self, joined: bytes, size: int) -> int:
        """`cached_prefix_len` of concatenated hashes of `size` bytes each; size: a multiple of 8,
        at least 16."""
        rows = np.frombuffer(joined, np.uint64).reshape(-1, size // 8)
        marks = rows[:, 0] ^ self._mark_seed
        positions = (rows[:, 1] ^ self._position_seed) & self._mask
        same = self._marks.take(positions.view(np.int64), axis=0) == marks[:, None]
        if np.count_nonzero(same) == len(rows):  # a bucket has no mark twice
            return len(rows)
        ready = same.any(axis=1)
        return len(rows) if ready.all() else int(ready.argmin())

    def contains(self, name: bytes) -> bool:
        """Whether this block is READY in L2."""
        mark, position = _hash_words(name, self._seeds)
        return mark in self._marks[position & (self._buckets - 1)].tolist()

    def is_absent(self, name: bytes) -> bool:
        """Whether this block is certainly not cached; False: it may or may not be."""
        generation = self._words[_GENERATION]
        if not generation:
            return False
        mark, position = _hash_words(name, self._seeds)
        mask, cells = self._cells - 1, self._filters[generation & 1]
        maybe_cached = (
            cells[mark + position & mask]
            and cells[mark + 2 * position & mask]
            and cells[mark + 3 * position & mask]
        )
        return not maybe_cached and bool(self._words[_GENERATION] == generation)


def _hash_words(name: bytes, seeds: tuple[int, ...]) -> tuple[int, int]:
    """(mark, position) of a hash: 64 bits each. The mark 0 means an empty entry."""
    return (
        int.from_bytes(name[:8], "little") ^ seeds[0],
        int.from_bytes(name[8:16], "little") ^ seeds[1],
    )


def _next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def _no_op(*_: Any) -> None:
    """The default of `on_filter_full`."""
