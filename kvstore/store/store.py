"""The store: one slab, its L2 manager, the tiers below it and their threads.

`kvstore.open` and the sidecar both run a store. Engines use it through sessions (`session.py`). The
L2 manager (`cache/manager.py`) decides and does no I/O. Workers (`tier_workers.py`) do the I/O.

A load: the session looks up the tier of each block in the locator. The L2 manager leases slots and
starts in-flight loads. A worker reads the block and calls `_on_load_end`, which publishes the block
and updates every operation that waits for it.

A save: the L2 manager assigns slots. `commit` publishes the blocks and returns tier writes, and
`dispatch` queues them. A worker writes the block and calls `_on_write_end`.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.blocks import frame
from kvstore.blocks.key import Key, Namespace
from kvstore.cache.commands import InFlightLoad, LoadOutcome, TierWrite, WriteOutcome
from kvstore.cache.eviction import EvictionPolicy, eviction_policy
from kvstore.cache.manager import L2Manager
from kvstore.cache.slots import WORKERS
from kvstore.cache.write_policy import WritePolicy
from kvstore.codecs.chooser import Chooser
from kvstore.config.units import format_bytes
from kvstore.errors import ConfigError, StoreClosed
from kvstore.shm.slab import Slab
from kvstore.store.block_io import TransferResult
from kvstore.store.frame_api import FrameAccess
from kvstore.store.limits import LimitApplier, StoreLimits
from kvstore.store.locator import L2, BlockLocator
from kvstore.store.maintenance import PinResult, Warmer, pin_prefix
from kvstore.store.session import Session
from kvstore.store.tier_workers import TierWorkers
from kvstore.telemetry.traffic import check_traffic_label
from kvstore.telemetry.usage_counters import Record, UsageCounters
from kvstore.tiers.base import Tier
from kvstore.tiers.unsupported import UnsupportedFrames

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 5.0
"""Maximum time that `close` waits for workers inside a tier."""
MIN_CACHED_SLOTS: Final = 2
MIN_SAVE_SLOTS: Final = 2
MAX_SESSIONS: Final = 1024
MAX_NAMESPACES: Final = 4096
"""Namespaces whose dtype and block size the store remembers; the oldest are dropped first."""


@dataclass(frozen=True)
class SlotNeeds:
    """Minimum number of slots of a store, by use."""

    cached: int
    saves: int
    workers: int

    @property
    def total(self) -> int:
        return self.cached + self.saves + self.workers


class Store:
    """A store in this process. See the module's docstring.

    tiers: fastest first; the store owns and closes them.
    codecs: tier name to kind of codec. Default: "auto" (see `codecs.chooser`).
    limits: quotas, pins, write queues and time to live; see `StoreLimits`.
    own_slab: close the slab with the store.
    record: called from workers for every block that a tier read or wrote. Must not block.

    Raises:
        ConfigError: the slab has too few slots, two tiers have the same name, or a policy or codec
            is unknown.
    """

    def __init__(
        self,
        slab: Slab,
        tiers: Sequence[Tier] = (),
        *,
        write_policy: WritePolicy | None = None,
        eviction: EvictionPolicy[Key] | str = "lru",
        codecs: Mapping[str, str] | None = None,
        limits: StoreLimits | None = None,
        own_slab: bool = True,
        record: Record | None = None,
    ) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names) or L2 in names:
            raise ConfigError(f"tier names must be distinct and not {L2!r} (got {names})")
        needs = _check_slots(slab, tiers)
        limits = limits or StoreLimits()
        self.slab = slab
        self._own_slab = own_slab
        self._tiers = [UnsupportedFrames(tier) for tier in tiers]
        cores = len(os.sched_getaffinity(0))
        choosers = [Chooser((codecs or {}).get(name, "auto"), cores=cores) for name in names]
        self._namespaces: dict[str, Namespace] = {}
        self._clients = itertools.count(WORKERS + 1)
        self._sessions: dict[int, Session] = {}
        self._hit_blocks: Counter[str] = Counter()
        self._usage = UsageCounters()
        self._closing = False
        policy = eviction_policy(eviction, slab.slots) if isinstance(eviction, str) else eviction
        self.manager = L2Manager(
            slab.slots,
            policy,
            write_policy or WritePolicy(),
            tiers=len(tiers),
            max_loads_per_tier=slab.slots - MIN_CACHED_SLOTS - MIN_SAVE_SLOTS,
            quotas=limits.quota_slots(slab.slot_bytes),
            max_pinned=limits.max_pins(slab.slots, needs.total),
        )
        self._workers = [
            TierWorkers(
                tier,
                slab,
                queue_blocks=limits.queue_blocks,
                queue_s=limits.queue_s.get(tier.name, 0.0),
                chooser=chooser,
                dtype_of=self._dtype_of,
                start_load=self.manager.start_load,
                start_write=self.manager.start_write,
                on_load_end=self._on_load_end,
                on_write_end=self._on_write_end,
                record=record,
            )
            for tier, chooser in zip(self._tiers, choosers, strict=True)
        ]
        self.locator = BlockLocator(self.manager, self._workers)
        self.frames = FrameAccess(
            self.manager,
            slab,
            self._tiers,
            namespace_of=self._namespaces.get,
            dispatch=self.dispatch,
            count_hits=self.count_hits,
            count_lookup=self._count_frame_read,
        )
        self.warmer = Warmer(self.manager, slab, self._tiers)
        self.limit_applier = LimitApplier(
            self.manager,
            self._workers,
            limits,
            self.dispatch,
            slab=slab,
            reserved_slots=needs.total,
        )

    def session(
        self,
        namespace: Namespace,
        tenant: str = "default",
        *,
        traffic_label: str = "",
        metered: bool = True,
    ) -> Session:
        """Open a session: one engine's view of the store.

        traffic_label: label of the engine's traffic in statistics. metered: count the session in
        the usage statistics; False for maintenance.

        Raises ConfigError: a block of the namespace does not fit in a slot, or the traffic label
        is invalid.
        """
        check_traffic_label(traffic_label)
        if namespace.block_bytes > self.slab.slot_bytes:
            raise ConfigError(
                f"a block of model {namespace.model!r} has {namespace.block_bytes} bytes and does "
                f"not fit in a slot of {self.slab.slot_bytes}; set l2.slot_bytes (--slot-bytes) to "
                f"at least {format_bytes(frame.padded_bytes(namespace.block_bytes))}"
            )
        with self.manager.lock:
            if self._closing:
                raise StoreClosed("the store is closed")
            if len(self._sessions) >= MAX_SESSIONS:
                raise ConfigError(f"too many open sessions ({MAX_SESSIONS}); close some first")
            client = next(self._clients)
            self.manager.add_client(client)
            self._namespaces[namespace.digest] = namespace
            if len(self._namespaces) > MAX_NAMESPACES:
                del self._namespaces[next(iter(self._namespaces))]
            usage = self._usage.session(namespace, tenant, traffic_label) if metered else None
            session = Session(self, client, namespace, tenant, usage)
            self._sessions[client] = session
            return session

    # --- for sessions -------------------------------------------------------------------

    def count_hits(self, tier: str, blocks: int) -> None:
        """Count blocks returned from a tier."""
        with self.manager.lock:
            self._hit_blocks[tier] += blocks

    def _count_frame_read(self, key: Key, tier: str) -> None:
        """Count a block requested as a frame. tier: its source tier, "" for a miss."""
        with self.manager.lock:
            self._usage.on_frame_read(self._namespaces.get(key.namespace), key.tenant, tier)

    def dispatch(self, loads: Iterable[InFlightLoad], writes: Iterable[TierWrite]) -> None:
        """Queue loads and writes for the workers of their tiers. Never blocks. The caller must not
        hold the L2 manager's lock."""
        for load in loads:
            self._dispatch_load(load)
        for write in writes:
            queued = self._workers[write.tier].submit_write(write)
            if not queued and self.manager.start_write(write):
                self.manager.complete_write(write, WriteOutcome.DROPPED)

    def _dispatch_load(self, load: InFlightLoad) -> None:
        """Queue a load for its tier's workers. It fails at once if they are closing."""
        if not self._workers[load.tier].submit_load(load) and self.manager.start_load(load):
            self._on_load_end(load, TransferResult(LoadOutcome.UNAVAILABLE, reason="closing"))

    def remove_session(self, client: int) -> None:
        """Remove a closed session."""
        with self.manager.lock:
            self._sessions.pop(client, None)

    # --- maintenance --------------------------------------------------------------------

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Write all queued and dirty blocks and make them durable. False on a timeout or an error.

        Does not wait for blocks that are saved meanwhile.
        """
        deadline_s = _deadline_after(timeout_s)
        dirty = self.manager.dirty_keys()
        while True:
            free = min((workers.free_blocks() for workers in self._workers), default=0)
            self.dispatch((), self.manager.flush_dirty(free))
            written = [workers.wait_written(deadline_s) for workers in self._workers]
            if not all(written):
                return False
            dirty &= self.manager.dirty_keys()
            if not dirty:
                return True

    def clear(self, tier: str = "all") -> None:
        """Delete all blocks of a tier ("l2", a tier's name, or "all"), except leased blocks.

        Raises ConfigError: unknown name. Passes on the tier's errors.
        """
        names = [L2, *(t.name for t in self._tiers)]
        if tier not in (*names, "all"):
            raise ConfigError(f"unknown tier {tier!r}; use one of {', '.join(names)}, all")
        for index, below in enumerate(self._tiers):
            if tier in (below.name, "all"):
                below.clear()
                with self.manager.lock:
                    self.manager.remote_locations.remove(index)
        if tier in (L2, "all"):
            self.manager.clear()

    def pin(
        self,
        namespace: str,
        hashes: Sequence[bytes],
        tenant: str = "default",
        timeout_s: float = 30.0,
    ) -> PinResult:
        """Load a prefix into L2 and keep it there until `unpin` or the end of the store.

        namespace: the digest of a namespace that a session has used. Waits for loads for at most
        timeout_s. Raises ConfigError: unknown namespace.
        """
        with self.session(self._known_namespace(namespace), tenant, metered=False) as session:
            deadline_s = _deadline_after(timeout_s)
            return pin_prefix(self.manager, session, hashes, deadline_s, self.dispatch)

    def unpin(self, namespace: str, hashes: Sequence[bytes], tenant: str = "default") -> int:
        """Allow eviction of these blocks again. Returns the number of blocks that were pinned."""
        return self.manager.unpin([Key(tenant, namespace, name) for name in hashes])

    def namespaces(self) -> dict[str, Namespace]:
        """The namespaces that sessions have used since the start, by digest."""
        with self.manager.lock:
            return dict(self._namespaces)

    def iter_tier_keys(self) -> Iterator[Key] | None:
        """Iterate over all blocks of all tiers. None if another process can write to a tier, so
        that the list would be incomplete."""
        if not all(tier.local_index and tier.sole_writer for tier in self._tiers):
            return None
        return itertools.chain.from_iterable(tier.keys() for tier in self._tiers)

    def _known_namespace(self, digest: str) -> Namespace:
        known = self.namespaces()
        if digest not in known:
            raise ConfigError(
                f"unknown namespace {digest!r}: no engine has used it since the start; "
                f"known: {', '.join(known) or '(none)'}"
            )
        return known[digest]

    def stats(self) -> dict[str, Any]:
        """Plain numbers: "l2" (slots, evictions, ...), "tiers" (by name), "hit_blocks"
        (by tier), "sessions", "usage" (see `UsageCounters.snapshot`)."""
        with self.manager.lock:
            l2 = self.manager.stats()
            hits = dict(self._hit_blocks)
            sessions = len(self._sessions)
            usage = self._usage.snapshot()
        # The workers' counters take precedence over a tier's own ones: they include errors of the
        # wrappers around the tier.
        tiers = {
            workers.tier.name: {**workers.tier.stats(), **workers.stats()}
            for workers in self._workers
        }
        return {
            "l2": {**l2, "slot_bytes": self.slab.slot_bytes},
            "tiers": tiers,
            "namespaces": {
                digest: {
                    "model": each.model,
                    "dtype": each.dtype,
                    "block_tokens": each.block_tokens,
                }
                for digest, each in self.namespaces().items()
            },
            "hit_blocks": {name: hits.get(name, 0) for name in (L2, *tiers)},
            "sessions": sessions,
            "usage": usage,
        }

    def close(self) -> None:
        """End sessions, write queued blocks, end threads and close tiers. Waits at most
        CLOSE_TIMEOUT_S. Afterwards every slot is free, except the slots of workers that hang inside
        a tier."""
        with self.manager.lock:
            if self._closing:
                return
            self._closing = True
            # Engines may still copy from slots whose leases end here, so no slot is filled again.
            self.manager.freeze()
            sessions = list(self._sessions.values())
        for session in sessions:
            session.close()
        deadline_s = _deadline_after(CLOSE_TIMEOUT_S)
        self.limit_applier.close()
        if not self.flush(CLOSE_TIMEOUT_S / 2):
            log.warning("store closed before all blocks were written: %s", self)
        warmed = self.warmer.close(deadline_s)
        ended = [workers.close(deadline_s) and warmed for workers in self._workers]
        for tier, done in zip(self._tiers, ended, strict=True):
            if done:
                tier.close()
            else:
                log.error("tier %s hangs; it is not closed", tier.name)
        if all(ended):
            self.manager.unpin()
            self.manager.clear()
            stats = self.manager.stats()
            assert stats["slots_free"] == stats["slots"], f"slots are missing at close: {stats}"
            if self._own_slab:
                self.slab.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        l2 = self.manager.stats()
        parts = [f"L2 {l2['slots_ready']}/{l2['slots']} slots, {l2['slots_leased']} leased"]
        for workers in self._workers:
            stats = workers.stats()
            parts.append(
                f"{workers.tier.name} {stats['queued_writes']} queued, {stats['errors']} errors"
            )
        parts.append(f"{l2['tier_writes_dropped']} dropped")
        return " | ".join(parts)

    # --- reports of the workers ---------------------------------------------------------

    def _on_load_end(self, load: InFlightLoad, result: TransferResult) -> None:
        """A load has ended in its tier. Publish the block, retry in a slower tier, or truncate the
        loads that wait for it."""
        name = self._tiers[load.tier].name
        if result.outcome is LoadOutcome.LOADED:
            with self.manager.lock:
                waiters, writes = self.manager.complete_load(load)
                self._hit_blocks[name] += len(waiters)
                for waiter in waiters:
                    waiter.owner.on_loaded(waiter.index, load.slot, name)
            self.dispatch((), writes)
            return
        with self.manager.lock:
            self.manager.remote_locations.remove(load.tier, [load.key])
        below = None if self._closing else self.locator.next_tier(load)
        with self.manager.lock:
            redirected = below is not None and self.manager.redirect_load(load, below)
            if not redirected:
                for waiter in self.manager.fail_load(load):
                    waiter.owner.truncate(waiter.index, f"{name}: {result.reason}")
        if redirected:
            self._dispatch_load(load)

    def _on_write_end(self, write: TierWrite, result: TransferResult) -> None:
        """A write has ended."""
        if result.outcome is LoadOutcome.LOADED:
            if not self._tiers[write.tier].local_index:
                with self.manager.lock:
                    self.manager.remote_locations.add(write.tier, [write.key])
            self.manager.complete_write(write, WriteOutcome.WRITTEN)
        else:
            self.manager.complete_write(write, WriteOutcome.FAILED)

    def _dtype_of(self, key: Key) -> str:
        """The dtype of a key's namespace; "" before the first session with it."""
        namespace = self._namespaces.get(key.namespace)
        return "" if namespace is None else namespace.dtype


def _check_slots(slab: Slab, tiers: Sequence[Tier]) -> SlotNeeds:
    """Reject a slab that workers and saves alone could exhaust."""
    needs = SlotNeeds(
        cached=MIN_CACHED_SLOTS,
        saves=MIN_SAVE_SLOTS,
        workers=sum(tier.workers_read + tier.workers_write for tier in tiers),
    )
    if slab.slots < needs.total:
        raise ConfigError(
            f"the slab has {slab.slots} slots but at least {needs.total} are needed: "
            f"{needs.cached} for cached blocks, {needs.saves} for saves, {needs.workers} for "
            "workers; "
            "raise l2.bytes (--l2) or lower l2.slot_bytes (--slot-bytes)"
        )
    return needs


def _deadline_after(timeout_s: float) -> float:
    """The monotonic time `timeout_s` from now."""
    return time.monotonic() + timeout_s
