"""The page pools of one rank: one for each host pool and each format of its pages.

This is the backend without SGLang's types. It knows the host pools of a rank, opens a page pool for
each, and runs the batches of SGLang's interfaces.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import kvstore
from kvstore.config.renamed import refuse_key
from kvstore.config.settings import suggest
from kvstore.config.units import format_bytes
from kvstore.connectors.sglang.copies import Copies, Extents
from kvstore.connectors.sglang.namespace import (
    EXTENTS,
    FLAT,
    HostPool,
    namespace_of,
    tensor_extents,
)
from kvstore.connectors.sglang.page_pool import PagePool
from kvstore.connectors.sglang.restorable import (
    ALL_PAGES,
    TRAILING_PAGES,
    RestorablePrefixes,
    kv_prefixes,
    trailing_lengths,
)
from kvstore.connectors.sglang.settings import BackendSettings
from kvstore.errors import ConfigError
from kvstore.interface import BlockStore
from kvstore.ipc.client import Client

if TYPE_CHECKING:
    from kvstore.store.store import Store

log = logging.getLogger(__name__)

KV: Final = "kv"
CLEAR_TIMEOUT_S: Final = 10.0
"""Timeout of SGLang's clear, which waits for the sidecar on SGLang's scheduler thread."""
MEASURED_MAX: Final = 1024
"""Maximum number of measured batches that wait for SGLang's metrics. Older ones are dropped."""


class PagePools:
    """See the module's text.

    config: SGLang's HiCacheStorageConfig. zero_copy: KV is passed by address (interface v1).
    """

    def __init__(
        self,
        settings: BackendSettings,
        config: Any,
        *,
        zero_copy: bool,
        model: str,
        revision: str,
        compute_dtype: str = "",
    ) -> None:
        self._settings = settings
        self._config = config
        self._page_format = EXTENTS if zero_copy else FLAT
        self._identity = {"model": model, "revision": revision, "compute_dtype": compute_dtype}
        self._copies = Copies(settings.threads)
        self._lock = threading.Lock()
        self._host_pools: dict[str, HostPool] = {}
        self._page_pools: dict[tuple[str, str], PagePool] = {}
        self._replaced: list[PagePool] = []
        self._embedded: Store | None = None
        self.read: deque[tuple[int, float]] = deque(maxlen=MEASURED_MAX)
        """(pages, GB/s) of batches read; `written` of batches written."""
        self.written: deque[tuple[int, float]] = deque(maxlen=MEASURED_MAX)

    def add_host_pool(self, pool: Any, name: str) -> None:
        """Add a host pool. It replaces a pool of the same name.

        Another thread may still read or write the pages of the replaced pool, so its page pools are
        closed only by `close`.

        Raises ConfigError: the sidecar rejects the namespace, or a page is larger than a slot.
        """
        with self._lock:
            known = self._host_pools.get(name)
            if known is not None and known.pool is pool:
                return
            for key in [key for key in self._page_pools if key[0] == name]:
                self._replaced.append(self._page_pools.pop(key))
            self._host_pools[name] = HostPool(pool, name)
        if self._host_pools[name].has_bytes:
            self._page_pool(name, self._page_format if name == KV else self._side_page_format(name))

    def host_pool(self, name: str) -> HostPool:
        assert name in self._host_pools, f"SGLang registered no host pool {name!r}"
        return self._host_pools[name]

    # Lookups.

    def cached_prefix_len(self, keys: Sequence[str]) -> int:
        """Number of leading KV pages that are stored."""
        if not self.host_pool(KV).has_bytes:
            return len(keys)  # pages of an index space: only its side pools have data
        return self._page_pool(KV, self._page_format).cached_prefix_len(keys)

    def restorable_prefixes(
        self, keys: Sequence[str], rules: Sequence[tuple[str, str, int]]
    ) -> RestorablePrefixes:
        """Prefixes that can be restored from KV and side pools.

        rules: (pool, hit policy, pages of its window) of each side pool.
        """
        prefixes = kv_prefixes(KV, self.cached_prefix_len(keys))
        for name, policy, window in rules:
            if not prefixes.lengths:
                break
            within = keys[: prefixes.pages]
            if policy == ALL_PAGES:
                length = self._page_pool(name, self._side_page_format(name)).cached_prefix_len(
                    within
                )
                prefixes.restrict(name, range(1, length + 1))
            elif policy == TRAILING_PAGES:
                cached = self._page_pool(name, self._side_page_format(name)).contains(within)
                prefixes.restrict(name, trailing_lengths(cached, max(1, window)))
        return prefixes

    # Batches.

    def get_addressed(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Read pages of a pool to the addresses of their token slots."""
        return self._transfer(name, keys, host_indices, PagePool.get, self.read)

    def set_addressed(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Write pages of a pool from the addresses of their token slots."""
        return self._transfer(name, keys, host_indices, PagePool.set, self.written)

    def reject(self, name: str, pages: int) -> None:
        """Count pages of a pool that must not be saved, because other weights computed them."""
        page_format = self._page_format if name == KV else self._side_page_format(name)
        self._page_pool(name, page_format).reject(pages)

    def get_flat(self, keys: Sequence[str], targets: Sequence[Any]) -> list[bool]:
        """Read pages of KV, flat, into tensors."""
        pages = tensor_extents(targets)
        return self._timed_transfer(PagePool.get, self._page_pool(KV, FLAT), keys, pages, self.read)

    def set_flat(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """Write pages of KV, flat, from tensors."""
        tensors = [value.contiguous() for value in values]
        pages = tensor_extents(tensors)
        return self._timed_transfer(
            PagePool.set, self._page_pool(KV, FLAT), keys, pages, self.written
        )

    def _transfer(
        self,
        name: str,
        keys: Sequence[str],
        host_indices: Any,
        move: Callable[[PagePool, Sequence[str], Sequence[Extents]], list[bool]],
        measured: deque[tuple[int, float]],
    ) -> list[bool]:
        host = self.host_pool(name)
        if not host.has_bytes:
            return [True] * len(keys)
        token_slots = 0 if host_indices is None else len(host_indices)
        assert token_slots == len(keys) * host.page_tokens, (
            f"{token_slots} token slots of pool {name!r}, not {len(keys)} x {host.page_tokens}"
        )
        page_format = EXTENTS if name == KV else self._side_page_format(name)
        pool = self._page_pool(name, page_format)
        if page_format == EXTENTS:
            return self._timed_transfer(move, pool, keys, host.extents(host_indices), measured)
        firsts = [int(host_indices[at]) for at in range(0, token_slots, host.page_tokens)]
        if measured is self.written:
            flat = [host.pool.get_data_page(first, flat=True).contiguous() for first in firsts]
            return self._timed_transfer(move, pool, keys, tensor_extents(flat), measured)
        flat = [host.pool.get_dummy_flat_data_page() for _ in firsts]
        got = self._timed_transfer(move, pool, keys, tensor_extents(flat), measured)
        for first, page, is_loaded in zip(firsts, flat, got, strict=True):
            if is_loaded:
                host.pool.set_from_flat_data_page(first, page)
        return got

    def _timed_transfer(
        self,
        move: Callable[[PagePool, Sequence[str], Sequence[Extents]], list[bool]],
        pool: PagePool,
        keys: Sequence[str],
        pages: Sequence[Extents],
        measured: deque[tuple[int, float]],
    ) -> list[bool]:
        started_s = time.perf_counter()
        done = move(pool, keys, pages)
        took_s = max(time.perf_counter() - started_s, 1e-9)
        if count := sum(done):
            measured.append((count, count * pool.namespace.block_bytes / took_s / 1e9))
        return done

    # Page pools.

    def _side_page_format(self, name: str) -> str:
        """Format of a side pool's pages: extents if the pool gives addresses, else flat."""
        for page_format in (EXTENTS, FLAT):
            if (name, page_format) in self._page_pools:
                return page_format
        return EXTENTS if self.host_pool(name).extent_sizes(EXTENTS) else FLAT

    def _page_pool(self, name: str, page_format: str) -> PagePool:
        pool = self._page_pools.get((name, page_format))
        if pool is not None:
            return pool
        with self._lock:
            pool = self._page_pools.get((name, page_format))
            if pool is None:
                pool = self._page_pools[name, page_format] = self._open_page_pool(
                    self.host_pool(name), page_format
                )
            return pool

    def _open_page_pool(self, host: HostPool, page_format: str) -> PagePool:
        namespace = namespace_of(host, self._config, page_format, **self._identity)
        store = self._open_store(namespace, host.name)
        log.info(
            "pages of pool %s: %s each (use --slot-bytes %d on the sidecar), namespace %s",
            host.name,
            format_bytes(namespace.block_bytes),
            namespace.block_bytes,
            namespace.digest,
        )
        return PagePool(store, self._copies, self._settings.max_wait)

    def _open_store(self, namespace: Any, pool: str) -> BlockStore:
        settings = self._settings
        if settings.embedded is not None:
            if self._embedded is None:
                self._embedded = _open_embedded(settings.embedded, namespace.block_bytes)
            return self._embedded.session(namespace)
        rank = f"tp{self._config.tp_rank}pp{self._config.pp_rank}"
        return Client(
            settings.socket,
            namespace,
            auth_token=settings.auth_token or None,
            name=f"sglang-{rank}-{pool}",
            traffic_label=settings.traffic_label,
            connect_timeout_s=settings.store_connect_timeout / 1e3,
        )

    # Administration.

    def clear(self) -> bool:
        """Clear every tier for all users of the store; True if that was done."""
        if self._embedded is not None:
            self._embedded.clear("all")
            return True
        if not self._settings.http:
            log.warning(
                "clear: the sidecar is not cleared; set 'http' (and 'admin_auth_token') in the "
                "extra config to let SGLang clear it"
            )
            return False
        request = urllib.request.Request(
            self._settings.http.rstrip("/") + "/v1/clear?tier=all", method="POST"
        )
        if self._settings.admin_auth_token:
            request.add_header("Authorization", f"Bearer {self._settings.admin_auth_token}")
        try:
            with urllib.request.urlopen(request, timeout=CLEAR_TIMEOUT_S) as response:
                return bool(json.load(response)["cleared"] == "all")
        except (OSError, ValueError, KeyError) as error:
            log.warning("clear: the sidecar at %s was not cleared: %s", self._settings.http, error)
            return False

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts of each page pool, by host pool and page format."""
        return {
            f"{name}/{page_format}": pool.stats()
            for (name, page_format), pool in self._page_pools.items()
        }

    def close(self) -> None:
        """Close all page pools. No call may be under way."""
        with self._lock:
            for pool in (*self._page_pools.values(), *self._replaced):
                pool.close()
            self._page_pools.clear()
            self._replaced.clear()
            if self._embedded is not None:
                self._embedded.close()
                self._embedded = None
        self._copies.close()


def _open_embedded(arguments: Mapping[str, Any], block_bytes: int) -> Store:
    known = inspect.signature(kvstore.open).parameters
    for argument in arguments:
        refuse_key(f"embedded.{argument}")
        if argument not in known:
            raise ConfigError(f"unknown key 'embedded.{argument}'; {suggest(argument, known)}")
    return kvstore.open(**{"slot_bytes": block_bytes, **arguments})
