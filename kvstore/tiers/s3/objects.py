"""The tier's objects in the bucket: segments and graves, made, read, listed and removed.

Knows names and bytes; what is worth keeping is decided elsewhere (`catalog`, `keeper`).
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
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.disk.index import Entries
from kvstore.tiers.s3 import layout
from kvstore.tiers.s3.client import Client, Listed
from kvstore.tiers.s3.faults import Exists, Invalid, Missing
from kvstore.tiers.s3.packer import Group
from kvstore.tiers.s3.segment_index import Segment

HELPERS: Final = 8
"""Requests in flight while listing, reading footers and clearing."""
MAX_NAMES: Final = 4
"""Names tried for one segment."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Listing:
    """Everything of ours in the bucket. graves: by the name of the segment they belong to."""

    segments: dict[str, Listed] = field(default_factory=dict)
    graves: dict[str, list[Listed]] = field(default_factory=dict)


class Objects:
    """Segments and graves under `prefix`, spread over `shards` folders. Thread-safe.

    adopt_s: age up to which somebody else's segment of the same blocks is as good as our own;
    0: none is.
    """

    def __init__(self, client: Client, prefix: str, shards: int, adopt_s: float) -> None:
        self.client = client
        self._prefix = prefix
        self._shards = shards
        self._adopt_s = adopt_s

    # ------------------------------------------------------------------ segments

    def put(self, group: Group, usable: Callable[[str], bool]) -> Segment:
        """Upload a group as one segment, or find that somebody has just done so.

        usable: whether a name may be used (it is not about to be removed).
        Raises TierUnavailable, TierError.
        """
        entries, page = Entries(), 0
        for key, pages in zip(group.keys, group.pages, strict=True):
            entries.add(key, page, pages)
            page += pages
        identity = os.urandom(layout.IDENTITY_BYTES)
        packed = layout.pack_footer(entries, identity, group.nbytes)
        footer = layout.Footer(entries, identity, group.nbytes, group.nbytes + len(packed))
        body = [*group.views, memoryview(packed)]
        # The last name is nobody else's, however many nodes put the same blocks at once.
        for attempt in (*range(MAX_NAMES - 1), int.from_bytes(identity, "little")):
            name = layout.segment_name(self._prefix, self._shards, group.keys, attempt)
            if not usable(name):
                continue
            try:
                self.client.put(name, body, absent=True)
            except Exists:
                found = self._adopt(name, footer)
                if found is None:
                    continue
                return found
            # Its ETag is learnt from the first listing: some services put another into the reply.
            return Segment(name, footer, etag="", modified_s=self.client.now_s(), own=True)
        raise TierError(f"{MAX_NAMES} names of a segment are all taken by others")

    def _adopt(self, name: str, ours: layout.Footer) -> Segment | None:
        """The segment of that name, if our blocks are safe in it; None when they are not.

        An older one may be collected at any moment, and one with a grave lacks some blocks.
        """
        found = None
        stem = name.removesuffix(layout.SEGMENT_SUFFIX)
        for item in self.client.listing(stem):
            if item.name != name:
                return None
            found = item
        if found is None:
            return None
        try:
            segment = self.open(found)
        except (Missing, Invalid):
            return None
        if segment.identity == ours.identity:
            segment.own = True  # the reply to our own put was lost
            return segment
        if not self._adopt_s or self.client.now_s() - segment.modified_s > self._adopt_s:
            return None
        return segment if _keys(segment.entries) == _keys(ours.entries) else None

    def open(self, listed: Listed) -> Segment:
        """What a listed segment's footer says. Raises Missing, Invalid, TierUnavailable."""
        guess = min(layout.FOOTER_GUESS_BYTES, listed.nbytes)
        if guess < layout.TRAILER_BYTES:
            raise Invalid("shorter than a trailer")
        got = self.client.get(listed.name, None, guess, of_bytes=listed.nbytes)
        if len(got.body) != guess:
            raise Invalid("not the bytes that were asked for")
        wanted = layout.footer_bytes(got.body, listed.nbytes)
        if wanted > layout.MAX_FOOTER_BYTES:
            raise Invalid(f"a footer of {wanted} bytes")
        footer = got.body[-wanted:]
        if wanted > guess:
            footer = self.client.get(listed.name, None, wanted).body
        parsed = layout.parse_footer(footer, listed.nbytes)
        # The listing's ETag, not the reply's: it is what the next listing is compared with.
        return Segment(
            listed.name, parsed, etag=listed.etag, modified_s=listed.modified_s, own=False
        )

    def read(self, segment: Segment, page: int, header: memoryview, payload: memoryview) -> None:
        """Fill the buffers with a frame. Raises Missing, Invalid, TierUnavailable."""
        first = page * PAGE_BYTES
        last = first + len(header) + len(payload) - 1
        self.client.get(segment.name, first, last, [header, payload], of_bytes=segment.nbytes)

    def remove(self, segment: Segment) -> None:
        """Remove a segment, unless its name means another one by this time, and its graves.

        Raises TierUnavailable, TierError.
        """
        with contextlib.suppress(Missing):
            if self._is_still(segment):
                self.client.delete(segment.name)
        for name in segment.graves:
            self.client.delete(name)

    def _is_still(self, segment: Segment) -> bool:
        """Whether the object of that name is this segment, or a ruin. Raises Missing."""
        try:
            tail = self.client.get(segment.name, None, layout.TRAILER_BYTES).body
            return layout.identity_of(tail) == segment.identity
        except Invalid:
            return True

    # ------------------------------------------------------------------ graves

    def bury(self, segment: Segment, dead: Iterable[int], older: Iterable[str]) -> str:
        """Say for good that the blocks at these pages are deleted; the grave's name.

        older: graves that hold no other page; they are removed. Raises TierUnavailable, TierError.
        """
        grave = layout.pack_grave(segment.identity, dead)
        name = layout.grave_name(segment.name, grave)
        self.client.put(name, [memoryview(grave)], absent=False)
        for grave_before in set(older) - {name}:
            self.client.delete(grave_before)
        return name

    def dug(self, listed: Listed, identity: bytes) -> set[int]:
        """Pages that a grave names; none if it belongs to an earlier segment of the same name.

        Raises Missing, Invalid, TierUnavailable.
        """
        if not listed.nbytes or listed.nbytes > layout.MAX_GRAVE_BYTES:
            raise Invalid(f"a grave of {listed.nbytes} bytes")
        found, pages = layout.parse_grave(self.client.get(listed.name, 0, listed.nbytes - 1).body)
        return pages if found == identity else set()

    # ------------------------------------------------------------------ all of them

    def listing(self) -> Listing:
        """Every object of ours, whatever number of shards it was written with.

        Raises TierUnavailable, TierError.
        """
        found = Listing()
        for items in self.each(
            lambda folder: list(self.client.listing(folder)), self.client.folders(self._prefix)
        ):
            for item in items:
                if not layout.is_ours(item.name, self._prefix):
                    continue
                if item.name.endswith(layout.SEGMENT_SUFFIX):
                    found.segments[item.name] = item
                else:
                    found.graves.setdefault(layout.segment_of(item.name), []).append(item)
        return found

    def clear(self) -> None:
        """Remove every object of ours; segments before their graves."""
        listing = self.listing()
        graves = [item.name for each in listing.graves.values() for item in each]
        for names in (list(listing.segments), graves):
            for _ in self.each(self.client.delete, names):
                pass

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """`work` on every item, several at a time; results in order, as they come."""
        if len(items) < 2:
            yield from map(work, items)
            return
        waiting: deque[tuple[T, Future[R]]] = deque((item, Future()) for item in items)
        results = deque(future for _, future in waiting)

        def help_out() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    item, future = waiting.popleft()
                    try:
                        future.set_result(work(item))
                    except BaseException as error:
                        future.set_exception(error)

        # Not an executor's threads: those would keep a process from ending while S3 hangs.
        threads = [
            threading.Thread(target=help_out, name=f"kvstore-s3-{number}", daemon=True)
            for number in range(min(HELPERS, len(items)))
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
