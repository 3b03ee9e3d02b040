"""The brain: which block is where, who holds a lease, what goes where next. It does no I/O.

It knows no sockets, clocks or threads; only the lock that guards its tables. Every method decides
and returns at once; what it wants done comes back as plans (`plans.py`), which the store's threads
carry out and report. The lock is never held across I/O, a copy or a codec. It is re-entrant, so
that the store can keep a ticket's book in step with the brain's.

A key is filled by at most one filler at a time (a client with a grant, or a flight), and
`SlotTable.publish` is the only door to READY: the first writer wins, the second is told to drop
its copy, and nobody sees a block before its bytes are there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstore.blocks.key import Key
from kvstore.cache.commands import (
    COUNTERS,
    MISSING,
    Admission,
    Flight,
    LoadPlan,
    Spill,
    Spilled,
    Waiter,
)
from kvstore.cache.eviction import EvictionPolicy
from kvstore.cache.in_flight import FlightTable
from kvstore.cache.pending_writes import STALL_OFFERS
from kvstore.cache.quotas import SlotQuotas
from kvstore.cache.remote_locations import Places
from kvstore.cache.slots import WORKERS, Block, Listing, SlotTable
from kvstore.cache.tier_writes import Spills
from kvstore.cache.tunables import Dials
from kvstore.cache.write_policy import WritePolicy


class L2Manager:
    """Tables of one slab. See the module's text.

    slots: of the slab. tiers: how many tiers lie below. flights_max: loads in progress at most,
    per tier; more are cut. quotas: slots by tenant (`quotas.EVERYBODY` for each other one).
    pins_max: slots that may be pinned. stall_offers: see `queued.STALL_OFFERS`.
    """

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy[Key],
        write: WritePolicy,
        *,
        tiers: int,
        flights_max: int,
        quotas: Mapping[str, int] | None = None,
        pins_max: int = 0,
        stall_offers: int = STALL_OFFERS,
    ) -> None:
        self.lock = threading.RLock()
        self.places = Places()
        self._counts: Counter[str] = Counter()
        self._policy = SlotQuotas(policy, quotas or {})
        self._table = SlotTable(slots, self._policy)
        self.changes = self._table.changes
        counts, stall = self._counts, stall_offers
        self._spills = Spills(
            self._table, write, self._policy, tiers=tiers, stall_offers=stall, counts=counts
        )
        self.dials = Dials(self.lock, self._table, self._spills, self._policy, pins_max)
        self._flights = FlightTable(tiers, flights_max)
        self._frozen = False

    def add_client(self, client: int) -> None:
        """A client that may hold leases from here on."""
        with self.lock:
            self._table.add_client(client)

    def drop_client(self, client: int) -> None:
        """The client is gone and no copy of it can run: every lease comes back.

        Its flights stay useful for others; those that only it waited for are cancelled, unless a
        worker is at work.
        """
        with self.lock:
            for flight in self._flights.all():
                for waiter in [w for w in flight.waiters if w.client == client]:
                    self.leave(waiter, flight)
            self._table.drop_client(client)

    def freeze(self) -> None:
        """From here on nobody is given a slot to fill; what is filled can still be published,
        written and read.

        For the end: leases are then taken back from engines that may still copy, and a slot that
        came back so must not change under them.
        """
        with self.lock:
            self._frozen = True

    # --- saves --------------------------------------------------------------------------

    def admit(self, client: int, keys: Sequence[Key], nbytes: int) -> Admission:
        """Offer blocks of `nbytes` bytes each; slots are granted for those that are lacking."""
        with self.lock:
            answer = Admission()
            # What is there first, and leased meanwhile: making room for the rest of a run must not
            # leave a hole in it. The first block of all last, so that a prefix outlives what
            # follows it.
            own: list[int] = []
            for key in reversed(keys):
                block = self._of_size(key, nbytes)
                if block is not None:
                    answer.rejected += 1
                    if block.ready:
                        self._table.lease(client, block)
                        own.append(block.slot)
                        self._spills.hit(block, answer.spills)
            for index, key in enumerate(keys):
                if self._table.get(key) is not None:
                    continue
                slot = self._take(key)
                if slot is None:
                    answer.dropped = sum(self._table.get(key) is None for key in keys[index:])
                    break
                self._table.fill(client, key, slot, nbytes)
                answer.grants.append((index, slot))
            self.release(client, own)
            self._spills.ahead(answer.spills)
            self._counts["admitted"] += len(answer.grants)
            self._counts["rejected"] += answer.rejected
            self._counts["busy"] += answer.dropped
            return answer

    def commit(self, client: int, slots: Iterable[int]) -> list[Spill]:
        """These granted slots are filled: publish them, the deepest first (evicted first)."""
        with self.lock:
            spills: list[Spill] = []
            for slot in reversed(list(slots)):
                self._spills.published(self._table.publish(client, slot), spills)
            # Queues are served in order, and a prefix is worth more than what follows it.
            spills.reverse()
            return spills

    def abandon(self, client: int, slots: Iterable[int]) -> None:
        """These granted slots will not be filled; they are free again."""
        with self.lock:
            for slot in slots:
                self._table.discard(client, slot)

    # --- loads --------------------------------------------------------------------------

    def record_lookup(self, keys: Sequence[Key]) -> None:
        """Somebody asks for this run, from a prompt's first block on."""
        with self.lock:
            self._policy.asked(keys)

    def match(self, keys: Sequence[Key], nbytes: int) -> int:
        """Length of the leading run that is READY in L2."""
        with self.lock:
            return self._table.run(keys, nbytes)

    def held(self, keys: Sequence[Key], nbytes: int) -> list[bool]:
        """For each key, whether it is READY in L2 or on its way there from a tier."""
        with self.lock:
            return self._table.held(keys, nbytes, self._flights)

    def lacks(self, key: Key) -> bool:
        """Nobody has a block of this key in L2, nor is filling one."""
        with self.lock:
            return self._table.get(key) is None

    def lease(
        self,
        client: int,
        keys: Sequence[Key],
        nbytes: int,
        sources: Sequence[int | None],
        owner: Any,
    ) -> LoadPlan:
        """Lease the run to a client: what is READY now, what is on its way or can be fetched.

        sources: for each key the tier that has it, None where none is known to.
        """
        with self.lock:
            plan = LoadPlan(cut_at=len(keys))
            # First what is there, so that making room for the rest cannot evict it; the first
            # block last, so that it is the most recent of all.
            ready: dict[int, int] = {}
            for index in range(len(keys) - 1, -1, -1):
                block = self._table.usable(keys[index], nbytes)
                if block is not None:
                    self._table.lease(client, block)
                    self._spills.hit(block, plan.spills)
                    ready[index] = block.slot
            for index in range(len(keys)):
                if index in ready:
                    continue
                waiter = Waiter(client, owner, index)
                plan.reason = self._fetch(waiter, keys[index], nbytes, sources[index], plan)
                if plan.reason:
                    plan.cut_at = index
                    break
            for index in sorted(ready):
                if index < plan.cut_at:
                    plan.ready.append((index, ready[index]))
                else:
                    self._table.release(client, ready[index])
            self._spills.ahead(plan.spills)
            return plan

    def take_off(self, flight: Flight) -> bool:
        """A worker begins; False when the flight was cancelled."""
        with self.lock:
            flight.started = not flight.cancelled
            return flight.started

    def redirect(self, flight: Flight, tier: int) -> bool:
        """The flight goes on from another tier, where no worker has begun it; False when it cannot:
        nobody waits for it any more, or that tier has as many as it may."""
        with self.lock:
            if not flight.waiters or self._flights.full(tier):
                return False
            self._flights.redirect(flight, tier)
            return True

    def land(self, flight: Flight) -> tuple[list[Waiter], list[Spill]]:
        """The block is in its slot, verified: publish it and lease it to those who still wait."""
        with self.lock:
            self._flights.end(flight)
            block = self._table.publish(WORKERS, flight.slot)
            for waiter in flight.waiters:
                self._table.lease(waiter.client, block)
            spills: list[Spill] = []
            self._spills.landed(block, flight.tier, spills)
            return list(flight.waiters), spills

    def fail(self, flight: Flight) -> list[Waiter]:
        """The block did not come; its slot is free again. Returns those who waited."""
        with self.lock:
            self._flights.end(flight)
            self._table.discard(WORKERS, flight.slot)
            return list(flight.waiters)

    def leave(self, waiter: Waiter, flight: Flight) -> None:
        """A waiter gives up. A flight that nobody waits for and no worker began is cancelled."""
        with self.lock:
            if waiter not in flight.waiters or self._flights.get(flight.key) is not flight:
                return
            flight.waiters.remove(waiter)
            if not flight.waiters and not flight.started:
                flight.cancelled = True
                self.fail(flight)

    def borrow(self, key: Key) -> tuple[int, int] | None:
        """(slot, nbytes) of a READY block, leased to the workers; None when there is none."""
        with self.lock:
            block = self._table.get(key)
            if block is None or not block.ready:
                return None
            self._table.lease(WORKERS, block)
            return block.slot, block.nbytes

    def release(self, client: int, slots: Iterable[int]) -> None:
        """Leases of READY slots go back."""
        with self.lock:
            for slot in slots:
                self._table.release(client, slot)

    # --- spills -------------------------------------------------------------------------

    def begin(self, spill: Spill) -> bool:
        """A worker begins to write; False when the spill was cancelled."""
        with self.lock:
            return self._spills.begin(spill)

    def spilled(self, spill: Spill, outcome: Spilled) -> None:
        """A spill ended; its lease goes back. See `Spills.ended`."""
        with self.lock:
            self._spills.ended(spill, outcome)

    def spill_dirty(self, limit: int) -> list[Spill]:
        """Spills of up to `limit` dirty blocks, coldest first: for a flush."""
        with self.lock:
            return self._spills.dirty(limit)

    def dirty(self) -> set[Key]:
        """Blocks that are to be written before they go."""
        with self.lock:
            return self._table.dirty()

    # --- care ---------------------------------------------------------------------------

    def pin(self, keys: Sequence[Key], nbytes: int) -> tuple[int, list[Spill]]:
        """Keep the leading run that is READY in L2 until `unpin`: neither evicted nor cleared.

        Returns how many of the keys are pinned now (fewer: not READY, or no more may be pinned),
        and what is to be written below, because it would else have waited for its eviction.
        """
        with self.lock:
            spills: list[Spill] = []
            for index, key in enumerate(keys):
                block = self._table.usable(key, nbytes)
                if block is None:
                    return index, spills
                if self._table.is_pinned(block):
                    continue
                if self._table.pinned >= self.dials.pins_max:
                    return index, spills
                self._table.pin(block)
                self._spills.settle(block, spills)
            return len(keys), spills

    def unpin(self, keys: Iterable[Key] | None = None) -> int:
        """Let these, or all, be evicted again; returns how many were pinned."""
        with self.lock:
            blocks = self._table.pinned_of(keys)
            for block in blocks:
                self._table.unpin(block)
            return len(blocks)

    def pinned(self, keys: Iterable[Key]) -> int:
        """How many of these are pinned."""
        with self.lock:
            return len(self._table.pinned_of(keys))

    def age(self, epochs: int) -> tuple[int, list[Spill]]:
        """One epoch has passed: evict what was published at least so many ago, nobody uses, and
        waits for no write; how many, and the writes of what is not written yet and goes later."""
        with self.lock:
            self._table.epoch += 1
            spills: list[Spill] = []
            evicted = 0
            for block in self._table.older(epochs):
                if block.evictable:
                    self._table.evict(block)
                    evicted += 1
                else:
                    self._spills.settle(block, spills)
            self._counts["expired"] += evicted
            return evicted, spills

    def adopt(self, key: Key, nbytes: int, spare: int) -> int | None:
        """A slot to fill with a block that a tier has, before anybody asks for it.

        None when L2 has the key, its tenant has its share, or no more than `spare` slots are free:
        nothing is evicted for it. To be handed to `adopted` or `abandon`, as WORKERS.
        """
        with self.lock:
            if self._table.free <= spare or self._table.get(key) is not None:
                return None
            if self._frozen or self._policy.full(key.tenant):
                return None
            slot = self._table.take()
            assert slot is not None
            self._table.fill(WORKERS, key, slot, nbytes)
            return slot

    def adopted(self, slot: int) -> None:
        """The block in an adopted slot is there: publish it. The tiers have it already."""
        with self.lock:
            self._table.publish(WORKERS, slot).written = True
            self._counts["warmed"] += 1

    # --- views --------------------------------------------------------------------------

    def list_in(self, listing: Listing) -> None:
        """Show every READY block there, now and from here on."""
        with self.lock:
            self._table.list_in(listing)

    def clear(self) -> int:
        """Evict every block that nobody has a lease on; returns how many."""
        with self.lock:
            return self._table.evict_idle()

    def stats(self) -> dict[str, Any]:
        """Occupancy in slots, and counters; "tenants": slots by tenant; "eviction": its policy's
        own numbers."""
        with self.lock:
            return {
                **self._table.stats(),
                "pins_max": self.dials.pins_max,
                "flights": len(self._flights),
                "spilling": self._spills.spilling,
                "known": len(self.places),
                **{name: self._counts[name] for name in COUNTERS},
                "tenants": dict(self._policy.slots),
                "eviction": self._policy.stats(),
            }

    def check(self) -> None:
        """Assert every invariant of the tables; for tests."""
        with self.lock:
            self._table.check()
            self._flights.check(self._table)
            self._spills.check()

    # --- inside: all under the lock -----------------------------------------------------

    def _fetch(
        self, waiter: Waiter, key: Key, nbytes: int, source: int | None, plan: LoadPlan
    ) -> str:
        """Join the flight of a block or start one; says why not, when neither can be."""
        flight = self._flights.get(key)
        if flight is None:
            if self._of_size(key, nbytes) is not None:
                return "being saved, or of another size"
            if source is None:
                return MISSING
            if self._flights.full(source):
                return "too many loads in progress"
            slot = self._take(key)
            if slot is None:
                self._counts["busy"] += 1
                return "no free slot"
            self._table.fill(WORKERS, key, slot, nbytes)
            flight = Flight(key, slot, nbytes, source)
            self._flights.start(flight)
            plan.flights.append(flight)
        elif flight.nbytes != nbytes:
            return "of another size"
        flight.waiters.append(waiter)
        plan.waiting.append((waiter, flight))
        return ""

    def _of_size(self, key: Key, nbytes: int) -> Block | None:
        """The block of this key. A namespace has blocks of one size: one of another size came as a
        frame before any session had told the size, and goes as soon as nobody uses it."""
        block = self._table.get(key)
        wrong = block is not None and block.ready and block.nbytes != nbytes
        if block is None or not wrong or not self._spills.idle(block):
            return block
        self._spills.give_up(block)
        return None

    def _take(self, key: Key) -> int | None:
        """A slot to fill with this key."""
        return None if self._frozen else self._spills.take(key.tenant)
