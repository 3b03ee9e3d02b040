"""What of the brain can be set while it runs, and a look at what it holds. No I/O, no decisions."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.blocks.key import Key
from kvstore.cache.quotas import SlotQuotas
from kvstore.cache.slots import SlotTable
from kvstore.cache.tier_writes import Spills
from kvstore.cache.write_policy import WritePolicy


@dataclass(frozen=True)
class Held:
    """A READY block of L2. hits: since it was published."""

    key: Key
    nbytes: int
    hits: int
    pinned: bool
    leased: bool
    dirty: bool


class Dials:
    """Made by the brain over its tables; lock: the brain's. pins_max: slots that may be pinned."""

    def __init__(
        self,
        lock: threading.RLock,
        table: SlotTable,
        spills: Spills,
        quotas: SlotQuotas,
        pins_max: int,
    ) -> None:
        self.pins_max = pins_max
        self._lock = lock
        self._table = table
        self._spills = spills
        self._quotas = quotas

    def set(self, write: WritePolicy, quotas: Mapping[str, int], pins_max: int) -> None:
        """From here on, these. A tenant that has more slots than it may have makes room with its
        next save; more pins than may be stay until they are let go."""
        with self._lock:
            self._spills.follow(write)
            self._quotas.limit_to(quotas)
            self.pins_max = pins_max

    def held(self) -> list[Held]:
        """Every READY block: the pinned ones, then those that would be evicted last first."""
        with self._lock:
            coldest = list(self._quotas.victims())
            loose = set(coldest)
            blocks = [block for block in self._table.ready() if block.key not in loose]
            blocks += [self._table[key] for key in reversed(coldest)]
            return [
                Held(
                    key=block.key,
                    nbytes=block.nbytes,
                    hits=block.hits,
                    pinned=(pinned := self._table.is_pinned(block)),
                    leased=block.count > 1 + pinned,
                    dirty=block.dirty,
                )
                for block in blocks
            ]
