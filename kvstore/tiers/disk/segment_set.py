"""The segments of one directory and their files: references, expiry, eviction order, deletion."""

from __future__ import annotations

import logging
import time

from kvstore.cache.eviction import eviction_policy
from kvstore.tiers.disk.aside import SetAside
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.lockfile import LOCK_BYTES, DirectoryLock
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import DiskLimits, DiskState

log = logging.getLogger(__name__)


class SegmentSet:
    """The segments of one directory. The lock of `state` guards them.

    Methods take the lock unless their docstring says that the caller owns it.
    """

    def __init__(
        self,
        state: DiskState,
        files: Files,
        directory_lock: DirectoryLock,
        volume_no: int,
        limits: DiskLimits,
    ) -> None:
        self.directory = directory_lock.directory
        self.volume_no = volume_no
        self.expires_ms = 0
        """When the first segment expires, in milliseconds since 1970; 0: never."""
        self.lost = ""
        """Why the directory is not used: it, or its open segment, was deleted or replaced. "": it
        is used."""
        self._state = state
        self._files = files
        self._directory_lock = directory_lock
        self._limits = limits
        self._segments: dict[int, Segment] = {}
        """Segments by sequence number, oldest first."""
        self._aside: SetAside | None = None
        self._eviction_policy = eviction_policy(
            limits.eviction, max(1, limits.capacity_bytes // limits.segment_bytes)
        )
        self._active: Segment | None = None
        self._missing: Segment | None = None
        """The segment whose file was not in place at the last check."""
        self._total_bytes = LOCK_BYTES
        """Bytes of the lock file and of the segments, without files set aside."""
        self._closing_count = 0
        self._expired_segments: list[Segment] = []
        """Expired segments whose files are not deleted yet."""

    def touch(self, segment: Segment) -> None:
        """Record a read or write of the segment. The caller owns the lock."""
        self._state.touch(segment)
        self._eviction_policy.on_access(segment.sequence_no)

    def stats(self) -> dict[str, int]:
        """Statistics of this directory. The caller owns the lock."""
        return {
            "bytes_used": self._used_bytes(),
            "segments": len(self._segments),
            "segments_set_aside": len(self._aside or ()),
        }

    def sync_error(self) -> str:
        """Why not all acknowledged writes are on stable storage: the directory is lost, or the sync
        of a segment failed; "" if neither."""
        with self._state.lock:
            errors = (segment.sync_error for segment in self._segments.values())
            return self.lost or next(filter(None, errors), "")

    def _used_bytes(self) -> int:
        return self._total_bytes + (self._aside.nbytes if self._aside else 0)

    # ------------------------------------------------------------------ place

    def check_in_place(self, segment: Segment | None = None) -> str:
        """Check that the directory, and the segment (None: the active one), are still the opened
        ones at their paths; returns why not, and "" if they are.

        If not, the directory is lost: its blocks are misses, and it takes no writes. A later check
        may find it in place again. No thread may own the lock.
        """
        with self._state.lock:
            checked = {segment or self._active, self._missing} - {None}
        reason, missing = "", None
        if not self._directory_lock.is_in_place(self._files):
            reason = f"{self.directory} was deleted or replaced while in use"
        else:
            for each in checked:
                assert each is not None
                if not each.removed and not self._files.is_same(each.fd, each.path):
                    reason, missing = f"{each.path} was deleted or replaced while in use", each
        with self._state.lock:
            changed, self.lost, self._missing = bool(reason) != bool(self.lost), reason, missing
        if changed and reason:
            log.error("%s; its blocks are cache misses until it is back", reason)
        elif changed:
            log.warning("%s is back", self.directory)
        return reason

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

    # ------------------------------------------------------------------ expiry

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

    def _set_expiry(self) -> None:
        if self._limits.ttl_ms:
            created = (segment.created_ms for segment in self._segments.values())
            oldest_ms = min(created, default=0)
            self.expires_ms = oldest_ms + self._limits.ttl_ms if oldest_ms else 0

    # ------------------------------------------------------------------ addition and removal

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

    def _is_reusable(self, removed: Segment) -> bool:
        """Whether a new segment can reuse the file of a removed one. The caller owns the lock.

        Not with a TTL: the bytes of expired blocks must be deleted, not only become unreachable.
        """
        unused = removed.refs == 1 and not removed.truncated and not removed.sync_error
        return unused and removed.nbytes == self._limits.segment_bytes and not self._limits.ttl_ms

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

    def _delete_file(self, segment: Segment) -> None:
        """Delete the file of a removed segment, and drop the volume's reference.

        A file that replaced it in a lost directory belongs to another tier, and is not deleted.
        """
        try:
            if self._files.is_same(segment.fd, segment.path):
                self._files.unlink(segment.path)
        except OSError as error:
            log.error("%s: cannot delete the file: %s", segment.path, error)
        with self._state.lock:
            segment.refs -= 1
            last = segment.refs == 0
        if last:
            self.close_segment(segment)
