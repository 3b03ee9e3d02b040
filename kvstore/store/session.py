"""One engine's view of a store: `verbs.BlockStore`, bound to a tenant and a namespace.

The embedded engine holds one; the sidecar holds one for each connection. Verbs are called from one
thread at a time; `poll` may block in a second thread meanwhile, and the store's workers move
tickets from theirs. All books are kept under the brain's lock, so a lease and the ticket that
shows it change together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvstore.blocks.key import Key, Namespace
from kvstore.cache.commands import MISSING, Flight, LoadPlan, Waiter
from kvstore.interface import Load, Match, Save, Ticket
from kvstore.shm.slab import Slab
from kvstore.store.locator import L2
from kvstore.telemetry.usage_counters import SessionMeter

if TYPE_CHECKING:
    from kvstore.store.store import Store

TicketT = TypeVar("TicketT", bound=Ticket)

CLOSED: Final = "the store is closed"
LOAD_TRIES: Final = 2
"""Plans made for one load: one more when a block left L2 between looking for it and leasing it."""
MOVED_MAX: Final = 1 << 16
"""Tickets kept for a poll; of a caller that never polls, the longest waiting are let go."""


class Session:
    """Verbs over an embedded store. Made by `Store.session`."""

    def __init__(
        self,
        store: Store,
        client: int,
        namespace: Namespace,
        tenant: str,
        meter: SessionMeter | None = None,
    ) -> None:
        self.tenant = tenant
        self.meter = meter
        self.closed = False
        self._store = store
        self._client = client
        self._namespace = namespace
        self._nbytes = namespace.block_bytes
        self._brain = store.brain
        self._tickets = 0
        self._books: dict[int, LoadBook] = {}
        self._saves: dict[int, Save] = {}
        self._matches: set[Match] = set()
        self._moved: dict[int, Ticket] = {}
        self._news = threading.Condition(self._brain.lock)

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def slab(self) -> Slab | None:
        return None if self.closed else self._store.slab

    def slab_of(self, ticket: Load | Save) -> Slab:
        return self._store.slab

    def match(self, hashes: Sequence[bytes]) -> Match:
        ticket = Match(self._number(), hashes)
        if self.closed:
            return self._ended(ticket)
        keys = self._keys(hashes)
        self._hear(hashes, keys)
        self._locate(ticket, keys, probe=True)
        return ticket

    def asked(self, hashes: Sequence[bytes]) -> None:
        """A run was asked for where the answer was known without us."""
        if not self.closed:
            self._hear(hashes, self._keys(hashes))

    def load(self, hashes: Sequence[bytes]) -> Load:
        """See `verbs`. A block in a tier without a local index is found only after a match."""
        ticket = Load(self._number(), hashes)
        if self.closed:
            return self._ended(ticket)
        keys = self._keys(hashes)
        for left in reversed(range(LOAD_TRIES)):
            held = self._brain.held(keys, self._nbytes)
            sources = self._store.finder.sources(keys, held)
            with self._brain.lock:
                if self.closed:
                    return self._ended(ticket)
                book = LoadBook(self, ticket)
                plan = self._brain.lease(self._client, keys, self._nbytes, sources, book)
                again = left > 0 and plan.reason == MISSING and held[plan.cut_at]
                if again:
                    self._undo(plan)
                else:
                    self._books[ticket.ticket_id] = book
                    if self.meter is not None:
                        self.meter.loading(ticket.hashes)
                    book.begin(plan)
            # Flights of a plan undone were cancelled with it.
            self._store.carry_out(() if again else plan.flights, plan.spills)
            if not again:
                self._store.count_hits(L2, len(plan.ready))
                break
        return ticket

    def save(self, hashes: Sequence[bytes]) -> Save:
        ticket = Save(self._number(), hashes)
        with self._brain.lock:
            if self.closed:
                return self._ended(ticket)
            answer = self._brain.admit(self._client, self._keys(hashes), self._nbytes)
            ticket.grants.extend(answer.grants)
            ticket.dropped = answer.dropped
            self._saves[ticket.ticket_id] = ticket
            self._end(ticket)
        self._store.carry_out((), answer.spills)
        return ticket

    def commit(self, save: Save) -> None:
        with self._brain.lock:
            if self.closed:
                return
            assert self._saves.pop(save.ticket_id, None) is save, "handed back already"
            self._moved.pop(save.ticket_id, None)
            spills = self._brain.commit(self._client, [slot for _, slot in save.grants])
            if self.meter is not None:
                self.meter.saved(len(save.grants))
        self._store.carry_out((), spills)

    def release(self, ticket: Load | Save) -> None:
        with self._brain.lock:
            if self.closed:
                return
            self._moved.pop(ticket.ticket_id, None)
            if isinstance(ticket, Save):
                assert self._saves.pop(ticket.ticket_id, None) is ticket, "handed back already"
                self._brain.abandon(self._client, [slot for _, slot in ticket.grants])
                return
            book = self._books.pop(ticket.ticket_id, None)
            assert book is not None, "handed back already"
            book.give_back()

    def poll(self, timeout_s: float = 0.0) -> list[Ticket]:
        with self._news:
            if not self._moved and timeout_s > 0 and not self.closed:
                self._news.wait_for(lambda: self._moved or self.closed, timeout_s)
            moved = list(self._moved.values())
            self._moved.clear()
            return moved

    def stats(self) -> dict[str, Any]:
        return self._store.stats()

    def close(self) -> None:
        """Every lease comes back; tickets still out end with a fault.

        Also what the sidecar calls when a client's connection has ended, which is the word that
        none of its copies can run any more.
        """
        with self._brain.lock:
            if self.closed:
                return
            self.closed = True
            # Leases of books go back with the client's; nobody hands these tickets back now.
            self._brain.drop_client(self._client)
            for book in self._books.values():
                self._ended(book.ticket)
            for match in list(self._matches):
                self._ended(match)
            self._books.clear()
            self._saves.clear()
            self._matches.clear()
            self._news.notify_all()
        self._store.forget_session(self._client)

    drop = close

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- for the store and the books ----------------------------------------------------

    def moved(self, ticket: Ticket) -> None:
        """Under the lock: the ticket has something new for its holder."""
        self._moved[ticket.ticket_id] = ticket
        if len(self._moved) > MOVED_MAX:
            del self._moved[next(iter(self._moved))]
        self._news.notify_all()

    def release_slots(self, slots: Sequence[int]) -> None:
        """Under the lock: leases of this session that no ticket shows any more."""
        self._brain.release(self._client, slots)

    def leave(self, waiter: Waiter, flight: Flight) -> None:
        """Under the lock: a book waits for this flight no more."""
        self._brain.leave(waiter, flight)

    def _locate(self, ticket: Match, keys: Sequence[Key], *, probe: bool) -> None:
        """Say how long a run is held and where; ask remote tiers once for what is not known."""
        tiers, behind = self._store.finder.locate(keys, self._nbytes)
        with self._brain.lock:
            if self.closed:
                self._ended(ticket)
                return
            ticket.tiers.extend(tiers[len(ticket.tiers) :])
            if probe and len(tiers) < len(keys):
                self._matches.add(ticket)
                rest = keys[len(tiers) :]
                if self._store.finder.probe(rest, lambda: self._probed(ticket, keys)):
                    return
            self._matches.discard(ticket)
            ticket.behind = [index for index in behind if index > len(ticket.tiers)]
            self._end(ticket)

    def _probed(self, ticket: Match, keys: Sequence[Key]) -> None:
        """From a worker: every remote tier has answered."""
        self._locate(ticket, keys, probe=False)

    def _undo(self, plan: LoadPlan) -> None:
        """Under the lock: give back what a plan has leased and started."""
        for waiter, flight in plan.waiting:
            self._brain.leave(waiter, flight)
        self._brain.release(self._client, [slot for _, slot in plan.ready])

    def _hear(self, hashes: Sequence[bytes], keys: Sequence[Key]) -> None:
        """Somebody asks for this run: for the order of eviction, and for statistics."""
        with self._brain.lock:
            self._brain.record_lookup(keys)
            if self.meter is not None:
                self.meter.asked(hashes)

    def _keys(self, hashes: Sequence[bytes]) -> list[Key]:
        tenant, digest = self.tenant, self._namespace.digest
        make = tuple.__new__  # a third of the time of Key(...)
        return [make(Key, (tenant, digest, name)) for name in hashes]

    def _number(self) -> int:
        self._tickets += 1
        return self._tickets

    def _end(self, ticket: Ticket) -> None:
        ticket.done = True
        self.moved(ticket)

    def _ended(self, ticket: TicketT) -> TicketT:
        """A ticket that nothing will be added to, because the store is closed."""
        ticket.fault = CLOSED
        ticket.done = True
        return ticket

    def __repr__(self) -> str:
        return f"session {self._client} of {self.tenant}, namespace {self._namespace.digest[:8]}"


class LoadBook:
    """One load's bookkeeping: what has arrived, what is awaited, where the run ends.

    The ticket shows a leading run only; blocks that arrive early are held back until it reaches
    them. All methods run under the brain's lock.
    """

    def __init__(self, session: Session, ticket: Load) -> None:
        self.ticket = ticket
        self._session = session
        self._arrived: dict[int, tuple[int, str]] = {}
        self._awaited: dict[int, tuple[Waiter, Flight]] = {}
        self._end = len(ticket.hashes)
        self._began_s = time.monotonic()

    def begin(self, plan: LoadPlan) -> None:
        """Take the brain's plan."""
        self._end = plan.cut_at
        self.ticket.fault = plan.reason
        self._arrived = {index: (slot, L2) for index, slot in plan.ready}
        self._awaited = {waiter.index: (waiter, flight) for waiter, flight in plan.waiting}
        self._advance()

    def arrived(self, index: int, slot: int, tier: str) -> None:
        """A block is in its slot, leased to this session."""
        del self._awaited[index]
        self._arrived[index] = (slot, tier)
        self._advance()

    def cut(self, index: int, reason: str) -> None:
        """A block will not come: the run ends before it, and what lies behind is given back.

        Whoever is told of a failed flight may have left it a moment ago, by a cut of this same
        run: a key that stands in it twice waits twice.
        """
        if self._awaited.pop(index, None) is None:
            return
        if index < self._end:
            self._end = index
            self.ticket.fault = reason
            behind = [i for i in self._arrived if i > index]
            self._session.release_slots([self._arrived.pop(i)[0] for i in behind])
            for i in [i for i in self._awaited if i > index]:
                self._session.leave(*self._awaited.pop(i))
        self._advance()

    def give_back(self) -> None:
        """The ticket is handed back: leases go back, flights fly on for others."""
        for waiter, flight in self._awaited.values():
            self._session.leave(waiter, flight)
        self._session.release_slots([*self.ticket.slots, *(s for s, _ in self._arrived.values())])
        self._awaited.clear()
        self._arrived.clear()

    def _advance(self) -> None:
        """Show what has become part of the leading run."""
        ticket = self.ticket
        meter = self._session.meter
        before = len(ticket.slots)
        while len(ticket.slots) in self._arrived:
            slot, tier = self._arrived.pop(len(ticket.slots))
            ticket.tiers.append(tier)
            ticket.slots.append(slot)
        if meter is not None and len(ticket.slots) > before:
            meter.served(ticket.tiers[before:])
        if len(ticket.slots) == self._end and not ticket.done:
            ticket.done = True
            if meter is not None:
                meter.loaded(time.monotonic() - self._began_s)
            self._session.moved(ticket)
        elif len(ticket.slots) > before:
            self._session.moved(ticket)


def deadline_after(timeout_s: float) -> float:
    """The moment `timeout_s` from now, on the monotonic clock."""
    return time.monotonic() + timeout_s
