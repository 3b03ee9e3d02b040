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
from kvstore.tiers.plans import Admission, Flight, LoadPlan, Spill, Spilled, Waiter
from kvstore.tiers.policies.eviction import EvictionPolicy
from kvstore.tiers.policies.write import WritePolicy
from kvstore.tiers.slots import WORKERS, Block, SlotTable

CLEAN_SHARE: Final = 8
"""write_back keeps one slot in this many free or clean, so that a burst finds room."""
AHEAD_MAX: Final = 128
"""Blocks that write_back has on their way down ahead of need, at most: fewer than a queue takes."""
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
    per tier; more are cut.
    """

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy,
        write: WritePolicy,
        *,
        tiers: int,
        flights_max: int,
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
        self._queued: dict[int, list[Spill]] = {}
        """Spills that no worker has begun, by slot."""
        self._clean_floor = min(max(1, slots // CLEAN_SHARE), AHEAD_MAX)
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

    # --- saves --------------------------------------------------------------------------

    def admit(self, client: int, keys: Sequence[Key], nbytes: int) -> Admission:
        """Offer blocks of `nbytes` bytes each; slots are granted for those that are lacking."""
        with self.lock:
            answer = Admission()
            # What is there first, so that making room for the rest evicts it last; the first
            # block of all last, so that a prefix outlives what follows it.
            for key in reversed(keys):
                block = self._table.get(key)
                if block is not None:
                    answer.rejected += 1
                    if block.ready:
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
            for index, key in enumerate(keys):
                if self._table.usable(key, nbytes) is None:
                    return index
            return len(keys)

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

    def redirect(self, flight: Flight, tier: int) -> None:
        """The flight goes on from another tier."""
        with self.lock:
            self._in_flight[flight.tier] -= 1
            self._in_flight[tier] += 1
            flight.tier = tier

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
                self._unqueue(spill)
            return not spill.cancelled

    def spilled(self, spill: Spill, outcome: Spilled) -> None:
        """A spill ended; its lease goes back. Once a tier has tried, L2 need not keep the block."""
        with self.lock:
            assert self._table.at(spill.slot).key == spill.key, "a leased slot changed hands"
            assert not spill.cancelled, "a cancelled spill was carried out"
            self._unqueue(spill)
            self._spilling -= 1
            self._counts[f"spills_{outcome.value}"] += 1
            block = self._table.release(WORKERS, spill.slot)
            if outcome is not Spilled.DROPPED:
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
            for slot, spills in self._queued.items():
                assert spills, "an empty list was left behind"
                for spill in spills:
                    assert spill.slot == slot
                    assert not spill.cancelled
                    assert self._table.at(slot).key == spill.key
            assert sum(map(len, self._queued.values())) <= self._spilling

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
            if self._table.get(key) is not None:
                return "being saved, or of another size"
            if source is None:
                return "missing"
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

    def _take(self) -> int | None:
        """A slot to fill: a free one, one of a block that may go, or one that waits to be written.

        A tier that is slow or hangs would else hold, by its queue alone, slots that everybody
        needs. Saves may be lost: the coldest block goes unwritten, and is counted as dropped.
        """
        slot = self._table.take()
        if slot is not None or not self._queued:
            return slot
        for key in self._policy.victims():
            block = self._table[key]
            waiting = self._queued.get(block.slot, ())
            if waiting and block.count == 1 + len(waiting) and not block.dirty:
                for spill in list(waiting):
                    self.spilled(spill, Spilled.DROPPED)
                    spill.cancelled = True
                return self._table.take()
        return None

    def _unqueue(self, spill: Spill) -> None:
        """The spill waits no more, if it did."""
        waiting = self._queued.get(spill.slot, [])
        if spill in waiting:
            waiting.remove(spill)
            if not waiting:
                del self._queued[spill.slot]

    def _end(self, flight: Flight) -> None:
        ended = self._flights.pop(flight.key)
        assert ended is flight
        self._in_flight[flight.tier] -= 1

    def _hit(self, block: Block, spills: list[Spill]) -> None:
        block.hits += 1
        self._policy.touched(block.key)
        if self._tiers and not block.written and self._write.on_hit(block.hits):
            self._spill(block, range(self._tiers), spills)

    def _spill(self, block: Block, tiers: Iterable[int], spills: list[Spill]) -> None:
        """Lease the block to the workers once for each tier it goes to."""
        for tier in tiers:
            self._table.lease(WORKERS, block)
            self._spilling += 1
            block.written = True
            spill = Spill(block.key, block.slot, block.nbytes, tier)
            self._queued.setdefault(block.slot, []).append(spill)
            spills.append(spill)

    def _spill_ahead(self, spills: list[Spill]) -> None:
        """write_back: send the coldest dirty blocks down before their slots are needed."""
        if not self._write.on_evict:
            return
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
