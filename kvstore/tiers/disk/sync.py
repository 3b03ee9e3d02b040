"""Stable storage in groups: one fdatasync for many writes.

A write is acknowledged when the kernel has it, which a kill of this process does not undo. Power
loss does; so a thread syncs what was written when there is enough of it or when it is old
enough, and whoever needs to know waits for the next round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk.segment import Segment

log = logging.getLogger(__name__)

GROUP_BYTES = 64 << 20
"""Bytes written that start a round."""
GROUP_S = 1.0
"""Age of the oldest unsynced write that starts a round."""
WAIT_LIMIT_S = 60.0
"""Longest anybody waits for a round."""


class Syncer:
    """Syncs segments on a thread of its own.

    sync: `Segment.sync` of one; does nothing for one that is gone. Raises OSError.
    """

    def __init__(self, sync: Callable[[Segment], None]) -> None:
        self._sync = sync
        self._changed = threading.Condition()
        self._dirty: set[Segment] = set()
        self._written = 0
        """Writes ever; a mark is a value of this count."""
        self._synced = 0
        """Every write up to this mark has been through a round."""
        self._dirty_bytes = 0
        self._urgent = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstore-disk-sync", daemon=True)
        self._thread.start()

    def wrote(self, segment: Segment, nbytes: int) -> int:
        """Say that a write has returned; the mark to wait for."""
        with self._changed:
            self._dirty.add(segment)
            self._written += 1
            self._dirty_bytes += nbytes
            if self._dirty_bytes == nbytes or self._dirty_bytes >= GROUP_BYTES:
                self._changed.notify_all()
            return self._written

    def wait(self, mark: int | None = None) -> None:
        """Return when a sync of every write up to `mark` (default: until now) has ended.

        Whether it went well is told by the segments' `sync_fault`. Raises TierUnavailable when it
        does not end.
        """
        with self._changed:
            if mark is None:
                mark = self._written
            self._urgent = True
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: self._synced >= mark, WAIT_LIMIT_S)
            if not ended:
                raise TierUnavailable(f"the disk did not sync within {WAIT_LIMIT_S:.0f} s")

    def stop(self) -> bool:
        """One last round, then the thread ends; False when it hangs in a sync."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(WAIT_LIMIT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dirty or self._urgent or self._stopping)
                self._changed.wait_for(
                    lambda: self._dirty_bytes >= GROUP_BYTES or self._urgent or self._stopping,
                    GROUP_S,
                )
                dirty, self._dirty, self._dirty_bytes = self._dirty, set(), 0
                mark, stopping, self._urgent = self._written, self._stopping, False
            self._round(dirty)
            with self._changed:
                self._synced = mark
                self._changed.notify_all()
            if stopping:
                return

    def _round(self, dirty: set[Segment]) -> None:
        """Sync these segments; each remembers its failure itself."""
        for segment in dirty:
            try:
                self._sync(segment)
            except OSError as error:
                log.error("%s may not be on stable storage: %s", segment.path, error)
