"""Settings of the L2 manager that can change at runtime, and a list of its blocks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.blocks.key import Key
from kvstore.cache.quotas import SlotQuotas
from kvstore.cache.slots import SlotTable
from kvstore.cache.tier_writes import TierWrites
from kvstore.cache.write_policy import WritePolicy


@dataclass(frozen=True)
class BlockInfo:
    """Snapshot of a READY block of L2. hits: since it was published."""

    key: Key
    nbytes: int
    hits: int
    pinned: bool
    leased: bool
    dirty: bool


class L2Tunables:
    """Part of the L2 manager; lock: the manager's. max_pinned: maximum pinned slots."""

    def __init__(
        self,
        lock: threading.RLock,
        table: SlotTable,
        tier_writes: TierWrites,
        quotas: SlotQuotas,
        max_pinned: int,
    ) -> None:
        self.max_pinned = max_pinned
        self._lock = lock
        self._table = table
        self._tier_writes = tier_writes
        self._quotas = quotas

    def set(self, write_policy: WritePolicy, quotas: Mapping[str, int], max_pinned: int) -> None:
        """Apply new settings. A tenant above its new quota makes room at its next save. Pins above
        the new maximum stay until they are unpinned."""
        with self._lock:
            self._tier_writes.set_policy(write_policy)
            self._quotas.set_limits(quotas)
            self.max_pinned = max_pinned

    def blocks(self) -> list[BlockInfo]:
        """Every READY block: pinned ones first, then in reverse eviction order."""
        with self._lock:
            evicted_first = list(self._quotas.eviction_order())
            not_pinned = set(evicted_first)
            blocks = [block for block in self._table.ready_blocks() if block.key not in not_pinned]
            blocks += [self._table[key] for key in reversed(evicted_first)]
            return [
                BlockInfo(
                    key=block.key,
                    nbytes=block.nbytes,
                    hits=block.hits,
                    pinned=(pinned := self._table.is_pinned(block)),
                    leased=block.ref_count > 1 + pinned,
                    dirty=block.dirty,
                )
                for block in blocks
            ]
