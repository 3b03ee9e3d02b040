"""Tenant quotas of one tier: a wrapper with the same methods as the tier.

The wrapper counts each tenant's blocks. It lists the tier at start and every `LIST_INTERVAL_S`, and
counts the writes and deletes that pass through it. A write that would exceed the quota first
deletes the tenant's least recently used blocks. Evictions by the tier and writes of other nodes are
counted at the next listing.

The wrapper calls the tier without its lock. Writers of one tenant therefore run concurrently, and a
write that hangs does not block the others. A tenant may exceed its quota by the size of its writes
in progress.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from kvstore.blocks.key import Key
from kvstore.cache.quotas import OTHER_TENANTS
from kvstore.config.units import format_bytes
from kvstore.errors import TierFull
from kvstore.tiers.base import IO_ALIGNMENT, Tier
from kvstore.tiers.wrappers import Wrapper

log = logging.getLogger(__name__)

LIST_INTERVAL_S: Final = 300.0
"""Seconds between two listings of the tier."""


class TenantAccount:
    """One tenant's blocks in a tier, least recently used first."""

    def __init__(self, limit: int) -> None:
        self.limit_bytes = limit
        self.used_bytes = 0
        self.pending_bytes = 0
        """Bytes of the writes in progress."""
        self.blocks: OrderedDict[Key, int] = OrderedDict()

    def add(self, key: Key, nbytes: int) -> None:
        """Add a block, or mark it as the most recently used."""
        self.used_bytes += nbytes - self.blocks.pop(key, 0)
        self.blocks[key] = nbytes

    def remove(self, key: Key) -> int:
        """Remove a block; returns its size in bytes, 0 if it was not counted."""
        nbytes = self.blocks.pop(key, 0)
        self.used_bytes -= nbytes
        return nbytes


class TenantQuotas(Wrapper):
    """Limits the bytes of each tenant in a tier. The module's docstring explains how.

    limits: bytes by tenant. `OTHER_TENANTS` is the limit of each tenant without an entry. Tenants
    without a limit are not counted.
    """

    def __init__(self, tier: Tier, limits: Mapping[str, int]) -> None:
        super().__init__(tier)
        self._limits = dict(limits)
        self._lock = threading.Lock()
        self._accounts: dict[str, TenantAccount] = {}
        self._changes_since_list: dict[Key, int] | None = None
        """Size of each block written (0: deleted) since the current listing began; None: no
        listing is in progress."""
        self._evictions = 0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lister: threading.Thread | None = None
        if self._limits:
            if self.local_index:
                self._list_blocks()
            self._start_lister()

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replace the limits. A tenant over its new limit frees room at its next write. The blocks
        of a tenant that had no limit before are counted at the next listing."""
        with self._lock:
            if limits == self._limits:
                return
            self._limits = dict(limits)
            for tenant in list(self._accounts):
                limit = self._limit_of(tenant)
                if limit is None:
                    del self._accounts[tenant]
                else:
                    self._accounts[tenant].limit_bytes = limit
        self._wake.set()
        if limits and self._lister is None:
            self._start_lister()

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        length = self.inner.read(key, header, payload)
        if length and self._limit_of(key.tenant) is not None:
            with self._lock:
                self._add(key, IO_ALIGNMENT + length)
        return length

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """Write a frame. Also raises TierFull if this one block exceeds the quota."""
        limit = self._limit_of(key.tenant)
        if limit is None:
            self.inner.write(key, header, payload)
            return
        nbytes = IO_ALIGNMENT + len(payload)
        if nbytes > limit:
            raise TierFull(
                f"block of {format_bytes(nbytes)} exceeds the quota of tenant {key.tenant!r} in "
                f"{self.name} ({format_bytes(limit)})"
            )
        with self._lock:
            account = self._account_of(key.tenant)
            victims = self._take_victims(account, key, nbytes)
            account.pending_bytes += nbytes
        try:
            self._evict(victims)
            self.inner.write(key, header, payload)
            with self._lock:
                self._add(key, nbytes)
        finally:
            with self._lock:
                account.pending_bytes -= nbytes

    def delete(self, keys: Sequence[Key]) -> None:
        self.inner.delete(keys)
        with self._lock:
            for key in keys:
                self._remove(key)

    def clear(self) -> None:
        with self._lock:
            counted = [key for account in self._accounts.values() for key in account.blocks]
        self.inner.clear()
        with self._lock:
            for key in counted:
                self._remove(key)

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        self.inner.close()

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            return {**self.inner.stats(), "quota_evictions": self._evictions}

    def used_bytes(self) -> dict[str, int]:
        """Bytes in the tier by tenant, of tenants with a quota."""
        with self._lock:
            used = {tenant: account.used_bytes for tenant, account in self._accounts.items()}
        return {tenant: nbytes for tenant, nbytes in used.items() if nbytes}

    def _limit_of(self, tenant: str) -> int | None:
        return self._limits.get(tenant, self._limits.get(OTHER_TENANTS))

    # --- accounts: the caller owns the lock ------------------------------------------------

    def _account_of(self, tenant: str) -> TenantAccount:
        account = self._accounts.get(tenant)
        if account is None:
            limit = self._limit_of(tenant)
            assert limit is not None
            account = self._accounts[tenant] = TenantAccount(limit)
        return account

    def _add(self, key: Key, nbytes: int) -> None:
        if self._limit_of(key.tenant) is None:
            return  # the limit was removed in the meantime
        self._account_of(key.tenant).add(key, nbytes)
        if self._changes_since_list is not None:
            self._changes_since_list[key] = nbytes

    def _remove(self, key: Key) -> None:
        if key.tenant in self._accounts:
            self._accounts[key.tenant].remove(key)
            if self._changes_since_list is not None:
                self._changes_since_list[key] = 0

    def _take_victims(self, account: TenantAccount, key: Key, nbytes: int) -> list[tuple[Key, int]]:
        """Remove least recently used blocks from the account until `nbytes` more fit."""
        needed = (
            account.used_bytes
            + account.pending_bytes
            - account.blocks.get(key, 0)
            + nbytes
            - account.limit_bytes
        )
        victims: list[tuple[Key, int]] = []
        for name, size in account.blocks.items():
            if needed <= 0:
                break
            if name != key:
                victims.append((name, size))
                needed -= size
        for name, _ in victims:
            self._remove(name)
        return victims

    # --- calls to the tier: without the lock -----------------------------------------------

    def _evict(self, victims: Sequence[tuple[Key, int]]) -> None:
        """Delete blocks that were removed from an account; restore them if the delete fails."""
        if not victims:
            return
        try:
            self.inner.delete([key for key, _ in victims])
        except BaseException:
            with self._lock:
                for key, nbytes in victims:
                    self._add(key, nbytes)
                    if key.tenant in self._accounts:
                        self._accounts[key.tenant].blocks.move_to_end(key, last=False)
            raise
        with self._lock:
            self._evictions += len(victims)

    def _start_lister(self) -> None:
        """Start the thread that lists the tier periodically."""
        name = f"{self.name}-quotas"
        self._lister = threading.Thread(target=self._run_lister, name=name, daemon=True)
        self._lister.start()

    def _run_lister(self) -> None:
        if not self.local_index:
            self._list_blocks()
        while not self._stop.is_set():
            self._wake.wait(LIST_INTERVAL_S)
            self._wake.clear()
            if not self._stop.is_set() and self._limits:
                self._list_blocks()

    def _list_blocks(self) -> None:
        """Count the tier's blocks anew. Known blocks keep their LRU position, and writes and
        deletes during the listing are applied to it."""
        with self._lock:
            self._changes_since_list = {}
        try:
            limits = self._limits
            listed = {
                k: n
                for k, n in self.inner.usage()
                if limits.get(k.tenant, limits.get(OTHER_TENANTS)) is not None
            }
        except Exception as error:
            if isinstance(error, NotImplementedError):
                log.warning("%s cannot list its blocks; quotas count new writes only", self.name)
                self._stop.set()
            else:
                log.warning("%s: listing for quotas failed: %s", self.name, error)
            with self._lock:
                self._changes_since_list = None
            return
        with self._lock:
            changes, self._changes_since_list = self._changes_since_list or {}, None
            for key, nbytes in changes.items():
                if nbytes:
                    listed[key] = nbytes
                else:
                    listed.pop(key, None)
            for account in self._accounts.values():
                for key in [key for key in account.blocks if key not in listed]:
                    account.remove(key)
            # The listing starts with the most recently used key. Each new key is put at the LRU
            # end, so the new keys end up in LRU order, before the keys known already.
            for key, nbytes in listed.items():
                if self._limit_of(key.tenant) is None:
                    continue
                account = self._account_of(key.tenant)
                if key not in account.blocks:
                    account.add(key, nbytes)
                    account.blocks.move_to_end(key, last=False)
