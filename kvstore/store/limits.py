"""What may be taken of L2 and of time: by tenants, pins, queues and age.

`Regulator` holds a running store to its budgets, and sets others while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.cache.manager import L2Manager
from kvstore.cache.write_policy import WritePolicy
from kvstore.config.units import format_bytes
from kvstore.errors import ConfigError
from kvstore.shm.slab import Slab
from kvstore.store.maintenance import Ageing, CarryOut
from kvstore.store.tier_workers import TierWorkers
from kvstore.tiers.base import Tier


@dataclass(frozen=True)
class Budgets:
    """What may be taken, of L2 and of time.

    queue_blocks: spills waiting, per tier; more are dropped and counted.
    queue_s: by tier name, how many seconds of the tier's measured rate may wait; 0: no such bound.
    quotas: bytes of L2 by tenant, whole slots of them; `quotas.EVERYBODY` for each other one.
    pin_share: of all slots, how many may be pinned.
    ttl_s: how long a block stays in L2 at most; 0: for ever.
    """

    queue_blocks: int = 256
    queue_s: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, int] = field(default_factory=dict)
    pin_share: float = 0.25
    ttl_s: float = 0.0

    def slots(self, slot_bytes: int) -> dict[str, int]:
        """The quotas of L2 in slots, by tenant. Raises ConfigError: one holds no slot."""
        for tenant, nbytes in self.quotas.items():
            if nbytes < slot_bytes:
                raise ConfigError(
                    f"the quota of {tenant!r}, {format_bytes(nbytes)} of L2, holds no slot of "
                    f"{format_bytes(slot_bytes)}; give it at least that"
                )
        return {tenant: nbytes // slot_bytes for tenant, nbytes in self.quotas.items()}

    def pins(self, slots: int, needed: int) -> int:
        """Slots of so many that may be pinned, when `needed` must be left to others."""
        return min(int(slots * self.pin_share), slots - needed)


class Regulator:
    """Holds a store to its budgets. needed: slots of its slab that pins leave to others."""

    def __init__(
        self,
        brain: L2Manager,
        workers: Sequence[TierWorkers],
        budgets: Budgets,
        carry_out: CarryOut,
        *,
        slab: Slab,
        needed: int,
    ) -> None:
        self._brain = brain
        self._workers = workers
        self._carry_out = carry_out
        self._slab = slab
        self._needed = needed
        self._ageing: Ageing | None = None
        self._age(budgets.ttl_s)

    def prepare(self, budgets: Budgets, write: WritePolicy) -> Callable[[], None]:
        """What, once called, puts these in place of those in force; it cannot fail.

        A tenant, or a tier's queue, that has more than it may have from then on makes room as it
        asks for more. Pins beyond a smaller budget stay until they are let go. What was to be
        written when it is evicted (write_back) is, whatever the new policy.

        Raises ConfigError: a quota that holds no slot.
        """
        quotas = budgets.slots(self._slab.slot_bytes)

        def set_them() -> None:
            for workers in self._workers:
                queue_s = budgets.queue_s.get(workers.tier.name, 0.0)
                workers.bound(budgets.queue_blocks, queue_s)
            self._brain.dials.set(write, quotas, budgets.pins(self._slab.slots, self._needed))
            room = min((workers.room() for workers in self._workers), default=0)
            if not write.on_evict:
                self._carry_out((), self._brain.spill_dirty(room))
            self._age(budgets.ttl_s)

        return set_them

    @property
    def tiers(self) -> list[Tier]:
        """The store's tiers, fastest first."""
        return [workers.tier for workers in self._workers]

    def close(self) -> None:
        """End the thread that lets blocks grow old."""
        if self._ageing is not None:
            self._ageing.close()

    def _age(self, ttl_s: float) -> None:
        if self._ageing is not None and self._ageing.ttl_s == ttl_s:
            return
        self.close()
        self._ageing = Ageing(self._brain, ttl_s, self._carry_out) if ttl_s else None
