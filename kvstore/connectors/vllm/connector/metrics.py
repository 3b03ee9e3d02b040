"""The connector's metrics in vLLM: per interval in its log, and as counters on /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstore.connectors.vllm.connector.metadata import CONNECTED

CONNECTS, DISCONNECTS = "connects", "disconnects"
"""Two counters instead of a gauge, because vLLM adds up the values of ranks and processes."""
COUNTERS: Final = {
    "blocks_loaded": "blocks loaded into the engine's KV",
    "bytes_loaded": "bytes loaded into the engine's KV",
    "load_us": "duration of loads in microseconds, from the scheduler's decision to the end",
    "blocks_failed": "blocks that could not be loaded and were computed",
    "loads_failed": "requests whose load missed a block in some rank",
    "loads_timed_out": "loads truncated after the maximum wait",
    "saves": "saves sent to the store",
    "blocks_saved": "blocks saved in the store",
    "bytes_saved": "bytes saved in the store",
    "blocks_dropped": "blocks not saved because no slot was free",
    "saves_dropped": "saves dropped because too many were under way",
    "saves_failed": "saves that failed with an error of the store, such as a missing sidecar",
    "saves_timed_out": "saves dropped after the maximum wait for slots",
    "saves_preempted": "saves dropped because vLLM preempted the request",
    "lookups": "lookups of prompts",
    "hits": "lookups with at least one cached block",
    "misses": "lookups without a cached block",
    "lookups_failed": "misses because the store could not answer, such as a missing sidecar",
    "prompts_mixed": "prompts of embeddings and token ids, which do not use the store",
    "waits_timed_out": "waits for lower tiers that ended after the maximum wait",
    "waits_ended_by_policy": "waits for lower tiers that the prefetch policy ended",
    "copies_failed": "copies that failed",
    "copies_dropped": "copies dropped because too many were queued",
    "store_errors": "exceptions raised by the store",
    CONNECTS: "connections to the store, of the scheduler and of each rank",
    DISCONNECTS: "connections lost; connects minus disconnects is the number of open connections",
}
"""Counts of `WorkerSide.counts` and `SchedulerSide.counts` that are exported, with their help."""


@dataclass
class StoreStats(KVConnectorStats):
    """Increments of the counters since the last interval; only those that are not zero."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> StoreStats:
        for name, increment in other.data.items():
            self.data[name] = self.data.get(name, 0) + increment
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class CounterDeltas:
    """Turns counts since the start into increments since the last call."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def since(self, counts: Mapping[str, int]) -> StoreStats | None:
        """Increments since the last call; None without any."""
        increments = {
            name: counts[name] - self._before.get(name, 0)
            for name in COUNTERS
            if counts.get(name, 0) != self._before.get(name, 0)
        }
        changed = counts[CONNECTED] - self._before.get(CONNECTED, 0)
        if changed:
            increments[CONNECTS if changed > 0 else DISCONNECTS] = 1
        self._before = dict(counts)
        return StoreStats(increments) if increments else None


class StorePromMetrics(KVConnectorPromMetrics):
    """The counters on vLLM's /metrics, as `vllm:kvstore_<name>_total`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvstore_{name}",
                documentation=f"kvstore: {documentation}",
                labelnames=labelnames,
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, increment in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(increment)
