"""The connector's metrics, in vLLM's own: per interval in its log, as counters on /metrics."""

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
"""Two counters instead of a gauge: vLLM adds up what ranks and processes tell."""
COUNTERS: Final = {
    "blocks_loaded": "blocks brought into the engine's KV",
    "bytes_loaded": "bytes brought into the engine's KV",
    "load_us": "microseconds that loads took, from plan to end",
    "blocks_failed": "blocks of loads that were computed instead",
    "loads_failed": "requests whose load lacked a block in some rank",
    "loads_past_deadline": "loads cut at their deadline",
    "saves": "saves that the store was asked for",
    "blocks_saved": "blocks the store took",
    "bytes_saved": "bytes the store took",
    "blocks_refused": "blocks of saves that found no slot",
    "saves_dropped": "saves that were not asked, too many being under way",
    "saves_failed": "saves that ended in a fault of the store, an absent sidecar among them",
    "saves_past_deadline": "saves given up at their deadline",
    "saves_cut_by_preemption": "saves given up because their blocks were taken",
    "matches": "questions what is held of a prompt",
    "hits": "questions answered by a run",
    "misses": "questions answered by nothing",
    "matches_failed": "misses because the store could not answer, an absent sidecar among them",
    "waits_cut_by_deadline": "waits for lower tiers ended by the deadline",
    "waits_cut_by_policy": "waits for lower tiers ended by the policy",
    "copies_failed": "copies that ended in an error",
    "copies_dropped": "copies that were not made, too many being under way",
    "store_faults": "verbs that broke the store's promise not to raise",
    CONNECTS: "connections made to the store: the scheduler's and each rank's",
    DISCONNECTS: "connections lost; without the connections made they leave those there are",
}
"""What is told, of `WorkerSide.counts` and `SchedulerSide.counts`."""


@dataclass
class StoreStats(KVConnectorStats):
    """Growth of the counters since the last interval; only what has grown is in it."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> StoreStats:
        for name, grown in other.data.items():
            self.data[name] = self.data.get(name, 0) + grown
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Growth:
    """Turns counts since the start into their growth since the last call."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def since(self, counts: Mapping[str, int]) -> StoreStats | None:
        """None when nothing has grown."""
        grown = {
            name: counts[name] - self._before.get(name, 0)
            for name in COUNTERS
            if counts.get(name, 0) != self._before.get(name, 0)
        }
        changed = counts[CONNECTED] - self._before.get(CONNECTED, 0)
        if changed:
            grown[CONNECTS if changed > 0 else DISCONNECTS] = 1
        self._before = dict(counts)
        return StoreStats(grown) if grown else None


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
        for name, grown in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(grown)
