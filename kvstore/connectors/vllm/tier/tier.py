"""`KVStoreTier`: a secondary tier of vLLM's own offloading, over the sidecar or an embedded store.

vLLM keeps L2 (its host pool), copies between device and host, and decides which blocks to save and
load. The tier saves and loads its offloaded blocks in the store, which has them on disk, in Redis
or in S3. The store verifies every block before it is copied into the pool.

It runs in the scheduler's process and waits in two places only. `drain_jobs`, which vLLM calls
before it resets its pool, waits for running jobs. A step that computes nothing waits up to 1 ms,
so that vLLM's loop does not take CPU time from the threads it waits for.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368,
        "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm",
                             "revision": "COMMIT"}]}
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.config.settings import validate
from kvstore.connectors.vllm.common.idle_steps import IdleSteps
from kvstore.connectors.vllm.common.open_store import open_store
from kvstore.connectors.vllm.common.settings import TierSettings
from kvstore.connectors.vllm.common.unsupported import (
    check_causal,
    check_multimodal,
    check_prefix_caching,
    check_remote_code,
    check_tokens_only,
)
from kvstore.connectors.vllm.tier.engine_config import engine_config
from kvstore.connectors.vllm.tier.jobs import OffloadJobs, rows_of
from kvstore.connectors.vllm.tier.lookups import LookupCache
from kvstore.connectors.vllm.tier.metrics import TierDeltas, metric_definitions
from kvstore.connectors.vllm.tier.offload_keys import GROUP_BYTES, OffloadKeyMap, offload_namespace
from kvstore.connectors.vllm.tier.stale_pools import remove_stale_pools
from kvstore.interface import LookupStatus

log = logging.getLogger("vllm.kvstore")

KEY_BYTES: Final = 32 + GROUP_BYTES
"""Bytes of a key whose hash is SHA-256."""
DRAIN_SLICE_S: Final = 0.01
LOOKUP_RESULTS: Final = {
    LookupStatus.HIT: LookupResult.HIT,
    LookupStatus.MISS: LookupResult.MISS,
    LookupStatus.PENDING: LookupResult.RETRY,
}


class KVStoreTier(SecondaryTierManager):
    """See the module."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **table: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = validate(TierSettings, table, "secondary_tiers")
        remove_stale_pools()
        vllm_config, kv_cache_config = engine_config(offloading_spec.config.engine_id)
        check_tokens_only(vllm_config.model_config)
        check_prefix_caching(vllm_config.model_config)
        check_multimodal(vllm_config)
        check_remote_code(vllm_config.model_config)
        check_causal(vllm_config, kv_cache_config)
        namespace = offload_namespace(
            offloading_spec, self.block_size_bytes, settings, vllm_config, kv_cache_config
        )
        self._opened = open_store(
            settings, namespace, engine=offloading_spec.config.engine_id, name="vllm tier"
        )
        self._store = store = OffloadKeyMap(self._opened.store)
        max_wait_ms = settings.max_wait
        self._lookups = LookupCache(store, timeout_ms=max_wait_ms, clock=time.monotonic)
        self._jobs = OffloadJobs(
            store, rows_of(primary_kv_view), max_wait_ms=max_wait_ms, clock=time.monotonic
        )
        self._steps = IdleSteps(time.monotonic)
        self._deltas = TierDeltas()
        self._forgets_on_reset = settings.on_reset == "forget"
        self._alive: set[str] = set()
        self._outdated: set[str] = set()
        self._loading: dict[int, str] = {}
        self._key_bytes_seen = KEY_BYTES
        log.info("kvstore: tier over namespace %s", namespace.digest)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if len(key) != self._key_bytes_seen:
            self._warn_of_hash(key)
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        position = req_context.get_offload_key_position(key) or 0
        return LOOKUP_RESULTS[self._lookups.lookup(bytes(key), req_context.req_id, group, position)]

    def submit_store(self, job_metadata: TransferJob) -> None:
        if job_metadata.req_context.req_id in self._outdated:
            self._jobs.drop_save(job_metadata.job_id, [bytes(key) for key in job_metadata.keys])
        else:
            self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loading[job_metadata.job_id] = job_metadata.req_context.req_id
        self._submit(job_metadata, is_load=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Outcomes of ended jobs. vLLM calls this first in each step, before any lookup."""
        results = []
        waiting = self._lookups.has_in_flight or self._jobs.busy
        for outcome in self._jobs.finished(self._steps.wait_s(waiting)):
            if outcome.is_load:
                self._lookups.end_load(self._loading.pop(outcome.job_id))
            self._lookups.mark_missing(outcome.failed)
            copied = [OffloadKey(key) for key in outcome.copied]
            results.append(
                JobResult(
                    job_id=outcome.job_id,
                    success=outcome.ok,
                    successful_keys=copied if outcome.is_load else None,
                    transfer_time=outcome.seconds,
                    transfer_bytes=len(copied) * self.block_size_bytes,
                )
            )
        self._lookups.collect()
        self._steps.end_step()
        return results

    def has_pending_work(self) -> bool:
        return self._jobs.busy

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._alive.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._alive.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)
        self._lookups.finish_request(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request_id in context.preempted_req_ids:
            self._lookups.preempt_request(request_id)
        self._lookups.send_batches()
        self._jobs.advance()

    def drain_jobs(self) -> None:
        """vLLM calls this only before it resets its host pool. `on_reset` sets the effect.

        Running requests may have KV from before the reset, so their blocks are not saved.
        """
        self._jobs.drain(DRAIN_SLICE_S)
        if self._forgets_on_reset:
            self._store.start_epoch()
            self._lookups.mark_all_missing()
            self._outdated = set(self._alive)
            log.info("kvstore: cache reset; this engine no longer uses blocks saved before it")

    def stats(self) -> Mapping[str, Any]:
        """Counts since the start, and current gauges."""
        return {
            **self._lookups.counts,
            **self._jobs.counts,
            "store_errors": self._store.errors,
            "store_connected": self._opened.store.slab is not None,
            "lookup_cache_size": len(self._lookups),
            "lookup_batches_done": self._lookups.batches_done,
            "busy": self._jobs.busy,
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._deltas.since(self.stats())

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def shutdown(self) -> None:
        """Wait for running copies, release every lease, drop the view of vLLM's pool."""
        self._jobs.close()
        self._opened.close()

    def _warn_of_hash(self, key: OffloadKey) -> None:
        self._key_bytes_seen = len(key)
        log.warning(
            "kvstore: keys of %d bytes (xxhash) differ in each process unless PYTHONHASHSEED is "
            "set, so no other engine and no restart finds the blocks; use "
            "--prefix-caching-hash-algo sha256_cbor",
            len(key),
        )

    def _submit(self, job: TransferJob, *, is_load: bool) -> None:
        keys = [bytes(key) for key in job.keys]
        rows = [int(row) for row in job.chunk_ids]
        self._jobs.submit(job.job_id, keys, rows, is_load=is_load)
