"""Write everything that L2 has and the tiers do not, and make it durable."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from kvstore.blocks.key import Key
from kvstore.cache.manager import L2Manager
from kvstore.store.maintenance import Dispatch
from kvstore.store.tier_workers import TierWorkers

log = logging.getLogger(__name__)

POLL_S: Final = 0.02
"""Time between two looks at the writes that are left."""


class Flusher:
    """Flushes a store. `workers`: of its tiers."""

    def __init__(
        self, manager: L2Manager, workers: Sequence[TierWorkers], dispatch: Dispatch
    ) -> None:
        self._manager = manager
        self._workers = workers
        self._dispatch = dispatch

    def flush(self, deadline_s: float, *, wait_for_failing: bool = True) -> bool:
        """Write all queued, deferred and dirty blocks. Does not wait for later saves.

        False if the deadline (monotonic time) passed, or a tier failed: what is left is logged, and
        is written later. wait_for_failing: wait for a tier that does not answer, if it is tried
        again before the deadline.
        """
        left: dict[str, set[Key]] | None = None
        while True:
            free = min((workers.free_blocks() for workers in self._workers), default=0)
            self._dispatch((), self._manager.flush_dirty(free))
            ended = [workers.wait_queue(deadline_s) for workers in self._workers]
            unwritten = self._unwritten()
            left = left or unwritten  # the queue's blocks may have been deferred by now
            left = {name: keys & unwritten[name] for name, keys in left.items()}
            if not any(left.values()) or not all(ended):
                break
            latest_s = deadline_s if wait_for_failing else time.monotonic()
            behind = [each for each in self._workers if left[each.tier.name]]
            if time.monotonic() >= deadline_s or all(e.next_try_s() > latest_s for e in behind):
                break
            time.sleep(POLL_S)
        flushed = [workers.flush(deadline_s) for workers in self._workers]
        counts = {name: len(keys) for name, keys in left.items() if keys}
        if counts:
            blocks = ", ".join(f"{count} to {name}" for name, count in counts.items())
            log.warning("flush: blocks not written yet: %s", blocks)
        return all(ended) and all(flushed) and not counts

    def _unwritten(self) -> dict[str, set[Key]]:
        """The blocks that have no place in a write queue, by tier; dirty ones count for all."""
        dirty = self._manager.dirty_keys()
        return {
            workers.tier.name: dirty | self._manager.tier_writes.deferred_keys(number)
            for number, workers in enumerate(self._workers)
        }
