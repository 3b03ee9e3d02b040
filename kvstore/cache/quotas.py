"""How many slots of L2 each tenant may have, and which of its own blocks goes when it has them.

A tenant over its quota makes room at its own cost: its least recently used block leaves, whatever
the eviction policy thinks of the others. Tenants without a quota are bounded by the slab alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvstore.blocks.key import Key
from kvstore.cache.eviction import EvictionPolicy

EVERYBODY: Final = "*"
"""Names, in a table of quotas, each tenant that is not named itself."""


class SlotQuotas:
    """Counts slots by tenant, FILLING and READY; an eviction policy around another, so that it sees
    what is used. All methods are called under the brain's lock.

    limits: slots by tenant; `EVERYBODY` for the rest of them, each.
    """

    def __init__(self, policy: EvictionPolicy[Key], limits: Mapping[str, int]) -> None:
        self.name = policy.name
        self.slots: Counter[str] = Counter()
        """Slots that are not free, by tenant."""
        self._policy = policy
        self._limits = dict(limits)
        self._orders: dict[str, OrderedDict[Key, None]] = {}

    def limit_to(self, limits: Mapping[str, int]) -> None:
        """From here on, these limits."""
        self._limits = dict(limits)
        self._orders.clear()
        for key in self._policy.victims() if limits else ():
            if self.limit(key.tenant) is not None:
                self._orders.setdefault(key.tenant, OrderedDict())[key] = None

    def limit(self, tenant: str) -> int | None:
        """Slots this tenant may have; None when only the slab bounds it."""
        return self._limits.get(tenant, self._limits.get(EVERYBODY))

    def full(self, tenant: str) -> bool:
        """The tenant has all it may have."""
        if not self._limits:
            return False
        limit = self.limit(tenant)
        return limit is not None and self.slots[tenant] >= limit

    def crowded(self, tenant: str) -> bool:
        """The tenant has half of what it may have."""
        limit = self.limit(tenant) if self._limits else None
        return limit is not None and 2 * self.slots[tenant] >= limit

    def coldest(self, tenant: str) -> Iterator[Key]:
        """The tenant's READY blocks, least recently used first."""
        return iter(self._orders.get(tenant, ()))

    def took(self, tenant: str) -> None:
        """One more slot of the tenant's is not free."""
        self.slots[tenant] += 1

    def gave(self, tenant: str) -> None:
        """One slot of the tenant's is free again."""
        assert self.slots[tenant] > 0, f"tenant {tenant!r} has no slot to give"
        self.slots[tenant] -= 1
        if not self.slots[tenant]:
            del self.slots[tenant]

    # --- as a policy --------------------------------------------------------------------

    def asked(self, run: Sequence[Key]) -> None:
        self._policy.asked(run)

    def inserted(self, key: Key, nbytes: int = 1) -> None:
        self._policy.inserted(key, nbytes)
        if self._limits and self.limit(key.tenant) is not None:
            self._orders.setdefault(key.tenant, OrderedDict())[key] = None

    def touched(self, key: Key) -> None:
        self._policy.touched(key)
        order = self._orders.get(key.tenant)
        if order is not None and key in order:
            order.move_to_end(key)

    def removed(self, key: Key) -> None:
        self._policy.removed(key)
        order = self._orders.get(key.tenant)
        if order is not None:
            order.pop(key, None)
            if not order:
                del self._orders[key.tenant]

    def victims(self) -> Iterator[Key]:
        return self._policy.victims()

    def stats(self) -> dict[str, Any]:
        return dict(self._policy.stats())
