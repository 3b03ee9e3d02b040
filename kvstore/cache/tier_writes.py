"""What goes from L2 to the tiers below, and which slot is given up when one is needed.

Part of the brain: it decides, under the brain's lock, and does no I/O. A spill is a lease of the
workers on a block until it is written; a block that waits to be written still gives way when its
slot is needed, and is then counted as dropped.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from kvstore.cache.commands import Spill, Spilled
from kvstore.cache.pending_writes import QueuedSpills
from kvstore.cache.quotas import SlotQuotas
from kvstore.cache.slots import WORKERS, Block, SlotTable
from kvstore.cache.write_policy import WritePolicy

AHEAD_SCAN_MAX: Final = 1024
"""Cold blocks looked at for writing ahead, at most, on any one call."""


class Spills:
    """See the module's text.

    tiers: how many lie below. counts: the brain's counters. stall_offers: see
    `queued.STALL_OFFERS`.
    """

    def __init__(
        self,
        table: SlotTable,
        write: WritePolicy,
        quotas: SlotQuotas,
        *,
        tiers: int,
        stall_offers: int,
        counts: Counter[str],
    ) -> None:
        self.spilling = 0
        """Spills that have not ended."""
        self._table = table
        self._write = write
        self._quotas = quotas
        self._tiers = tiers
        self._counts = counts
        self._queued = QueuedSpills(stall_offers)
        self._clean_floor = write.clean_floor(table.slots)

    def follow(self, write: WritePolicy) -> None:
        """From here on, this policy. What waited for its eviction to be written (write_back) is
        written ahead of need all the same, and not left where nobody would write it."""
        self._write = write
        self._clean_floor = max(self._clean_floor, write.clean_floor(self._table.slots))

    # --- slots --------------------------------------------------------------------------

    def take(self, tenant: str) -> int | None:
        """A slot for a block of `tenant`: a free one, one of a block that may go, or one that waits
        to be written; None when there is none, or the tenant has its share.

        A tier that is slow or hangs would else hold slots that everybody needs. A block that goes
        unwritten for that is counted as dropped.
        """
        while self._quotas.full(tenant):  # more than once where its quota was made smaller
            if not self._make_share(tenant):
                self._counts["over_quota"] += 1
                return None
        slot = self._table.take()
        if slot is not None:
            return slot
        block = self._queued.victim(self._table)
        if block is not None:
            self.give_up(block)
            return self._table.take()
        if self.spilling:
            self._queued.refused()
        return None

    def give_up(self, block: Block) -> None:
        """Evict a block that nobody uses, unwritten: its spills are cancelled, and dropped."""
        spills = self._queued.of(block)
        if block.dirty and not spills:
            self._counts["spills_dropped"] += self._tiers
        for spill in spills:
            self.ended(spill, Spilled.DROPPED)
            spill.cancelled = True
        self._table.evict(block)

    def idle(self, block: Block) -> bool:
        """Nobody has a lease on the READY block but spills that no worker has begun."""
        return self._queued.alone_hold(block)

    def _make_share(self, tenant: str) -> bool:
        """Evict the tenant's coldest block that nobody uses, rather one that is written below;
        whether there was one. What only this slot holds goes when the tiers are stuck, as ever."""
        clean = next((b for b in self._of(tenant) if b.evictable), None)
        waiting = clean or next((b for b in self._of(tenant) if self._may_give_up(b)), None)
        if waiting is None:
            self._queued.refused()
            return False
        self.give_up(waiting)
        return True

    def _of(self, tenant: str) -> Iterator[Block]:
        """The tenant's coldest blocks; its share is full of them, so not all are looked at."""
        keys = itertools.islice(self._quotas.coldest(tenant), AHEAD_SCAN_MAX)
        return map(self._table.__getitem__, keys)

    def _may_give_up(self, block: Block) -> bool:
        return self.idle(block) and (not block.dirty or self._queued.stuck)

    # --- down ---------------------------------------------------------------------------

    def published(self, block: Block, spills: list[Spill]) -> None:
        """A save was committed."""
        if self._tiers and self._write.on_commit:
            self.send(block, range(self._tiers), spills)
        elif self._tiers and self._write.on_evict:
            self._table.set_dirty(block, True)
            if self._quotas.crowded(block.key.tenant):
                # Its share is filled by itself, long before the slab is: write what is in it, two
                # blocks for each that comes, so that all of it is written when it is full.
                unsent = (b for b in self._of(block.key.tenant) if b.dirty and not b.written)
                for each in list(itertools.islice(unsent, 2)):
                    self.send(each, range(self._tiers), spills)

    def settle(self, block: Block, spills: list[Spill]) -> None:
        """Write a dirty block now: it will not be evicted, so that nothing else would."""
        if block.dirty and not block.written:
            self.send(block, range(self._tiers), spills)

    def landed(self, block: Block, tier: int, spills: list[Spill]) -> None:
        """A block came up from `tier`: the faster ones may have it too."""
        block.written = True
        if self._write.on_commit:
            self.send(block, range(tier), spills)

    def hit(self, block: Block, spills: list[Spill]) -> None:
        """A READY block was asked for."""
        block.hits += 1
        self._table.touch(block)
        if self._tiers and not block.written and self._write.on_hit(block.hits):
            self.send(block, range(self._tiers), spills)
        if self._tiers and not block.written and self._write.on_evict:
            self._table.set_dirty(block, True)

    def send(self, block: Block, tiers: Iterable[int], spills: list[Spill]) -> None:
        """Lease the block to the workers once for each tier it goes to."""
        for tier in tiers:
            self._table.lease(WORKERS, block)
            self.spilling += 1
            block.written = True
            spill = Spill(block.key, block.slot, block.nbytes, tier)
            self._queued.add(spill)
            spills.append(spill)

    def ahead(self, spills: list[Spill]) -> None:
        """write_back: send the coldest dirty blocks down before their slots are needed."""
        have = self._table.free + self._table.evictable + self.spilling // max(1, self._tiers)
        if have >= self._clean_floor:
            return
        for key in itertools.islice(self._table.policy.victims(), AHEAD_SCAN_MAX):
            block = self._table[key]
            if block.dirty and not block.written and block.count == 1:
                self.send(block, range(self._tiers), spills)
                have += 1
                if have >= self._clean_floor:
                    return

    def dirty(self, limit: int) -> list[Spill]:
        """Spills of up to `limit` dirty blocks, coldest first: for a flush."""
        spills: list[Spill] = []
        for key in self._table.policy.victims():
            if limit <= 0:
                break
            block = self._table[key]
            if block.dirty and not block.written:
                self.send(block, range(self._tiers), spills)
                limit -= 1
        return spills

    # --- reports ------------------------------------------------------------------------

    def begin(self, spill: Spill) -> bool:
        """A worker begins to write; False when the spill was cancelled."""
        if not spill.cancelled:
            self._queued.remove(spill)
        return not spill.cancelled

    def ended(self, spill: Spill, outcome: Spilled) -> None:
        """A spill ended; its lease goes back.

        Once a tier has tried, L2 need not keep the block: one that the tier refused may leave
        unwritten, unless it is hit before that, which asks for another try.
        """
        assert self._table.at(spill.slot).key == spill.key, "a leased slot changed hands"
        assert not spill.cancelled, "a cancelled spill was carried out"
        self._queued.remove(spill)
        self.spilling -= 1
        self._counts[f"spills_{outcome.value}"] += 1
        block = self._table.release(WORKERS, spill.slot)
        if outcome is not Spilled.DROPPED:
            self._queued.ended()
            self._table.set_dirty(block, False)
        if outcome is not Spilled.WRITTEN:
            block.written = False  # so that its next hit sends it again

    def check(self) -> None:
        """Assert every invariant; for tests."""
        self._queued.check(self._table)
        assert len(self._queued) <= self.spilling
