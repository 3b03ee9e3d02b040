"""The L2 manager: which blocks are in L2, which slots are leased, what is evicted or written next.

It does no I/O and knows no sockets, clocks or threads, only the lock that guards its tables. Every
method decides and returns at once. It returns the reads and writes to do (`commands.py`); the
store's threads carry them out and report the outcome. No thread keeps the lock during I/O, a copy
or a codec. The lock is re-entrant: the store can update an operation together with the tables.

At most one filler at a time fills a key: a client with a slot assignment, or an in-flight load.
`SlotTable.publish` is the only way to READY, so no reader sees a block before its bytes are there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstore.blocks.key import Key
from kvstore.cache.block import Block
from kvstore.cache.commands import (
    COUNTERS,
    MISSING,
    InFlightLoad,
    LeaseResult,
    SaveAllocation,
    TierWrite,
    Waiter,
    WriteOutcome,
)
from kvstore.cache.eviction import EvictionPolicy
from kvstore.cache.in_flight import InFlightLoads
from kvstore.cache.pins import Pins
from kvstore.cache.quotas import SlotQuotas
from kvstore.cache.recent_keys import RecentKeys
from kvstore.cache.remote_locations import RemoteLocations
from kvstore.cache.slots import WORKERS, SlotListener, SlotTable
from kvstore.cache.tier_writes import TierWrites
from kvstore.cache.tunables import L2Tunables
from kvstore.cache.write_policy import WritePolicy


class L2Manager:
    """The tables of one slab.

    slots: slots of the slab. tiers: number of tiers. max_loads_per_tier: maximum in-flight loads
    of one tier; further loads are truncated. quotas: slots per tenant (`OTHER_TENANTS` for each
    tenant without an entry). max_pinned: maximum pinned slots.
    """

    def __init__(
        self,
        slots: int,
        eviction: EvictionPolicy[Key],
        write_policy: WritePolicy,
        *,
        tiers: int,
        max_loads_per_tier: int,
        quotas: Mapping[str, int] | None = None,
        max_pinned: int = 0,
    ) -> None:
        self.lock = threading.RLock()
        self.remote_locations = RemoteLocations()
        self._counts: Counter[str] = Counter()
        self._quotas = SlotQuotas(eviction, quotas or {})
        self._table = SlotTable(slots, self._quotas)
        self.events = self._table.events
        self.tier_writes = TierWrites(
            self.lock,
            self._table,
            write_policy,
            self._quotas,
            tiers=tiers,
            counts=self._counts,
        )
        self.tunables = L2Tunables(
            self.lock, self._table, self.tier_writes, self._quotas, max_pinned
        )
        self.pins = Pins(self.lock, self._table, self.tier_writes, self.tunables)
        self._in_flight = InFlightLoads(tiers, max_loads_per_tier)
        self._looked_up: RecentKeys[Key] = RecentKeys()
        """The block before each block of recent lookups."""
        self._refused: RecentKeys[None] = RecentKeys()
        """Blocks that got no slot, to count a block once whose save is tried again."""
        self._frozen = False

    def add_client(self, client: int) -> None:
        """Add a client that may have leases."""
        with self.lock:
            self._table.add_client(client)

    def drop_client(self, client: int) -> None:
        """Release every lease of a client that has exited, when no copy of it can still run.

        Loads that only this client waited for are cancelled, unless a worker has started them.
        """
        with self.lock:
            for load in self._in_flight.all():
                for waiter in [w for w in load.waiters if w.client == client]:
                    self.cancel_wait(waiter, load)
            self._table.drop_client(client)

    def freeze(self) -> None:
        """Assign no more slots. Filled slots can still be published, written and read.

        For shutdown: the store then releases the leases of engines that may still copy, so the
        content of those slots must not change.
        """
        with self.lock:
            self._frozen = True

    # --- saves --------------------------------------------------------------------------

    def allocate_save(self, client: int, keys: Sequence[Key], nbytes: int) -> SaveAllocation:
        """Assign slots to the blocks that are not cached; `nbytes`: size of each block.

        A block whose tiers still have to write it is not evicted for this: its slot is free for a
        later save. The blocks that get no slot are the last ones.
        """
        with self.lock:
            result = SaveAllocation()
            # Lease the cached blocks first, so that making room for the others does not evict one
            # in the middle. Touch the first block last, so that a prefix outlives its extension.
            leased: list[int] = []
            for key in reversed(keys):
                block = self._block_of_size(key, nbytes)
                if block is not None:
                    result.already_cached += 1
                    if block.ready:
                        self._table.lease(client, block)
                        leased.append(block.slot)
                        self.tier_writes.on_hit(block, result.tier_writes)
            before = self._looked_up.get(keys[0]) if keys else None
            parent = self._table.get(before) if before is not None else None
            for index, key in enumerate(keys):
                block = self._table.get(key)
                if block is None:
                    slot = self._take_slot(key, parent)
                    if slot is None:
                        missing = [key for key in keys[index:] if self._table.get(key) is None]
                        result.dropped = len(missing)
                        self._counts["no_slot"] += sum(key not in self._refused for key in missing)
                        self._refused.update((key, None) for key in missing)
                        break
                    block = self._table.fill_slot(client, key, slot, nbytes)
                    if self._refused:
                        self._refused.discard(key)
                    result.slot_assignments.append((index, slot))
                self._table.chains.link(parent, block)
                parent = block
            self.release(client, leased)
            self.tier_writes.preclean(result.tier_writes)
            self._counts["stored"] += len(result.slot_assignments)
            self._counts["already_cached"] += result.already_cached
            return result

    def commit(self, client: int, slots: Iterable[int]) -> list[TierWrite]:
        """Publish the filled slots, the last block first (it is evicted first)."""
        with self.lock:
            writes: list[TierWrite] = []
            blocks = [self._table.publish(client, slot) for slot in reversed(list(slots))]
            # Queues are served in order, and a prefix is worth more than its extension.
            for block in reversed(blocks):
                self.tier_writes.on_publish(block, writes)
            return writes

    def abandon(self, client: int, slots: Iterable[int]) -> None:
        """Free assigned slots that will not be filled."""
        with self.lock:
            for slot in slots:
                self._table.discard(client, slot)

    # --- loads --------------------------------------------------------------------------

    def record_lookup(self, keys: Sequence[Key]) -> None:
        """Record a lookup of these keys; they start with a prompt's first block."""
        with self.lock:
            self._quotas.on_lookup(keys)
            if len(keys) > 1 and self._table.get(keys[-1]) is None:
                self._looked_up.update(zip(keys[1:], keys, strict=False))

    def match(self, keys: Sequence[Key], nbytes: int) -> int:
        """Number of leading blocks that are READY in L2."""
        with self.lock:
            return self._table.cached_prefix_len(keys, nbytes)

    def cached_or_loading(self, keys: Sequence[Key], nbytes: int) -> list[bool]:
        """For each key, whether its block is READY in L2 or in flight from a tier."""
        with self.lock:
            return self._table.cached_or_loading(keys, nbytes, self._in_flight)

    def is_absent(self, key: Key) -> bool:
        """Whether L2 neither has a block of this key nor is getting one."""
        with self.lock:
            return self._table.get(key) is None

    def lease(
        self,
        client: int,
        keys: Sequence[Key],
        nbytes: int,
        sources: Sequence[int | None],
        owner: Any,
    ) -> LeaseResult:
        """Lease the leading blocks to a client: READY ones now, others when they are loaded.

        sources: for each key the index of a tier that has it, or None if no tier is known to.
        """
        with self.lock:
            result = LeaseResult(truncated_at=len(keys))
            # Lease the cached blocks first, so that making room for the others does not evict
            # them. Touch the first block last: it is then the most recently used.
            ready: dict[int, int] = {}
            for index in range(len(keys) - 1, -1, -1):
                block = self._table.ready_block(keys[index], nbytes)
                if block is not None:
                    self._table.lease(client, block)
                    self.tier_writes.on_hit(block, result.tier_writes)
                    ready[index] = block.slot
            for index in range(len(keys)):
                if index in ready:
                    continue
                waiter = Waiter(client, owner, index)
                parent = self._table.get(keys[index - 1]) if index else None
                result.reason = self._join_or_start(
                    waiter, keys[index], nbytes, sources[index], parent, result
                )
                if result.reason:
                    result.truncated_at = index
                    break
            for index in sorted(ready):
                if index < result.truncated_at:
                    result.ready.append((index, ready[index]))
                else:
                    self._table.release(client, ready[index])
            self.tier_writes.preclean(result.tier_writes)
            return result

    def start_load(self, load: InFlightLoad) -> bool:
        """A worker starts the read; False if the load was cancelled."""
        with self.lock:
            load.started = not load.cancelled
            return load.started

    def redirect_load(self, load: InFlightLoad, tier: int) -> bool:
        """Continue the load from another tier, where no worker has started it. False if no waiter
        is left, or the tier has its maximum number of loads."""
        with self.lock:
            if not load.waiters or self._in_flight.is_full(tier):
                return False
            self._in_flight.redirect(load, tier)
            return True

    def complete_load(self, load: InFlightLoad) -> tuple[list[Waiter], list[TierWrite]]:
        """The block is in its slot and verified: publish it and lease it to its waiters."""
        with self.lock:
            self._in_flight.end(load)
            block = self._table.publish(WORKERS, load.slot)
            for waiter in load.waiters:
                self._table.lease(waiter.client, block)
            writes: list[TierWrite] = []
            self.tier_writes.on_load(block, load.tier, writes)
            return list(load.waiters), writes

    def fail_load(self, load: InFlightLoad) -> list[Waiter]:
        """The load failed: free its slot. Returns its waiters."""
        with self.lock:
            self._in_flight.end(load)
            self._table.discard(WORKERS, load.slot)
            return list(load.waiters)

    def cancel_wait(self, waiter: Waiter, load: InFlightLoad) -> None:
        """Remove a waiter. A load without waiters is cancelled unless a worker has started it."""
        with self.lock:
            if waiter not in load.waiters or self._in_flight.get(load.key) is not load:
                return
            load.waiters.remove(waiter)
            if not load.waiters and not load.started:
                load.cancelled = True
                self.fail_load(load)

    def lease_for_worker(self, key: Key) -> tuple[int, int] | None:
        """Lease a READY block to the workers: (slot, nbytes), or None if it is not READY."""
        with self.lock:
            block = self._table.get(key)
            if block is None or not block.ready:
                return None
            self._table.lease(WORKERS, block)
            return block.slot, block.nbytes

    def release(self, client: int, slots: Iterable[int]) -> None:
        """Release leases of READY slots."""
        with self.lock:
            for slot in slots:
                self._table.release(client, slot)

    # --- writes to tiers ----------------------------------------------------------------

    def start_write(self, write: TierWrite) -> bool:
        """A worker starts the write; False if the write was cancelled."""
        with self.lock:
            return self.tier_writes.start(write)

    def complete_write(self, write: TierWrite, outcome: WriteOutcome) -> None:
        """A write has ended; release its lease. See `TierWrites.complete`."""
        with self.lock:
            self.tier_writes.complete(write, outcome)

    def flush_dirty(self, limit: int) -> list[TierWrite]:
        """Writes of up to `limit` dirty blocks, in eviction order: for a flush."""
        with self.lock:
            return self.tier_writes.enqueue_dirty(limit)

    def dirty_keys(self) -> set[Key]:
        """Keys of the blocks that must be written before they may be evicted."""
        with self.lock:
            return self._table.dirty_keys()

    # --- maintenance --------------------------------------------------------------------

    def evict_expired(self, epochs: int) -> tuple[int, list[TierWrite]]:
        """Start a new epoch and evict evictable blocks published at least `epochs` epochs ago.

        Returns the number of evicted blocks, and writes of old dirty blocks that go later.
        """
        with self.lock:
            self._table.epoch += 1
            writes: list[TierWrite] = []
            evicted = 0
            for block in self._table.older_than(epochs):
                if block.evictable:
                    self._table.evict(block)
                    evicted += 1
                else:
                    self.tier_writes.write_now(block, writes)
            self._counts["expired"] += evicted
            return evicted, writes

    def reserve_for_warm(self, key: Key, nbytes: int, spare: int) -> int | None:
        """A slot to fill with a block that a tier has, before any request needs it.

        None if L2 has the key, the tenant's quota is full, or at most `spare` slots are free:
        nothing is evicted for warming. The caller then calls `publish_warmed`, or `abandon` as
        WORKERS.
        """
        with self.lock:
            if self._table.free <= spare or self._table.get(key) is not None:
                return None
            if self._frozen or self._quotas.is_full(key.tenant):
                return None
            slot = self._table.take_slot()
            assert slot is not None
            self._table.fill_slot(WORKERS, key, slot, nbytes)
            return slot

    def publish_warmed(self, slot: int) -> None:
        """Publish the block in a slot of `reserve_for_warm`. The tiers have it already."""
        with self.lock:
            self._table.publish(WORKERS, slot).written = True
            self._counts["warmed"] += 1

    # --- views --------------------------------------------------------------------------

    def set_listener(self, listener: SlotListener) -> None:
        """Tell the listener of every READY block, now and from now on."""
        with self.lock:
            self._table.set_listener(listener)

    def clear(self) -> int:
        """Evict every block without a lease; returns their number."""
        with self.lock:
            return self._table.evict_idle()

    def stats(self) -> dict[str, Any]:
        """Occupancy in slots, and counters. "tenants": slots in use by tenant. "eviction": figures
        of the eviction policy."""
        with self.lock:
            return {
                **self._table.stats(),
                "max_pinned": self.tunables.max_pinned,
                "loads_in_flight": len(self._in_flight),
                "tier_writes_in_flight": self.tier_writes.in_flight,
                "tier_writes_deferred": len(self.tier_writes.deferred),
                "remote_locations": len(self.remote_locations),
                **{name: self._counts[name] for name in COUNTERS},
                "tenants": dict(self._quotas.slots),
                "eviction": self._quotas.stats(),
            }

    def check(self) -> None:
        """Assert every invariant of the tables; for tests."""
        with self.lock:
            self._table.check()
            self._in_flight.check(self._table)
            self.tier_writes.check()

    # --- internal, under the lock -------------------------------------------------------

    def _join_or_start(
        self,
        waiter: Waiter,
        key: Key,
        nbytes: int,
        source: int | None,
        parent: Block | None,
        result: LeaseResult,
    ) -> str:
        """Join or start the in-flight load of a block. Returns the reason if that is impossible."""
        load = self._in_flight.get(key)
        if load is None:
            if self._block_of_size(key, nbytes) is not None:
                return "the block is being saved, or has another size"
            if source is None:
                return MISSING
            if self._in_flight.is_full(source):
                return "too many loads in flight"
            slot = self._take_slot(key, parent, evict_unwritten=True)
            if slot is None:
                self._counts["no_slot"] += 1
                return "no free slot"
            self._table.chains.link(parent, self._table.fill_slot(WORKERS, key, slot, nbytes))
            load = InFlightLoad(key, slot, nbytes, source)
            self._in_flight.start(load)
            result.new_loads.append(load)
        elif load.nbytes != nbytes:
            return "the block has another size"
        load.waiters.append(waiter)
        result.waiting.append((waiter, load))
        return ""

    def _block_of_size(self, key: Key, nbytes: int) -> Block | None:
        """The block of this key. A block of another size is evicted if it is not in use: all blocks
        of a namespace have one size, but a frame can be put over HTTP before the size is known."""
        block = self._table.get(key)
        wrong = block is not None and block.ready and block.nbytes != nbytes
        if block is None or not wrong or not self.tier_writes.only_pending_leases(block):
            return block
        self.tier_writes.evict_unwritten(block)
        return None

    def _take_slot(
        self, key: Key, parent: Block | None, *, evict_unwritten: bool = False
    ) -> int | None:
        """A slot to fill with this key; None if none can be assigned."""
        if self._frozen:
            return None
        return self.tier_writes.take_slot(key.tenant, parent, evict_unwritten=evict_unwritten)
