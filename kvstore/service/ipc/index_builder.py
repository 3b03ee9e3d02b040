"""Builds the shared index: fills it at the sidecar's start, and rebuilds its filter when full.

Listing the blocks of a large disk takes a second or two, so a separate thread does it. Until it has
finished, the shared index reports no block as absent, and clients ask the sidecar.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Final

from kvstore.blocks.key import Key
from kvstore.shm.shared_index import SharedIndex
from kvstore.store.store import Store

log = logging.getLogger(__name__)

SLAB_DIVISOR: Final = 64
"""The filters use at most the slab's bytes divided by this."""
BLOCKS_PER_SLOT: Final = 2
"""Compressed blocks that a tier may store in one slot's bytes."""
YIELD_EVERY: Final = 256
"""Keys listed between two pauses, in which other threads can run."""
YIELD_S: Final = 0.0005
JOIN_TIMEOUT_S: Final = 5.0


class IndexBuilder:
    """Builds `index` for one store. Call `start` once, and `close` after the last client."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._can_list = store.iter_tier_keys() is not None
        slab = store.slab
        self.index = SharedIndex(slab.slots, self._tier_blocks(), slab.nbytes // SLAB_DIVISOR)
        self.index.on_filter_full = self._wake
        self._wake_up = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index-builder", daemon=True)
        self._started = False
        store.manager.set_listener(self.index)

    def start(self) -> None:
        """Start to report absent blocks, if the tiers can list their blocks."""
        self._started = self._can_list
        if self._started:
            self._thread.start()

    def close(self) -> None:
        """End the thread and free the index."""
        self._ending.set()
        self._wake_up.set()
        if self._started:
            self._thread.join(JOIN_TIMEOUT_S)
        self.index.close()

    def _wake(self) -> None:
        self._wake_up.set()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wake_up.clear()
            try:
                self.index.rebuild_filter(
                    lambda: self._store.manager.set_listener(self.index), self._tier_keys()
                )
            except Exception:
                # A tier cannot list its blocks now. No block is reported absent, and clients ask.
                log.exception("cannot rebuild the filter of the shared index")
            self._wake_up.wait()

    def _tier_keys(self) -> Iterator[Key]:
        for count, key in enumerate(self._store.iter_tier_keys() or ()):
            if count % YIELD_EVERY == 0 and self._ending.wait(YIELD_S):
                return
            yield key

    def _tier_blocks(self) -> int:
        """Approximate number of blocks that the tiers can store; 0 if they cannot list them."""
        if not self._can_list:
            return 0
        tiers = self._store.stats()["tiers"].values()
        capacity = int(sum(tier.get("bytes_capacity", 0) for tier in tiers))
        return BLOCKS_PER_SLOT * capacity // self._store.slab.slot_bytes
