"""The thread that reconciles the index with the bucket and collects garbage.

Every `list_interval_s` it lists the tier's objects in the bucket. It reads the footers of new
segments, untracks missing segments, and applies new tombstones. Then it deletes useless segments.

Nodes do not communicate. Each rule of the garbage collection depends only on facts that every node
can see. Concurrent collectors therefore delete the same objects, or do no harm
(docs/decisions/0008-s3-tier.md has the argument).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvstore.blocks.key import Key
from kvstore.errors import TierError, TierFull
from kvstore.tiers.s3.client import ListedObject
from kvstore.tiers.s3.faults import Invalid, Missing, Unsupported
from kvstore.tiers.s3.layout import SEGMENT_SUFFIX
from kvstore.tiers.s3.objects import BucketListing, Objects
from kvstore.tiers.s3.segment_index import MAX_SEGMENTS, Segment, SegmentIndex

log = logging.getLogger(__name__)

JITTER: Final = 0.2
"""Random fraction of the list interval, so that nodes do not collect at the same time."""
STOP_WAIT_S: Final = 5.0
"""Maximum wait of `stop` for a running round."""


@dataclass(frozen=True)
class RetentionRules:
    """Rules for keeping segments. capacity_bytes, ttl_s: 0 for no limit."""

    capacity_bytes: int
    ttl_s: float
    gc_grace_s: float
    list_interval_s: float

    @property
    def accept_peer_s(self) -> float:
        """Maximum age in seconds of another node's segment that is accepted for the same blocks.

        It is half of the grace period, or of the TTL if that is shorter. An accepted segment then
        stays for at least the other half. With a capacity it is 0: the owner may delete its segment
        at any age to make room, because nodes do not communicate.
        """
        lifetime_s = min(self.gc_grace_s, self.ttl_s) if self.ttl_s else self.gc_grace_s
        return 0.0 if self.capacity_bytes else lifetime_s / 2


class Reconciler:
    """Reconciles a `SegmentIndex` with the bucket, and keeps the bucket within the rules.

    Thread-safe. lock: the tier's lock. It guards the index and this object. No thread owns it
    during a request.
    """

    def __init__(
        self,
        index: SegmentIndex,
        objects: Objects,
        lock: threading.Condition,
        rules: RetentionRules,
    ) -> None:
        self._index = index
        self._objects = objects
        self._lock = lock
        self._rules = rules
        self._reserved_bytes = 0
        self._pending_deletes: dict[str, Segment] = {}
        """Untracked segments that may still be in the bucket."""
        self._recently_removed: set[str] = set()
        """Names removed since this round began. Its listing may still contain them."""
        self._invalid: dict[str, str] = {}
        """ETags of invalid objects by name. They are not read again in each round."""
        self._unsupported: set[str] = set()
        """Names of objects of later versions. They are not read again, and never deleted."""
        self._first_round = threading.Event()
        self._stopping = threading.Event()
        self._counts = dict.fromkeys(
            ("evictions", "expired", "duplicates", "vanished", "corrupt_segments", "listings"), 0
        )
        self._round_lock = threading.Lock()
        """Serializes rounds and `clear`."""
        self._thread = threading.Thread(target=self._run, name="kvstore-s3-reconciler", daemon=True)

    def start(self, wait_s: float) -> bool:
        """Start the thread; returns whether the first round ended within `wait_s` seconds."""
        self._thread.start()
        return self._first_round.wait(wait_s)

    def request_stop(self) -> None:
        """Start no more rounds, and end a running round as soon as possible."""
        self._stopping.set()

    def stop(self, wait_s: float = STOP_WAIT_S) -> bool:
        """Stop the thread; returns False if a request hangs for longer than `wait_s`."""
        self.request_stop()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def stats(self) -> dict[str, int | float | str]:
        """Statistics. The caller owns the lock."""
        return {
            **self._counts,
            "segments": len(self._index.segments),
            "segments_unsupported": sum(
                name.endswith(SEGMENT_SUFFIX) for name in self._unsupported
            ),
            "segments_pending_delete": len(self._pending_deletes),
            "bytes_used": self._index.used_bytes + self._pending_delete_bytes(),
            "bytes_capacity": self._rules.capacity_bytes,
        }

    # ------------------------------------------------------------------ room

    def reserve(self, nbytes: int) -> None:
        """Reserve room for a segment, deleting others if necessary.

        Raises TierFull (no room can be made), TierUnavailable, TierError.
        """
        victims: list[Segment] = []
        with self._lock:
            if self._rules.capacity_bytes:
                victims = self._make_room(nbytes)
            self._reserved_bytes += nbytes
        try:
            self.delete(victims)
        except BaseException:
            self.release(nbytes)
            raise

    def release(self, nbytes: int) -> None:
        """End a reservation: the room is used, or not needed."""
        with self._lock:
            self._reserved_bytes -= nbytes

    def _make_room(self, nbytes: int) -> list[Segment]:
        """Untrack LRU segments until `nbytes` more fit. The caller owns the lock."""
        room = (
            self._rules.capacity_bytes
            - self._reserved_bytes
            - self._pending_delete_bytes()
            - nbytes
        )
        victims: list[Segment] = []
        used = self._index.used_bytes
        for segment in self._index.lru_order():
            if used <= room:
                break
            if segment.own or self._is_past_grace(segment):
                victims.append(segment)
                used -= segment.nbytes
        if used > room:
            raise TierFull("the tier is full, and all segments are younger than gc_grace")
        for segment in victims:
            self._counts["evictions"] += self.untrack(segment)
        return victims

    def _pending_delete_bytes(self) -> int:
        return sum(segment.nbytes for segment in self._pending_deletes.values())

    def _is_past_grace(self, segment: Segment) -> bool:
        """Whether the segment is older than the grace period, so no node relies on it any more."""
        age_s = self._objects.client.now_s() - segment.modified_s
        return age_s > self._rules.gc_grace_s

    def is_expired(self, segment: Segment) -> bool:
        """Whether the segment is older than the TTL."""
        ttl_s = self._rules.ttl_s
        return bool(ttl_s) and self._objects.client.now_s() - segment.modified_s > ttl_s

    def find(self, key: Key) -> tuple[Segment, int, int] | None:
        """(segment, sector, sectors) of a block that has not expired. The caller owns the lock.

        An expired segment is untracked, because it would hide a newer copy of the block.
        """
        while (found := self._index.find(key)) is not None and self.is_expired(found[0]):
            self._counts["expired"] += self.untrack(found[0])
        return found

    # ------------------------------------------------------------------ tracking and deleting

    def is_usable(self, name: str) -> bool:
        """Whether a new segment may use this name: no deletion of that name is pending."""
        with self._lock:
            return name not in self._pending_deletes

    def register(self, segment: Segment) -> None:
        """Make a segment in the bucket visible to readers. The caller owns the lock."""
        tracked = self._index.segments.get(segment.name)
        if tracked is not None:
            if tracked.identity == segment.identity:
                return
            self._index.remove_segment(tracked)
        self._recently_removed.discard(segment.name)
        if len(self._index.segments) >= MAX_SEGMENTS:
            raise TierFull(f"the tier has {MAX_SEGMENTS} segments, the maximum")
        self._index.add_segment(segment)

    def untrack(self, segment: Segment, *, delete: bool = True) -> int:
        """Hide a segment from readers; returns the number of lost keys. The caller owns the lock.

        delete: delete it from the bucket in the next round. False: it is not in the bucket.
        """
        lost = self._index.remove_segment(segment)
        self._recently_removed.add(segment.name)
        if delete:
            self._pending_deletes[segment.name] = segment
        return lost

    def on_missing(self, segment: Segment) -> None:
        """Untrack a segment that a reader found missing. The caller owns the lock."""
        self._counts["vanished"] += self.untrack(segment, delete=False)

    def delete(self, segments: Iterable[Segment]) -> None:
        """Delete untracked segments from the bucket. The next round retries those that fail.

        Raises TierUnavailable, TierError.
        """
        for _ in self._objects.map_concurrently(self._delete_one, list(segments)):
            pass

    def _delete_one(self, segment: Segment) -> None:
        self._objects.delete_segment(segment)
        with self._lock:
            self._recently_removed.add(segment.name)
            if self._pending_deletes.get(segment.name) is segment:
                del self._pending_deletes[segment.name]

    def write_tombstone(self, segment: Segment) -> None:
        """Record the deletions in a segment in the bucket. Raises TierUnavailable."""
        with self._lock:
            # Copy both under one lock: this tombstone may lack sectors of later tombstones.
            deleted, older = set(segment.deleted_sectors), set(segment.tombstones)
        name = self._objects.write_tombstone(segment, deleted, older)
        with self._lock:
            segment.tombstones = (segment.tombstones - older) | {name}
            segment.tombstone_pending = segment.deleted_sectors != deleted

    def clear(self) -> None:
        """Delete all objects of the tier. Raises TierUnavailable, TierError."""
        with self._round_lock:
            with self._lock:
                for segment in list(self._index.segments.values()):
                    self.untrack(segment)
            self._objects.clear()
            with self._lock:
                self._pending_deletes.clear()
                self._invalid.clear()
                self._unsupported.clear()

    # ------------------------------------------------------------------ rounds

    def _run(self) -> None:
        failing = False
        while not self._stopping.is_set():
            try:
                self.reconcile()
                failing = False
            except TierError as error:
                level = logging.DEBUG if failing else logging.WARNING
                failing = True
                log.log(level, "%s: %s", self._objects.client.where, error)
            except Exception:
                log.exception("%s: internal error in reconciliation", self._objects.client.where)
            self._first_round.set()
            spread = 1 + JITTER * (2 * random.random() - 1)
            self._stopping.wait(self._rules.list_interval_s * spread)

    def reconcile(self) -> None:
        """Update the index, then collect garbage. Raises TierUnavailable, TierError."""
        with self._round_lock:
            with self._lock:
                last_serial = self._index.serial
                self._recently_removed.clear()
            listing = self._objects.list_bucket()
            self._untrack_missing(listing, last_serial)
            self._apply_new_tombstones(listing)
            self._open_new_segments(listing)
            self._collect_garbage(listing)
            with self._lock:
                self._counts["listings"] += 1

    def _untrack_missing(self, listing: BucketListing, last_serial: int) -> None:
        """Untrack segments that are missing in the listing, or replaced by another object."""
        with self._lock:
            for segment in list(self._index.segments.values()):
                listed = listing.segments.get(segment.name)
                if listed is None:
                    if segment.serial <= last_serial:
                        self._counts["vanished"] += self.untrack(segment, delete=False)
                elif listed.nbytes != segment.nbytes or segment.etag not in ("", listed.etag):
                    self._counts["vanished"] += self.untrack(segment, delete=False)
                    self._recently_removed.discard(segment.name)
                else:
                    segment.etag, segment.modified_s = listed.etag, listed.modified_s
                    tombstones = listing.tombstones.get(segment.name, [])
                    segment.tombstones &= {item.name for item in tombstones}
            self._invalid = {
                name: etag for name, etag in self._invalid.items() if name in listing.segments
            }
            self._unsupported &= listing.names()

    def _apply_new_tombstones(self, listing: BucketListing) -> None:
        """Apply other nodes' tombstones to tracked segments."""
        with self._lock:
            unread = [
                (self._index.segments[name], item)
                for name, items in listing.tombstones.items()
                for item in items
                if name in self._index.segments
                and item.name not in self._index.segments[name].tombstones
                and item.name not in self._unsupported
            ]
        for segment, item in unread:
            sectors = self._read_tombstone(item, segment)
            with self._lock:
                if sectors is not None and self._index.segments.get(segment.name) is segment:
                    self._index.apply_tombstone(segment, sectors)
                    segment.tombstones.add(item.name)

    def _open_new_segments(self, listing: BucketListing) -> None:
        """Read the footer of every listed segment that is not tracked."""
        with self._lock:
            unknown = [
                item
                for name, item in listing.segments.items()
                if name not in self._index.segments
                and name not in self._pending_deletes
                and name not in self._recently_removed
                and self._invalid.get(name) != item.etag
            ]
        unknown.sort(key=lambda item: item.modified_s)
        for item, segment in zip(
            unknown, self._objects.map_concurrently(self._open_segment, unknown), strict=True
        ):
            if self._stopping.is_set():
                return
            if segment is None:
                continue
            for tombstone in listing.tombstones.get(item.name, []):
                sectors = self._read_tombstone(tombstone, segment)
                if sectors is not None:
                    segment.deleted_sectors |= sectors
                    segment.tombstones.add(tombstone.name)
            with self._lock:
                if not (item.name in self._pending_deletes or item.name in self._recently_removed):
                    self.register(segment)

    def _open_segment(self, listed: ListedObject) -> Segment | None:
        """Read a segment's footer; returns None if the object is invalid, missing or of a later
        version."""
        try:
            return self._objects.open_segment(listed)
        except Missing:
            return None
        except Unsupported as error:
            self._set_aside(listed, error)
            with self._lock:
                self._invalid[listed.name] = listed.etag
            return None
        except Invalid as error:
            log.warning("%s: not a valid segment: %s", listed.name, error)
            with self._lock:
                self._invalid[listed.name] = listed.etag
                self._counts["corrupt_segments"] += 1
            return None

    def _set_aside(self, listed: ListedObject, error: Unsupported) -> None:
        """Record an object of a later version; the first one is logged."""
        with self._lock:
            is_first = not self._unsupported
            self._unsupported.add(listed.name)
        if is_first:
            text = "leaving objects of a later version as they are: %s: %s"
            log.warning(text, listed.name, error)

    def _read_tombstone(self, tombstone: ListedObject, segment: Segment) -> set[int] | None:
        """The deleted sectors in a tombstone; None if it is of a later version. The blocks that it
        lists are then found, as before it was written."""
        try:
            return self._objects.read_tombstone(tombstone, segment.identity)
        except Missing:
            return set()
        except Unsupported as error:
            self._set_aside(tombstone, error)
            return None
        except Invalid as error:
            log.warning("%s: not a valid tombstone: %s", tombstone.name, error)
            return set()

    # ------------------------------------------------------------------ collection

    def _collect_garbage(self, listing: BucketListing) -> None:
        """Delete useless objects, and retry writes of tombstones that failed."""
        self.delete(self._untrack_garbage())
        with self._lock:
            pending = [each for each in self._index.segments.values() if each.tombstone_pending]
        for segment in pending:
            self.write_tombstone(segment)
        oldest_s = self._objects.client.now_s() - self._rules.gc_grace_s
        for name, tombstones in listing.tombstones.items():
            if name not in listing.segments:
                for item in tombstones:
                    if item.modified_s < oldest_s and item.name not in self._unsupported:
                        self._delete_orphan(item)

    def _delete_orphan(self, tombstone: ListedObject) -> None:
        try:
            self._objects.delete_orphan(tombstone)
        except Unsupported as error:
            self._set_aside(tombstone, error)

    def _untrack_garbage(self) -> list[Segment]:
        """Untrack segments that are expired, completely deleted, duplicates, or over the capacity.

        Returns all segments to delete from the bucket.
        """
        with self._lock:
            for segment in list(self._index.segments.values()):
                if self.is_expired(segment):
                    self._counts["expired"] += self.untrack(segment)
                elif segment.primary_count == 0 and (
                    segment.all_deleted or self._is_past_grace(segment)
                ):
                    self._counts["duplicates"] += not segment.all_deleted
                    self.untrack(segment)
            if self._rules.capacity_bytes:
                try:
                    self._make_room(0)
                except TierFull as error:
                    log.info("%s: %s", self._objects.client.where, error)
            return list(self._pending_deletes.values())
