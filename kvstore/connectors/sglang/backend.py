"""`KVStoreBackend`: SGLang's HiCacheStorage over `PagePools`.

SGLang looks up (`batch_exists`), reads and writes on one thread each, in batches of at most 128
pages. It treats every error as a miss, and so does this module. It expects parallel I/O inside a
call, and reads a batch only up to its first False.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolTransfer,
    PoolTransferResult,
)

from kvstore.connectors.sglang.calls import GuardedCalls
from kvstore.connectors.sglang.metrics import StorageCounters
from kvstore.connectors.sglang.model_identity import compute_dtype, model_of, revision_of
from kvstore.connectors.sglang.page_pools import KV, MEASURED_MAX, PagePools
from kvstore.connectors.sglang.settings import (
    backend_settings,
    check_parallel,
    check_version,
)
from kvstore.connectors.sglang.weight_watch import WeightWatch

log = logging.getLogger("sglang.kvstore")

T = TypeVar("T")


class KVStoreBackend(HiCacheStorage):
    """Pages of SGLang's host memory, stored by the node's sidecar.

    storage_config: SGLang's; its extra_config has the keys of `settings.BackendSettings`.
    more: other arguments of SGLang's factory, not used.

    Raises:
        ConfigError: an unsupported release of SGLang, an unsupported kind of parallelism, an
            unknown key, weights that cannot be identified. SGLang exits with this line.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, more: Any = None) -> None:
        check_version(sglang.__version__)
        check_parallel(storage_config)
        extra = dict(storage_config.extra_config or {})
        self._settings = backend_settings(extra)
        server_args = _server_args()
        self._weights = WeightWatch(self._settings.revision, server_args)
        self._page_pools = PagePools(
            self._settings,
            storage_config,
            zero_copy=bool(extra.get("interface_v1", 0)),
            model=model_of(self._settings, storage_config),
            revision=revision_of(self._settings, server_args),
            compute_dtype=compute_dtype(server_args),
        )
        self._calls = GuardedCalls()
        measured = getattr(storage_config, "enable_storage_metrics", False)
        self._counters = StorageCounters(storage_config) if measured else None

    # SGLang's start. An error here ends it with one line.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._page_pools.add_host_pool(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._page_pools.add_host_pool(host_pool, str(host_pool_name))

    # Every call of a batch.

    def _load(self, what: str, miss: Callable[[], T], call: Callable[[], T]) -> T:
        """A lookup or a read: a miss if the weights are no longer those of the namespace."""
        return miss() if self._weights.ended() else self._calls.run(what, miss, call)

    def _save(
        self, what: str, pool: str, pages: int, miss: Callable[[], T], call: Callable[[], T]
    ) -> T:
        """A write of some pages: rejected if other weights than the namespace's computed them."""
        if not self._weights.ended():
            return self._calls.run(what, miss, call)
        self._calls.run(what, lambda: None, lambda: self._page_pools.reject(pool, pages))
        return miss()

    # Zero copy: KV, and side pools.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._load("batch_exists", int, lambda: self._page_pools.cached_prefix_len(keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._load(
            "batch_get_v1",
            partial(_all_false, keys),
            lambda: self._page_pools.get_addressed(KV, keys, host_indices),
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._save(
            "batch_set_v1",
            KV,
            len(keys),
            partial(_all_false, keys),
            lambda: self._page_pools.set_addressed(KV, keys, host_indices),
        )

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        def look_up() -> PoolTransferResult:
            transfers = pool_transfers or []
            names = {str(transfer.name): transfer.name for transfer in transfers}
            rules = [(str(t.name), str(t.hit_policy.value), len(t.keys or ())) for t in transfers]
            found = self._page_pools.restorable_prefixes(keys, rules)
            by_pool = {names.get(name, name): pages for name, pages in found.by_pool.items()}
            return PoolTransferResult(found.pages, by_pool, found.lengths)

        return self._load("batch_exists_v2", PoolTransferResult.empty, look_up)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        answer = {}
        for transfer in transfers:
            name, keys, indices = transfer.name, transfer.keys or [], transfer.host_indices
            call = partial(self._page_pools.get_addressed, str(name), keys, indices)
            answer[name] = self._load("batch_get_v2", partial(_all_false, keys), call)
        return answer

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        answer = {}
        for transfer in transfers:
            name, keys, indices = transfer.name, transfer.keys or [], transfer.host_indices
            call = partial(self._page_pools.set_addressed, str(name), keys, indices)
            miss = partial(_all_false, keys)
            answer[name] = self._save("batch_set_v2", str(name), len(keys), miss, call)
        return answer

    # The generic interface: whole pages, flat, in tensors.

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        def read() -> list[torch.Tensor | None]:
            targets = target_locations
            if targets is None:
                pool = self._page_pools.host_pool(KV).pool
                targets = [pool.get_dummy_flat_data_page() for _ in keys]
            got = self._page_pools.get_flat(keys, targets)
            return [page if loaded else None for page, loaded in zip(targets, got, strict=True)]

        return self._load("batch_get", lambda: [None] * len(keys), read)

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self._save(
            "batch_set",
            KV,
            len(keys),
            bool,
            lambda: all(self._page_pools.set_flat(keys, values or ())),
        )

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any = None,
    ) -> torch.Tensor | None:
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets)[0]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # Administration.

    def clear(self) -> bool:
        """Clear the store for all of its users; True if that was done."""
        return self._calls.run("clear", bool, self._page_pools.clear)

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics of the batches since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        if self._counters is not None:
            self._counters.add(self._page_pools.stats())
        metrics = StorageMetrics()
        for done, pages, rates in (
            (self._page_pools.read, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self._page_pools.written, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            with contextlib.suppress(IndexError):  # empty; another thread may take them too
                for _ in range(MEASURED_MAX):
                    count, gb_per_s = done.popleft()
                    pages.append(count)
                    rates.append(gb_per_s)
        return metrics

    def close(self) -> None:
        """Release every lease. If a call does not end, its leases end with the process."""
        if self._calls.inherited:
            return
        if self._calls.close(2 * self._settings.max_wait.max / 1e3):
            self._page_pools.close()
        else:
            log.error("kvstore: a call of SGLang has not ended; the store stays open")


def _all_false(keys: Sequence[str]) -> list[bool]:
    return [False] * len(keys)


def _server_args() -> Any | None:
    """The server's arguments; None outside a server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except Exception as error:  # any exception of SGLang if there is no server
        log.info("kvstore: no server arguments (%s); set 'revision' to identify the weights", error)
        return None
