"""One directory of the disk tier: its segments, and room for new frames."""

from __future__ import annotations

import errno
import logging
import threading
import time

from kvstore.blocks.key import Key
from kvstore.cache.eviction import eviction_policy
from kvstore.errors import TierFull
from kvstore.tiers.disk.files import SECTOR_BYTES, Files
from kvstore.tiers.disk.index import MAX_OPEN_SEGMENTS
from kvstore.tiers.disk.lockfile import LOCK_BYTES
from kvstore.tiers.disk.recover import index_segment, recover
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import DiskLimits, DiskState
from kvstore.tiers.disk.sync import Syncer

log = logging.getLogger(__name__)

RECLAIM_WAIT_S = 10.0
"""Maximum wait of a write for the readers, writers or footer of the segment to reclaim."""
MAX_ROLLS = 4
"""Maximum number of new segments that other writes may fill before a frame is rejected."""
OVERHEAD_SECTORS = 5
"""Sectors of a segment that frames cannot use: the header and the smallest footer."""


Reservation = tuple[Segment, int]
"""Room for a frame: the segment and the first sector."""


class Volume:
    """The segments of one directory. The lock of `state` guards them.

    Methods take the lock unless their docstring says that the caller owns it.
    """

    def __init__(
        self,
        state: DiskState,
        files: Files,
        directory: str,
        volume_no: int,
        limits: DiskLimits,
        name: str,
    ) -> None:
        """Recover the segments of the directory, and evict until they fit into the capacity.

        volume_no: number of the directory in the tier. Raises ConfigError.
        """
        self.directory = directory
        self.volume_no = volume_no
        self.writes_in_progress = 0
        """Number of frames being written to this directory."""
        self.expires_ms = 0
        """When the first segment expires, in milliseconds since 1970; 0: never."""
        self._state = state
        self._files = files
        self._limits = limits
        self._roll_lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        """Segments by sequence number, oldest first."""
        self._eviction_policy = eviction_policy(
            limits.eviction, max(1, limits.capacity_bytes // limits.segment_bytes)
        )
        self._active: Segment | None = None
        self._total_bytes = LOCK_BYTES
        self._closing_count = 0
        self._expired_segments: list[Segment] = []
        """Expired segments whose files are not deleted yet."""
        self._recover()
        self.syncer = Syncer(self, name=f"{name}-{volume_no}")

    # ------------------------------------------------------------------ lookups

    def touch(self, segment: Segment) -> None:
        """Record a read or write of the segment. The caller owns the lock."""
        self._state.touch(segment)
        self._eviction_policy.on_access(segment.sequence_no)

    def sync_error(self) -> str:
        """Error of the first segment whose sync failed; "" if none failed."""
        with self._state.lock:
            errors = (segment.sync_error for segment in self._segments.values())
            return next(filter(None, errors), "")

    def stats(self) -> dict[str, int]:
        """Statistics of this directory. The caller owns the lock."""
        used = {"bytes_used": self._total_bytes, "segments": len(self._segments)}
        left = sum(segment.left_as_it_is for segment in self._segments.values())
        return {**used, "segments_unsupported": len(self._unsupported) + left}

    # ------------------------------------------------------------------ references

    def release(self, segment: Segment) -> None:
        """Drop a reference to a segment; the last one closes it."""
        with self._state.lock:
            last = self._state.release(segment)
        if last:
            self.close_segment(segment)

    def close_segment(self, segment: Segment) -> None:
        """Close a removed segment without references; its bytes become free."""
        self._files.close(segment.fd)
        with self._state.lock:
            self._total_bytes -= segment.nbytes
            self._closing_count -= 1
            self._state.changed.notify_all()

    # ------------------------------------------------------------------ writing

    def reserve_in_active(self, key: Key, sectors: int) -> Reservation | None:
        """Reserve sectors for a frame in the active segment, if it has room. The reservation owns a
        reference until `end_write`. The caller owns the lock.
        """
        segment = self._active
        if segment is None or self._is_append_window_over(segment):
            return None
        sector = segment.reserve(key, sectors)
        if not sector:
            return None
        self._state.acquire(segment)
        segment.writing.add(sector)
        self.writes_in_progress += 1
        return segment, sector

    def reserve(self, key: Key, sectors: int) -> Reservation:
        """Reserve sectors for a frame, in a new segment if necessary.

        Raises TierFull; OSError: a new segment cannot be created.
        """
        with self._roll_lock:
            # Other writes may fill the new segment first.
            for turn in range(MAX_ROLLS + 1):
                with self._state.lock:
                    reservation = self.reserve_in_active(key, sectors)
                if reservation is not None:
                    return reservation
                if turn < MAX_ROLLS:
                    self._retire_active()
                    self._add_segment()
        raise TierFull(f"{self.directory}: other writes filled {MAX_ROLLS} new segments")

    def end_write(
        self, key: Key, segment: Segment, sector: int, sectors: int, *, written: bool
    ) -> bool:
        """End a write: publish the frame if it was written. The caller owns the lock, and calls
        `close_segment` if this returns True."""
        if written and segment.removed:
            self._state.evictions += 1
        elif written:
            segment.entries.add(key, sector, sectors)
            self._state.publish(key, segment, sector, sectors)
            self.touch(segment)
        segment.writing.discard(sector)
        self.writes_in_progress -= 1
        self._queue_seal(segment)
        return self._state.release(segment)

    def _is_append_window_over(self, segment: Segment) -> bool:
        """Whether a segment is too old for new frames."""
        append_ms = self._limits.append_window_ms
        return append_ms > 0 and self._limits.now_ms() >= segment.created_ms + append_ms

    def _retire_active(self) -> None:
        """Stop appending to the active segment."""
        with self._state.lock:
            segment, self._active = self._active, None
            if segment is not None:
                self._queue_seal(segment)

    def _queue_seal(self, segment: Segment) -> None:
        """Pass a segment without writers to the syncer for its footer. The caller owns the lock."""
        if segment.writing or segment is self._active or segment.seal_pending or segment.removed:
            return
        if not segment.sealed:
            segment.seal_pending = True
            segment.refs += 1
            self.syncer.queue_seal(segment)

    # ------------------------------------------------------------------ tasks of the syncer

    def seal_segment(self, segment: Segment) -> None:
        """Write the footer. After an error the next opening scans the segment; no data is lost."""
        try:
            if not segment.removed:
                segment.seal(self._files)
        except OSError as error:
            log.warning("%s: cannot write the footer: %s", segment.path, error)
        with self._state.lock:
            segment.seal_pending = False
            segment.refs -= 1
            last = segment.refs == 0
            self._state.changed.notify_all()
        if last:
            self.close_segment(segment)

    def sync_segment(self, segment: Segment) -> None:
        """Sync a segment, and write a checkpoint if enough was written. Raises OSError."""
        with self._state.lock:
            if segment.removed:
                return
            self._state.acquire(segment)
            sector = min(segment.writing, default=segment.next_sector)
            new_bytes = (sector - max(1, segment.checkpoint_sector)) * SECTOR_BYTES
            is_due = not segment.sealed and new_bytes >= self._limits.checkpoint_bytes
            deleted_count = len(segment.deleted_sectors)
            entries = None
            if is_due:
                entries = segment.entries.copy_before(sector, without=segment.deleted_sectors)
        try:
            segment.sync(self._files)
            if entries is not None:
                segment.checkpoint(self._files, entries, sector, deleted_count)
        finally:
            self.release(segment)

    def remove_expired(self) -> float | None:
        """Remove expired segments; returns the seconds until the next one expires, or None."""
        if not self._limits.ttl_ms:
            return None
        with self._state.lock:
            self.expire_segments()
            expired, self._expired_segments = self._expired_segments, []
            expires_ms = self.expires_ms
        for segment in expired:
            self._delete_file(segment)
        return max(0.0, (expires_ms - self._limits.now_ms()) / 1000) if expires_ms else None

    def expire_segments(self) -> bool:
        """Remove expired segments from the index; returns whether `remove_expired` has files to
        delete. The caller owns the lock."""
        now_ms = self._limits.now_ms()
        if not self.expires_ms or now_ms < self.expires_ms:
            return False
        old = [s for s in self._segments.values() if s.created_ms + self._limits.ttl_ms <= now_ms]
        for segment in old:
            if segment is self._active:
                self._active = None
            self._state.expired += self._unregister_segment(segment)
        self._expired_segments += old
        return bool(old)

    # ------------------------------------------------------------------ room

    def _add_segment(self) -> None:
        """Create a new active segment, reclaiming others for it. The caller owns the roll lock."""
        # After a failed sync, sync the new segment first to test the disk. Otherwise a disk that
        # cannot sync would take one segment after another, each at the cost of older blocks.
        sync_first = bool(self.sync_error())
        self.remove_expired()
        deadline_s = time.monotonic() + RECLAIM_WAIT_S
        while True:
            reuse = self._make_room()
            try:
                segment = self._create_segment(sync_first, reuse)
                break
            except OSError as error:
                with self._state.lock:
                    self._total_bytes -= self._limits.segment_bytes
                if reuse is not None:
                    log.warning("%s cannot be reused: %s", reuse.path, error)
                elif error.errno != errno.ENOSPC or not self._reclaim_segment(deadline_s):
                    raise
                else:
                    log.warning("%s: the file system is full; reclaiming a segment", self.directory)
        self._next_sequence_no += 1
        with self._state.lock:
            self._register_segment(segment)
            self._active = segment

    def _create_segment(self, sync_first: bool, reuse: Segment | None) -> Segment:
        limits = self._limits
        number = self._next_sequence_no
        segment = Segment.create(
            self._files, self.directory, number, limits.segment_bytes, limits.now_ms(), reuse=reuse
        )
        try:
            if sync_first:
                segment.sync(self._files)
            return segment
        except BaseException:
            self._files.close(segment.fd)
            self._files.unlink(segment.path)
            raise

    def _make_room(self) -> Segment | None:
        """Reserve the bytes of a new segment, reclaiming others if necessary. Raises TierFull.

        Returns a removed segment whose file the new one can reuse, or None.
        """
        limits = self._limits
        deadline_s = time.monotonic() + RECLAIM_WAIT_S
        while True:
            with self._state.lock:
                fits = self._total_bytes + limits.segment_bytes <= limits.capacity_bytes
                if fits and len(self._state.segments) < MAX_OPEN_SEGMENTS:
                    self._total_bytes += limits.segment_bytes
                    return None
                victim = self._pop_victim()
                if victim is not None and self._is_reusable(victim):
                    self._closing_count -= 1
                    return victim
                if victim is None:
                    if not self._wait_for_room(deadline_s):
                        raise TierFull(f"{self.directory}: no segment can be reclaimed now")
                    continue
            self._delete_file(victim)

    def _is_reusable(self, removed: Segment) -> bool:
        """Whether a new segment can reuse the file of a removed one. The caller owns the lock.

        Not with a TTL: the bytes of expired blocks must be deleted, not only become unreachable.
        """
        unused = removed.refs == 1 and not removed.read_only and not removed.sync_error
        return unused and removed.nbytes == self._limits.segment_bytes and not self._limits.ttl_ms

    def _reclaim_segment(self, deadline_s: float) -> bool:
        """Evict an idle segment, or wait until one is idle or closed. Returns False if no space was
        freed and none will be."""
        with self._state.lock:
            victim = self._pop_victim()
            if victim is None:
                return self._wait_for_room(deadline_s)
        self._delete_file(victim)
        return True

    def _wait_for_room(self, deadline_s: float) -> bool:
        """Wait for a change; returns False if none is expected. The caller owns the lock."""
        waits = self._closing_count or any(
            segment.writing or segment.seal_pending for segment in self._segments.values()
        )
        left_s = deadline_s - time.monotonic()
        return bool(waits) and left_s > 0 and self._state.changed.wait(left_s)

    def _pop_victim(self) -> Segment | None:
        """Unregister the first idle segment in eviction order. Returns None while an earlier victim
        has readers, since its bytes will become free. The caller owns the lock."""
        if self._closing_count:
            return None
        for sequence_no in self._eviction_policy.eviction_order():
            segment = self._segments[sequence_no]
            if not segment.writing and not segment.seal_pending and segment is not self._active:
                self._unregister_segment(segment)
                return segment
        return None

    def _register_segment(self, segment: Segment) -> None:
        """Add a segment. The caller owns the lock."""
        segment.volume_no = self.volume_no
        self._state.add_segment(segment)
        self._segments[segment.sequence_no] = segment
        self._eviction_policy.on_insert(segment.sequence_no, segment.nbytes)
        self._set_expiry()

    def _unregister_segment(self, segment: Segment) -> int:
        """Remove a segment and its blocks; returns the number of blocks. The caller owns the lock,
        and calls `_delete_file` afterwards."""
        self._closing_count += 1
        del self._segments[segment.sequence_no]
        self._eviction_policy.on_remove(segment.sequence_no)
        self._set_expiry()
        return self._state.remove_segment(segment)

    def _set_expiry(self) -> None:
        if self._limits.ttl_ms:
            created = (segment.created_ms for segment in self._segments.values())
            oldest_ms = min(created, default=0)
            self.expires_ms = oldest_ms + self._limits.ttl_ms if oldest_ms else 0

    def _delete_file(self, segment: Segment) -> None:
        """Delete the file of a removed segment, and drop the volume's reference."""
        try:
            self._files.unlink(segment.path)
        except OSError as error:
            log.error("%s: cannot delete the file: %s", segment.path, error)
        with self._state.lock:
            segment.refs -= 1
            last = segment.refs == 0
        if last:
            self.close_segment(segment)

    def clear(self) -> None:
        """Remove all segments, including frames being written and segments of later versions."""
        with self._roll_lock:
            with self._state.lock:
                self._active = None
                segments = list(self._segments.values())
                for segment in segments:
                    self._unregister_segment(segment)
            for segment in segments:
                self._delete_file(segment)
            freed_bytes = self._unsupported.delete(self._files)
            with self._state.lock:
                self._total_bytes -= freed_bytes

    # ------------------------------------------------------------------ start and end

    def _recover(self) -> None:
        result = recover(
            self._files, self.directory, self._limits, MAX_OPEN_SEGMENTS - len(self._state.segments)
        )
        self._state.torn += result.torn
        self._unsupported, self._next_sequence_no = result.unsupported, result.next_sequence_no
        self._total_bytes += self._unsupported.nbytes
        for segment in result.segments:
            self._total_bytes += segment.nbytes
            self._register_segment(segment)
            index_segment(self._files, self._state, segment)
        while self._total_bytes > self._limits.capacity_bytes and self._segments:
            with self._state.lock:
                victim = self._pop_victim()
            assert victim is not None, "a segment is in use before the tier is open"
            self._delete_file(victim)
        self._resume_newest()
        for segment in self._segments.values():
            if not segment.sealed and segment is not self._active:
                segment.refs += 1
                self.seal_segment(segment)

    def _resume_newest(self) -> None:
        """Append to the newest segment if it has the current size and is not too old."""
        newest = max(self._segments.values(), key=lambda s: s.sequence_no, default=None)
        if newest is None or newest.nbytes != self._limits.segment_bytes or newest.read_only:
            return
        if self._is_append_window_over(newest):
            return
        try:
            newest.reopen(self._files)
        except OSError as error:
            log.warning("%s: cannot reopen the segment for appending: %s", newest.path, error)
            return
        self._active = newest

    def close(self) -> None:
        """Seal open segments and close all files. No call uses a segment; the syncer has ended."""
        for segment in [*self._segments.values(), *self._expired_segments]:
            if segment.removed:
                self._delete_file(segment)
                continue
            if not segment.sealed:
                segment.refs += 1
                self.seal_segment(segment)
            self._files.close(segment.fd)
        self._segments.clear()
