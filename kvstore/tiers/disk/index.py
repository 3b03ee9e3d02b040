"""Where each block lies: the disk tier's memory of itself.

A place is one number, and hashes are looked up in a dict per (tenant, namespace): neither is an
object that Python's garbage collector has to visit, which with a million blocks would stop an
engine in the same process for a tenth of a second at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Sequence

import msgpack
import numpy as np

from kvstore.blocks.key import Key

_PAGES_BITS = 19
_PAGE_BITS = 28
MAX_FRAME_PAGES = (1 << _PAGES_BITS) - 1
"""Largest frame a place can name: 2 GiB."""
MAX_SEGMENT_PAGES = 1 << _PAGE_BITS
"""Largest segment a place can name: 1 TiB."""
MAX_SLOTS = 1 << 12
"""Most segments open at once."""
MAX_NAMES = 1 << 16
"""Most (tenant, namespace) pairs in one segment."""

Name = tuple[str, str]


def pack_place(slot: int, page: int, pages: int) -> int:
    """One number for `pages` pages from `page` on, in the segment in table slot `slot`."""
    return ((slot << _PAGE_BITS) | page) << _PAGES_BITS | pages


def unpack_place(place: int) -> tuple[int, int, int]:
    """slot, page, pages."""
    rest = place >> _PAGES_BITS
    return rest >> _PAGE_BITS, rest & (MAX_SEGMENT_PAGES - 1), place & MAX_FRAME_PAGES


class Entries:
    """The blocks of one segment, column by column; what a footer holds."""

    def __init__(self) -> None:
        self.names: dict[Name, int] = {}
        self.name_of = array("H")
        self.hashes: list[bytes] = []
        self.page_of = array("I")
        self.pages_of = array("I")

    def __len__(self) -> int:
        return len(self.hashes)

    def add(self, key: Key, page: int, pages: int) -> None:
        """Append a block."""
        self.name_of.append(self.names.setdefault((key.tenant, key.namespace), len(self.names)))
        self.hashes.append(key.hash)
        self.page_of.append(page)
        self.pages_of.append(pages)

    def __iter__(self) -> Iterator[tuple[Key, int, int]]:
        """(key, page, pages) of each block, in the order they were added."""
        names = list(self.names)
        rows = zip(self.name_of, self.hashes, self.page_of, self.pages_of, strict=True)
        for name, hash_, page, pages in rows:
            yield Key(*names[name], hash_), page, pages

    def in_page_order(self, *, without: Container[int] = ()) -> Entries:
        """The same blocks by page, less those at the pages in `without`."""
        ordered = Entries()
        for key, page, pages in sorted(self, key=lambda row: row[1]):
            if page not in without:
                ordered.add(key, page, pages)
        return ordered

    def before(self, end: int, *, without: Container[int] = ()) -> Entries:
        """A copy of the blocks at pages before `end`, less those at the pages in `without`."""
        kept = Entries()
        kept.names = dict(self.names)
        rows = zip(self.name_of, self.hashes, self.page_of, self.pages_of, strict=True)
        for name, hash_, page, pages in rows:
            if page < end and page not in without:
                kept.name_of.append(name)
                kept.hashes.append(hash_)
                kept.page_of.append(page)
                kept.pages_of.append(pages)
        return kept

    def pack(self) -> bytes:
        """All columns as bytes, for `unpack`."""
        names = msgpack.packb(list(self.names))
        return b"".join(
            (
                len(self).to_bytes(4, "little"),
                len(names).to_bytes(4, "little"),
                names,
                np.asarray(self.name_of, "<u2").tobytes(),
                np.asarray(self.page_of, "<u4").tobytes(),
                np.asarray(self.pages_of, "<u4").tobytes(),
                bytes(map(len, self.hashes)),
                *self.hashes,
            )
        )

    @classmethod
    def unpack(cls, body: bytes) -> Entries:
        """Raises ValueError for bytes that `pack` cannot have made."""
        count, names_bytes = (int.from_bytes(body[at : at + 4], "little") for at in (0, 4))
        at = 8 + names_bytes
        if at + count * 11 > len(body):
            raise ValueError("an index that ends early")
        entries = cls()
        names = [(str(tenant), str(space)) for tenant, space in msgpack.unpackb(body[8:at])]
        entries.names = {name: number for number, name in enumerate(names)}
        for column, kind in ((entries.name_of, "<u2"), (entries.page_of, "<u4")):
            column.extend(np.frombuffer(body, kind, count, at).tolist())
            at += count * int(kind[2])
        entries.pages_of.extend(np.frombuffer(body, "<u4", count, at).tolist())
        at += 4 * count
        lengths = body[at : at + count]
        at += count
        for length in lengths:
            entries.hashes.append(body[at : at + length])
            at += length
        if at != len(body) or len(entries.names) != len(names):
            raise ValueError("an index of another length than its columns")
        if count and max(entries.name_of) >= len(names):
            raise ValueError("an index that names what it does not hold")
        return entries

    def places(self, slot: int) -> list[int]:
        """The place of each block, given the segment's table slot."""
        page = np.asarray(self.page_of, np.int64)
        pages = np.asarray(self.pages_of, np.int64)
        places: list[int] = (((slot << _PAGE_BITS) | page) << _PAGES_BITS | pages).tolist()
        return places


def entry_bytes(key: Key) -> int:
    """Most bytes by which one more block lengthens a packed index."""
    names = 16 + len(key.tenant.encode()) + len(key.namespace.encode())
    return 11 + len(key.hash) + names


class Index:
    """Key to place. Not thread-safe: the tier's lock guards it."""

    def __init__(self) -> None:
        self._names: dict[Name, dict[bytes, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        places = self._names.get(key[:2])
        return places is not None and key[2] in places

    def held(self, keys: Sequence[Key]) -> list[bool]:
        """`in` for each key. A run's keys differ in their hashes only: a third of the time then."""
        if not keys:
            return []
        tenants, namespaces, hashes = zip(*keys, strict=True)
        if len(set(tenants)) > 1 or len(set(namespaces)) > 1:
            return [key in self for key in keys]
        places = self._names.get((tenants[0], namespaces[0]), {})
        return list(map(places.__contains__, hashes))

    def get(self, key: Key) -> int:
        """The key's place; 0 when it has none (page 0 of a segment is never a block)."""
        places = self._names.get(key[:2])
        return 0 if places is None else places.get(key[2], 0)

    def put(self, key: Key, place: int) -> None:
        """Set the key's place."""
        places = self._names.setdefault(key[:2], {})
        self._count += key[2] not in places
        places[key[2]] = place

    def put_many(self, name: Name, hashes: list[bytes], places: list[int]) -> list[int]:
        """`put` for many blocks of one tenant and namespace; the places that are theirs no more."""
        if not hashes:
            return []
        known = self._names.setdefault(name, {})
        old = []
        if not known.keys().isdisjoint(hashes):
            old = [known[hash_] for hash_ in hashes if hash_ in known]
        before = len(known)
        known.update(zip(hashes, places, strict=True))
        self._count += len(known) - before
        return old

    def remove(self, key: Key, place: int) -> bool:
        """Forget the key if it still lies at `place`; whether it did."""
        places = self._names.get(key[:2])
        if places is None or places.get(key[2]) != place:
            return False
        del places[key[2]]
        if not places:
            del self._names[key[:2]]
        self._count -= 1
        return True

    def live(self, entries: Entries, slot: int) -> list[tuple[Key, int]]:
        """Those of a segment's entries that still lie there: key and pages of each, as written."""
        names = [(name, self._names.get(name, {})) for name in entries.names]
        found = []
        rows = zip(
            entries.name_of, entries.hashes, entries.places(slot), entries.pages_of, strict=True
        )
        for number, hash_, place, pages in rows:
            (tenant, namespace), places = names[number]
            if places.get(hash_) == place:
                found.append((Key(tenant, namespace, hash_), pages))
        return found

    def remove_all(self, entries: Entries, slot: int) -> int:
        """Forget those of a segment's entries that still lie there; how many did."""
        names = [self._names.get(name, {}) for name in entries.names]
        removed = 0
        rows = zip(entries.name_of, entries.hashes, entries.places(slot), strict=True)
        for number, hash_, place in rows:
            places = names[number]
            if places.get(hash_) == place:
                del places[hash_]
                removed += 1
        for name in entries.names:
            if not self._names.get(name, True):
                del self._names[name]
        self._count -= removed
        return removed
