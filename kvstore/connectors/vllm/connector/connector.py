"""`KVStoreConnector`: vLLM's connector interface over `SchedulerSide` and `WorkerSide`.

vLLM creates one in the scheduler's process and one for each worker. Loads and saves are
asynchronous. The blocks have vLLM's own hashes.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.blocks.key import Namespace
from kvstore.config.settings import hash_seed
from kvstore.connectors.vllm.common.open_store import open_store
from kvstore.connectors.vllm.common.settings import connector_settings
from kvstore.connectors.vllm.connector.lora import Adapters
from kvstore.connectors.vllm.connector.metadata import StepMetadata, StepResult
from kvstore.connectors.vllm.connector.metrics import CounterDeltas, StorePromMetrics, StoreStats
from kvstore.connectors.vllm.connector.namespace import (
    check_embedded,
    check_outermost,
    hashes_per_block,
    namespaces_of,
    set_engine_flags,
)
from kvstore.connectors.vllm.connector.rank_stores import RankStores
from kvstore.connectors.vllm.connector.scheduler import SchedulerSide
from kvstore.connectors.vllm.connector.worker import WorkerSide

log = logging.getLogger("vllm.kvstore")

HIT_SOURCES: Final = {"l2": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
"""vLLM's names of kvstore's tiers. All other tiers are "external_unspecified"."""


@dataclass
class ConnectorMetadata(KVConnectorMetadata):
    """The metadata of a step for the workers."""

    step: StepMetadata = field(default_factory=StepMetadata)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Results of all workers for the scheduler's side that vLLM itself does not pass on.

    saved: number of workers in which these saves have ended.
    """

    failed: set[str] = field(default_factory=set)
    saved: Counter[tuple[str, int]] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata), "metadata of this connector"
        return WorkerMetadata(self.failed | other.failed, self.saved + other.saved)


@dataclass
class NamespaceHandshake(KVConnectorHandshakeMetadata):
    """Namespace of a worker's blocks, sent to the scheduler's side once at the start."""

    namespace: Namespace


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. `kv_connector_extra_config` has the keys of `ConnectorSettings`."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = connector_settings(self._kv_transfer_config.kv_connector_extra_config)
        if self._settings.embedded is not None:
            check_embedded(vllm_config.parallel_config)
        current = get_current_vllm_config_or_none()  # set when a worker starts
        if current is not None and current.kv_transfer_config is not None:
            check_outermost(self._kv_transfer_config, current.kv_transfer_config)
        self._namespaces = namespaces_of(
            vllm_config, kv_cache_config, self._settings, fnuz=current_platform.is_fp8_fnuz()
        )
        self._open_stores = ExitStack()
        self._deltas = CounterDeltas()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._result = StepResult()
        self._sources: dict[CacheHitSource, int] = {}
        if role == KVConnectorRole.SCHEDULER:
            for line in set_engine_flags(vllm_config, hash_seed()):
                log.warning("kvstore: %s", line)
            self._scheduler = self._make_scheduler()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost save is only a later miss."""
        return False

    # Both sides.

    def shutdown(self) -> None:
        """Wait for running copies, release every lease, disconnect."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._open_stores.close()

    def get_kv_connector_stats(self) -> StoreStats | None:
        side = self._scheduler or self._worker
        return self._deltas.since(side.counts()) if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        return StoreStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StorePromMetrics:
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduler_side.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (block_ids,) = blocks.get_block_ids()
        tiers = self._scheduler_side.start_load(request, block_ids, num_external_tokens)
        self._sources = {}
        for tier, tokens in tiers.items():
            source = HIT_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            self._sources[source] = self._sources.get(source, 0) + tokens

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._sources if num_external_tokens else {}

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        tables = scheduler_output.kv_connector_block_state
        counts = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        new = scheduler_output.scheduled_new_reqs
        before = [(each.req_id, each.num_computed_tokens) for each in new]
        before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        step = self._scheduler_side.build_step_metadata(
            [(request_id, computed + counts[request_id]) for request_id, computed in before],
            lambda request_id: tables.get_block_ids(request_id)[0],
            scheduler_output.preempted_req_ids or (),
        )
        return ConnectorMetadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        metadata = metadata if isinstance(metadata, WorkerMetadata) else WorkerMetadata()
        recved = connector_output.finished_recving or ()
        self._scheduler_side.update_from_workers(recved, metadata.failed, metadata.saved)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.finish_request(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.finish_request(request), None

    def reset_cache(self) -> bool:
        return self._scheduler_side.reset()

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Adopt the namespaces of the workers. Some models change their configuration while they
        load; if a worker is a separate process, only that worker sees the change."""
        namespaces = {
            rank: each.namespace
            for rank, each in metadata.items()
            if isinstance(each, NamespaceHandshake)
        }
        updated = [namespaces.get(rank, ours) for rank, ours in enumerate(self._namespaces)]
        if updated == self._namespaces:
            return
        self._scheduler_side.close()
        self._open_stores.close()
        self._namespaces = updated
        self._scheduler = self._make_scheduler()

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        opened = open_store(
            self._settings,
            self._namespaces[self._rank],
            engine=self._kv_transfer_config.engine_id,
            name=f"vllm worker {self._rank}",
        )
        self._open_stores.callback(opened.close)
        self._worker = WorkerSide(
            opened.store,
            kv_caches,
            self._kv_cache_config.num_blocks,
            max_save_wait_ms=self._settings.max_save_wait,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if get_kv_transfer_group() is not self:
            return None  # a MultiConnector would give it to every connector, replacing theirs
        return NamespaceHandshake(self._namespaces[self._rank])

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, ConnectorMetadata), "metadata of this connector"
        self._worker_side.handle_preemptions(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker_side.start_loads(self._step_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        self._worker_side.start_saves(self._step_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._result = self._worker_side.collect(self._step_metadata())
        return KVConnectorTransferResults(
            finished_sending=self._result.sent, finished_recving=self._result.recved
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._result.bad_blocks

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        failed, saved = self._result.failed, self._result.saved
        return WorkerMetadata(failed, Counter(saved)) if failed or saved else None

    # Inside.

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a call for the scheduler's side"
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "a call for a worker's side, after register_kv_caches"
        return self._worker

    @property
    def _rank(self) -> int:
        """Tensor-parallel rank of this worker."""
        parallel = self._vllm_config.parallel_config
        rank: int = parallel.rank % parallel.tensor_parallel_size
        return rank

    def _step_metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ConnectorMetadata), "metadata of this connector"
        return metadata.step

    def _make_scheduler(self) -> SchedulerSide:
        settings = self._settings
        stores = []
        for namespace in dict.fromkeys(self._namespaces):
            opened = open_store(
                settings,
                namespace,
                engine=self._kv_transfer_config.engine_id,
                name="vllm scheduler",
            )
            self._open_stores.callback(opened.close)
            stores.append(opened.store)
        address = settings.socket if settings.embedded is None else "a store in this process"
        log.info("kvstore: %s, namespace %s", address, self._namespaces[0].digest)
        return SchedulerSide(
            stores[0] if len(stores) == 1 else RankStores(stores),
            policy=settings.policy(),
            max_wait_ms=settings.prefetch.max_wait,
            min_load_tokens=settings.prefetch.min_load_tokens,
            adapters=Adapters(),
            hashes_per_block=hashes_per_block(
                self._kv_cache_config, self._namespaces[0].block_tokens
            ),
            workers=len(self._namespaces),
        )
