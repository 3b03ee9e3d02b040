"""`KVStoreConnector`: vLLM's connector interface over `SchedulerSide` and `WorkerSide`.

vLLM makes two of it for each engine: one in the scheduler's process, one for each worker. Loads
and saves are asynchronous. vLLM's own hashes name the blocks.
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
from kvstore.connectors.vllm.connector.metadata import StepPlan, StepReport
from kvstore.connectors.vllm.connector.metrics import Growth, StorePromMetrics, StoreStats
from kvstore.connectors.vllm.connector.rank_stores import RankStores
from kvstore.connectors.vllm.connector.scheduler import SchedulerSide
from kvstore.connectors.vllm.connector.worker import WorkerSide
from kvstore.connectors.vllm.lora import Adapters
from kvstore.connectors.vllm.namespace import (
    check_embedded,
    check_outermost,
    hashes_per_block,
    namespaces_of,
    set_engine_flags,
)
from kvstore.connectors.vllm.open_store import open_store
from kvstore.connectors.vllm.settings import connector_settings

log = logging.getLogger("vllm.kvstore")

SOURCES: Final = {"l2": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
"""vLLM's names of our tiers; others are "external_unspecified"."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The plan on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """What the scheduler's side wants to know besides what vLLM carries: the workers' together.

    saved: in how many workers these saves have ended.
    """

    failed: set[str] = field(default_factory=set)
    saved: Counter[tuple[str, int]] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        assert isinstance(other, WorkerNews), "news of one connector"
        return WorkerNews(self.failed | other.failed, self.saved + other.saved)


@dataclass
class WorkerNamespace(KVConnectorHandshakeMetadata):
    """Where a worker keeps blocks: told to the scheduler's side once, at the start."""

    namespace: Namespace


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Configured by `kv_connector_extra_config`: `settings.ConnectorSettings`."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = connector_settings(self._kv_transfer_config.kv_connector_extra_config)
        if self._settings.embedded is not None:
            check_embedded(vllm_config.parallel_config)
        engines = get_current_vllm_config_or_none()  # set where workers begin
        if engines is not None and engines.kv_transfer_config is not None:
            check_outermost(self._kv_transfer_config, engines.kv_transfer_config)
        self._namespaces = namespaces_of(
            vllm_config, kv_cache_config, self._settings, fnuz=current_platform.is_fp8_fnuz()
        )
        self._open = ExitStack()
        self._growth = Growth()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._report = StepReport()
        self._sources: dict[CacheHitSource, int] = {}
        if role == KVConnectorRole.SCHEDULER:
            for line in set_engine_flags(vllm_config, hash_seed()):
                log.warning("kvstore: %s", line)
            self._scheduler = self._make_scheduler()

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a miss later, nothing more."""
        return False

    # Both sides.

    def shutdown(self) -> None:
        """Wait for running copies, hand back every lease, disconnect."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._open.close()

    def get_kv_connector_stats(self) -> StoreStats | None:
        side = self._scheduler or self._worker
        return self._growth.since(side.counts()) if side is not None else None

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
        tokens = self._scheduling.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (block_ids,) = blocks.get_block_ids()
        tiers = self._scheduling.allocated(request, block_ids, num_external_tokens)
        self._sources = {}
        for tier, tokens in tiers.items():
            source = SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            self._sources[source] = self._sources.get(source, 0) + tokens

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._sources if num_external_tokens else {}

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        tables = scheduler_output.kv_connector_block_state
        counts = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        new = scheduler_output.scheduled_new_reqs
        before = [(each.req_id, each.num_computed_tokens) for each in new]
        before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        plan = self._scheduling.plan(
            [(request_id, computed + counts[request_id]) for request_id, computed in before],
            lambda request_id: tables.get_block_ids(request_id)[0],
            scheduler_output.preempted_req_ids or (),
        )
        return StepMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        news = connector_output.kv_connector_worker_meta
        news = news if isinstance(news, WorkerNews) else WorkerNews()
        recved = connector_output.finished_recving or ()
        self._scheduling.heard(recved, news.failed, news.saved)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request), None

    def reset_cache(self) -> bool:
        return self._scheduling.reset()

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Look where the workers keep blocks. Some models change their configuration while they
        are loaded: of workers in processes of their own, nobody else sees what it has become."""
        told = {
            rank: each.namespace
            for rank, each in metadata.items()
            if isinstance(each, WorkerNamespace)
        }
        theirs = [told.get(rank, ours) for rank, ours in enumerate(self._namespaces)]
        if theirs == self._namespaces:
            return
        self._scheduling.close()
        self._open.close()
        self._namespaces = theirs
        self._scheduler = self._make_scheduler()

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        opened = open_store(
            self._settings,
            self._namespaces[self._rank],
            engine=self._kv_transfer_config.engine_id,
            name=f"vllm worker {self._rank}",
        )
        self._open.callback(opened.close)
        self._worker = WorkerSide(
            opened.store,
            kv_caches,
            self._kv_cache_config.num_blocks,
            save_ms=self._settings.save_ms,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if get_kv_transfer_group() is not self:
            return None  # a MultiConnector would hand it to every connector, in place of theirs
        return WorkerNamespace(self._namespaces[self._rank])

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata), "metadata of this connector"
        self._working.begin(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.start_loads(self._step_plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        self._working.start_saves(self._step_plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._report = self._working.collect(self._step_plan())
        return KVConnectorTransferResults(
            finished_sending=self._report.sent, finished_recving=self._report.recved
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._report.bad_blocks

    def build_connector_worker_meta(self) -> WorkerNews | None:
        failed, saved = self._report.failed, self._report.saved
        return WorkerNews(failed, Counter(saved)) if failed or saved else None

    # Inside.

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a call for the scheduler's side"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a call for a worker's side, after register_kv_caches"
        return self._worker

    @property
    def _rank(self) -> int:
        """A worker's, of tensor parallelism."""
        parallel = self._vllm_config.parallel_config
        rank: int = parallel.rank % parallel.tensor_parallel_size
        return rank

    def _step_plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata), "metadata of this connector"
        return metadata.plan

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
            self._open.callback(opened.close)
            stores.append(opened.store)
        where = settings.socket if settings.embedded is None else "a store in this process"
        log.info("kvstore: %s, namespace %s", where, self._namespaces[0].digest)
        return SchedulerSide(
            stores[0] if len(stores) == 1 else RankStores(stores),
            policy=settings.policy(),
            deadline_ms=settings.prefetch.cap_ms,
            min_load_tokens=settings.prefetch.min_tokens,
            adapters=Adapters(),
            hashes_per_block=hashes_per_block(
                self._kv_cache_config, self._namespaces[0].block_tokens
            ),
            workers=len(self._namespaces),
        )
