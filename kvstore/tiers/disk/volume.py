"""The segments of one directory: which there are, and where the next frame goes."""

from __future__ import annotations

import errno
import logging
import threading
import time

from kvstore.blocks.key import Key
from kvstore.cache.eviction import eviction_policy
from kvstore.errors import TierFull
from kvstore.tiers.disk.files import PAGE, Files
from kvstore.tiers.disk.index import MAX_SLOTS
from kvstore.tiers.disk.lockfile import LOCK_BYTES
from kvstore.tiers.disk.recover import fill, recover
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import Limits, Shared
from kvstore.tiers.disk.sync import Syncer

log = logging.getLogger(__name__)

RECLAIM_WAIT_S = 10.0
"""Longest a write waits for the last reader, writer or footer of a segment it wants to reclaim."""
ROLL_TRIES = 4
"""New segments that one frame may see filled by others before it is refused."""
OVERHEAD_PAGES = 5
"""Pages of a segment that no frame can have: its header, and the least footer."""


Taken = tuple[Segment, int]
"""Pages for a frame: their segment, and the first one."""


class Table:
    """Segments of one directory; the lock of `shared` guards them.

    Methods take the lock themselves unless they say that the caller holds it.
    """

    def __init__(
        self, shared: Shared, files: Files, directory: str, number: int, limits: Limits, name: str
    ) -> None:
        """Open what the directory holds, and cut it to the capacity. Raises ConfigError.

        number: this directory's among the tier's.
        """
        self.directory = directory
        self.number = number
        self.writes = 0
        """Frames being written here now."""
        self.expires_ms = 0
        """When the first segment does; 0 when none will."""
        self._shared = shared
        self._files = files
        self._limits = limits
        self._roll_lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        """By number: the oldest first."""
        self._order = eviction_policy(
            limits.eviction, max(1, limits.capacity_bytes // limits.segment_bytes)
        )
        self._active: Segment | None = None
        self._next_number = 1
        self._total_bytes = LOCK_BYTES
        self._zombies = 0
        self._doomed: list[Segment] = []
        """Left the table by age; their files are still to be removed."""
        self._recover()
        self.syncer = Syncer(self, name=f"{name}-{number}")

    # ------------------------------------------------------------------ lookups

    def touch(self, segment: Segment) -> None:
        """It was read or written. The caller holds the lock."""
        self._shared.touch(segment)
        self._order.touched(segment.number)

    def sync_fault(self) -> str:
        """Why a segment may not be on stable storage; empty when none failed."""
        with self._shared.lock:
            faults = (segment.sync_fault for segment in self._segments.values())
            return next(filter(None, faults), "")

    def stats(self) -> dict[str, int]:
        """Of this directory alone. The caller holds the lock."""
        return {"bytes_used": self._total_bytes, "segments": len(self._segments)}

    # ------------------------------------------------------------------ references

    def drop(self, segment: Segment) -> None:
        """Let go of a segment that was held."""
        with self._shared.lock:
            last = self._shared.let_go(segment)
        if last:
            self.bury(segment)

    def bury(self, segment: Segment) -> None:
        """Close a segment that left the table and that nobody holds: its bytes are free."""
        self._files.close(segment.fd)
        with self._shared.lock:
            self._total_bytes -= segment.nbytes
            self._zombies -= 1
            self._shared.changed.notify_all()

    # ------------------------------------------------------------------ writing

    def take(self, key: Key, pages: int) -> Taken | None:
        """Pages for one frame in the active segment, and a hold on it until `end_write`.

        The caller holds the lock.
        """
        segment = self._active
        if segment is None or self._is_aged(segment):
            return None
        page = segment.reserve(key, pages)
        if not page:
            return None
        self._shared.hold(segment)
        segment.writing.add(page)
        self.writes += 1
        return segment, page

    def reserve(self, key: Key, pages: int) -> Taken:
        """`take`, in a new segment if need be.

        Raises TierFull, or OSError when a new segment cannot be made.
        """
        with self._roll_lock:
            # Others may fill a new segment before we have our part of it.
            for turn in range(ROLL_TRIES + 1):
                with self._shared.lock:
                    taken = self.take(key, pages)
                if taken is not None:
                    return taken
                if turn < ROLL_TRIES:
                    self._retire()
                    self._add_segment()
        raise TierFull(f"{ROLL_TRIES} new segments were full before a frame found its place")

    def end_write(
        self, key: Key, segment: Segment, page: int, pages: int, *, written: bool
    ) -> bool:
        """The frame is written, and visible from now on, or given up. The caller holds the lock.

        True when the caller must `bury` the segment.
        """
        if written and segment.dead:
            self._shared.evictions += 1
        elif written:
            segment.entries.add(key, page, pages)
            self._shared.put(key, segment, page, pages)
            self.touch(segment)
        segment.writing.discard(page)
        self.writes -= 1
        self._seal_later(segment)
        return self._shared.let_go(segment)

    def _is_aged(self, segment: Segment) -> bool:
        """Whether a segment is too old for new frames."""
        append_ms = self._limits.append_ms
        return append_ms > 0 and self._limits.now_ms() >= segment.made_ms + append_ms

    def _retire(self) -> None:
        """No more frames for the active segment."""
        with self._shared.lock:
            segment, self._active = self._active, None
            if segment is not None:
                self._seal_later(segment)

    def _seal_later(self, segment: Segment) -> None:
        """Hand a segment that nobody writes to any more to the syncer; the lock is held."""
        if segment.writing or segment is self._active or segment.sealing or segment.dead:
            return
        if not segment.sealed:
            segment.sealing = True
            segment.users += 1
            self.syncer.retire(segment)

    # ------------------------------------------------------------------ the syncer's chores

    def seal_segment(self, segment: Segment) -> None:
        """Write the footer. A fault costs a scan at the next opening, nothing else."""
        try:
            if not segment.dead:
                segment.seal(self._files)
        except OSError as error:
            log.warning("%s is left without a footer: %s", segment.path, error)
        with self._shared.lock:
            segment.sealing = False
            segment.users -= 1
            last = segment.users == 0
            self._shared.changed.notify_all()
        if last:
            self.bury(segment)

    def sync_segment(self, segment: Segment) -> None:
        """Sync it, and write a checkpoint when there is enough to say. Raises OSError."""
        with self._shared.lock:
            if segment.dead:
                return
            self._shared.hold(segment)
            page = min(segment.writing, default=segment.next_page)
            since = (page - max(1, segment.saved_page)) * PAGE
            worth = not segment.sealed and since >= self._limits.checkpoint_bytes
            killed = len(segment.killed)
            entries = segment.entries.before(page, without=segment.killed) if worth else None
        try:
            segment.sync(self._files)
            if entries is not None:
                segment.checkpoint(self._files, entries, page, killed)
        finally:
            self.drop(segment)

    def tidy(self) -> float | None:
        """Remove what has expired; seconds until the next segment does."""
        if not self._limits.ttl_ms:
            return None
        with self._shared.lock:
            self.expire()
            doomed, self._doomed = self._doomed, []
            expires_ms = self.expires_ms
        for segment in doomed:
            self._dispose(segment)
        return max(0.0, (expires_ms - self._limits.now_ms()) / 1000) if expires_ms else None

    def expire(self) -> bool:
        """Take what is too old out of the index; whether there is something for `tidy`.

        The caller holds the lock.
        """
        now_ms = self._limits.now_ms()
        if not self.expires_ms or now_ms < self.expires_ms:
            return False
        old = [s for s in self._segments.values() if s.made_ms + self._limits.ttl_ms <= now_ms]
        for segment in old:
            if segment is self._active:
                self._active = None
            self._shared.expired += self._leave(segment)
        self._doomed += old
        return bool(old)

    # ------------------------------------------------------------------ room

    def _add_segment(self) -> None:
        """Make a new active segment, reclaiming others for it; under the roll lock."""
        # After a failed sync a new segment proves at its birth that the disk syncs again. Else a
        # disk that never does would be given one segment after another, each for another's blocks.
        proven = bool(self.sync_fault())
        self.tidy()
        deadline_s = time.monotonic() + RECLAIM_WAIT_S
        while True:
            reuse = self._make_room()
            try:
                segment = self._create(proven, reuse)
                break
            except OSError as error:
                with self._shared.lock:
                    self._total_bytes -= self._limits.segment_bytes
                if reuse is not None:
                    log.warning("%s cannot be used again: %s", reuse.path, error)
                elif error.errno != errno.ENOSPC or not self._reclaim(deadline_s):
                    raise
                else:
                    log.warning("the file system of %s is full; reclaiming", self.directory)
        self._next_number += 1
        with self._shared.lock:
            self._enter(segment)
            self._active = segment

    def _create(self, proven: bool, reuse: Segment | None) -> Segment:
        limits = self._limits
        segment = Segment.create(
            self._files,
            self.directory,
            self._next_number,
            limits.segment_bytes,
            limits.now_ms(),
            reuse=reuse,
        )
        try:
            if proven:
                segment.sync(self._files)
            return segment
        except BaseException:
            self._files.close(segment.fd)
            self._files.unlink(segment.path)
            raise

    def _make_room(self) -> Segment | None:
        """Take the bytes of a new segment from the capacity. Raises TierFull.

        Returns a dead segment whose file is to become the new one's, if one can.
        """
        limits = self._limits
        deadline_s = time.monotonic() + RECLAIM_WAIT_S
        while True:
            with self._shared.lock:
                fits = self._total_bytes + limits.segment_bytes <= limits.capacity_bytes
                if fits and len(self._shared.segments) < MAX_SLOTS:
                    self._total_bytes += limits.segment_bytes
                    return None
                victim = self._pop_victim()
                if victim is not None and self._is_reusable(victim):
                    self._zombies -= 1
                    return victim
                if victim is None:
                    if not self._wait_for_room(deadline_s):
                        raise TierFull(f"no segment of {self.directory} can be reclaimed now")
                    continue
            self._dispose(victim)

    def _is_reusable(self, dead: Segment) -> bool:
        """Whether a segment that has left may lend its file to a new one; the lock is held.

        Not with a time to live: what is too old shall be gone, not only out of reach.
        """
        alone = dead.users == 1 and not dead.short and not dead.sync_fault
        return alone and dead.nbytes == self._limits.segment_bytes and not self._limits.ttl_ms

    def _reclaim(self, deadline_s: float) -> bool:
        """Remove the coldest idle segment, or wait for one that is on its way out or not idle yet.

        False when nothing has changed, nor will by itself.
        """
        with self._shared.lock:
            victim = self._pop_victim()
            if victim is None:
                return self._wait_for_room(deadline_s)
        self._dispose(victim)
        return True

    def _wait_for_room(self, deadline_s: float) -> bool:
        """Until something has changed; False when nothing will. The lock is held."""
        waits = self._zombies or any(
            segment.writing or segment.sealing for segment in self._segments.values()
        )
        left_s = deadline_s - time.monotonic()
        return bool(waits) and left_s > 0 and self._shared.changed.wait(left_s)

    def _pop_victim(self) -> Segment | None:
        """Take the coldest idle segment out of the table; the lock is held.

        None while an earlier victim still has readers: its bytes are on their way.
        """
        if self._zombies:
            return None
        for number in self._order.victims():
            segment = self._segments[number]
            if not segment.writing and not segment.sealing and segment is not self._active:
                self._leave(segment)
                return segment
        return None

    def _enter(self, segment: Segment) -> None:
        """Add a segment; the lock is held."""
        segment.stripe = self.number
        self._shared.enter(segment)
        self._segments[segment.number] = segment
        self._order.inserted(segment.number, segment.nbytes)
        self._set_expiry()

    def _leave(self, segment: Segment) -> int:
        """Take a segment and its blocks out; the lock is held, and `_dispose` must follow."""
        self._zombies += 1
        del self._segments[segment.number]
        self._order.removed(segment.number)
        self._set_expiry()
        return self._shared.leave(segment)

    def _set_expiry(self) -> None:
        if self._limits.ttl_ms:
            made = (segment.made_ms for segment in self._segments.values())
            oldest_ms = min(made, default=0)
            self.expires_ms = oldest_ms + self._limits.ttl_ms if oldest_ms else 0

    def _dispose(self, segment: Segment) -> None:
        """Remove the file of a segment that has left, and the table's reference."""
        try:
            self._files.unlink(segment.path)
        except OSError as error:
            log.error("%s cannot be removed: %s", segment.path, error)
        with self._shared.lock:
            segment.users -= 1
            last = segment.users == 0
        if last:
            self.bury(segment)

    def clear(self) -> None:
        """Forget and remove everything; frames being written meanwhile go with it."""
        with self._roll_lock:
            with self._shared.lock:
                self._active = None
                gone = list(self._segments.values())
                for segment in gone:
                    self._leave(segment)
            for segment in gone:
                self._dispose(segment)

    # ------------------------------------------------------------------ start and end

    def _recover(self) -> None:
        found = recover(
            self._files, self.directory, self._limits, MAX_SLOTS - len(self._shared.segments)
        )
        self._shared.torn += found.torn
        for segment in found.segments:
            self._next_number = segment.number + 1
            self._total_bytes += segment.nbytes
            self._enter(segment)
            fill(self._files, self._shared, segment)
        while self._total_bytes > self._limits.capacity_bytes and self._segments:
            with self._shared.lock:
                victim = self._pop_victim()
            assert victim is not None, "a reader before the tier is open"
            self._dispose(victim)
        self._resume()
        for segment in self._segments.values():
            if not segment.sealed and segment is not self._active:
                segment.users += 1
                self.seal_segment(segment)

    def _resume(self) -> None:
        """Go on in the newest segment if it is of the size that new ones have, and young."""
        newest = max(self._segments.values(), key=lambda s: s.number, default=None)
        if newest is None or newest.nbytes != self._limits.segment_bytes or newest.short:
            return
        if self._is_aged(newest):
            return
        try:
            newest.reopen(self._files)
        except OSError as error:
            log.warning("%s cannot be appended to: %s", newest.path, error)
            return
        self._active = newest

    def close(self) -> None:
        """Seal what is in use and close every file. No call holds a segment, the syncer ended."""
        for segment in [*self._segments.values(), *self._doomed]:
            if segment.dead:
                self._dispose(segment)
                continue
            if not segment.sealed:
                segment.users += 1
                self.seal_segment(segment)
            self._files.close(segment.fd)
        self._segments.clear()
