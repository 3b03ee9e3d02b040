"""The tier's metrics in vLLM: counters since the last interval, and gauges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

PREFIX: Final = "vllm:kvstore_tier_"
COUNTERS: Final = {
    "blocks_loaded": "blocks loaded into vLLM's host pool",
    "blocks_failed": "blocks that were a hit but could not be loaded",
    "blocks_saved": "blocks saved in the store",
    "blocks_already_stored": "blocks of saves that were already stored",
    "blocks_dropped": "blocks of saves that were dropped",
    "load_jobs": "load jobs of vLLM",
    "save_jobs": "save jobs of vLLM",
    "lookups_timed_out": "lookups without an answer within max_wait",
    "lookups_dropped": "keys not looked up because the lookup cache was full",
    "requests_truncated": "requests whose prefix did not fit into vLLM's host pool",
    "loads_timed_out": "parts of loads truncated after max_wait",
    "saves_timed_out": "parts of saves dropped after max_wait",
    "copies_dropped": "copies dropped because the queue was full",
    "copies_failed": "copies that failed",
    "store_errors": "exceptions raised by the store",
}
"""Counts of `KVStoreTier.stats` that are exported, with their help."""
GAUGES: Final = {
    "store_connected": "1 while the store can be reached",
    "lookup_cache_size": "keys in the lookup cache",
}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Definitions of all metrics by their name in vLLM. Counters end with _total on /metrics."""
    return {
        **{
            PREFIX + name: OffloadingCounterMetadata(documentation=f"kvstore: {text}")
            for name, text in COUNTERS.items()
        },
        **{
            PREFIX + name: OffloadingGaugeMetadata(documentation=f"kvstore: {text}")
            for name, text in GAUGES.items()
        },
    }


class TierDeltas:
    """Turns counts since the start into the increments that vLLM collects."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def since(self, now: Mapping[str, int]) -> OffloadingConnectorStats | None:
        """Changes since the last call; None without any."""
        stats = OffloadingConnectorStats()
        for name in COUNTERS:
            increment = now.get(name, 0) - self._before.get(name, 0)
            if increment:
                stats.increase_counter(PREFIX + name, increment)
        for name in GAUGES:
            if now[name] != self._before.get(name):
                stats.set_gauge(PREFIX + name, int(now[name]))
        self._before = dict(now)
        return None if stats.is_empty() else stats
