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

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvstore.blocks import Key
from kvstore.tiers.places import Places
from kvstore.tiers.plans import MISSING, Admission, Flight, LoadPlan, Spill, Spilled, Waiter
from kvstore.tiers.policies.eviction import EvictionPolicy
from kvstore.tiers.policies.write import WritePolicy
from kvstore.tiers.queued import STALL_OFFERS, QueuedSpills
from kvstore.tiers.slots import WORKERS, Block, SlotTable

AHEAD_SCAN_MAX: Final = 1024
"""Cold blocks looked at for that, at most, on any one call."""
COUNTERS: Final = (
    "admitted",
    "rejected",
    "busy",
    "spills_written",
    "spills_dropped",
    "spills_failed",
)


class Brain:
    """Tables of one slab. See the module's text.

    slots: of the slab. tiers: how many tiers lie below. flights_max: loads in progress at most,
    per tier; more are cut. stall_offers: see `queued.STALL_OFFERS`.
    """

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy[Key],
        write: WritePolicy,
        *,
        tiers: int,
        flights_max: int,
        stall_offers: int = STALL_OFFERS,
    ) -> None:
        assert flights_max >= 0
        self.lock = threading.RLock()
        self.places = Places()
        self._table = SlotTable(slots, policy)
        self._policy = policy
        self._write = write
        self._tiers = tiers
        self._flights_max = flights_max
        self._flights: dict[Key, Flight] = {}
        self._in_flight = [0] * tiers
        self._spilling = 0
        self._frozen = False
        self._queued = QueuedSpills(stall_offers)
        self._clean_floor = write.clean_floor(slots)
        self._counts: Counter[str] = Counter()

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
            for flight in list(self._flights.values()):
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
                        self._hit(block, answer.spills)
            for index, key in enumerate(keys):
                if self._table.get(key) is not None:
                    continue
                slot = self._take()
                if slot is None:
                    answer.dropped = sum(self._table.get(key) is None for key in keys[index:])
                    break
                self._table.fill(client, key, slot, nbytes)
                answer.grants.append((index, slot))
            self.release(client, own)
            self._spill_ahead(answer.spills)
            self._counts["admitted"] += len(answer.grants)
            self._counts["rejected"] += answer.rejected
            self._counts["busy"] += answer.dropped
            return answer

    def commit(self, client: int, slots: Iterable[int]) -> list[Spill]:
        """These granted slots are filled: publish them, the deepest first (evicted first)."""
        with self.lock:
            spills: list[Spill] = []
            for slot in reversed(list(slots)):
                block = self._table.publish(client, slot)
                if self._tiers and self._write.on_commit:
                    self._spill(block, range(self._tiers), spills)
                elif self._tiers and self._write.on_evict:
                    self._table.set_dirty(block, True)
            # Queues are served in order, and a prefix is worth more than what follows it.
            spills.reverse()
            return spills

    def abandon(self, client: int, slots: Iterable[int]) -> None:
        """These granted slots will not be filled; they are free again."""
        with self.lock:
            for slot in slots:
                self._table.discard(client, slot)

    # --- loads --------------------------------------------------------------------------

    def match(self, keys: Sequence[Key], nbytes: int) -> int:
        """Length of the leading run that is READY in L2."""
        with self.lock:
            lacks = (i for i, key in enumerate(keys) if self._table.usable(key, nbytes) is None)
            return next(lacks, len(keys))

    def held(self, keys: Sequence[Key], nbytes: int) -> list[bool]:
        """For each key, whether it is READY in L2 or on its way there from a tier."""
        with self.lock:
            return [
                self._table.usable(key, nbytes) is not None or key in self._flights for key in keys
            ]

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
                    self._hit(block, plan.spills)
                    ready[index] = block.slot
            for index in range(len(keys)):
                if index in ready:
                    continue
                plan.reason = self._fetch(client, keys, index, nbytes, sources[index], owner, plan)
                if plan.reason:
                    plan.cut_at = index
                    break
            for index in sorted(ready):
                if index < plan.cut_at:
                    plan.ready.append((index, ready[index]))
                else:
                    self._table.release(client, ready[index])
            self._spill_ahead(plan.spills)
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
            if not flight.waiters or self._in_flight[tier] >= self._flights_max:
                return False
            self._in_flight[flight.tier] -= 1
            self._in_flight[tier] += 1
            flight.tier = tier
            flight.started = False
            return True

    def land(self, flight: Flight) -> tuple[list[Waiter], list[Spill]]:
        """The block is in its slot, verified: publish it and lease it to those who still wait."""
        with self.lock:
            self._end(flight)
            block = self._table.publish(WORKERS, flight.slot)
            block.written = True
            for waiter in flight.waiters:
                self._table.lease(waiter.client, block)
            spills: list[Spill] = []
            if self._write.on_commit:
                self._spill(block, range(flight.tier), spills)
            return list(flight.waiters), spills

    def fail(self, flight: Flight) -> list[Waiter]:
        """The block did not come; its slot is free again. Returns those who waited."""
        with self.lock:
            self._end(flight)
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
            if not spill.cancelled:
                self._queued.remove(spill)
            return not spill.cancelled

    def spilled(self, spill: Spill, outcome: Spilled) -> None:
        """A spill ended; its lease goes back.

        Once a tier has tried, L2 need not keep the block: one that the tier refused may leave
        unwritten, unless it is hit before that, which asks for another try.
        """
        with self.lock:
            assert self._table.at(spill.slot).key == spill.key, "a leased slot changed hands"
            assert not spill.cancelled, "a cancelled spill was carried out"
            self._queued.remove(spill)
            self._spilling -= 1
            self._counts[f"spills_{outcome.value}"] += 1
            block = self._table.release(WORKERS, spill.slot)
            if outcome is not Spilled.DROPPED:
                self._queued.ended()
                self._table.set_dirty(block, False)
            if outcome is not Spilled.WRITTEN:
                block.written = False  # so that its next hit sends it again

    def spill_dirty(self, limit: int) -> list[Spill]:
        """Spills of up to `limit` dirty blocks, coldest first: for a flush."""
        with self.lock:
            spills: list[Spill] = []
            for key in self._policy.victims():
                if limit <= 0:
                    break
                block = self._table[key]
                if block.dirty and not block.written:
                    self._spill(block, range(self._tiers), spills)
                    limit -= 1
            return spills

    # --- views --------------------------------------------------------------------------

    def clear(self) -> int:
        """Evict every block that nobody has a lease on; returns how many."""
        with self.lock:
            return self._table.evict_idle()

    def stats(self) -> dict[str, int]:
        """Occupancy in slots, and counters."""
        with self.lock:
            return {
                **self._table.stats(),
                "flights": len(self._flights),
                "spilling": self._spilling,
                "known": len(self.places),
                **{name: self._counts[name] for name in COUNTERS},
            }

    def check(self) -> None:
        """Assert every invariant of the tables; for tests."""
        with self.lock:
            self._table.check()
            assert sum(self._in_flight) == len(self._flights)
            assert all(count >= 0 for count in self._in_flight)
            for key, flight in self._flights.items():
                assert self._table.at(flight.slot).key == key
                assert not flight.cancelled
            self._queued.check(self._table)
            assert len(self._queued) <= self._spilling

    # --- inside: all under the lock -----------------------------------------------------

    def _fetch(
        self,
        client: int,
        keys: Sequence[Key],
        index: int,
        nbytes: int,
        source: int | None,
        owner: Any,
        plan: LoadPlan,
    ) -> str:
        """Join the flight of keys[index] or start one; says why not, when neither can be."""
        key = keys[index]
        flight = self._flights.get(key)
        if flight is None:
            if self._of_size(key, nbytes) is not None:
                return "being saved, or of another size"
            if source is None:
                return MISSING
            if self._in_flight[source] >= self._flights_max:
                return "too many loads in progress"
            slot = self._take()
            if slot is None:
                self._counts["busy"] += 1
                return "no free slot"
            self._table.fill(WORKERS, key, slot, nbytes)
            flight = self._flights[key] = Flight(key, slot, nbytes, source)
            self._in_flight[source] += 1
            plan.flights.append(flight)
        elif flight.nbytes != nbytes:
            return "of another size"
        waiter = Waiter(client, owner, index)
        flight.waiters.append(waiter)
        plan.waiting.append((waiter, flight))
        return ""

    def _of_size(self, key: Key, nbytes: int) -> Block | None:
        """The block of this key. A namespace has blocks of one size: one of another size came as a
        frame before any session had told the size, and goes as soon as nobody uses it."""
        block = self._table.get(key)
        wrong = block is not None and block.ready and block.nbytes != nbytes
        if block is None or not wrong or not self._queued.alone_hold(block):
            return block
        self._give_up(block)
        return None

    def _take(self) -> int | None:
        """A slot to fill: a free one, one of a block that may go, or one that waits to be written.

        A tier that is slow or hangs would else hold slots that everybody needs. A block that goes
        unwritten for that is counted as dropped.
        """
        slot = None if self._frozen else self._table.take()
        if slot is not None or self._frozen:
            return slot
        block = self._queued.victim(self._table)
        if block is not None:
            self._give_up(block)
            return self._table.take()
        if self._spilling:
            self._queued.refused()
        return None

    def _give_up(self, block: Block) -> None:
        """Evict a block that nobody uses, unwritten: its spills are cancelled, and dropped."""
        spills = self._queued.of(block)
        if block.dirty and not spills:
            self._counts["spills_dropped"] += self._tiers
        for spill in spills:
            self.spilled(spill, Spilled.DROPPED)
            spill.cancelled = True
        self._table.evict(block)

    def _end(self, flight: Flight) -> None:
        ended = self._flights.pop(flight.key)
        assert ended is flight
        self._in_flight[flight.tier] -= 1

    def _hit(self, block: Block, spills: list[Spill]) -> None:
        block.hits += 1
        self._policy.touched(block.key)
        if self._tiers and not block.written and self._write.on_hit(block.hits):
            self._spill(block, range(self._tiers), spills)
        if self._tiers and not block.written and self._write.on_evict:
            self._table.set_dirty(block, True)

    def _spill(self, block: Block, tiers: Iterable[int], spills: list[Spill]) -> None:
        """Lease the block to the workers once for each tier it goes to."""
        for tier in tiers:
            self._table.lease(WORKERS, block)
            self._spilling += 1
            block.written = True
            spill = Spill(block.key, block.slot, block.nbytes, tier)
            self._queued.add(spill)
            spills.append(spill)

    def _spill_ahead(self, spills: list[Spill]) -> None:
        """write_back: send the coldest dirty blocks down before their slots are needed."""
        have = self._table.free + self._table.evictable + self._spilling // max(1, self._tiers)
        if have >= self._clean_floor:
            return
        for key in itertools.islice(self._policy.victims(), AHEAD_SCAN_MAX):
            block = self._table[key]
            if block.dirty and not block.written and block.count == 1:
                self._spill(block, range(self._tiers), spills)
                have += 1
                if have >= self._clean_floor:
                    return
