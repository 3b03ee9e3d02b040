"""Pins: an administrator's order to keep blocks in L2."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvstore.blocks.key import Key
from kvstore.cache.commands import TierWrite
from kvstore.cache.slots import SlotTable
from kvstore.cache.tier_writes import TierWrites
from kvstore.cache.tunables import L2Tunables


class Pins:
    """Part of the L2 manager; lock: the manager's."""

    def __init__(
        self,
        lock: threading.RLock,
        table: SlotTable,
        tier_writes: TierWrites,
        tunables: L2Tunables,
    ) -> None:
        self._lock = lock
        self._table = table
        self._tier_writes = tier_writes
        self._tunables = tunables

    def pin(self, keys: Sequence[Key], nbytes: int) -> tuple[int, list[TierWrite]]:
        """Pin the leading blocks that are READY: `evict` and `clear` skip them until `unpin`.

        Returns the number of keys that are now pinned, and writes of blocks that would otherwise be
        written at their eviction. The number is below len(keys) if the next block is not READY, or
        the maximum of pinned slots is reached.
        """
        with self._lock:
            writes: list[TierWrite] = []
            for index, key in enumerate(keys):
                block = self._table.ready_block(key, nbytes)
                if block is None:
                    return index, writes
                if self._table.is_pinned(block):
                    continue
                if self._table.pinned >= self._tunables.max_pinned:
                    return index, writes
                self._table.pin(block)
                self._tier_writes.write_now(block, writes)
            return len(keys), writes

    def unpin(self, keys: Iterable[Key] | None = None) -> int:
        """Unpin these blocks, or all; returns how many were pinned."""
        with self._lock:
            blocks = self._table.pinned_blocks(keys)
            for block in blocks:
                self._table.unpin(block)
            return len(blocks)

    def count(self, keys: Iterable[Key]) -> int:
        """Number of these keys that are pinned."""
        with self._lock:
            return len(self._table.pinned_blocks(keys))
