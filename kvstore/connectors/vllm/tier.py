"""`KVStoreTier`: a secondary tier of vLLM's own offloading, over the sidecar or a store in here.

vLLM keeps L2 (its host pool), copies between device and host, and decides what goes down and comes
up. This moves its units to and from the store, which has them on disk, in Redis or in S3, and
checks every byte that comes from there before it can land in the pool. It runs in the scheduler's
process: nothing in it waits but `drain_jobs`, which vLLM calls before it resets its pool, and a
step that computes nothing, for a moment: vLLM's loop would else take the time from the threads
that it waits for.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368,
        "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm"}]}
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import vllm
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.blocks import DTYPE_BYTES, Namespace
from kvstore.config import validated
from kvstore.connectors.base import GuardedStore
from kvstore.connectors.vllm.host_pool import remove_abandoned
from kvstore.connectors.vllm.lookups import Lookups
from kvstore.connectors.vllm.plans import IdleSteps
from kvstore.connectors.vllm.settings import StoreSettings, TierSettings, check_version
from kvstore.connectors.vllm.stores import open_store
from kvstore.connectors.vllm.transfers import Transfers, rows_of
from kvstore.connectors.vllm.weights import fingerprint_of_name
from kvstore.verbs import Answer

log = logging.getLogger("vllm.kvstore")

GROUP_BYTES: Final = 4
"""vLLM's keys end with the number of the KV group, big-endian."""
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
        check_version(vllm.__version__)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = validated(TierSettings, table, "secondary_tiers")
        remove_abandoned()
        namespace = namespace_of_units(offloading_spec, self.block_size_bytes, settings)
        self._opened = open_store(
            settings, namespace, engine=offloading_spec.config.engine_id, name="vllm tier"
        )
        store = GuardedStore(self._opened.store)
        deadline_ms = settings.deadline_ms
        self._lookups = Lookups(store, deadline_ms=deadline_ms, clock=time.monotonic)
        self._transfers = Transfers(
            store, rows_of(primary_kv_view), deadline_ms=deadline_ms, clock=time.monotonic
        )
        self._steps = IdleSteps(time.monotonic)
        log.info("kvstore: tier over namespace %s", namespace.digest)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        position = req_context.get_offload_key_position(key) or 0
        return ANSWERS[self._lookups.lookup(bytes(key), req_context.req_id, group, position)]

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Called first in each step, before any lookup of it."""
        results = []
        waiting = self._lookups.waiting or self._transfers.busy
        for end in self._transfers.finished(self._steps.wait_s(waiting)):
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
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.request_finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.send()
        self._transfers.advance()

    def drain_jobs(self) -> None:
        self._transfers.drain(DRAIN_SLICE_S)

    def stats(self) -> Mapping[str, Any]:
        """Counts since the start, and what is under way."""
        return {
            **self._lookups.counts,
            **self._transfers.counts,
            "store_connected": self._opened.store.slab is not None,
            "keys_known": len(self._lookups),
            "busy": self._transfers.busy,
        }

    def shutdown(self) -> None:
        """Wait for running copies, hand back every lease, let go of vLLM's pool."""
        self._transfers.close()
        self._opened.close()

    def _submit(self, job: TransferJob, *, is_load: bool) -> None:
        keys = [bytes(key) for key in job.keys]
        rows = [int(row) for row in job.chunk_ids]
        self._transfers.submit(job.job_id, keys, rows, is_load=is_load)


def namespace_of_units(spec: Any, unit_bytes: int, settings: StoreSettings) -> Namespace:
    """What fixes the bytes of a unit: opaque, all ranks and layers of a group of blocks in a row.

    vLLM tells the tier the model's name only, so its weights are known by a local folder's files or
    by the revision the user gives.
    """
    config = spec.config
    dtype = str(config.model.dtype).removeprefix("torch.")
    element = DTYPE_BYTES.get(dtype, 1)
    if unit_bytes % element:
        element = 1
    parts = {
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in config.groups
        ],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks": spec.blocks_per_chunk,
        "bytes": config.worker_kv_bytes_per_block,
        "ranks": [
            config.parallel.world_size,
            config.parallel.tp_size,
            config.parallel.pp_size,
            config.parallel.pcp_size,
            config.parallel.dcp_size,
        ],
        "replicated": bool(spec.replicated_layout),
        "canonical": bool(config.canonical_layout),
        "order": config.kv_cache_layout,
        "dtype": dtype,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    model, revision = fingerprint_of_name(config.model.name)
    return Namespace(
        model=settings.model or model,
        revision=settings.revision or revision,
        dtype=dtype if element > 1 else "int8",
        layers=1,
        kv_heads=1,
        head_dim=unit_bytes // element,
        head_dim_v=0,
        block_tokens=1,
        layout=f"vllm-offload-{digest}",
    )
