"""A quota for each tenant of one tier: a wrapper with the tier's verbs.

What a tenant has there is known from the tier's own list (at start, so also after a restart) and
from what is written, read and deleted through here. A tenant over its quota makes room at its own
cost: its blocks that were used longest ago are deleted before the new one is written.

A tier that has to be asked is listed every `RELIST_S` in a thread of its own: other nodes write to
it too, and a quota there is exact but for what they wrote since.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from kvstore.blocks import Key
from kvstore.errors import TierFull
from kvstore.tiers.base import PAGE_BYTES, Tier
from kvstore.tiers.limits import Wrapper
from kvstore.tiers.quotas import EVERYBODY
from kvstore.units import format_bytes

log = logging.getLogger(__name__)

RELIST_S: Final = 300.0
STALE_LOOK: Final = 256
"""Blocks that are looked up at a time, when room is needed, for whether the tier still has them."""


class Account:
    """One tenant's blocks in a tier, the longest unused first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.blocks: OrderedDict[Key, int] = OrderedDict()

    def put(self, key: Key, nbytes: int) -> None:
        """The tenant has this block, and has just used it."""
        self.used += nbytes - self.blocks.pop(key, 0)
        self.blocks[key] = nbytes

    def drop(self, key: Key) -> None:
        """The tenant has this block no more."""
        self.used -= self.blocks.pop(key, 0)


class TenantQuotas(Wrapper):
    """See the module's text.

    limits: bytes by tenant; `EVERYBODY` for each that is not named. Tenants that neither names are
    not counted.
    """

    def __init__(self, tier: Tier, limits: Mapping[str, int]) -> None:
        super().__init__(tier)
        self._limits = dict(limits)
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._accounts: dict[str, Account] = {}
        self._evictions = 0
        self._stop = threading.Event()
        if self.local_index:
            self._list()
        else:
            name = f"{self.name}-quotas"
            threading.Thread(target=self._relist, name=name, daemon=True).start()

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        length = self.inner.read(key, header, payload)
        if self._limit(key.tenant) is None:
            return length
        with self._lock:
            if length:
                self._account(key.tenant).put(key, PAGE_BYTES + length)
            else:
                self._account(key.tenant).drop(key)
        return length

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """Raises TierFull, besides what the tier does: the block alone is over the quota."""
        limit = self._limit(key.tenant)
        if limit is None:
            self.inner.write(key, header, payload)
            return
        nbytes = PAGE_BYTES + len(payload)
        if nbytes > limit:
            raise TierFull(
                f"a block of {format_bytes(nbytes)}; tenant {key.tenant!r} may have "
                f"{format_bytes(limit)} of {self.name}"
            )
        # One write of a tenant at a time, so that two do not fit into the room of one.
        with self._turn(key.tenant):
            self._make_room(key, nbytes)
            self.inner.write(key, header, payload)
            with self._lock:
                self._account(key.tenant).put(key, nbytes)

    def delete(self, keys: Sequence[Key]) -> None:
        self.inner.delete(keys)
        with self._lock:
            for key in keys:
                if key.tenant in self._accounts:
                    self._accounts[key.tenant].drop(key)

    def clear(self) -> None:
        self.inner.clear()
        with self._lock:
            self._accounts.clear()

    def close(self) -> None:
        self._stop.set()
        self.inner.close()

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            return {**self.inner.stats(), "quota_evictions": self._evictions}

    def used_bytes(self) -> dict[str, int]:
        """What each tenant with a quota has."""
        with self._lock:
            return {tenant: account.used for tenant, account in self._accounts.items()}

    def _limit(self, tenant: str) -> int | None:
        return self._limits.get(tenant, self._limits.get(EVERYBODY))

    def _account(self, tenant: str) -> Account:
        """The lock is held, and the tenant has a quota."""
        account = self._accounts.get(tenant)
        if account is None:
            limit = self._limit(tenant)
            assert limit is not None
            account = self._accounts[tenant] = Account(limit)
        return account

    def _turn(self, tenant: str) -> threading.Lock:
        with self._lock:
            return self._turns.setdefault(tenant, threading.Lock())

    def _make_room(self, key: Key, nbytes: int) -> None:
        """Delete the tenant's longest unused blocks until one of `nbytes` fits."""
        while True:
            with self._lock:
                account = self._account(key.tenant)
                needed = account.used - account.blocks.get(key, 0) + nbytes - account.limit
                oldest = list(zip(account.blocks, range(STALE_LOOK), strict=False))
            if needed <= 0:
                return
            names = [name for name, _ in oldest if name != key]
            gone = [n for n, has in zip(names, self.inner.contains(names), strict=True) if not has]
            victims = gone or self._coldest(names, needed)
            # Also what is gone: a tier that is down says that of all, and refuses this.
            self.inner.delete(victims)
            with self._lock:
                for name in victims:
                    account.drop(name)
                self._evictions += 0 if gone else len(victims)

    def _coldest(self, names: Sequence[Key], needed: int) -> list[Key]:
        """The first of these whose sizes add up to what is needed."""
        victims: list[Key] = []
        with self._lock:
            for name in names:
                if needed <= 0:
                    break
                needed -= self._accounts[name.tenant].blocks.get(name, 0)
                victims.append(name)
        return victims

    def _relist(self) -> None:
        while True:
            self._list()
            if self._stop.wait(RELIST_S):
                return

    def _list(self) -> None:
        """Learn what the tier holds; the order of what is known already is kept."""
        try:
            listed = [(k, n) for k, n in self.inner.usage() if self._limit(k.tenant) is not None]
        except NotImplementedError:
            log.warning("%s cannot list its blocks: quotas count what is written now", self.name)
            self._stop.set()
            return
        except Exception as error:
            log.warning("%s cannot be listed for its quotas: %s", self.name, error)
            return
        with self._lock:
            before, self._accounts = self._accounts, {}
            known = {key for account in before.values() for key in account.blocks}
            # The most recently used come first in a list, and last in an account.
            for key, nbytes in reversed(listed):
                if key not in known:
                    self._account(key.tenant).put(key, nbytes)
            sizes = dict(listed)
            for account in before.values():
                for key in account.blocks:
                    if key in sizes:
                        self._account(key.tenant).put(key, sizes[key])
