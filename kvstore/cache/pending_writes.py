"""Spills that no worker has begun, and which block to give up when its slot is needed."""

from __future__ import annotations

from typing import Final

from kvstore.cache.commands import Spill
from kvstore.cache.slots import Block, SlotTable

STALL_OFFERS: Final = 16
"""Offers and loads refused for want of a slot, with no write ended meanwhile, after which
write_back gives unwritten blocks up: the tiers are then not busy but stuck."""


class QueuedSpills:
    """Called under the brain's lock."""

    def __init__(self, stall_offers: int = STALL_OFFERS) -> None:
        self._stall_offers = stall_offers
        self._by_slot: dict[int, list[Spill]] = {}
        self._refused = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_slot.values()))

    def add(self, spill: Spill) -> None:
        """The spill waits for a worker."""
        self._by_slot.setdefault(spill.slot, []).append(spill)

    def remove(self, spill: Spill) -> None:
        """The spill waits no more, if it did."""
        waiting = self._by_slot.get(spill.slot, [])
        if spill in waiting:
            waiting.remove(spill)
            if not waiting:
                del self._by_slot[spill.slot]

    def of(self, block: Block) -> list[Spill]:
        """Those of this block."""
        return list(self._by_slot.get(block.slot, ()))

    def alone_hold(self, block: Block) -> bool:
        """Nobody has a lease on the READY block but spills that no worker has begun."""
        return block.count == 1 + len(self._by_slot.get(block.slot, ()))

    @property
    def stuck(self) -> bool:
        """So many were refused without a write ended that the tiers are not busy but stuck."""
        return self._refused >= self._stall_offers

    def refused(self) -> None:
        """Somebody got no slot while writes were on their way."""
        self._refused += 1

    def ended(self) -> None:
        """A worker has ended a write, well or not: the tiers move."""
        self._refused = 0

    def victim(self, table: SlotTable) -> Block | None:
        """The block to give up unwritten: the coldest clean one that only waits to be written or,
        when the tiers are stuck, the coldest dirty one that nobody uses."""
        blocks = map(table.__getitem__, table.policy.victims())
        if any(not table.at(slot).dirty for slot in self._by_slot):
            for block in blocks:
                if not block.dirty and self.alone_hold(block):
                    return block
            blocks = map(table.__getitem__, table.policy.victims())
        if not self.stuck:
            return None
        return next((block for block in blocks if block.dirty and self.alone_hold(block)), None)

    def check(self, table: SlotTable) -> None:
        """Assert every invariant; for tests."""
        for slot, spills in self._by_slot.items():
            assert spills, "an empty list was left behind"
            for spill in spills:
                assert spill.slot == slot
                assert not spill.cancelled
                assert table.at(slot).key == spill.key
