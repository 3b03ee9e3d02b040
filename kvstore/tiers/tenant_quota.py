"""A quota for each tenant of one tier: a wrapper with the tier's verbs.

What a tenant has there is known from the tier's own list (at start, so also after a restart, and
every `RELIST_S`) and from what is written and deleted through here. A tenant over its quota makes
room at its own cost: its blocks that were used longest ago are deleted before the new one is
written. What the tier evicted by itself, or other nodes wrote to it, is known with the next list.

Nothing is held while the tier is asked: writers of one tenant run side by side, and one that hangs
keeps no other. So a tenant may pass its quota by what its writers have in their hands.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from kvstore.blocks.key import Key
from kvstore.cache.quotas import EVERYBODY
from kvstore.config.units import format_bytes
from kvstore.errors import TierFull
from kvstore.tiers.base import PAGE_BYTES, Tier
from kvstore.tiers.wrappers import Wrapper

log = logging.getLogger(__name__)

RELIST_S: Final = 300.0


class Account:
    """One tenant's blocks in a tier, the longest unused first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.coming = 0
        """Bytes that writers have in their hands."""
        self.blocks: OrderedDict[Key, int] = OrderedDict()

    def put(self, key: Key, nbytes: int) -> None:
        """The tenant has this block, and has just used it."""
        self.used += nbytes - self.blocks.pop(key, 0)
        self.blocks[key] = nbytes

    def drop(self, key: Key) -> int:
        """The tenant has this block no more; the bytes it had."""
        nbytes = self.blocks.pop(key, 0)
        self.used -= nbytes
        return nbytes


class TenantQuotas(Wrapper):
    """See the module's text.

    limits: bytes by tenant; `EVERYBODY` for each that is not named. Tenants that neither names are
    not counted.
    """

    def __init__(self, tier: Tier, limits: Mapping[str, int]) -> None:
        super().__init__(tier)
        self._limits = dict(limits)
        self._lock = threading.Lock()
        self._accounts: dict[str, Account] = {}
        self._news: dict[Key, int] | None = None
        """What was written (bytes) or deleted (0) since the list being made began."""
        self._evictions = 0
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._lister: threading.Thread | None = None
        if self._limits:
            if self.local_index:
                self._list()
            self._start()

    def limit_to(self, limits: Mapping[str, int]) -> None:
        """From here on, these limits. A tenant that has more makes room with its next write; what
        one has that had no limit before is known once the tier was listed."""
        with self._lock:
            if limits == self._limits:
                return
            self._limits = dict(limits)
            for tenant in list(self._accounts):
                limit = self._limit(tenant)
                if limit is None:
                    del self._accounts[tenant]
                else:
                    self._accounts[tenant].limit = limit
        self._woken.set()
        if limits and self._lister is None:
            self._start()

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        length = self.inner.read(key, header, payload)
        if length and self._limit(key.tenant) is not None:
            with self._lock:
                self._put(key, PAGE_BYTES + length)
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
        with self._lock:
            account = self._account(key.tenant)
            victims = self._room_for(account, key, nbytes)
            account.coming += nbytes
        try:
            self._evict(victims)
            self.inner.write(key, header, payload)
            with self._lock:
                self._put(key, nbytes)
        finally:
            with self._lock:
                account.coming -= nbytes

    def delete(self, keys: Sequence[Key]) -> None:
        self.inner.delete(keys)
        with self._lock:
            for key in keys:
                self._drop(key)

    def clear(self) -> None:
        with self._lock:
            held = [key for account in self._accounts.values() for key in account.blocks]
        self.inner.clear()
        with self._lock:
            for key in held:
                self._drop(key)

    def close(self) -> None:
        self._stop.set()
        self._woken.set()
        self.inner.close()

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            return {**self.inner.stats(), "quota_evictions": self._evictions}

    def used_bytes(self) -> dict[str, int]:
        """What each tenant with a quota has."""
        with self._lock:
            used = {tenant: account.used for tenant, account in self._accounts.items()}
        return {tenant: nbytes for tenant, nbytes in used.items() if nbytes}

    def _limit(self, tenant: str) -> int | None:
        return self._limits.get(tenant, self._limits.get(EVERYBODY))

    # --- the book: all under the lock -----------------------------------------------------

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            limit = self._limit(tenant)
            assert limit is not None
            account = self._accounts[tenant] = Account(limit)
        return account

    def _put(self, key: Key, nbytes: int) -> None:
        if self._limit(key.tenant) is None:
            return  # its limit was taken away meanwhile
        self._account(key.tenant).put(key, nbytes)
        if self._news is not None:
            self._news[key] = nbytes

    def _drop(self, key: Key) -> None:
        if key.tenant in self._accounts:
            self._accounts[key.tenant].drop(key)
            if self._news is not None:
                self._news[key] = 0

    def _room_for(self, account: Account, key: Key, nbytes: int) -> list[tuple[Key, int]]:
        """Take the longest unused blocks out of the account, until one of `nbytes` fits."""
        needed = account.used + account.coming - account.blocks.get(key, 0) + nbytes - account.limit
        victims: list[tuple[Key, int]] = []
        for name, size in account.blocks.items():
            if needed <= 0:
                break
            if name != key:
                victims.append((name, size))
                needed -= size
        for name, _ in victims:
            self._drop(name)
        return victims

    # --- the tier: none under the lock ----------------------------------------------------

    def _evict(self, victims: Sequence[tuple[Key, int]]) -> None:
        """Delete what was taken out of an account; it is back there when that cannot be."""
        if not victims:
            return
        try:
            self.inner.delete([key for key, _ in victims])
        except BaseException:
            with self._lock:
                for key, nbytes in victims:
                    self._put(key, nbytes)
                    if key.tenant in self._accounts:
                        self._accounts[key.tenant].blocks.move_to_end(key, last=False)
            raise
        with self._lock:
            self._evictions += len(victims)

    def _start(self) -> None:
        """Begin to list the tier again and again."""
        name = f"{self.name}-quotas"
        self._lister = threading.Thread(target=self._relist, name=name, daemon=True)
        self._lister.start()

    def _relist(self) -> None:
        if not self.local_index:
            self._list()
        while not self._stop.is_set():
            self._woken.wait(RELIST_S)
            self._woken.clear()
            if not self._stop.is_set() and self._limits:
                self._list()

    def _list(self) -> None:
        """Learn what the tier holds; the order of what is known already is kept, and what was
        written or deleted meanwhile is not forgotten."""
        with self._lock:
            self._news = {}
        try:
            limits = self._limits
            listed = {
                k: n
                for k, n in self.inner.usage()
                if limits.get(k.tenant, limits.get(EVERYBODY)) is not None
            }
        except Exception as error:
            if isinstance(error, NotImplementedError):
                log.warning("%s cannot list its blocks: quotas count what is written", self.name)
                self._stop.set()
            else:
                log.warning("%s cannot be listed for its quotas: %s", self.name, error)
            with self._lock:
                self._news = None
            return
        with self._lock:
            news, self._news = self._news or {}, None
            for key, nbytes in news.items():
                if nbytes:
                    listed[key] = nbytes
                else:
                    listed.pop(key, None)
            for account in self._accounts.values():
                for key in [key for key in account.blocks if key not in listed]:
                    account.drop(key)
            # A list gives the most recently used first: what is new here goes before what is known.
            for key, nbytes in listed.items():
                if self._limit(key.tenant) is None:
                    continue
                account = self._account(key.tenant)
                if key not in account.blocks:
                    account.put(key, nbytes)
                    account.blocks.move_to_end(key, last=False)
