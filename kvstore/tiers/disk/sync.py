"""Group commit: one fdatasync for many writes, in a separate thread.

A write is acknowledged when the kernel has the data. It then survives a kill of this process, but
not a power loss. One thread for each directory syncs the written data, by amount or by age. A
caller that needs stable storage waits for the next sync. The same thread writes footers and
checkpoints, and removes expired segments.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk.segment import Segment

log = logging.getLogger(__name__)

SYNC_GROUP_BYTES = 1 << 30
"""Unsynced bytes that trigger a sync. A sync takes 90 ms of a virtual disk, which does little else
meanwhile (ext4, 2 cores): a sync every 64 MiB halved the write rate."""
SYNC_GROUP_S = 5.0
"""Age of the oldest unsynced write that triggers a sync; ext4 uses the same interval."""
MAX_WAIT_S = 60.0
"""Maximum wait of a caller for a sync."""


class SyncTasks(Protocol):
    """The tasks that the thread runs for its directory, without the syncer's lock."""

    def sync_segment(self, segment: Segment) -> None:
        """Sync a segment, and write a checkpoint if one is due. Ignores a removed segment.

        Raises OSError, also if its file was deleted.
        """
        ...

    def seal_segment(self, segment: Segment) -> None:
        """Write the segment's footer. Errors are logged."""
        ...

    def remove_expired(self) -> float | None:
        """Remove expired segments; returns the seconds until the next one expires, or None."""
        ...


class Syncer:
    """A thread that syncs and seals the segments of one directory."""

    def __init__(self, tasks: SyncTasks, *, name: str) -> None:
        self._tasks = tasks
        self._changed = threading.Condition()
        self._dirty: dict[Segment, int] = {}
        """Bytes written to each segment since its last sync."""
        self._seal_queue: list[Segment] = []
        self._written = 0
        """Number of writes so far, which is also the number of the last write."""
        self._synced = 0
        """A sync has ended for every write up to this number."""
        self._dirty_bytes = 0
        self._dirty_since_s = 0.0
        self._urgent = False
        self._woken = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-sync", daemon=True)
        self._thread.start()

    def record_write(self, segment: Segment, nbytes: int) -> int:
        """Record a completed write; returns its number, for `wait_synced`."""
        with self._changed:
            self._written += 1
            if not self._dirty:
                self._dirty_since_s = time.monotonic()
                self._changed.notify_all()
            self._dirty[segment] = self._dirty.get(segment, 0) + nbytes
            self._dirty_bytes += nbytes
            if self._dirty_bytes >= SYNC_GROUP_BYTES:
                self._changed.notify_all()
            return self._written

    def queue_seal(self, segment: Segment) -> None:
        """Queue a segment for its footer. The caller has set `Segment.seal_pending` and taken a
        reference."""
        with self._changed:
            self._seal_queue.append(segment)
            self._changed.notify_all()

    def wake(self) -> None:
        """Run `SyncTasks.remove_expired` now."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def wait_synced(self, write_no: int | None = None) -> None:
        """Wait until a sync of all writes up to `write_no` has ended; None: of all writes so far.

        `Segment.sync_error` says whether the sync failed. Raises TierUnavailable: the sync does not
        end.
        """
        with self._changed:
            if write_no is None:
                write_no = self._written
            self._urgent = True
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: self._synced >= write_no, MAX_WAIT_S)
            if not ended:
                raise TierUnavailable(f"the disk did not sync within {MAX_WAIT_S:.0f} s")

    def stop(self) -> bool:
        """Sync a last time and end the thread; returns False if it hangs in a sync."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(MAX_WAIT_S)
        return not self._thread.is_alive()

    def _is_due(self) -> bool:
        """Whether a sync is due. The caller owns the lock."""
        if self._urgent or self._stopping or self._dirty_bytes >= SYNC_GROUP_BYTES:
            return True
        return bool(self._dirty) and time.monotonic() >= self._dirty_since_s + SYNC_GROUP_S

    def _wait_s(self, expiry_s: float | None) -> float | None:
        """Seconds to wait for the next task; None: until notified. The caller owns the lock."""
        waits = [] if expiry_s is None else [expiry_s]
        if self._dirty:
            waits.append(max(0.0, self._dirty_since_s + SYNC_GROUP_S - time.monotonic()))
        return min(waits, default=None)

    def _run(self) -> None:
        while True:
            expiry_s = self._tasks.remove_expired()
            with self._changed:
                if not (self._seal_queue or self._woken or self._is_due()):
                    self._changed.wait(self._wait_s(expiry_s))
                self._woken = False
                to_seal, self._seal_queue = self._seal_queue, []
                due, stopping = self._is_due(), self._stopping
                for segment in to_seal:
                    # Sealing syncs the segment, and it takes no more writes.
                    self._dirty_bytes -= self._dirty.pop(segment, 0)
                write_no, dirty = self._written, list(self._dirty) if due else []
                if due:
                    self._dirty, self._dirty_bytes, self._urgent = {}, 0, False
            for segment in to_seal:
                self._tasks.seal_segment(segment)
            self._sync_segments(dirty)
            if due:
                with self._changed:
                    self._synced = write_no
                    self._changed.notify_all()
            if stopping:
                return

    def _sync_segments(self, dirty: list[Segment]) -> None:
        """Sync these segments. Each records its own error."""
        for segment in dirty:
            try:
                self._tasks.sync_segment(segment)
            except OSError as error:
                log.error("%s may not be on stable storage: %s", segment.path, error)
