"""Quotas of L2 slots per tenant.

A tenant at its quota makes room at its own cost: its least recently used block is evicted, whatever
the eviction policy ranks first. Only the slab bounds a tenant without a quota.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvstore.blocks.key import Key
from kvstore.cache.eviction import EvictionPolicy

OTHER_TENANTS: Final = "*"
"""Key in a table of quotas: the quota of each tenant that has no entry."""


class SlotQuotas:
    """Counts slots per tenant, FILLING and READY. It wraps an eviction policy and implements its
    interface, so that it sees every access. Call it under the L2 manager's lock.

    limits: slots per tenant; `OTHER_TENANTS` for each tenant that has no entry.
    """

    def __init__(self, policy: EvictionPolicy[Key], limits: Mapping[str, int]) -> None:
        self.name = policy.name
        self.slots: Counter[str] = Counter()
        """Slots in use, by tenant."""
        self._policy = policy
        self._limits = dict(limits)
        self._lru_orders: dict[str, OrderedDict[Key, None]] = {}

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replace the limits."""
        self._limits = dict(limits)
        self._lru_orders.clear()
        for key in self._policy.eviction_order() if limits else ():
            if self.limit(key.tenant) is not None:
                self._lru_orders.setdefault(key.tenant, OrderedDict())[key] = None

    def limit(self, tenant: str) -> int | None:
        """Maximum slots of this tenant; None if only the slab bounds it."""
        return self._limits.get(tenant, self._limits.get(OTHER_TENANTS))

    def is_full(self, tenant: str) -> bool:
        """Whether the tenant uses all slots of its quota."""
        if not self._limits:
            return False
        limit = self.limit(tenant)
        return limit is not None and self.slots[tenant] >= limit

    def above_half(self, tenant: str) -> bool:
        """Whether the tenant uses at least half of its quota."""
        limit = self.limit(tenant) if self._limits else None
        return limit is not None and 2 * self.slots[tenant] >= limit

    def lru_order(self, tenant: str) -> Iterator[Key]:
        """The tenant's READY blocks, least recently used first."""
        return iter(self._lru_orders.get(tenant, ()))

    def on_alloc(self, tenant: str) -> None:
        """Count one more slot in use."""
        self.slots[tenant] += 1

    def on_free(self, tenant: str) -> None:
        """Count one slot less in use."""
        assert self.slots[tenant] > 0, f"tenant {tenant!r} has no slot in use"
        self.slots[tenant] -= 1
        if not self.slots[tenant]:
            del self.slots[tenant]

    # --- the interface of an eviction policy ---------------------------------------------

    def on_lookup(self, keys: Sequence[Key]) -> None:
        self._policy.on_lookup(keys)

    def on_insert(self, key: Key, nbytes: int = 1) -> None:
        self._policy.on_insert(key, nbytes)
        if self._limits and self.limit(key.tenant) is not None:
            self._lru_orders.setdefault(key.tenant, OrderedDict())[key] = None

    def on_access(self, key: Key) -> None:
        self._policy.on_access(key)
        order = self._lru_orders.get(key.tenant)
        if order is not None and key in order:
            order.move_to_end(key)

    def on_remove(self, key: Key) -> None:
        self._policy.on_remove(key)
        order = self._lru_orders.get(key.tenant)
        if order is not None:
            order.pop(key, None)
            if not order:
                del self._lru_orders[key.tenant]

    def eviction_order(self) -> Iterator[Key]:
        return self._policy.eviction_order()

    def stats(self) -> dict[str, Any]:
        return dict(self._policy.stats())
