"""The tier's own thread: what other nodes have done is learnt, what is of no use is removed.

Every `refresh_s` it lists the bucket's objects of ours. A segment that is new is opened by its
footer; one that is gone is forgotten; a new grave's blocks too. Then it collects. Nodes do not talk
to each other: each rule of collection looks only at what every node can see, so two collectors do
the same or do no harm (docs/decisions/0008-s3-tier.md has the argument).
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
from kvstore.tiers.s3.client import Listed
from kvstore.tiers.s3.faults import Invalid, Missing
from kvstore.tiers.s3.objects import Listing, Objects
from kvstore.tiers.s3.segment_index import MAX_SEGMENTS, Catalog, Segment

log = logging.getLogger(__name__)

JITTER: Final = 0.2
"""Part by which the time between two rounds varies, so that nodes do not collect in step."""
STOP_WAIT_S: Final = 5.0
"""Longest `stop` waits for a round under way."""


@dataclass(frozen=True)
class Rules:
    """How long segments are kept. capacity_bytes, ttl_s: 0 for no limit."""

    capacity_bytes: int
    ttl_s: float
    grace_s: float
    refresh_s: float

    @property
    def adopt_s(self) -> float:
        """Age up to which another node's segment keeps our blocks as well as one of our own: half
        the grace period, or of its life, so that what is adopted stays for the other half at
        least. 0 with a capacity: its owner may remove it at any age to make room, and nobody can
        tell him not to.
        """
        kept_s = min(self.grace_s, self.ttl_s) if self.ttl_s else self.grace_s
        return 0.0 if self.capacity_bytes else kept_s / 2


class Keeper:
    """Keeps a `Catalog` in step with the bucket, and the bucket within the rules. Thread-safe.

    lock: the tier's; guards the catalog and everything here, and is never held across a request.
    """

    def __init__(
        self, catalog: Catalog, objects: Objects, lock: threading.Condition, rules: Rules
    ) -> None:
        self._catalog = catalog
        self._objects = objects
        self._lock = lock
        self._rules = rules
        self._reserved_bytes = 0
        self._doomed: dict[str, Segment] = {}
        """Forgotten, and perhaps not yet removed from the bucket."""
        self._removed: set[str] = set()
        """Names removed since this round began: its listing may still show them."""
        self._bad: dict[str, str] = {}
        """Names of objects that are no segments, with their ETags: not read again each round."""
        self._fresh = threading.Event()
        self._stopping = threading.Event()
        self._counts = dict.fromkeys(
            ("evictions", "expired", "duplicates", "vanished", "bad_segments", "refreshes"), 0
        )
        self._turn = threading.Lock()
        """One round, or `clear`, at a time."""
        self._thread = threading.Thread(target=self._run, name="kvstore-s3-keeper", daemon=True)

    def start(self, wait_s: float) -> bool:
        """Begin, and wait for the end of the first round; whether it has ended in time."""
        self._thread.start()
        return self._fresh.wait(wait_s)

    def halt(self) -> None:
        """Begin no other round, and end the one under way where it can."""
        self._stopping.set()

    def stop(self, wait_s: float = STOP_WAIT_S) -> bool:
        """End the thread; False when it hangs in a request for longer than `wait_s`."""
        self.halt()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def stats(self) -> dict[str, int | float | str]:
        """Counters; the lock is held."""
        return {
            **self._counts,
            "segments": len(self._catalog.segments),
            "doomed": len(self._doomed),
            "bytes_used": self._catalog.used_bytes + self._doomed_bytes(),
            "bytes_capacity": self._rules.capacity_bytes,
        }

    # ------------------------------------------------------------------ room

    def reserve(self, nbytes: int) -> None:
        """Make room for a segment, by removing others if need be.

        Raises TierFull when there is none to be made, TierUnavailable, TierError.
        """
        victims: list[Segment] = []
        with self._lock:
            if self._rules.capacity_bytes:
                victims = self._make_room(nbytes)
            self._reserved_bytes += nbytes
        try:
            self.remove(victims)
        except BaseException:
            self.release(nbytes)
            raise

    def release(self, nbytes: int) -> None:
        """The room is used, or not needed."""
        with self._lock:
            self._reserved_bytes -= nbytes

    def _make_room(self, nbytes: int) -> list[Segment]:
        """Forget the coldest segments until `nbytes` more fit; the lock is held."""
        room = self._rules.capacity_bytes - self._reserved_bytes - self._doomed_bytes() - nbytes
        victims: list[Segment] = []
        used = self._catalog.used_bytes
        for segment in self._catalog.coldest():
            if used <= room:
                break
            if segment.own or self._settled(segment):
                victims.append(segment)
                used -= segment.nbytes
        if used > room:
            raise TierFull("every segment is too young to be removed, and there is no more room")
        for segment in victims:
            self._counts["evictions"] += self.forget(segment)
        return victims

    def _doomed_bytes(self) -> int:
        return sum(segment.nbytes for segment in self._doomed.values())

    def _settled(self, segment: Segment) -> bool:
        """Whether nobody was told less than the grace period ago that his blocks are in it."""
        age_s = self._objects.client.now_s() - segment.modified_s
        return age_s > self._rules.grace_s

    def is_expired(self, segment: Segment) -> bool:
        """Whether its time is over."""
        ttl_s = self._rules.ttl_s
        return bool(ttl_s) and self._objects.client.now_s() - segment.modified_s > ttl_s

    def find(self, key: Key) -> tuple[Segment, int, int] | None:
        """Segment, first page and pages of a block; an expired one is none; the lock is held.

        A segment that is found to be expired is forgotten, or it would hide a copy written since.
        """
        while (found := self._catalog.find(key)) is not None and self.is_expired(found[0]):
            self._counts["expired"] += self.forget(found[0])
        return found

    # ------------------------------------------------------------------ forgetting and removing

    def usable(self, name: str) -> bool:
        """Whether a new segment may have this name: no removal of it is under way."""
        with self._lock:
            return name not in self._doomed

    def register(self, segment: Segment) -> None:
        """A segment is in the bucket: let readers see it; the lock is held."""
        known = self._catalog.segments.get(segment.name)
        if known is not None:
            if known.identity == segment.identity:
                return
            self._catalog.drop(known)
        self._removed.discard(segment.name)
        if len(self._catalog.segments) >= MAX_SEGMENTS:
            raise TierFull(f"there are {MAX_SEGMENTS} segments, the most that can be known")
        self._catalog.add(segment)

    def forget(self, segment: Segment, *, doom: bool = True) -> int:
        """Readers see it no more; how many keys are lost; the lock is held.

        doom: it will be removed from the bucket; False: it is no longer there.
        """
        lost = self._catalog.drop(segment)
        self._removed.add(segment.name)
        if doom:
            self._doomed[segment.name] = segment
        return lost

    def lose(self, segment: Segment) -> None:
        """A reader found that it is not there any more; the lock is held."""
        self._counts["vanished"] += self.forget(segment, doom=False)

    def remove(self, segments: Iterable[Segment]) -> None:
        """Remove doomed segments from the bucket. Raises TierUnavailable, TierError; those that
        are left are tried again in the next round."""
        for _ in self._objects.each(self._remove, list(segments)):
            pass

    def _remove(self, segment: Segment) -> None:
        self._objects.remove(segment)
        with self._lock:
            self._removed.add(segment.name)
            if self._doomed.get(segment.name) is segment:
                del self._doomed[segment.name]

    def write_grave(self, segment: Segment) -> None:
        """Make the deletions in a segment outlive this process. Raises TierUnavailable."""
        with self._lock:
            # At one moment: of graves that come later, this one does not hold every page.
            dead, older = set(segment.dead), set(segment.graves)
        name = self._objects.bury(segment, dead, older)
        with self._lock:
            segment.graves = (segment.graves - older) | {name}
            segment.dirty = segment.dead != dead

    def clear(self) -> None:
        """Forget and remove everything of ours. Raises TierUnavailable, TierError."""
        with self._turn:
            with self._lock:
                for segment in list(self._catalog.segments.values()):
                    self.forget(segment)
            self._objects.clear()
            with self._lock:
                self._doomed.clear()
                self._bad.clear()

    # ------------------------------------------------------------------ rounds

    def _run(self) -> None:
        troubled = False
        while not self._stopping.is_set():
            try:
                self.refresh()
                troubled = False
            except TierError as error:
                level = logging.DEBUG if troubled else logging.WARNING
                troubled = True
                log.log(level, "%s: %s", self._objects.client.where, error)
            except Exception:
                log.exception("%s: a round failed", self._objects.client.where)
            self._fresh.set()
            spread = 1 + JITTER * (2 * random.random() - 1)
            self._stopping.wait(self._rules.refresh_s * spread)

    def refresh(self) -> None:
        """One round: learn, then collect. Raises TierUnavailable, TierError."""
        with self._turn:
            with self._lock:
                known_until = self._catalog.serial
                self._removed.clear()
            listing = self._objects.listing()
            self._compare(listing, known_until)
            self._learn_graves(listing)
            self._learn_segments(listing)
            self._collect(listing)
            with self._lock:
                self._counts["refreshes"] += 1

    def _compare(self, listing: Listing, known_until: int) -> None:
        """Forget what the listing shows no more, or shows to be another object."""
        with self._lock:
            for segment in list(self._catalog.segments.values()):
                listed = listing.segments.get(segment.name)
                if listed is None:
                    if segment.serial <= known_until:
                        self._counts["vanished"] += self.forget(segment, doom=False)
                elif listed.nbytes != segment.nbytes or segment.etag not in ("", listed.etag):
                    self._counts["vanished"] += self.forget(segment, doom=False)
                    self._removed.discard(segment.name)
                else:
                    segment.etag, segment.modified_s = listed.etag, listed.modified_s
                    graves = listing.graves.get(segment.name, [])
                    segment.graves &= {item.name for item in graves}
            self._bad = {name: etag for name, etag in self._bad.items() if name in listing.segments}

    def _learn_graves(self, listing: Listing) -> None:
        """Deletions by others in segments that are known."""
        with self._lock:
            fresh = [
                (self._catalog.segments[name], item)
                for name, items in listing.graves.items()
                for item in items
                if name in self._catalog.segments
                and item.name not in self._catalog.segments[name].graves
            ]
        for segment, item in fresh:
            pages = self._dug(item, segment)
            with self._lock:
                if self._catalog.segments.get(segment.name) is segment:
                    self._catalog.bury(segment, pages)
                    segment.graves.add(item.name)

    def _learn_segments(self, listing: Listing) -> None:
        """Open every listed segment that is not known."""
        with self._lock:
            fresh = [
                item
                for name, item in listing.segments.items()
                if name not in self._catalog.segments
                and name not in self._doomed
                and name not in self._removed
                and self._bad.get(name) != item.etag
            ]
        fresh.sort(key=lambda item: item.modified_s)
        for item, segment in zip(fresh, self._objects.each(self._open, fresh), strict=True):
            if self._stopping.is_set():
                return
            if segment is None:
                continue
            for grave in listing.graves.get(item.name, []):
                segment.dead |= self._dug(grave, segment)
                segment.graves.add(grave.name)
            with self._lock:
                if not (item.name in self._doomed or item.name in self._removed):
                    self.register(segment)

    def _open(self, listed: Listed) -> Segment | None:
        """A segment by its footer; None when it is none, or is gone."""
        try:
            return self._objects.open(listed)
        except Missing:
            return None
        except Invalid as fault:
            log.warning("%s is no segment of ours: %s", listed.name, fault)
            with self._lock:
                self._bad[listed.name] = listed.etag
                self._counts["bad_segments"] += 1
            return None

    def _dug(self, grave: Listed, segment: Segment) -> set[int]:
        try:
            return self._objects.dug(grave, segment.identity)
        except Missing:
            return set()
        except Invalid as fault:
            log.warning("%s is no grave of ours: %s", grave.name, fault)
            return set()

    # ------------------------------------------------------------------ collection

    def _collect(self, listing: Listing) -> None:
        """Remove what is of no use, and try again what failed before."""
        self.remove(self._useless())
        with self._lock:
            dirty = [each for each in self._catalog.segments.values() if each.dirty]
        for segment in dirty:
            self.write_grave(segment)
        oldest_s = self._objects.client.now_s() - self._rules.grace_s
        for name, graves in listing.graves.items():
            if name not in listing.segments:
                for item in graves:
                    if item.modified_s < oldest_s:
                        self._objects.client.delete(item.name)

    def _useless(self) -> list[Segment]:
        """Forget segments that are expired, all dead, all duplicates, or too many."""
        with self._lock:
            for segment in list(self._catalog.segments.values()):
                if self.is_expired(segment):
                    self._counts["expired"] += self.forget(segment)
                elif segment.wins == 0 and (segment.all_dead or self._settled(segment)):
                    self._counts["duplicates"] += not segment.all_dead
                    self.forget(segment)
            if self._rules.capacity_bytes:
                try:
                    self._make_room(0)
                except TierFull as error:
                    log.info("%s: %s", self._objects.client.where, error)
            return list(self._doomed.values())
