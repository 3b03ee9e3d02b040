"""The catalogue: which blocks the sidecar holds, in memory that every client of the node reads.

A question over the socket costs the way between two processes and four threads, whatever it asks.
What is asked most, "is this run there?", needs no plan and no lease, so the sidecar keeps the
answer where a client looks it up by itself. Two tables in one memory file, written by the sidecar
only:

- the *shown* blocks, READY in L2 and nothing else: buckets of eight 64-bit marks. A block is shown
  by the publish that makes it READY and taken off by its eviction, both under the brain's lock, so
  what `commit` acknowledged is shown. A mark is one aligned word: a reader sees it or does not.
- the *ever held*: a Bloom filter over all blocks that have been in L2 or lie in a tier. Nothing is
  taken out, so a block it does not know is nowhere, for certain. There are two of them: when one is
  crowded the other is made anew from what is held now, and the generation in the header says which
  is in force (odd or even; 0: neither, nothing is certain).

What the first says is as true as any match: a block may go before it is loaded, and its bytes are
verified by nobody here; a load that does not find it is cut, as ever. What neither knows is asked
over the socket.

A place is 128 bits of a block's hash, disguised by a salt for each tenant and namespace: hashes are
uniform already, and no salt leads from one tenant's blocks to another's.
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

SALT_BYTES: Final = 16
WAYS: Final = 8
"""Marks of one bucket: one cache line. A ninth block of it is not shown, and asked for."""
CELLS_PER_BLOCK: Final = 16
"""At that many, three cells a block are all taken by others once in two hundred times."""
CELLS_LEAST: Final = 1 << 16
CROWDED: Final = 8
"""Cells for each block ever held below which the filter is made anew: one in thirty by then."""
_HEADER: Final = 4096
_MAGIC: Final = b"KVCATLG1"
_FIELDS: Final = struct.Struct("<8sQQ")
_GENERATION: Final = 64 // 8
"""Word of the generation: on a cache line of its own."""
_F_ADD_SEALS: Final = 1033
_F_SEALS: Final = 0x1 | 0x2 | 0x4 | 0x10
"""The size is final, and (from Linux 5.1) who maps the file from here on cannot write to it."""


def catalog_bytes(buckets: int, cells: int) -> int:
    """Bytes of the memory file."""
    return _HEADER + buckets * WAYS * 8 + 2 * cells


class Catalog:
    """The sidecar's side. `show` and `take_off` are called under the brain's lock.

    slots: of the slab. below: blocks that the tiers below can hold, about. most_bytes: what the
    two filters may take together.
    """

    def __init__(self, slots: int, below: int, most_bytes: int) -> None:
        self.buckets = max(WAYS, _power(slots))
        wanted = _power(CELLS_PER_BLOCK * (slots + below))
        self.cells = max(CELLS_LEAST, min(wanted, _power(most_bytes // 2 + 1) // 2))
        self.nbytes = catalog_bytes(self.buckets, self.cells)
        self.crowded: Callable[[], None] = _ignore
        """Called when the filter in force is to be made anew."""
        self.fd = os.memfd_create("kvstore-catalog", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        self._map = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # an older kernel: clients are trusted, as with the slab
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEALS)
        _FIELDS.pack_into(self._map, 0, _MAGIC, self.buckets, self.cells)
        whole = memoryview(self._map)
        self._words = whole[: _HEADER + self.buckets * WAYS * 8].cast("Q")
        filters = whole[_HEADER + self.buckets * WAYS * 8 :]
        self._halves = (filters[: self.cells], filters[self.cells :])
        self._into: tuple[memoryview, ...] = ()
        self._held = self._new = 0
        self._salts_of = functools.lru_cache(maxsize=4096)(self._make_salts)
        self._secret = os.urandom(32)

    def salt(self, tenant: str, namespace: str) -> bytes:
        """What a client of this tenant and namespace has to know to look its blocks up."""
        return struct.pack("<QQ", *self._salts_of(tenant, namespace))

    def show(self, key: Key) -> None:
        """The block is READY in L2."""
        mark, place = self._places(key)
        at = _HEADER // 8 + (place & (self.buckets - 1)) * WAYS
        bucket = self._words[at : at + WAYS].tolist()
        if mark not in bucket and 0 in bucket:
            self._words[at + bucket.index(0)] = mark
        if self._into:
            self._hold(mark, place, self._into)

    def take_off(self, key: Key) -> None:
        """The block is not in L2 any more."""
        mark, place = self._places(key)
        at = _HEADER // 8 + (place & (self.buckets - 1)) * WAYS
        bucket = self._words[at : at + WAYS].tolist()
        if mark in bucket:
            self._words[at + bucket.index(mark)] = 0

    def renew(self, list_shown: Callable[[], None], below: Iterable[Key]) -> None:
        """Make the other filter of what is held now, and put it in force.

        list_shown: shows every READY block (again). below: what the tiers hold, listed after that:
        a block that comes to a tier meanwhile was shown, and is in both filters. One renewal at a
        time.
        """
        generation = self._words[_GENERATION]
        fresh = self._halves[(generation + 1) & 1]
        fresh[:] = bytes(self.cells)
        old = self._into
        self._held = self._new = 0
        self._into = (fresh, *old)
        try:
            list_shown()
            for key in below:
                self._hold(*self._places(key), (fresh,))
        except BaseException:
            self._into = old
            raise
        self._new = 0
        self._words[_GENERATION] = generation + 1
        self._into = (fresh,)

    def close(self) -> None:
        """Let go of the file; clients keep what they have mapped, which says nothing certain."""
        self._into = ()
        self._words[_GENERATION] = 0
        os.close(self.fd)

    def _hold(self, mark: int, place: int, filters: tuple[memoryview, ...]) -> None:
        """Enter a block into filters, the newest of which is the first."""
        cells = [mark + n * place & (self.cells - 1) for n in (1, 2, 3)]
        known = all(filters[0][cell] for cell in cells)
        for half in filters:
            for cell in cells:
                half[cell] = 1
        if not known:
            self._held += 1
            self._new += 1
            few = self.cells // CROWDED
            if self._held >= few and self._new >= few // 2:
                self._new = 0
                self.crowded()

    def _places(self, key: Key) -> tuple[int, int]:
        return _places(key.hash, self._salts_of(key.tenant, key.namespace))

    def _make_salts(self, tenant: str, namespace: str) -> tuple[int, int]:
        named = f"{len(tenant)}:{tenant}{namespace}".encode()
        digest = hashlib.blake2b(named, key=self._secret, digest_size=SALT_BYTES).digest()
        first, second = struct.unpack("<QQ", digest)
        return first, second


class CatalogView:
    """A client's side: reads only. Any thread may call it, at any time.

    fd: of the memory file; still the caller's afterwards. salt: of the client's blocks.

    Raises ConfigError: it is no catalogue, or another salt than one.
    """

    def __init__(self, fd: int, salt: bytes) -> None:
        size = os.fstat(fd).st_size
        if size < _HEADER or len(salt) != SALT_BYTES:
            raise ConfigError(f"a catalogue of {size} bytes, a salt of {len(salt)}")
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        magic, buckets, cells = _FIELDS.unpack_from(mapped)
        fits = buckets & (buckets - 1) == 0 == cells & (cells - 1) and buckets and cells
        if magic != _MAGIC or not fits or size < catalog_bytes(buckets, cells):
            raise ConfigError(f"a catalogue of {size} bytes that is none")
        self._salts = struct.unpack("<QQ", salt)
        self._words = memoryview(mapped)[: _HEADER + buckets * WAYS * 8].cast("Q")
        words = np.frombuffer(self._words, np.uint64)
        self._shown = words[_HEADER // 8 :].reshape(buckets, WAYS)
        filters = memoryview(mapped)[_HEADER + buckets * WAYS * 8 :]
        self._halves = (filters[:cells], filters[cells : 2 * cells])
        self._buckets, self._cells = buckets, cells
        self._first, self._second = (np.uint64(salt) for salt in self._salts)
        self._mask = np.uint64(buckets - 1)

    def run(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are shown: READY in L2."""
        size = len(hashes[0]) if hashes else 0
        if size < SALT_BYTES or size % 8 or len(set(map(len, hashes))) > 1:
            return next((n for n, name in enumerate(hashes) if not self.shows(name)), len(hashes))
        return self.run_of(b"".join(hashes), size)

    def run_of(self, joined: bytes, size: int) -> int:
        """`run` of hashes of `size` bytes each, one after another; size: a multiple of 8, from 16
        on."""
        rows = np.frombuffer(joined, np.uint64).reshape(-1, size // 8)
        marks = rows[:, 0] ^ self._first
        places = (rows[:, 1] ^ self._second) & self._mask
        same = self._shown.take(places.view(np.int64), axis=0) == marks[:, None]
        if np.count_nonzero(same) == len(rows):  # no mark stands in its bucket twice
            return len(rows)
        shown = same.any(axis=1)
        return len(rows) if shown.all() else int(shown.argmin())

    def shows(self, name: bytes) -> bool:
        """Whether this block is READY in L2."""
        mark, place = _places(name, self._salts)
        return mark in self._shown[place & (self._buckets - 1)].tolist()

    def absent(self, name: bytes) -> bool:
        """Whether this block is nowhere, for certain; False says nothing."""
        generation = self._words[_GENERATION]
        if not generation:
            return False
        mark, place = _places(name, self._salts)
        mask, half = self._cells - 1, self._halves[generation & 1]
        held = (
            half[mark + place & mask]
            and half[mark + 2 * place & mask]
            and half[mark + 3 * place & mask]
        )
        return not held and bool(self._words[_GENERATION] == generation)


def _places(name: bytes, salts: tuple[int, ...]) -> tuple[int, int]:
    """(mark, place) of a hash: 64 bits each. A mark of 0 is that of an empty place."""
    return (
        int.from_bytes(name[:8], "little") ^ salts[0],
        int.from_bytes(name[8:16], "little") ^ salts[1],
    )


def _power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()


def _ignore(*_: Any) -> None:
    """Nobody asked to be told."""
