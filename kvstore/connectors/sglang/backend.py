"""`KVStoreBackend`: SGLang's HiCacheStorage over `Shelves`.

SGLang asks (`batch_exists`), reads and writes from one thread each, in batches of at most 128
pages, and takes what goes wrong for a miss; so does everything here. It expects parallel I/O to
happen inside a call, and reads a batch only up to its first False.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolTransfer,
    PoolTransferResult,
)

from kvstore.connectors.sglang.calls import Calls
from kvstore.connectors.sglang.model_identity import model_of, revision_of
from kvstore.connectors.sglang.page_pools import KV, MEASURED_MAX, Shelves
from kvstore.connectors.sglang.settings import (
    backend_settings,
    check_parallel,
    check_version,
)

log = logging.getLogger("sglang.kvstore")


class KVStoreBackend(HiCacheStorage):
    """Pages of SGLang's host memory, kept by the node's sidecar.

    storage_config: SGLang's; its extra_config holds the keys of `settings.BackendSettings`.
    more: what SGLang's factory passes besides; nothing now.

    Raises:
        ConfigError: an SGLang this was not made for, a way of sharing the work it does not know,
            an unknown key. SGLang's start ends with that line.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, more: Any = None) -> None:
        check_version(sglang.__version__)
        check_parallel(storage_config)
        extra = dict(storage_config.extra_config or {})
        self._settings = backend_settings(extra)
        self._shelves = Shelves(
            self._settings,
            storage_config,
            zero_copy=bool(extra.get("interface_v1", 0)),
            model=model_of(self._settings, storage_config),
            revision=revision_of(self._settings, _server_args()),
        )
        self._calls = Calls()

    # SGLang's start. What is wrong here ends it, with one line.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._shelves.add(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._shelves.add(host_pool, str(host_pool_name))

    # Zero copy: KV, and side pools.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._calls.answer("batch_exists", int, lambda: self._shelves.run(keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._calls.answer(
            "batch_get_v1",
            partial(_all_false, keys),
            lambda: self._shelves.get_addressed(KV, keys, host_indices),
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._calls.answer(
            "batch_set_v1",
            partial(_all_false, keys),
            lambda: self._shelves.set_addressed(KV, keys, host_indices),
        )

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        def ask() -> PoolTransferResult:
            transfers = pool_transfers or []
            names = {str(transfer.name): transfer.name for transfer in transfers}
            rules = [(str(t.name), str(t.hit_policy.value), len(t.keys or ())) for t in transfers]
            hits = self._shelves.hits(keys, rules)
            by_pool = {names.get(name, name): pages for name, pages in hits.by_pool.items()}
            return PoolTransferResult(hits.pages, by_pool, hits.lengths)

        return self._calls.answer("batch_exists_v2", PoolTransferResult.empty, ask)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return self._by_pool("batch_get_v2", self._shelves.get_addressed, transfers)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return self._by_pool("batch_set_v2", self._shelves.set_addressed, transfers)

    def _by_pool(
        self,
        what: str,
        move: Callable[[str, Sequence[str], Any], list[bool]],
        transfers: list[PoolTransfer],
    ) -> dict[str, list[bool]]:
        answer = {}
        for transfer in transfers:
            name, keys, indices = transfer.name, transfer.keys or [], transfer.host_indices
            call = partial(move, str(name), keys, indices)
            answer[name] = self._calls.answer(what, partial(_all_false, keys), call)
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
                pool = self._shelves.pool(KV).pool
                targets = [pool.get_dummy_flat_data_page() for _ in keys]
            got = self._shelves.get_flat(keys, targets)
            return [page if came else None for page, came in zip(targets, got, strict=True)]

        return self._calls.answer("batch_get", lambda: [None] * len(keys), read)

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self._calls.answer(
            "batch_set", bool, lambda: all(self._shelves.set_flat(keys, values or ()))
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

    # Care.

    def clear(self) -> bool:
        """Empty the store, for everybody who shares it; whether that was done."""
        return self._calls.answer("clear", bool, self._shelves.clear)

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics of the batches since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        for done, pages, rates in (
            (self._shelves.read, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self._shelves.written, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            with contextlib.suppress(IndexError):  # empty; another thread may take them too
                for _ in range(MEASURED_MAX):
                    count, gb_per_s = done.popleft()
                    pages.append(count)
                    rates.append(gb_per_s)
        return metrics

    def close(self) -> None:
        """Hand everything back. Where a call does not end, its leases end with the process."""
        if self._calls.close(2 * self._settings.deadline.cap_ms / 1e3):
            self._shelves.close()
        else:
            log.error("kvstore: a call of SGLang's does not end; its store stays open")


def _all_false(keys: Sequence[str]) -> list[bool]:
    return [False] * len(keys)


def _server_args() -> Any | None:
    """The server's own arguments; None outside a server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except Exception as error:  # whatever SGLang raises where none are published
        log.info("kvstore: no server arguments (%s); 'revision' tells weights apart", error)
        return None
