"""Stable storage in groups: one fdatasync for many writes, off the path of the writers.

A write is acknowledged when the kernel has it, which a kill of this process does not undo. Power
loss does; so a thread for each directory syncs what was written when there is enough of it or when
it is old enough, and whoever needs to know waits for the next round. The same thread writes
footers and checkpoints, and removes what has expired.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk.segment import Segment

log = logging.getLogger(__name__)

GROUP_BYTES = 1 << 30
"""Bytes written that start a round. A sync costs 90 ms of a virtual disk's time, in which it does
little else (ext4, 2 cores): every 64 MiB it halved the rate of writes."""
GROUP_S = 5.0
"""Age of the oldest unsynced write that starts a round: ext4's own interval."""
WAIT_LIMIT_S = 60.0
"""Longest anybody waits for a round."""


class Chores(Protocol):
    """What the thread does for its directory; no lock of the syncer is held."""

    def sync_segment(self, segment: Segment) -> None:
        """`Segment.sync`, and a checkpoint if it is time; nothing for one that is gone.

        Raises OSError.
        """
        ...

    def seal_segment(self, segment: Segment) -> None:
        """Write its footer. Faults are logged."""
        ...

    def tidy(self) -> float | None:
        """Remove what has expired; seconds until the next does, None when nothing will."""
        ...


class Syncer:
    """Syncs and seals the segments of a directory on a thread of its own."""

    def __init__(self, chores: Chores, *, name: str) -> None:
        self._chores = chores
        self._changed = threading.Condition()
        self._dirty: dict[Segment, int] = {}
        """Bytes written to each since its last round."""
        self._retired: list[Segment] = []
        self._written = 0
        """Writes ever; a mark is a value of this count."""
        self._synced = 0
        """Every write up to this mark has been through a round."""
        self._dirty_bytes = 0
        self._dirty_since_s = 0.0
        self._urgent = False
        self._nudged = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-sync", daemon=True)
        self._thread.start()

    def wrote(self, segment: Segment, nbytes: int) -> int:
        """Say that a write has returned; the mark to wait for."""
        with self._changed:
            self._written += 1
            if not self._dirty:
                self._dirty_since_s = time.monotonic()
                self._changed.notify_all()
            self._dirty[segment] = self._dirty.get(segment, 0) + nbytes
            self._dirty_bytes += nbytes
            if self._dirty_bytes >= GROUP_BYTES:
                self._changed.notify_all()
            return self._written

    def retire(self, segment: Segment) -> None:
        """Have its footer written; `Segment.sealing` is set, and a reference taken."""
        with self._changed:
            self._retired.append(segment)
            self._changed.notify_all()

    def nudge(self) -> None:
        """Have `Chores.tidy` called now."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

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

    def _is_due(self) -> bool:
        """Whether it is time for a round; the lock is held."""
        if self._urgent or self._stopping or self._dirty_bytes >= GROUP_BYTES:
            return True
        return bool(self._dirty) and time.monotonic() >= self._dirty_since_s + GROUP_S

    def _patience_s(self, tidy_s: float | None) -> float | None:
        """How long to wait for something to do; None: until told. The lock is held."""
        waits = [] if tidy_s is None else [tidy_s]
        if self._dirty:
            waits.append(max(0.0, self._dirty_since_s + GROUP_S - time.monotonic()))
        return min(waits, default=None)

    def _run(self) -> None:
        while True:
            tidy_s = self._chores.tidy()
            with self._changed:
                if not (self._retired or self._nudged or self._is_due()):
                    self._changed.wait(self._patience_s(tidy_s))
                self._nudged = False
                retired, self._retired = self._retired, []
                due, stopping = self._is_due(), self._stopping
                for segment in retired:
                    # Sealing syncs it, and nothing more is written to it.
                    self._dirty_bytes -= self._dirty.pop(segment, 0)
                mark, dirty = self._written, list(self._dirty) if due else []
                if due:
                    self._dirty, self._dirty_bytes, self._urgent = {}, 0, False
            for segment in retired:
                self._chores.seal_segment(segment)
            self._round(dirty)
            if due:
                with self._changed:
                    self._synced = mark
                    self._changed.notify_all()
            if stopping:
                return

    def _round(self, dirty: list[Segment]) -> None:
        """Sync these segments; each remembers its failure itself."""
        for segment in dirty:
            try:
                self._chores.sync_segment(segment)
            except OSError as error:
                log.error("%s may not be on stable storage: %s", segment.path, error)
