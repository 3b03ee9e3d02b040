"""Keeps the catalogue: fills it when the sidecar starts, and makes its filter anew when crowded.

Listing what a large disk holds takes a second or two, so it happens in a thread of its own; until
it has ended the catalogue knows of nothing that it is absent, and clients ask.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Final

from kvstore.blocks.key import Key
from kvstore.shm.shared_index import Catalog
from kvstore.store.store import Store

log = logging.getLogger(__name__)

SLAB_SHARE: Final = 64
"""The filters take at most this part of the slab's bytes."""
COMPRESSED: Final = 2
"""Blocks that a tier may hold for each slot's bytes of its capacity, compressed."""
YIELD_EVERY: Final = 256
"""Keys listed between two offers of the interpreter to other threads."""
YIELD_S: Final = 0.0005
CLOSE_LIMIT_S: Final = 5.0


class Keeper:
    """Keeps `catalog` for one store. `start` begins, `close` ends, after the last client."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._certain = store.held_below() is not None
        slab = store.slab
        self.catalog = Catalog(slab.slots, self._below(), slab.nbytes // SLAB_SHARE)
        self.catalog.crowded = self._wake
        self._woken = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="catalogue", daemon=True)
        self._started = False
        store.brain.list_in(self.catalog)

    def start(self) -> None:
        """Begin to say what is absent, where that can be said."""
        self._started = self._certain
        if self._started:
            self._thread.start()

    def close(self) -> None:
        """End the thread and let go of the catalogue's memory."""
        self._ending.set()
        self._woken.set()
        if self._started:
            self._thread.join(CLOSE_LIMIT_S)
        self.catalog.close()

    def _wake(self) -> None:
        self._woken.set()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._woken.clear()
            try:
                self.catalog.renew(lambda: self._store.brain.list_in(self.catalog), self._listed())
            except Exception:
                # A tier that cannot list now: what is absent stays unsaid, and is asked for.
                log.exception("the catalogue's filter could not be made anew")
            self._woken.wait()

    def _listed(self) -> Iterator[Key]:
        for count, key in enumerate(self._store.held_below() or ()):
            if count % YIELD_EVERY == 0 and self._ending.wait(YIELD_S):
                return
            yield key

    def _below(self) -> int:
        """Blocks that the tiers can hold, about; 0 where that does not matter."""
        if not self._certain:
            return 0
        tiers = self._store.stats()["tiers"].values()
        capacity = int(sum(tier.get("bytes_capacity", 0) for tier in tiers))
        return COMPRESSED * capacity // self._store.slab.slot_bytes
