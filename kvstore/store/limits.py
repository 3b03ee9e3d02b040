"""Limits of a store: tenant quotas, pins, write queues and time to live.

`LimitApplier` applies the limits at start, and new limits while the store runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.cache.manager import L2Manager
from kvstore.cache.write_policy import WritePolicy
from kvstore.config.units import format_bytes
from kvstore.errors import ConfigError
from kvstore.shm.slab import Slab
from kvstore.store.maintenance import Dispatch, TTLExpirer
from kvstore.store.tier_workers import TierWorkers
from kvstore.tiers.base import Tier


@dataclass(frozen=True)
class StoreLimits:
    """The limits of a store that can change while it runs.

    queue_blocks: maximum number of queued writes per tier. Further writes are deferred.
    queue_s: by tier name, maximum backlog of writes in seconds of the tier's measured write rate;
        0: no limit.
    quotas: bytes of L2 by tenant, rounded down to whole slots. `quotas.OTHER_TENANTS` stands for
        every tenant without its own quota.
    max_pinned_fraction: maximum fraction of the slots that may be pinned.
    ttl_s: maximum age of a block in L2 in seconds; 0: no limit.
    """

    queue_blocks: int = 4096
    queue_s: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, int] = field(default_factory=dict)
    max_pinned_fraction: float = 0.25
    ttl_s: float = 0.0

    def quota_slots(self, slot_bytes: int) -> dict[str, int]:
        """The L2 quotas in slots, by tenant. Raises ConfigError: a quota is less than one slot."""
        for tenant, nbytes in self.quotas.items():
            if nbytes < slot_bytes:
                raise ConfigError(
                    f"the L2 quota of tenant {tenant!r} is {format_bytes(nbytes)}, less than one "
                    f"slot; set it to at least {format_bytes(slot_bytes)}"
                )
        return {tenant: nbytes // slot_bytes for tenant, nbytes in self.quotas.items()}

    def max_pins(self, slots: int, reserved_slots: int) -> int:
        """Maximum number of pinned slots. At least `reserved_slots` slots stay unpinned."""
        return min(int(slots * self.max_pinned_fraction), slots - reserved_slots)


class LimitApplier:
    """Applies limits to a running store. reserved_slots: slots that must not be pinned."""

    def __init__(
        self,
        manager: L2Manager,
        workers: Sequence[TierWorkers],
        limits: StoreLimits,
        dispatch: Dispatch,
        *,
        slab: Slab,
        reserved_slots: int,
    ) -> None:
        self._manager = manager
        self._workers = workers
        self._dispatch = dispatch
        self._slab = slab
        self._reserved_slots = reserved_slots
        self._expirer: TTLExpirer | None = None
        self._set_ttl(limits.ttl_s)

    def prepare(self, limits: StoreLimits, write: WritePolicy) -> Callable[[], None]:
        """Check new limits and return a function that applies them. That function cannot fail.

        A tenant above its new quota makes room when it saves its next blocks. A queue above its
        new bound accepts no writes until it has drained. Pins above a smaller limit stay until they
        are unpinned. Blocks that wait for a write on eviction (write_back) are still written,
        whatever the new policy.

        Raises ConfigError: a quota is less than one slot.
        """
        quotas = limits.quota_slots(self._slab.slot_bytes)

        def apply() -> None:
            for workers in self._workers:
                queue_s = limits.queue_s.get(workers.tier.name, 0.0)
                workers.set_limits(limits.queue_blocks, queue_s)
            max_pinned = limits.max_pins(self._slab.slots, self._reserved_slots)
            self._manager.tunables.set(write, quotas, max_pinned)
            free = min((workers.free_blocks() for workers in self._workers), default=0)
            if not write.on_evict:
                self._dispatch((), self._manager.flush_dirty(free))
            self._set_ttl(limits.ttl_s)

        return apply

    @property
    def tiers(self) -> list[Tier]:
        """The store's tiers, fastest first."""
        return [workers.tier for workers in self._workers]

    def close(self) -> None:
        """End the TTL expiry thread."""
        if self._expirer is not None:
            self._expirer.close()

    def _set_ttl(self, ttl_s: float) -> None:
        if self._expirer is not None and self._expirer.ttl_s == ttl_s:
            return
        self.close()
        self._expirer = TTLExpirer(self._manager, ttl_s, self._dispatch) if ttl_s else None
