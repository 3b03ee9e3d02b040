"""Writes of blocks from L2 to the tiers, and the choice of a slot when one is needed.

Part of the L2 manager: it decides under the manager's lock and does no I/O. A write leases the
block to the workers until it has ended. While no worker has started it, the write is pending and
can be cancelled: if a load needs the slot, the block is evicted and the write counts as dropped. A
save does not take such a slot. A write that the queue does not accept, or that fails, is deferred
(`deferred_writes.py`).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from kvstore.blocks.key import Key
from kvstore.cache.block import Block
from kvstore.cache.commands import TierWrite, WriteOutcome
from kvstore.cache.deferred_writes import DeferredWrite, DeferredWrites
from kvstore.cache.quotas import SlotQuotas
from kvstore.cache.slots import WORKERS, SlotTable
from kvstore.cache.write_policy import WritePolicy

PRECLEAN_SCAN_MAX: Final = 1024
"""Maximum blocks that one call examines, in eviction order, for a block to write or evict."""
QUOTA_SCAN_MAX: Final = 8192
"""Maximum blocks of a tenant that are examined, least recently used first, for one to evict. More
than a write queue takes by default."""
WRITE_TRIES_MAX: Final = 8
"""Maximum number of times that a block is written to a tier that does not answer. Writes that the
circuit breaker rejects do not count."""


class PendingWrites:
    """The writes that no worker has started. Call it under the L2 manager's lock."""

    def __init__(self) -> None:
        self._by_slot: dict[int, list[TierWrite]] = {}
        """In the order in which their first write was added."""

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

    def of_tier(self, tier: int) -> list[TierWrite]:
        """The pending writes to this tier, the oldest first."""
        return [w for writes in self._by_slot.values() for w in writes if w.tier == tier]

    def pick_victim(self, table: SlotTable) -> Block | None:
        """The block to evict unwritten: the newest clean one that has only pending writes. The
        writes of a chain are added in its order, so that its deepest block goes first."""
        for block in map(table.block_at, reversed(self._by_slot)):
            if not block.dirty and self.only_pending_leases(block):
                return block
        return None

    def check(self, table: SlotTable) -> None:
        """Assert every invariant; for tests."""
        for slot, writes in self._by_slot.items():
            assert writes, "an empty list was left behind"
            for write in writes:
                assert write.slot == slot
                assert not write.cancelled
                assert table.block_at(slot).key == write.key


class TierWrites:
    """lock: the L2 manager's; the methods below "for the store" take it. tiers: number of tiers.
    counts: the L2 manager's counters."""

    def __init__(
        self,
        lock: threading.RLock,
        table: SlotTable,
        policy: WritePolicy,
        quotas: SlotQuotas,
        *,
        tiers: int,
        counts: Counter[str],
    ) -> None:
        self.in_flight = 0
        """Number of writes that have not ended."""
        self.deferred = DeferredWrites(tiers)
        self.down: set[int] = set()
        """Tiers that take no writes now; see `set_down`."""
        self._lock = lock
        self._table = table
        self._policy = policy
        self._quotas = quotas
        self._tiers = tiers
        self._numbers = itertools.count(1)
        self._counts = counts
        self._pending = PendingWrites()
        self._min_clean_slots = policy.min_clean_slots(table.slots)
        table.on_evict_deferred = self._on_evict_deferred

    def set_policy(self, policy: WritePolicy) -> None:
        """Replace the write policy. Dirty blocks of a previous write_back policy are still written
        before they are evicted: the number of clean slots to keep never falls."""
        self._policy = policy
        self._min_clean_slots = max(
            self._min_clean_slots, policy.min_clean_slots(self._table.slots)
        )

    # --- slots --------------------------------------------------------------------------

    def take_slot(self, tenant: str, parent: Block | None, *, evict_unwritten: bool) -> int | None:
        """A slot for a block of `tenant`; None if no slot is available or the quota is full.

        It takes a free slot, or evicts a block that is not queued for a tier. parent: the block
        before it in its chain. evict_unwritten: if there is no such block, cancel the pending
        writes of a block and evict it: the writes are counted as dropped. A load may do this. A
        save may not: it waits for a block to be written, unless all tiers are down.
        """
        while self._quotas.is_full(tenant):  # more than once if its quota was reduced
            if not self._make_room_in_quota(tenant, parent, evict_unwritten):
                self._counts["over_quota"] += 1
                return None
        slot = self._table.take_slot(parent)
        if slot is not None:
            return slot
        block = self._pending.pick_victim(self._table) if evict_unwritten else None
        if block is None and self._all_down():
            block = next(filter(self._may_evict_unwritten, self._blocks_to_evict()), None)
        if block is None:
            return None
        self.evict_unwritten(block)
        return self._table.take_slot()

    def evict_unwritten(self, block: Block) -> None:
        """Evict a block that has only pending leases; its writes are cancelled, counted dropped."""
        writes = self._pending.for_block(block)
        if block.dirty and not writes:
            self._counts["tier_writes_dropped"] += self._tiers - block.deferred
        self._counts["tier_writes_dropped"] += len(writes)
        for write in writes:
            self._cancel(write)
        self._table.evict(block)

    def only_pending_leases(self, block: Block) -> bool:
        """Whether all leases on the READY block, if any, are those of its pending writes."""
        return self._pending.only_pending_leases(block)

    def _make_room_in_quota(self, tenant: str, parent: Block | None, evict_unwritten: bool) -> bool:
        """Evict the tenant's least recently used block without leases. Without such a block, evict
        one with pending writes if that is allowed, and a dirty one if all tiers are down. False: no
        block was evicted."""
        keys = itertools.islice(self._quotas.lru_order(tenant), QUOTA_SCAN_MAX)
        blocks = [self._table[key] for key in keys]
        clean = self._table.chains.pick_victim(blocks, parent)
        if clean is not None:
            self._table.evict(clean)
            return True
        victim = None
        if evict_unwritten or self._all_down():
            victim = next(filter(self._may_evict_unwritten, blocks), None)
        if victim is not None:
            self.evict_unwritten(victim)
        return victim is not None

    def _blocks_to_evict(self) -> Iterator[Block]:
        return map(self._table.__getitem__, self._table.quotas.eviction_order())

    def _lru_blocks(self, tenant: str) -> Iterator[Block]:
        """The tenant's least recently used blocks, at most PRECLEAN_SCAN_MAX."""
        keys = itertools.islice(self._quotas.lru_order(tenant), PRECLEAN_SCAN_MAX)
        return map(self._table.__getitem__, keys)

    def _may_evict_unwritten(self, block: Block) -> bool:
        return self.only_pending_leases(block) and (not block.dirty or self._all_down())

    def _all_down(self) -> bool:
        return 0 < self._tiers == len(self.down)

    def _on_evict_deferred(self, block: Block) -> None:
        self._counts["tier_writes_dropped"] += self.deferred.forget(block)

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
        """Add a pending write of the block to each tier, with a lease for each. A tier that is
        down gets it later."""
        for tier in tiers:
            if block.deferred:
                self.deferred.discard(block, tier)
            number = next(self._numbers)
            if tier in self.down:
                self.deferred.add(tier, DeferredWrite(block, number, tries=0))
            else:
                writes.append(self._lease_for_write(block, tier, number, tries=0))
        block.written = True
        if self.down and self._all_down():
            self._table.set_dirty(block, False)

    def _lease_for_write(self, block: Block, tier: int, number: int, tries: int) -> TierWrite:
        self._table.lease(WORKERS, block)
        self.in_flight += 1
        write = TierWrite(block.key, block.slot, block.nbytes, tier, number, tries)
        self._pending.add(write)
        return write

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
        """Writes of up to `limit` dirty blocks, those evicted last first: for a flush. If it ends
        early, the ends of prefixes are missing, not their fronts."""
        writes: list[TierWrite] = []
        for key in reversed(list(self._table.quotas.eviction_order())):
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

        L2 need not keep a block that a tier has tried to write, even if the write failed. A write
        that may succeed later is deferred. A dirty block that found no room in the queue stays
        dirty instead, and is queued again before it is evicted.
        """
        assert self._table.block_at(write.slot).key == write.key, "a leased slot changed its block"
        assert not write.cancelled, "a cancelled write was carried out"
        block = self._release(write)
        if outcome is WriteOutcome.WRITTEN:
            self.down.discard(write.tier)
        if outcome is WriteOutcome.NO_ROOM and block.dirty:
            block.written = False
            return
        self._table.set_dirty(block, False)
        write.tries += outcome is WriteOutcome.UNAVAILABLE
        if outcome is WriteOutcome.WRITTEN:
            self._counts["tier_writes_written"] += 1
            self.deferred.discard(block, write.tier)
        elif outcome is WriteOutcome.FAILED or write.tries >= WRITE_TRIES_MAX:
            self._counts["tier_writes_failed"] += 1
            block.written = False  # so that the next hit writes it
        else:
            self._counts["tier_writes_retried"] += outcome is WriteOutcome.UNAVAILABLE
            self._defer(write, block)

    def _defer(self, write: TierWrite, block: Block) -> None:
        """Write the block later, in its place; if it failed twice, after all others, so that it
        does not hold them up."""
        number = write.number if write.tries < 2 else next(self._numbers)
        self.deferred.add(write.tier, DeferredWrite(block, number, write.tries))

    def _release(self, write: TierWrite) -> Block:
        self._pending.remove(write)
        self.in_flight -= 1
        return self._table.release(WORKERS, write.slot)

    def _cancel(self, write: TierWrite) -> Block:
        """End a pending write: no worker carries it out."""
        write.cancelled = True
        return self._release(write)

    # --- for the store ------------------------------------------------------------------

    def set_down(self, tier: int, down: bool) -> None:
        """Record whether the tier takes writes. If it does not, its pending writes are deferred, so
        that L2 can evict their blocks."""
        with self._lock:
            if not down:
                self.down.discard(tier)
                return
            self.down.add(tier)
            for write in self._pending.of_tier(tier):
                block = self._cancel(write)
                self._defer(write, block)
                if self._all_down():
                    self._table.set_dirty(block, False)

    def take_deferred(self, tier: int, limit: int) -> list[TierWrite]:
        """Up to `limit` deferred writes to this tier, also if it is down: one write then shows
        whether it still is."""
        with self._lock:
            writes: list[TierWrite] = []
            while len(writes) < limit and (found := self.deferred.pop(tier)) is not None:
                writes.append(self._lease_for_write(found.block, tier, found.number, found.tries))
            return writes

    def deferred_keys(self, tier: int) -> set[Key]:
        """The blocks whose write to this tier is deferred."""
        with self._lock:
            return set(self.deferred.keys(tier))

    def check(self) -> None:
        """Assert every invariant; for tests."""
        self._pending.check(self._table)
        self.deferred.check()
        assert len(self._pending) <= self.in_flight
