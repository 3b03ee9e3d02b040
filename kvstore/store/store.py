"""The store: one slab, its brain, the tiers below it and their threads.

This is the embedded default (`kvstore.open`) and the heart of the sidecar. Engines talk to it
through sessions (`session.py`), the brain (`tiers/manager.py`) decides, workers (`workers.py`)
carry out; this file joins them.

A load: the session asks the finder which tier has each block, the brain leases slots and starts
flights, a worker fetches and reports to `_landed`, which publishes the block and tells every
ticket that waits for it. A save: the brain grants slots, `commit` publishes and returns spills,
`carry_out` queues them, a worker writes and reports to `_written`.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.blocks import frame
from kvstore.blocks.key import Key, Namespace
from kvstore.cache.commands import Flight, Landing, Spill, Spilled
from kvstore.cache.eviction import EvictionPolicy, eviction_policy
from kvstore.cache.manager import L2Manager
from kvstore.cache.slots import WORKERS
from kvstore.cache.write_policy import WritePolicy
from kvstore.codecs.chooser import Chooser
from kvstore.config.units import format_bytes
from kvstore.errors import ConfigError, StoreClosed
from kvstore.shm.slab import Slab
from kvstore.store.block_io import Moved
from kvstore.store.frame_api import FrameDoor
from kvstore.store.limits import Budgets, Regulator
from kvstore.store.locator import L2, Finder
from kvstore.store.maintenance import Pinned, Warmer, pin_run
from kvstore.store.session import Session, deadline_after
from kvstore.store.tier_workers import TierWorkers
from kvstore.telemetry.histogram import check_route
from kvstore.telemetry.usage_counters import Meters, Record
from kvstore.tiers.base import Tier

log = logging.getLogger(__name__)

CLOSE_WAIT_S: Final = 5.0
"""How long closing waits for workers that are inside a tier."""
RESIDENT_FLOOR: Final = 2
GRANTED_FLOOR: Final = 2
MAX_SESSIONS: Final = 1024
MAX_NAMESPACES: Final = 4096
"""Namespaces remembered for their dtype and block size; the first met go first."""


@dataclass(frozen=True)
class SlotNeeds:
    """The fewest slots a store can work with, a term for each holder."""

    resident: int
    granted: int
    workers: int

    @property
    def total(self) -> int:
        return self.resident + self.granted + self.workers


class Store:
    """See the module's text.

    tiers: fastest first; the store owns and closes them.
    codecs: tier name to kind of codec ("auto" where not named; see `codecs.chooser`).
    budgets: what tenants, pins, queues and age may take; see `Budgets`.
    own_slab: close the slab with the store.
    record: told of every block that a tier read or wrote; from workers, and must return at once.

    Raises:
        ConfigError: the slab has too few slots; two tiers of one name; an unknown policy or codec.
    """

    def __init__(
        self,
        slab: Slab,
        tiers: Sequence[Tier] = (),
        *,
        write_policy: WritePolicy | None = None,
        eviction: EvictionPolicy[Key] | str = "lru",
        codecs: Mapping[str, str] | None = None,
        budgets: Budgets | None = None,
        own_slab: bool = True,
        record: Record | None = None,
    ) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names) or L2 in names:
            raise ConfigError(f"tier names {names} must be distinct, and none of them {L2!r}")
        needs = _check_slots(slab, tiers)
        budgets = budgets or Budgets()
        self.slab = slab
        self._own_slab = own_slab
        self._tiers = list(tiers)
        cores = len(os.sched_getaffinity(0))
        choosers = [Chooser((codecs or {}).get(name, "auto"), cores=cores) for name in names]
        self._namespaces: dict[str, Namespace] = {}
        self._clients = itertools.count(WORKERS + 1)
        self._sessions: dict[int, Session] = {}
        self._hits: Counter[str] = Counter()
        self._meters = Meters()
        self._closing = False
        policy = eviction_policy(eviction, slab.slots) if isinstance(eviction, str) else eviction
        self.brain = L2Manager(
            slab.slots,
            policy,
            write_policy or WritePolicy(),
            tiers=len(tiers),
            flights_max=slab.slots - RESIDENT_FLOOR - GRANTED_FLOOR,
            quotas=budgets.slots(slab.slot_bytes),
            pins_max=budgets.pins(slab.slots, needs.total),
        )
        self._workers = [
            TierWorkers(
                tier,
                slab,
                queue_blocks=budgets.queue_blocks,
                queue_s=budgets.queue_s.get(tier.name, 0.0),
                chooser=chooser,
                dtype_of=self._dtype_of,
                take_off=self.brain.take_off,
                begin=self.brain.begin,
                landed=self._landed,
                written=self._written,
                record=record,
            )
            for tier, chooser in zip(self._tiers, choosers, strict=True)
        ]
        self.finder = Finder(self.brain, self._workers)
        self.frames = FrameDoor(
            self.brain,
            slab,
            self._tiers,
            namespace_of=self._namespaces.get,
            carry_out=self.carry_out,
            count_hits=self.count_hits,
            count_served=self._count_served,
        )
        self.warmer = Warmer(self.brain, slab, self._tiers)
        self.regulator = Regulator(
            self.brain, self._workers, budgets, self.carry_out, slab=slab, needed=needs.total
        )

    def session(
        self,
        namespace: Namespace,
        tenant: str = "default",
        *,
        route: str = "",
        metered: bool = True,
    ) -> Session:
        """A session for one engine.

        route: what its traffic is called in statistics. metered: whether what it asks for and is
        given counts there; care for the store itself does not.

        Raises ConfigError: a block of the namespace does not fit in a slot, or a route that is
        none.
        """
        check_route(route)
        if namespace.block_bytes > self.slab.slot_bytes:
            raise ConfigError(
                f"a block of {namespace.model!r} takes {namespace.block_bytes} bytes, a slot has "
                f"{self.slab.slot_bytes}; start the store with slots (--slot) of at least "
                f"{format_bytes(frame.padded(namespace.block_bytes))}"
            )
        with self.brain.lock:
            if self._closing:
                raise StoreClosed("the store is closed")
            if len(self._sessions) >= MAX_SESSIONS:
                raise ConfigError(f"{MAX_SESSIONS} sessions are open; close some first")
            client = next(self._clients)
            self.brain.add_client(client)
            self._namespaces[namespace.digest] = namespace
            if len(self._namespaces) > MAX_NAMESPACES:
                del self._namespaces[next(iter(self._namespaces))]
            meter = self._meters.session(namespace, tenant, route) if metered else None
            session = Session(self, client, namespace, tenant, meter)
            self._sessions[client] = session
            return session

    # --- for sessions -------------------------------------------------------------------

    def count_hits(self, tier: str, blocks: int) -> None:
        """Blocks served from a tier, for statistics."""
        with self.brain.lock:
            self._hits[tier] += blocks

    def _count_served(self, key: Key, tier: str) -> None:
        """A frame of a block was asked for; tier: where it came from, "" for nowhere."""
        with self.brain.lock:
            self._meters.frame(self._namespaces.get(key.namespace), key.tenant, tier)

    def carry_out(self, flights: Iterable[Flight], spills: Iterable[Spill]) -> None:
        """Give the brain's plans to the workers. Not under the lock: nothing here waits."""
        for flight in flights:
            self._fly(flight)
        for spill in spills:
            if not self._workers[spill.tier].write(spill) and self.brain.begin(spill):
                self.brain.spilled(spill, Spilled.DROPPED)

    def _fly(self, flight: Flight) -> None:
        """Give a flight to its tier's workers; it ends at once when they are closing."""
        if not self._workers[flight.tier].read(flight) and self.brain.take_off(flight):
            self._landed(flight, Moved(Landing.UNAVAILABLE, reason="closing"))

    def forget_session(self, client: int) -> None:
        """A session was closed."""
        with self.brain.lock:
            self._sessions.pop(client, None)

    # --- care ---------------------------------------------------------------------------

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Write what is queued or dirty now, and make it durable; False when that took too long.

        What is saved meanwhile is not waited for.
        """
        deadline_s = deadline_after(timeout_s)
        wanted = self.brain.dirty()
        while True:
            room = min((workers.room() for workers in self._workers), default=0)
            self.carry_out((), self.brain.spill_dirty(room))
            written = [workers.wait_written(deadline_s) for workers in self._workers]
            if not all(written):
                return False
            wanted &= self.brain.dirty()
            if not wanted:
                return True

    def clear(self, tier: str = "all") -> None:
        """Empty a tier ("l2", a tier's name, or "all"). Leased blocks stay; others are gone.

        Raises ConfigError for an unknown name; what a tier raises when it cannot.
        """
        names = [L2, *(t.name for t in self._tiers)]
        if tier not in (*names, "all"):
            raise ConfigError(f"unknown tier {tier!r}; one of {', '.join(names)}, all is right")
        for index, lower in enumerate(self._tiers):
            if tier in (lower.name, "all"):
                lower.clear()
                with self.brain.lock:
                    self.brain.places.forget(index)
        if tier in (L2, "all"):
            self.brain.clear()

    def pin(
        self,
        namespace: str,
        hashes: Sequence[bytes],
        tenant: str = "default",
        timeout_s: float = 30.0,
    ) -> Pinned:
        """Keep a run in L2 until `unpin` or the end of the store, loading what is not there.

        namespace: a digest that some session has told of. Waits for loads, at most timeout_s.
        Raises ConfigError for another namespace.
        """
        with self.session(self._known(namespace), tenant, metered=False) as session:
            deadline_s = deadline_after(timeout_s)
            return pin_run(self.brain, session, hashes, deadline_s, self.carry_out)

    def unpin(self, namespace: str, hashes: Sequence[bytes], tenant: str = "default") -> int:
        """Let a run be evicted again; blocks that were pinned."""
        return self.brain.unpin([Key(tenant, namespace, name) for name in hashes])

    def namespaces(self) -> dict[str, Namespace]:
        """By digest, those that sessions have told of since the start."""
        with self.brain.lock:
            return dict(self._namespaces)

    def held_below(self) -> Iterator[Key] | None:
        """Every block that a tier holds, listed as it is read; None where a tier may come to hold
        what this store does not know of."""
        if not all(tier.local_index and tier.sole_writer for tier in self._tiers):
            return None
        return itertools.chain.from_iterable(tier.keys() for tier in self._tiers)

    def _known(self, digest: str) -> Namespace:
        known = self.namespaces()
        if digest not in known:
            raise ConfigError(
                f"no engine has told of the namespace {digest!r} since the start; "
                f"known: {', '.join(known) or 'none'}"
            )
        return known[digest]

    def stats(self) -> dict[str, Any]:
        """Plain numbers: "l2" (slots, evictions, ...), "tiers" (by name), "hits" (blocks), "use"
        (see `Meters.snapshot`)."""
        with self.brain.lock:
            l2 = self.brain.stats()
            hits = dict(self._hits)
            sessions = len(self._sessions)
            use = self._meters.snapshot()
        # A tier may count reads and faults too; what was moved, and what failed of it, the workers
        # know, whatever stands between them and the tier.
        tiers = {
            workers.tier.name: {**workers.tier.stats(), **workers.stats()}
            for workers in self._workers
        }
        return {
            "l2": {**l2, "slot_bytes": self.slab.slot_bytes},
            "tiers": tiers,
            "namespaces": {
                digest: {"model": space.model, "dtype": space.dtype, "tokens": space.block_tokens}
                for digest, space in self.namespaces().items()
            },
            "hits": {name: hits.get(name, 0) for name in (L2, *tiers)},
            "sessions": sessions,
            "use": use,
        }

    def close(self) -> None:
        """End sessions, write what is queued, end threads, close tiers; at most CLOSE_WAIT_S of
        waiting. Then every slot is free again, unless a worker hangs inside a tier: its slot stays
        its own."""
        with self.brain.lock:
            if self._closing:
                return
            self._closing = True
            # Engines may still copy from slots whose leases end here; nobody may fill those anew.
            self.brain.freeze()
            sessions = list(self._sessions.values())
        for session in sessions:
            session.close()
        deadline_s = deadline_after(CLOSE_WAIT_S)
        self.regulator.close()
        if not self.flush(CLOSE_WAIT_S / 2):
            log.warning("not everything was written at close: %s", self)
        warmed = self.warmer.close(deadline_s)
        ended = [workers.close(deadline_s) and warmed for workers in self._workers]
        for tier, done in zip(self._tiers, ended, strict=True):
            if done:
                tier.close()
            else:
                log.error("%s hangs; left as it is", tier.name)
        if all(ended):
            self.brain.unpin()
            self.brain.clear()
            stats = self.brain.stats()
            assert stats["slots_free"] == stats["slots"], f"slots are missing at close: {stats}"
            if self._own_slab:
                self.slab.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        l2 = self.brain.stats()
        parts = [f"L2 {l2['slots_ready']}/{l2['slots']} slots, {l2['slots_leased']} leased"]
        for workers in self._workers:
            stats = workers.stats()
            parts.append(
                f"{workers.tier.name} {stats['queued_writes']} queued, {stats['faults']} faults"
            )
        parts.append(f"{l2['spills_dropped']} dropped")
        return " | ".join(parts)

    # --- reports of the workers ---------------------------------------------------------

    def _landed(self, flight: Flight, moved: Moved) -> None:
        """A flight ended in its tier: publish the block, or go on, or cut those who wait."""
        name = self._tiers[flight.tier].name
        if moved.landing is Landing.ARRIVED:
            with self.brain.lock:
                waiters, spills = self.brain.land(flight)
                self._hits[name] += len(waiters)
                for waiter in waiters:
                    waiter.owner.arrived(waiter.index, flight.slot, name)
            self.carry_out((), spills)
            return
        with self.brain.lock:
            self.brain.places.forget(flight.tier, [flight.key])
        lower = None if self._closing else self.finder.next_source(flight)
        with self.brain.lock:
            goes_on = lower is not None and self.brain.redirect(flight, lower)
            if not goes_on:
                for waiter in self.brain.fail(flight):
                    waiter.owner.cut(waiter.index, f"{name}: {moved.reason}")
        if goes_on:
            self._fly(flight)

    def _written(self, spill: Spill, moved: Moved) -> None:
        """A spill ended."""
        if moved.landing is Landing.ARRIVED:
            if not self._tiers[spill.tier].local_index:
                with self.brain.lock:
                    self.brain.places.learn(spill.tier, [spill.key])
            self.brain.spilled(spill, Spilled.WRITTEN)
        else:
            self.brain.spilled(spill, Spilled.FAILED)

    def _dtype_of(self, key: Key) -> str:
        """The dtype of a key's namespace; "" where no session has told of it."""
        namespace = self._namespaces.get(key.namespace)
        return "" if namespace is None else namespace.dtype


def _check_slots(slab: Slab, tiers: Sequence[Tier]) -> SlotNeeds:
    """Refuse a slab that its holders could exhaust among themselves."""
    needs = SlotNeeds(
        resident=RESIDENT_FLOOR,
        granted=GRANTED_FLOOR,
        workers=sum(tier.workers_read + tier.workers_write for tier in tiers),
    )
    if slab.slots < needs.total:
        raise ConfigError(
            f"a slab of {slab.slots} slots; at least {needs.total} are needed: {needs.resident} "
            f"resident, {needs.granted} being saved, {needs.workers} in workers' hands; "
            "raise l2.bytes (--l2) or lower l2.slot_bytes (--slot)"
        )
    return needs
