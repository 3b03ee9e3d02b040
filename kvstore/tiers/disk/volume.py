"""One directory of the disk tier: its segments, and room for new frames."""

from __future__ import annotations

import errno
import logging
import threading
import time

from kvstore.blocks.key import Key
from kvstore.errors import ConfigError, TierFull
from kvstore.tiers.disk.files import SECTOR_BYTES, Files
from kvstore.tiers.disk.index import MAX_OPEN_SEGMENTS
from kvstore.tiers.disk.lockfile import DirectoryLock
from kvstore.tiers.disk.recover import index_segment, recover
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.segment_set import SegmentSet
from kvstore.tiers.disk.state import DiskLimits, DiskState
from kvstore.tiers.disk.sync import Syncer

log = logging.getLogger(__name__)

RECLAIM_WAIT_S = 10.0
"""Maximum wait of a write for the readers, writers or footer of the segment to reclaim."""
MAX_ROLLS = 4
"""Maximum number of new segments that other writes may fill before a frame is rejected."""
OVERHEAD_SECTORS = 5
"""Sectors of a segment that frames cannot use: the header and the smallest footer."""
MIN_RECORD_S = 1.0
"""Minimum time between two records of the age clock."""
_NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})

Reservation = tuple[Segment, int]
"""Room for a frame: the segment and the first sector."""


class Volume(SegmentSet):
    """Writes to the segments of one directory."""

    def __init__(
        self,
        state: DiskState,
        files: Files,
        directory_lock: DirectoryLock,
        volume_no: int,
        limits: DiskLimits,
        name: str,
    ) -> None:
        """Recover the segments of the directory, and evict until they fit into the capacity.

        volume_no: number of the directory in the tier. Raises ConfigError.
        """
        super().__init__(state, files, directory_lock, volume_no, limits)
        self.writes_in_progress = 0
        """Number of frames being written to this directory."""
        self._roll_lock = threading.Lock()
        self._next_sequence_no = 1
        self._most_segments = 0
        """Maximum number of segments since the opening, or since the last `clear`."""
        self._full = False
        """The file system had no room for the last new segment."""
        self._recorded_ms = 0
        """The last record of the age clock."""
        self._recover()
        self._record_time()
        self.syncer = Syncer(self, name=f"{name}-{volume_no}")

    # ------------------------------------------------------------------ writing

    def reserve_in_active(self, key: Key, sectors: int) -> Reservation | None:
        """Reserve sectors for a frame in the active segment, if it has room. The reservation owns a
        reference until `end_write`. The caller owns the lock.
        """
        segment = self._active
        if segment is None or self.lost or self._is_append_window_over(segment):
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

        Raises TierFull; OSError: a new segment cannot be created, or the directory is lost.
        """
        if self.lost and (reason := self.check_in_place()):
            raise OSError(errno.ESTALE, reason)
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
                self.check_in_place(segment)
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
        """Sync a segment, and write a checkpoint if enough was written.

        Raises OSError, also if the file is not in place.
        """
        reason = self.check_in_place(segment)
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
        if reason:
            raise OSError(errno.ESTALE, reason)

    def remove_expired(self) -> float | None:
        """Remove expired segments, and record the age clock now and then.

        Returns the seconds until the next one expires or the next record; None: neither.
        """
        if not self._limits.ttl_ms:
            return None
        record_s = self._record_time()
        with self._state.lock:
            self.expire_segments()
            expired, self._expired_segments = self._expired_segments, []
            expires_ms = self.expires_ms
        for segment in expired:
            self._delete_file(segment)
        now_ms = self._limits.now_ms()
        if self._aside:
            self._aside.delete_written_before(now_ms - self._limits.ttl_ms)
        return max(0.0, min(record_s, (expires_ms - now_ms) / 1000 if expires_ms else record_s))

    def _record_time(self, *, closing: bool = False) -> float:
        """Record the age clock if it is due; returns the seconds until the next record."""
        every_ms = max(MIN_RECORD_S * 1000, self._limits.append_window_ms)
        reading = self._limits.clock.read()
        if closing or reading[0] >= self._recorded_ms + every_ms:
            self._recorded_ms = reading[0]
            try:
                self._directory_lock.record_time(reading)
            except ConfigError as error:
                log.warning("cannot record the time: %s", error)
        return (self._recorded_ms + every_ms - reading[0]) / 1000

    # ------------------------------------------------------------------ room

    def _add_segment(self) -> None:
        """Create a new active segment, reclaiming others for it. The caller owns the roll lock.

        Raises TierFull, OSError.
        """
        # After a failed sync, sync the new segment first to test the disk. Otherwise a disk that
        # cannot sync would take one segment after another, each at the cost of older blocks.
        sync_first = bool(self.sync_error())
        # Another process may use a directory that replaced this one.
        if reason := self.check_in_place():
            raise OSError(errno.ESTALE, reason)
        self.remove_expired()
        full = False
        while True:
            reuse = self._make_room(full=full)
            try:
                segment = self._create_segment(sync_first, reuse)
                break
            except OSError as error:
                with self._state.lock:
                    self._total_bytes -= self._limits.segment_bytes
                full = error.errno in _NO_SPACE_ERRNOS and reuse is None
                if reuse is not None:
                    log.warning("%s cannot be reused: %s", reuse.path, error)
                elif not full:
                    raise
                elif self._aside and self._aside.delete_oldest():
                    full = False
        self._next_sequence_no += 1
        with self._state.lock:
            self._register_segment(segment)
            self._active = segment
            self._most_segments = max(self._most_segments, len(self._segments))
            if not full:
                self._full = False

    def _create_segment(self, sync_first: bool, reuse: Segment | None) -> Segment:
        limits = self._limits
        segment = Segment.create(
            self._files,
            self.directory,
            self._next_sequence_no,
            limits.segment_bytes,
            limits.now_ms(),
            reuse=reuse,
        )
        try:
            if sync_first:
                segment.sync(self._files)
            return segment
        except BaseException:
            self._files.close(segment.fd)
            self._files.unlink(segment.path)
            raise

    def _make_room(self, *, full: bool) -> Segment | None:
        """Reserve the bytes of a new segment, reclaiming others if necessary.

        Returns a removed segment whose file the new one can reuse, or None. full: the file system
        has no room for a new file, so reclaim a segment first. Reusing its file takes no room.
        Deleting it may give the room to other programs, so half of the segments are kept.

        Raises TierFull.
        """
        limits = self._limits
        deadline_s = time.monotonic() + RECLAIM_WAIT_S
        while True:
            with self._state.lock:
                fits = self._used_bytes() + limits.segment_bytes <= limits.capacity_bytes
                if fits and not full and len(self._state.segments) < MAX_OPEN_SEGMENTS:
                    self._total_bytes += limits.segment_bytes
                    return None
                if full:
                    self._check_reclaimable()
                victim = self._pop_victim()
                if victim is not None and self._is_reusable(victim):
                    self._closing_count -= 1
                    return victim
                if victim is None:
                    if not self._wait_for_room(deadline_s):
                        raise TierFull(f"{self.directory}: no segment can be reclaimed now")
                    continue
            self._delete_file(victim)
            full = False

    def _check_reclaimable(self) -> None:
        """Check that a segment may be reclaimed because the file system is full. The caller owns
        the lock. Raises TierFull: not more than half of the segments are left."""
        if not self._full:
            self._full = True
            log.warning("%s: the file system is full; reclaiming segments", self.directory)
        least = max(self._most_segments // 2, 1 if self._limits.ttl_ms else 0)
        if len(self._segments) <= least:
            raise TierFull(
                f"{self.directory}: the file system is full, and the last {least} segments are kept"
            )

    def clear(self) -> None:
        """Remove all segments, including frames being written, and the files set aside."""
        with self._roll_lock:
            with self._state.lock:
                self._active = None
                segments = list(self._segments.values())
                for segment in segments:
                    self._unregister_segment(segment)
                self._most_segments = 0
            for segment in segments:
                self._delete_file(segment)
            if self._aside and not self.check_in_place():
                self._aside.delete_all()

    # ------------------------------------------------------------------ start and end

    def _recover(self) -> None:
        result = recover(
            self._files, self.directory, self._limits, MAX_OPEN_SEGMENTS - len(self._state.segments)
        )
        self._state.torn += result.torn
        self._state.unreadable_segments += result.unreadable
        self._aside = result.aside
        self._next_sequence_no = result.last_sequence_no + 1
        for segment in result.segments:
            self._total_bytes += segment.nbytes
            self._register_segment(segment)
            index_segment(self._files, self._state, segment)
        while self._used_bytes() > self._limits.capacity_bytes and self._segments:
            with self._state.lock:
                victim = self._pop_victim()
            assert victim is not None, "a segment is in use before the tier is open"
            self._delete_file(victim)
        self._most_segments = len(self._segments)
        self._resume_newest()
        for segment in self._segments.values():
            if not segment.sealed and segment is not self._active:
                segment.refs += 1
                self.seal_segment(segment)

    def _resume_newest(self) -> None:
        """Append to the newest segment if it has the current size and is not too old."""
        newest = max(self._segments.values(), key=lambda s: s.sequence_no, default=None)
        if newest is None or newest.nbytes != self._limits.segment_bytes or newest.truncated:
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
        self._record_time(closing=True)
