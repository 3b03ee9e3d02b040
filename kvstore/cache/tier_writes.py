"""Writes of blocks from L2 to the tiers, and the choice of a slot when one is needed.

Part of the L2 manager: it decides under the manager's lock and does no I/O. A write leases the
block to the workers until it has ended. While no worker has started it, the write is pending and
can be cancelled: if the slot is needed, the block is evicted and the write counts as dropped.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from kvstore.cache.commands import TierWrite, WriteOutcome
from kvstore.cache.quotas import SlotQuotas
from kvstore.cache.slots import WORKERS, Block, SlotTable
from kvstore.cache.write_policy import WritePolicy

PRECLEAN_SCAN_MAX: Final = 1024
"""Maximum blocks that one call examines, in eviction order, for a block to write or evict."""
STALL_LIMIT: Final = 16
"""Number of saves and loads without a slot, while no write ends, that means the tiers are stuck.
`write_back` then evicts unwritten blocks."""


class PendingWrites:
    """The writes that no worker has started. Call it under the L2 manager's lock."""

    def __init__(self, stall_limit: int = STALL_LIMIT) -> None:
        self._stall_limit = stall_limit
        self._by_slot: dict[int, list[TierWrite]] = {}
        self._no_slot_count = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_slot.values()))

    def add(self, write: TierWrite) -> None:
        """Add a write that waits for a worker."""
        self._by_slot.setdefault(write.slot, []).append(write)

    def remove(self, write: TierWrite) -> None:
        """Remove a write, if it is pending."""
        pending = self._by_slot.get(write.slot, [])
        if write in pending:
            pending.remove(write)
            if not pending:
                del self._by_slot[write.slot]

    def for_block(self, block: Block) -> list[TierWrite]:
        """The pending writes of this block."""
        return list(self._by_slot.get(block.slot, ()))

    def only_pending_leases(self, block: Block) -> bool:
        """Whether all leases on the READY block, if any, are those of its pending writes."""
        return block.ref_count == 1 + len(self._by_slot.get(block.slot, ()))

    @property
    def stuck(self) -> bool:
        """Whether STALL_LIMIT requests got no slot while no write ended."""
        return self._no_slot_count >= self._stall_limit

    def on_no_slot(self) -> None:
        """Count a request that got no slot while writes were in flight."""
        self._no_slot_count += 1

    def on_complete(self) -> None:
        """A worker has ended a write, successful or not: the tiers are not stuck."""
        self._no_slot_count = 0

    def pick_victim(self, table: SlotTable) -> Block | None:
        """The block to evict unwritten: the first clean one in eviction order that has only pending
        writes. If the tiers are stuck, else the first dirty one without other leases."""
        blocks = map(table.__getitem__, table.quotas.eviction_order())
        if any(not table.block_at(slot).dirty for slot in self._by_slot):
            for block in blocks:
                if not block.dirty and self.only_pending_leases(block):
                    return block
            blocks = map(table.__getitem__, table.quotas.eviction_order())
        if not self.stuck:
            return None
        return next((b for b in blocks if b.dirty and self.only_pending_leases(b)), None)

    def check(self, table: SlotTable) -> None:
        """Assert every invariant; for tests."""
        for slot, writes in self._by_slot.items():
            assert writes, "an empty list was left behind"
            for write in writes:
                assert write.slot == slot
                assert not write.cancelled
                assert table.block_at(slot).key == write.key


class TierWrites:
    """tiers: number of tiers. counts: the L2 manager's counters. stall_limit: see STALL_LIMIT."""

    def __init__(
        self,
        table: SlotTable,
        policy: WritePolicy,
        quotas: SlotQuotas,
        *,
        tiers: int,
        stall_limit: int,
        counts: Counter[str],
    ) -> None:
        self.in_flight = 0
        """Number of writes that have not ended."""
        self._table = table
        self._policy = policy
        self._quotas = quotas
        self._tiers = tiers
        self._counts = counts
        self._pending = PendingWrites(stall_limit)
        self._min_clean_slots = policy.min_clean_slots(table.slots)

    def set_policy(self, policy: WritePolicy) -> None:
        """Replace the write policy. Dirty blocks of a previous write_back policy are still written
        before they are evicted: the number of clean slots to keep never falls."""
        self._policy = policy
        self._min_clean_slots = max(
            self._min_clean_slots, policy.min_clean_slots(self._table.slots)
        )

    # --- slots --------------------------------------------------------------------------

    def take_slot(self, tenant: str) -> int | None:
        """A slot for a block of `tenant`; None if no slot is available or the quota is full.

        It takes a free slot, or evicts a block, or cancels pending writes and evicts their block.
        Otherwise a slow or hanging tier would occupy slots that every engine needs. The cancelled
        writes are counted as dropped.
        """
        while self._quotas.is_full(tenant):  # more than once if its quota was reduced
            if not self._make_room_in_quota(tenant):
                self._counts["over_quota"] += 1
                return None
        slot = self._table.take_slot()
        if slot is not None:
            return slot
        block = self._pending.pick_victim(self._table)
        if block is not None:
            self.evict_unwritten(block)
            return self._table.take_slot()
        if self.in_flight:
            self._pending.on_no_slot()
        return None

    def evict_unwritten(self, block: Block) -> None:
        """Evict a block that has only pending leases; its writes are cancelled, counted dropped."""
        writes = self._pending.for_block(block)
        if block.dirty and not writes:
            self._counts["tier_writes_dropped"] += self._tiers
        for write in writes:
            self.complete(write, WriteOutcome.DROPPED)
            write.cancelled = True
        self._table.evict(block)

    def only_pending_leases(self, block: Block) -> bool:
        """Whether all leases on the READY block, if any, are those of its pending writes."""
        return self._pending.only_pending_leases(block)

    def _make_room_in_quota(self, tenant: str) -> bool:
        """Evict the tenant's least recently used block without other leases, if possible one that
        is written. Dirty blocks are evicted only if the tiers are stuck. False: no such block."""
        clean = next((b for b in self._lru_blocks(tenant) if b.evictable), None)
        unwritten = (b for b in self._lru_blocks(tenant) if self._may_evict_unwritten(b))
        victim = clean or next(unwritten, None)
        if victim is None:
            self._pending.on_no_slot()
            return False
        self.evict_unwritten(victim)
        return True

    def _lru_blocks(self, tenant: str) -> Iterator[Block]:
        """The tenant's least recently used blocks, at most PRECLEAN_SCAN_MAX."""
        keys = itertools.islice(self._quotas.lru_order(tenant), PRECLEAN_SCAN_MAX)
        return map(self._table.__getitem__, keys)

    def _may_evict_unwritten(self, block: Block) -> bool:
        return self.only_pending_leases(block) and (not block.dirty or self._pending.stuck)

    # --- new writes ---------------------------------------------------------------------

    def on_publish(self, block: Block, writes: list[TierWrite]) -> None:
        """A save was committed. Appends the writes that the policy wants to `writes`."""
        if self._tiers and self._policy.on_commit:
            self.enqueue(block, range(self._tiers), writes)
        elif self._tiers and self._policy.on_evict:
            self._table.set_dirty(block, True)
            if self._quotas.above_half(block.key.tenant):
                # The tenant fills its quota long before the slab is full. Write two of its blocks
                # for each new one, so that all are written when the quota is full.
                unsent = (
                    b for b in self._lru_blocks(block.key.tenant) if b.dirty and not b.written
                )
                for each in list(itertools.islice(unsent, 2)):
                    self.enqueue(each, range(self._tiers), writes)

    def write_now(self, block: Block, writes: list[TierWrite]) -> None:
        """Write a dirty block that will not be evicted, and so would never be written."""
        if block.dirty and not block.written:
            self.enqueue(block, range(self._tiers), writes)

    def on_load(self, block: Block, tier: int, writes: list[TierWrite]) -> None:
        """A block was read from `tier`: write it to the faster tiers if the policy says so."""
        block.written = True
        if self._policy.on_commit:
            self.enqueue(block, range(tier), writes)

    def on_hit(self, block: Block, writes: list[TierWrite]) -> None:
        """A READY block was requested."""
        block.hits += 1
        self._table.touch(block)
        if self._tiers and not block.written and self._policy.on_hit(block.hits):
            self.enqueue(block, range(self._tiers), writes)
        if self._tiers and not block.written and self._policy.on_evict:
            self._table.set_dirty(block, True)

    def enqueue(self, block: Block, tiers: Iterable[int], writes: list[TierWrite]) -> None:
        """Add a pending write of the block to each tier, with a lease for each."""
        for tier in tiers:
            self._table.lease(WORKERS, block)
            self.in_flight += 1
            block.written = True
            write = TierWrite(block.key, block.slot, block.nbytes, tier)
            self._pending.add(write)
            writes.append(write)

    def preclean(self, writes: list[TierWrite]) -> None:
        """write_back: write the first dirty blocks in eviction order before slots are needed."""
        clean = self._table.free + self._table.evictable + self.in_flight // max(1, self._tiers)
        if clean >= self._min_clean_slots:
            return
        for key in itertools.islice(self._table.quotas.eviction_order(), PRECLEAN_SCAN_MAX):
            block = self._table[key]
            if block.dirty and not block.written and block.ref_count == 1:
                self.enqueue(block, range(self._tiers), writes)
                clean += 1
                if clean >= self._min_clean_slots:
                    return

    def enqueue_dirty(self, limit: int) -> list[TierWrite]:
        """Writes of up to `limit` dirty blocks, in eviction order: for a flush."""
        writes: list[TierWrite] = []
        for key in self._table.quotas.eviction_order():
            if limit <= 0:
                break
            block = self._table[key]
            if block.dirty and not block.written:
                self.enqueue(block, range(self._tiers), writes)
                limit -= 1
        return writes

    # --- reports of the workers ---------------------------------------------------------

    def start(self, write: TierWrite) -> bool:
        """A worker starts a write; False if the write was cancelled."""
        if not write.cancelled:
            self._pending.remove(write)
        return not write.cancelled

    def complete(self, write: TierWrite, outcome: WriteOutcome) -> None:
        """A write has ended; release its lease.

        L2 need not keep a block that a tier has tried to write, even if the write failed. The next
        hit of a block that was not written marks or queues it again.
        """
        assert self._table.block_at(write.slot).key == write.key, "a leased slot changed its block"
        assert not write.cancelled, "a cancelled write was carried out"
        self._pending.remove(write)
        self.in_flight -= 1
        self._counts[f"tier_writes_{outcome.value}"] += 1
        block = self._table.release(WORKERS, write.slot)
        if outcome is not WriteOutcome.DROPPED:
            self._pending.on_complete()
            self._table.set_dirty(block, False)
        if outcome is not WriteOutcome.WRITTEN:
            block.written = False  # so that the next hit writes it

    def check(self) -> None:
        """Assert every invariant; for tests."""
        self._pending.check(self._table)
        assert len(self._pending) <= self.in_flight
