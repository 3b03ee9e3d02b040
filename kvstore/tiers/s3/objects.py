"""The tier's objects in the bucket: creates, reads, lists and deletes segments and tombstones.

`reconciler` decides which of them to keep.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvstore.blocks.key import Key
from kvstore.errors import TierError
from kvstore.tiers.base import IO_ALIGNMENT
from kvstore.tiers.disk.index import Entries
from kvstore.tiers.s3 import layout
from kvstore.tiers.s3.client import Client, ListedObject
from kvstore.tiers.s3.faults import Exists, Invalid, Missing, Unsupported
from kvstore.tiers.s3.packer import Group
from kvstore.tiers.s3.segment_index import Segment

MAX_THREADS: Final = 8
"""Concurrent requests while listing, reading footers and clearing."""
MAX_NAMES: Final = 4
"""Maximum number of names tried for one segment."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class BucketListing:
    """The tier's objects in the bucket. segments: by name. tombstones: by name of the segment."""

    segments: dict[str, ListedObject] = field(default_factory=dict)
    tombstones: dict[str, list[ListedObject]] = field(default_factory=dict)

    def names(self) -> set[str]:
        """Names of all objects."""
        return {item.name for items in self.tombstones.values() for item in items}.union(
            self.segments
        )


class Objects:
    """Segments and tombstones under `prefix`, spread over `shards` folders. Thread-safe.

    accept_peer_s: maximum age in seconds at which another node's segment of the same blocks is
    accepted in place of a new one; 0: never.
    """

    def __init__(self, client: Client, prefix: str, shards: int, accept_peer_s: float) -> None:
        self.client = client
        self._prefix = prefix
        self._shards = shards
        self._accept_peer_s = accept_peer_s

    # ------------------------------------------------------------------ segments

    def put(self, group: Group, is_usable: Callable[[str], bool]) -> Segment:
        """Upload a group as one segment, unless another node has just uploaded the same blocks.

        is_usable: whether a name may be used (its object is not about to be deleted).
        Raises TierUnavailable, TierError.
        """
        entries, sector = Entries(), 0
        for key, sectors in zip(group.keys, group.sectors, strict=True):
            entries.add(key, sector, sectors)
            sector += sectors
        identity = os.urandom(layout.IDENTITY_BYTES)
        packed = layout.pack_footer(entries, identity, group.nbytes)
        footer = layout.Footer(entries, identity, group.nbytes, group.nbytes + len(packed))
        body = [*group.views, memoryview(packed)]
        # The last name is unique, even if many nodes put the same blocks at the same time.
        for attempt in (*range(MAX_NAMES - 1), int.from_bytes(identity, "little")):
            name = layout.segment_name(self._prefix, self._shards, group.keys, attempt)
            if not is_usable(name):
                continue
            try:
                self.client.put(name, body, if_absent=True)
            except Exists:
                found = self._accept_peer_segment(name, footer)
                if found is None:
                    continue
                return found
            # The first listing sets the ETag, because some services return another one for a put.
            return Segment(name, footer, etag="", modified_s=self.client.now_s(), own=True)
        raise TierError(f"all {MAX_NAMES} names of the segment are in use by other nodes")

    def _accept_peer_segment(self, name: str, new_footer: layout.Footer) -> Segment | None:
        """The existing segment of this name, if the blocks are safe in it; else None.

        An older segment may be garbage-collected at any time, and one with a tombstone does not
        have all blocks.
        """
        found = None
        stem = name.removesuffix(layout.SEGMENT_SUFFIX)
        for item in self.client.list_objects(stem):
            if item.name != name:
                return None
            found = item
        if found is None:
            return None
        try:
            segment = self.open_segment(found)
        except (Missing, Invalid):
            return None
        if segment.identity == new_footer.identity:
            segment.own = True  # this node uploaded it, but the reply was lost
            return segment
        if (
            not self._accept_peer_s
            or self.client.now_s() - segment.modified_s > self._accept_peer_s
        ):
            return None
        return segment if _keys(segment.entries) == _keys(new_footer.entries) else None

    def open_segment(self, listed: ListedObject) -> Segment:
        """Read the footer of a listed segment.

        Raises Missing, Invalid, Unsupported, TierUnavailable.
        """
        guess = min(layout.FOOTER_GUESS_BYTES, listed.nbytes)
        if guess < layout.TRAILER_BYTES:
            raise Invalid("the object is shorter than a trailer")
        got = self.client.get(listed.name, None, guess, object_bytes=listed.nbytes)
        if len(got.body) != guess:
            raise Invalid("the reply does not have the requested length")
        wanted = layout.footer_bytes(got.body, listed.nbytes)
        if wanted > layout.MAX_FOOTER_BYTES:
            raise Invalid(f"footer of {wanted} bytes is too large")
        footer = got.body[-wanted:]
        if wanted > guess:
            footer = self.client.get(listed.name, None, wanted).body
        parsed = layout.parse_footer(footer, listed.nbytes)
        # Use the listing's ETag, because it is compared with the next listing.
        return Segment(
            listed.name, parsed, etag=listed.etag, modified_s=listed.modified_s, own=False
        )

    def read(self, segment: Segment, sector: int, header: memoryview, payload: memoryview) -> None:
        """Read a frame into the buffers. Raises Missing, Invalid, TierUnavailable."""
        first = sector * IO_ALIGNMENT
        last = first + len(header) + len(payload) - 1
        self.client.get(segment.name, first, last, [header, payload], object_bytes=segment.nbytes)

    def delete_segment(self, segment: Segment) -> None:
        """Delete a segment and its tombstones, but not a newer segment of the same name.

        Raises TierUnavailable, TierError.
        """
        with contextlib.suppress(Missing):
            if self._is_same_segment(segment):
                self.client.delete(segment.name)
        for name in segment.tombstones:
            self.client.delete(name)

    def _is_same_segment(self, segment: Segment) -> bool:
        """Whether the object is still this segment, or is corrupt. Raises Missing."""
        try:
            tail = self.client.get(segment.name, None, layout.TRAILER_BYTES).body
            return layout.identity_of(tail) == segment.identity
        except Unsupported:
            return False
        except Invalid:
            return True

    # ------------------------------------------------------------------ tombstones

    def write_tombstone(
        self, segment: Segment, deleted: Iterable[int], older: Iterable[str]
    ) -> str:
        """Write a tombstone for these sectors; returns its name.

        older: names of tombstones that list a subset of these sectors; they are deleted.
        Raises TierUnavailable, TierError.
        """
        tombstone = layout.pack_tombstone(segment.identity, deleted)
        name = layout.tombstone_name(segment.name, tombstone)
        self.client.put(name, [memoryview(tombstone)], if_absent=False)
        for old_name in set(older) - {name}:
            self.client.delete(old_name)
        return name

    def read_tombstone(self, listed: ListedObject, identity: bytes) -> set[int]:
        """The sectors in a tombstone; empty if it belongs to an earlier segment of the same name.

        Raises Missing, Invalid, Unsupported, TierUnavailable.
        """
        if not listed.nbytes or listed.nbytes > layout.MAX_TOMBSTONE_BYTES:
            raise Invalid(f"tombstone of {listed.nbytes} bytes")
        found, sectors = layout.parse_tombstone(
            self.client.get(listed.name, 0, listed.nbytes - 1).body
        )
        return sectors if found == identity else set()

    def delete_orphan(self, tombstone: ListedObject) -> None:
        """Delete a tombstone whose segment does not exist. Raises Unsupported, TierUnavailable."""
        with contextlib.suppress(Missing):
            start = min(layout.TOMBSTONE_START_BYTES, tombstone.nbytes)
            if start:
                layout.check_tombstone_version(self.client.get(tombstone.name, 0, start - 1).body)
            self.client.delete(tombstone.name)

    # ------------------------------------------------------------------ the whole bucket

    def list_bucket(self) -> BucketListing:
        """List the tier's objects, also those written with another number of shards.

        Raises TierUnavailable, TierError.
        """
        found = BucketListing()
        for items in self.map_concurrently(
            lambda folder: list(self.client.list_objects(folder)),
            self.client.list_folders(self._prefix),
        ):
            for item in items:
                if not layout.is_tier_object(item.name, self._prefix):
                    continue
                if item.name.endswith(layout.SEGMENT_SUFFIX):
                    found.segments[item.name] = item
                else:
                    found.tombstones.setdefault(layout.segment_of(item.name), []).append(item)
        return found

    def clear(self) -> None:
        """Delete all objects of the tier, segments before their tombstones."""
        listing = self.list_bucket()
        tombstones = [item.name for each in listing.tombstones.values() for item in each]
        for names in (list(listing.segments), tombstones):
            for _ in self.map_concurrently(self.client.delete, names):
                pass

    def map_concurrently(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Apply `work` to every item in several threads; yields the results in order."""
        if len(items) < 2:
            yield from map(work, items)
            return
        waiting: deque[tuple[T, Future[R]]] = deque((item, Future()) for item in items)
        results = deque(future for _, future in waiting)

        def work_on_queue() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    item, future = waiting.popleft()
                    try:
                        future.set_result(work(item))
                    except BaseException as error:
                        future.set_exception(error)

        # Daemon threads, because an executor's threads keep the process alive while S3 hangs.
        threads = [
            threading.Thread(target=work_on_queue, name=f"kvstore-s3-{number}", daemon=True)
            for number in range(min(MAX_THREADS, len(items)))
        ]
        for thread in threads:
            thread.start()
        try:
            while results:
                yield results.popleft().result()
        finally:
            waiting.clear()
            for thread in threads:
                thread.join()


def _keys(entries: Entries) -> set[Key]:
    return {key for key, _, _ in entries}
