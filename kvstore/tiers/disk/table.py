"""The disk tier's segments: which there are, who uses them, and where the next frame goes.

Every segment has one reference for being in the table and one for each call that holds its
descriptor. Leaving the table removes its file at once; the descriptor is closed by whoever lets
go last, so a read under way ends well. Its bytes count until then.
"""

from __future__ import annotations

import errno
import logging
import threading

from kvstore.blocks import Key
from kvstore.errors import TierFull
from kvstore.tiers.disk.directory import LOCK_BYTES
from kvstore.tiers.disk.files import PAGE, Files
from kvstore.tiers.disk.index import MAX_SLOTS, Index, pack_place, unpack_place
from kvstore.tiers.disk.recover import fill, recover
from kvstore.tiers.disk.segment import Segment

log = logging.getLogger(__name__)

RECLAIM_WAIT_S = 10.0
"""Longest a write waits for the last reader of a reclaimed segment."""
ROLL_TRIES = 4
"""New segments that one frame may see filled by others before it is refused."""
OVERHEAD_PAGES = 5
"""Pages of a segment that no frame can have: its header, and the least footer."""


class Table:
    """Segments and index of one directory; `lock` guards both and is the tier's own.

    Methods take the lock themselves unless they say that the caller holds it.
    """

    def __init__(
        self, files: Files, directory: str, capacity_bytes: int, segment_bytes: int
    ) -> None:
        """Open what the directory holds, and cut it to the capacity. Raises ConfigError."""
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.index = Index()
        self.largest_frame_pages = segment_bytes // PAGE - OVERHEAD_PAGES
        self._files = files
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._segment_bytes = segment_bytes
        self._roll_lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._active: Segment | None = None
        self._next_number = 1
        self._total_bytes = LOCK_BYTES
        self._zombies = 0
        self._held = 0
        self._uses = 0
        self._evictions = 0
        self._torn = 0
        self._recover()

    # ------------------------------------------------------------------ lookups

    def find(self, key: Key) -> tuple[Segment, int, int] | None:
        """Segment, page and pages of a key, which counts as a use. The caller holds the lock."""
        place = self.index.get(key)
        if not place:
            return None
        slot, page, pages = unpack_place(place)
        segment = self._segments[slot]
        self._touch(segment)
        return segment, page, pages

    def insert(self, key: Key, segment: Segment, page: int, pages: int) -> None:
        """Make a written frame visible. The caller holds the lock."""
        if segment.dead:
            self._evictions += 1
            return
        segment.entries.add(key, page, pages)
        self.index.put(key, pack_place(segment.slot, page, pages))
        self._touch(segment)

    def sync_fault(self) -> str:
        """Why a segment of the table may not be on stable storage; empty when none failed."""
        with self.lock:
            faults = (segment.sync_fault for segment in self._segments.values())
            return next(filter(None, faults), "")

    def busy(self) -> bool:
        """Whether any call holds a segment. The caller holds the lock."""
        return self._held > 0

    def stats(self) -> dict[str, int | float | str]:
        with self.lock:
            return {
                "bytes_used": self._total_bytes,
                "bytes_capacity": self._capacity_bytes,
                "blocks": len(self.index),
                "evictions": self._evictions,
                "segments": len(self._segments),
                "torn": self._torn,
            }

    # ------------------------------------------------------------------ references

    def hold(self, segment: Segment) -> None:
        """Keep the descriptor open until `drop`. The caller holds the lock."""
        segment.users += 1
        self._held += 1

    def drop(self, segment: Segment) -> None:
        """Let go of a segment that was held."""
        with self.lock:
            self._held -= 1
        self._let_go(segment)

    def _let_go(self, segment: Segment) -> None:
        """Return one reference; the last one closes the file and frees its bytes."""
        with self.lock:
            segment.users -= 1
            assert segment.users >= 0, "a segment dropped twice"
            last = segment.users == 0
        if last:
            self._files.close(segment.fd)
        with self.lock:
            if last:
                self._total_bytes -= segment.nbytes
                self._zombies -= 1
            self.changed.notify_all()

    def _touch(self, segment: Segment) -> None:
        self._uses += 1
        segment.last_used = self._uses

    # ------------------------------------------------------------------ writing

    def reserve(self, key: Key, pages: int) -> tuple[Segment, int]:
        """Pages for one frame, and a hold on their segment until `end_write`.

        Raises TierFull, or OSError when a new segment cannot be made.
        """
        taken = self._take(key, pages)
        retired: list[Segment] = []
        if taken is None:
            try:
                with self._roll_lock:
                    # Others may fill a new segment before we have our part of it.
                    for _ in range(ROLL_TRIES):
                        taken = self._take(key, pages)
                        if taken is not None:
                            break
                        retired += self._retire()
                        self._add_segment()
                    else:
                        taken = self._take(key, pages)
            finally:
                # Also when no segment could be made: one that is never sealed is never a victim.
                for segment in retired:
                    self._seal(segment)
        if taken is None:
            raise TierFull(f"{ROLL_TRIES} new segments were full before a frame found its place")
        return taken

    def end_write(self, segment: Segment) -> None:
        """The frame is written or given up; the last one in a retired segment seals it."""
        with self.lock:
            segment.writers -= 1
            seal = self._may_seal(segment)
        if seal:
            self._seal(segment)
        self.drop(segment)

    def _take(self, key: Key, pages: int) -> tuple[Segment, int] | None:
        with self.lock:
            segment = self._active
            page = segment.reserve(key, pages) if segment is not None else 0
            if segment is None or not page:
                return None
            self.hold(segment)
            segment.writers += 1
            return segment, page

    def _retire(self) -> list[Segment]:
        """No more frames for the active segment; returned if it is for the caller to seal."""
        with self.lock:
            segment, self._active = self._active, None
            return [segment] if segment is not None and self._may_seal(segment) else []

    def _may_seal(self, segment: Segment) -> bool:
        """Whether the caller, who holds the lock, has become the one who seals it."""
        if segment.writers or segment is self._active or segment.sealing or segment.dead:
            return False
        segment.sealing = True
        segment.users += 1
        return True

    def _seal(self, segment: Segment) -> None:
        """Write the footer. A fault costs a scan at the next opening, nothing else."""
        try:
            segment.seal(self._files)
        except OSError as error:
            log.warning("%s is left without a footer: %s", segment.path, error)
        with self.lock:
            segment.sealing = False
        self._let_go(segment)

    # ------------------------------------------------------------------ room

    def _add_segment(self) -> None:
        """Make a new active segment, reclaiming others for it; under the roll lock."""
        # After a failed sync a new segment proves at its birth that the disk syncs again. Else a
        # disk that never does would be given one segment after another, each for another's blocks.
        proven = bool(self.sync_fault())
        while True:
            self._make_room()
            try:
                segment = Segment.create(
                    self._files,
                    self._directory,
                    self._next_number,
                    self._segment_bytes,
                    sync=proven,
                )
            except OSError as error:
                with self.lock:
                    self._total_bytes -= self._segment_bytes
                    victim = self._pop_victim() if error.errno == errno.ENOSPC else None
                if victim is None:
                    raise
                log.warning("the file system of %s is full; reclaiming", self._directory)
                self._dispose(victim)
                continue
            break
        self._next_number += 1
        with self.lock:
            self._enter(segment)
            self._active = segment

    def _make_room(self) -> None:
        """Take the bytes of a new segment from the capacity. Raises TierFull."""
        while True:
            with self.lock:
                fits = self._total_bytes + self._segment_bytes <= self._capacity_bytes
                if fits and len(self._segments) < MAX_SLOTS:
                    self._total_bytes += self._segment_bytes
                    return
                victim = self._pop_victim()
                if victim is None:
                    waits = self._zombies or any(s.writers for s in self._segments.values())
                    if not waits or not self.changed.wait(RECLAIM_WAIT_S):
                        raise TierFull(f"no segment of {self._directory} can be reclaimed now")
            if victim is not None:
                self._dispose(victim)

    def _pop_victim(self) -> Segment | None:
        """Take the least recently used idle segment out of the table; the lock is held.

        None while an earlier victim still has readers: its bytes are on their way.
        """
        idle = [
            segment
            for segment in self._segments.values()
            if not segment.writers and not segment.sealing and segment is not self._active
        ]
        if not idle or self._zombies:
            return None
        victim = min(idle, key=lambda segment: segment.last_used)
        self._leave(victim)
        return victim

    def _enter(self, segment: Segment) -> None:
        """Give a segment a table slot; the lock is held."""
        segment.slot = next(slot for slot in range(MAX_SLOTS) if slot not in self._segments)
        segment.users += 1
        self._segments[segment.slot] = segment
        self._touch(segment)

    def _leave(self, segment: Segment) -> None:
        """Take a segment and its blocks out; the lock is held, and `_dispose` must follow."""
        segment.dead = True
        self._zombies += 1
        del self._segments[segment.slot]
        for key, page, pages in segment.entries:
            place = pack_place(segment.slot, page, pages)
            self._evictions += self.index.remove(key, place)

    def _dispose(self, segment: Segment) -> None:
        """Remove the file of a segment that has left, and the table's reference."""
        try:
            self._files.unlink(segment.path)
        except OSError as error:
            log.error("%s cannot be removed: %s", segment.path, error)
        self._let_go(segment)

    def clear(self) -> None:
        """Forget and remove everything; frames being written meanwhile go with it."""
        with self._roll_lock:
            with self.lock:
                self._active = None
                gone = list(self._segments.values())
                for segment in gone:
                    self._leave(segment)
            for segment in gone:
                self._dispose(segment)

    # ------------------------------------------------------------------ start and end

    def _recover(self) -> None:
        found = recover(self._files, self._directory)
        self._torn = found.torn
        for segment in found.segments:
            self._next_number = segment.number + 1
            self._total_bytes += segment.nbytes
            self._enter(segment)
            fill(self.index, segment)
        while self._total_bytes > self._capacity_bytes and self._segments:
            with self.lock:
                victim = self._pop_victim()
            assert victim is not None, "a reader before the tier is open"
            self._dispose(victim)
        self._resume()
        for segment in list(self._segments.values()):
            if not segment.sealed and segment is not self._active:
                segment.users += 1
                self._seal(segment)

    def _resume(self) -> None:
        """Go on in the newest segment if it is of the size that new ones have."""
        newest = max(self._segments.values(), key=lambda s: s.number, default=None)
        if newest is None or newest.nbytes != self._segment_bytes or newest.short:
            return
        try:
            newest.reopen(self._files)
        except OSError as error:
            log.warning("%s cannot be appended to: %s", newest.path, error)
            return
        self._active = newest

    def close(self) -> None:
        """Seal what is in use and close every file. No call holds a segment."""
        for segment in self._segments.values():
            if not segment.sealed:
                segment.users += 1
                self._seal(segment)
            self._files.close(segment.fd)
        self._segments.clear()
