"""The disk tier's index in memory: the location of each block.

A location is one integer, and the hashes of each (tenant, namespace) are in one dict. Python's
garbage collector visits neither. If it visited an object for each of a million blocks, it would
stop an engine in the same process for a tenth of a second each time.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Sequence

import msgpack
import numpy as np

from kvstore.blocks.key import Key

_LENGTH_BITS = 19
_SECTOR_BITS = 28
MAX_FRAME_SECTORS = (1 << _LENGTH_BITS) - 1
"""Maximum frame in a location: 2 GiB."""
MAX_SEGMENT_SECTORS = 1 << _SECTOR_BITS
"""Maximum segment in a location: 1 TiB."""
MAX_OPEN_SEGMENTS = 1 << 12
"""Maximum number of open segments."""
MAX_NAMESPACES = 1 << 16
"""Maximum number of (tenant, namespace) pairs in one segment."""

TenantNamespace = tuple[str, str]
"""(tenant, namespace)."""


def pack_location(segment_no: int, sector: int, sectors: int) -> int:
    """The location of a frame as one integer: `sectors` sectors from `sector` of a segment."""
    return ((segment_no << _SECTOR_BITS) | sector) << _LENGTH_BITS | sectors


def unpack_location(location: int) -> tuple[int, int, int]:
    """(segment_no, sector, sectors)."""
    rest = location >> _LENGTH_BITS
    return rest >> _SECTOR_BITS, rest & (MAX_SEGMENT_SECTORS - 1), location & MAX_FRAME_SECTORS


class Entries:
    """The blocks of one segment in columns. A footer stores them packed."""

    def __init__(self) -> None:
        self.namespaces: dict[TenantNamespace, int] = {}
        self.namespace_ids = array("H")
        self.hashes: list[bytes] = []
        self.first_sectors = array("I")
        self.sector_counts = array("I")

    def __len__(self) -> int:
        return len(self.hashes)

    def add(self, key: Key, sector: int, sectors: int) -> None:
        """Append a block."""
        self.namespace_ids.append(
            self.namespaces.setdefault((key.tenant, key.namespace), len(self.namespaces))
        )
        self.hashes.append(key.hash)
        self.first_sectors.append(sector)
        self.sector_counts.append(sectors)

    def __iter__(self) -> Iterator[tuple[Key, int, int]]:
        """(key, sector, sectors) of each block, in the order of `add`."""
        namespaces = list(self.namespaces)
        rows = zip(
            self.namespace_ids, self.hashes, self.first_sectors, self.sector_counts, strict=True
        )
        for namespace, hash_, sector, sectors in rows:
            yield Key(*namespaces[namespace], hash_), sector, sectors

    def sorted_by_sector(self, *, without: Container[int] = ()) -> Entries:
        """A copy in the order of the sectors, without the blocks at the sectors in `without`."""
        ordered = Entries()
        for key, sector, sectors in sorted(self, key=lambda row: row[1]):
            if sector not in without:
                ordered.add(key, sector, sectors)
        return ordered

    def copy_before(self, end: int, *, without: Container[int] = ()) -> Entries:
        """A copy of the blocks before sector `end`, without those at the sectors in `without`."""
        kept = Entries()
        kept.namespaces = dict(self.namespaces)
        rows = zip(
            self.namespace_ids, self.hashes, self.first_sectors, self.sector_counts, strict=True
        )
        for namespace, hash_, sector, sectors in rows:
            if sector < end and sector not in without:
                kept.namespace_ids.append(namespace)
                kept.hashes.append(hash_)
                kept.first_sectors.append(sector)
                kept.sector_counts.append(sectors)
        return kept

    def pack(self) -> bytes:
        """All columns as bytes; `unpack` reads them."""
        namespaces = msgpack.packb(list(self.namespaces))
        return b"".join(
            (
                len(self).to_bytes(4, "little"),
                len(namespaces).to_bytes(4, "little"),
                namespaces,
                np.asarray(self.namespace_ids, "<u2").tobytes(),
                np.asarray(self.first_sectors, "<u4").tobytes(),
                np.asarray(self.sector_counts, "<u4").tobytes(),
                bytes(map(len, self.hashes)),
                *self.hashes,
            )
        )

    @classmethod
    def unpack(cls, body: bytes) -> Entries:
        """The entries that `pack` wrote. Raises ValueError: the bytes are corrupt."""
        count, namespaces_bytes = (int.from_bytes(body[at : at + 4], "little") for at in (0, 4))
        at = 8 + namespaces_bytes
        if at + count * 11 > len(body):
            raise ValueError("truncated index")
        entries = cls()
        namespaces = [(str(tenant), str(space)) for tenant, space in msgpack.unpackb(body[8:at])]
        entries.namespaces = {namespace: number for number, namespace in enumerate(namespaces)}
        for column, kind in ((entries.namespace_ids, "<u2"), (entries.first_sectors, "<u4")):
            column.extend(np.frombuffer(body, kind, count, at).tolist())
            at += count * int(kind[2])
        entries.sector_counts.extend(np.frombuffer(body, "<u4", count, at).tolist())
        at += 4 * count
        lengths = body[at : at + count]
        at += count
        for length in lengths:
            entries.hashes.append(body[at : at + length])
            at += length
        if at != len(body) or len(entries.namespaces) != len(namespaces):
            raise ValueError("index length does not match its columns")
        if count and max(entries.namespace_ids) >= len(namespaces):
            raise ValueError("index refers to an unknown namespace")
        return entries

    def locations(self, segment_no: int) -> list[int]:
        """The location of each block in the segment with this number."""
        first = np.asarray(self.first_sectors, np.int64)
        counts = np.asarray(self.sector_counts, np.int64)
        locations: list[int] = (
            ((segment_no << _SECTOR_BITS) | first) << _LENGTH_BITS | counts
        ).tolist()
        return locations


def max_entry_bytes(key: Key) -> int:
    """Maximum bytes that one more block adds to a packed index."""
    namespace_bytes = 16 + len(key.tenant.encode()) + len(key.namespace.encode())
    return 11 + len(key.hash) + namespace_bytes


class Index:
    """Maps keys to locations. Not thread-safe: the tier's lock guards it."""

    def __init__(self) -> None:
        self._by_namespace: dict[TenantNamespace, dict[bytes, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        locations = self._by_namespace.get(key[:2])
        return locations is not None and key[2] in locations

    def contains_each(self, keys: Sequence[Key]) -> list[bool]:
        """Whether the index contains each key. Takes a third of the time if all keys have the same
        tenant and namespace, as the blocks of one request do."""
        if not keys:
            return []
        tenants, namespaces, hashes = zip(*keys, strict=True)
        if len(set(tenants)) > 1 or len(set(namespaces)) > 1:
            return [key in self for key in keys]
        locations = self._by_namespace.get((tenants[0], namespaces[0]), {})
        return list(map(locations.__contains__, hashes))

    def get(self, key: Key) -> int:
        """The key's location; 0: unknown key (sector 0 of a segment is never a block)."""
        locations = self._by_namespace.get(key[:2])
        return 0 if locations is None else locations.get(key[2], 0)

    def put(self, key: Key, location: int) -> None:
        """Set the key's location."""
        locations = self._by_namespace.setdefault(key[:2], {})
        self._count += key[2] not in locations
        locations[key[2]] = location

    def put_many(
        self, namespace: TenantNamespace, hashes: list[bytes], locations: list[int]
    ) -> list[int]:
        """`put` for many blocks of one namespace; returns the locations that were replaced."""
        if not hashes:
            return []
        current = self._by_namespace.setdefault(namespace, {})
        replaced = []
        if not current.keys().isdisjoint(hashes):
            replaced = [current[hash_] for hash_ in hashes if hash_ in current]
        before = len(current)
        current.update(zip(hashes, locations, strict=True))
        self._count += len(current) - before
        return replaced

    def remove(self, key: Key, location: int) -> bool:
        """Remove the key if its location is `location`; returns whether it was."""
        locations = self._by_namespace.get(key[:2])
        if locations is None or locations.get(key[2]) != location:
            return False
        del locations[key[2]]
        if not locations:
            del self._by_namespace[key[:2]]
        self._count -= 1
        return True

    def live_entries(self, entries: Entries, segment_no: int) -> list[tuple[Key, int]]:
        """(key, sectors) of the entries of a segment whose location is in that segment."""
        namespaces = [
            (namespace, self._by_namespace.get(namespace, {})) for namespace in entries.namespaces
        ]
        found = []
        rows = zip(
            entries.namespace_ids,
            entries.hashes,
            entries.locations(segment_no),
            entries.sector_counts,
            strict=True,
        )
        for number, hash_, location, sectors in rows:
            (tenant, namespace), locations = namespaces[number]
            if locations.get(hash_) == location:
                found.append((Key(tenant, namespace, hash_), sectors))
        return found

    def remove_all(self, entries: Entries, segment_no: int) -> int:
        """Remove the entries of a segment whose location is in that segment; returns how many."""
        namespaces = [self._by_namespace.get(namespace, {}) for namespace in entries.namespaces]
        removed = 0
        rows = zip(
            entries.namespace_ids, entries.hashes, entries.locations(segment_no), strict=True
        )
        for number, hash_, location in rows:
            locations = namespaces[number]
            if locations.get(hash_) == location:
                del locations[hash_]
                removed += 1
        for namespace in entries.namespaces:
            if not self._by_namespace.get(namespace, True):
                del self._by_namespace[namespace]
        self._count -= removed
        return removed
