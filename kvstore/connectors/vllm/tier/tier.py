"""`KVStoreTier`: a secondary tier of vLLM's own offloading, over the sidecar or a store in here.

vLLM keeps L2 (its host pool), copies between device and host, and decides what goes down and comes
up. This moves its units to and from the store, which has them on disk, in Redis or in S3, and
checks every byte that comes from there before it can land in the pool. It runs in the scheduler's
process: nothing in it waits but `drain_jobs`, which vLLM calls before it resets its pool, and a
step that computes nothing, for a moment: vLLM's loop would else take the time from the threads
that it waits for.

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

from kvstore.config.settings import validated
from kvstore.connectors.vllm.connector.metadata import IdleSteps
from kvstore.connectors.vllm.open_store import open_store
from kvstore.connectors.vllm.settings import TierSettings
from kvstore.connectors.vllm.tier.jobs import Transfers, rows_of
from kvstore.connectors.vllm.tier.lookups import Lookups
from kvstore.connectors.vllm.tier.metrics import TierGrowth, definitions
from kvstore.connectors.vllm.tier.offload_keys import GROUP_BYTES, UnitStore, namespace_of_units
from kvstore.connectors.vllm.tier.stale_pools import remove_abandoned
from kvstore.interface import Answer

log = logging.getLogger("vllm.kvstore")

KEY_BYTES: Final = 32 + GROUP_BYTES
"""A key whose hash is SHA-256."""
DRAIN_SLICE_S: Final = 0.01
ANSWERS: Final = {
    Answer.HIT: LookupResult.HIT,
    Answer.MISS: LookupResult.MISS,
    Answer.PENDING: LookupResult.RETRY,
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
        settings = validated(TierSettings, table, "secondary_tiers")
        remove_abandoned()
        namespace = namespace_of_units(offloading_spec, self.block_size_bytes, settings)
        self._opened = open_store(
            settings, namespace, engine=offloading_spec.config.engine_id, name="vllm tier"
        )
        self._store = store = UnitStore(self._opened.store)
        deadline_ms = settings.deadline_ms
        self._lookups = Lookups(store, deadline_ms=deadline_ms, clock=time.monotonic)
        self._transfers = Transfers(
            store, rows_of(primary_kv_view), deadline_ms=deadline_ms, clock=time.monotonic
        )
        self._steps = IdleSteps(time.monotonic)
        self._growth = TierGrowth()
        self._forgets = settings.on_reset == "forget"
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
        return ANSWERS[self._lookups.lookup(bytes(key), req_context.req_id, group, position)]

    def submit_store(self, job_metadata: TransferJob) -> None:
        if job_metadata.req_context.req_id in self._outdated:
            self._transfers.refuse(job_metadata.job_id, [bytes(key) for key in job_metadata.keys])
        else:
            self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loading[job_metadata.job_id] = job_metadata.req_context.req_id
        self._submit(job_metadata, is_load=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Called first in each step, before any lookup of it."""
        results = []
        waiting = self._lookups.waiting or self._transfers.busy
        for end in self._transfers.finished(self._steps.wait_s(waiting)):
            if end.is_load:
                self._lookups.load_ended(self._loading.pop(end.job_id))
            self._lookups.forget(end.lost)
            moved = [OffloadKey(key) for key in end.moved]
            results.append(
                JobResult(
                    job_id=end.job_id,
                    success=end.ok,
                    successful_keys=moved if end.is_load else None,
                    transfer_time=end.seconds,
                    transfer_bytes=len(moved) * self.block_size_bytes,
                )
            )
        self._lookups.take_in()
        self._steps.stepped()
        return results

    def has_pending_work(self) -> bool:
        return self._transfers.busy

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._alive.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._alive.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)
        self._lookups.request_finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request_id in context.preempted_req_ids:
            self._lookups.preempted(request_id)
        self._lookups.send()
        self._transfers.advance()

    def drain_jobs(self) -> None:
        """vLLM resets its host pool, and nothing else calls this: `on_reset` says what that means.

        Requests that run on through it may hold KV from before: what they have is not saved.
        """
        self._transfers.drain(DRAIN_SLICE_S)
        if self._forgets:
            self._store.forget()
            self._lookups.forget_all()
            self._outdated = set(self._alive)
            log.info("kvstore: a reset; nothing saved before is found by this engine any more")

    def stats(self) -> Mapping[str, Any]:
        """Counts since the start, and what is under way."""
        return {
            **self._lookups.counts,
            **self._transfers.counts,
            "store_faults": self._store.faults,
            "store_connected": self._opened.store.slab is not None,
            "keys_known": len(self._lookups),
            "answered": self._lookups.answered,
            "busy": self._transfers.busy,
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._growth.since(self.stats())

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def shutdown(self) -> None:
        """Wait for running copies, hand back every lease, let go of vLLM's pool."""
        self._transfers.close()
        self._opened.close()

    def _warn_of_hash(self, key: OffloadKey) -> None:
        self._key_bytes_seen = len(key)
        log.warning(
            "kvstore: keys of %d bytes (xxhash): unless PYTHONHASHSEED is set, no other engine "
            "and no restart finds them; --prefix-caching-hash-algo sha256_cbor is right",
            len(key),
        )

    def _submit(self, job: TransferJob, *, is_load: bool) -> None:
        keys = [bytes(key) for key in job.keys]
        rows = [int(row) for row in job.chunk_ids]
        self._transfers.submit(job.job_id, keys, rows, is_load=is_load)
