"""The tier's metrics, in vLLM's own: what it did since the last interval, and what is now."""

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
    "units_loaded": "units brought into vLLM's host pool",
    "units_lost": "units that were there when asked for, and could not be loaded",
    "units_saved": "units the store took",
    "units_held_already": "units of saves that the store had",
    "units_refused": "units of saves that were not kept",
    "load_jobs": "loads that vLLM asked for",
    "save_jobs": "saves that vLLM asked for",
    "lookups_past_deadline": "questions given up at their deadline",
    "lookups_refused": "keys that were not asked for, too many being known",
    "requests_cut": "requests whose prefix had no room in vLLM's host pool",
    "loads_past_deadline": "parts of loads cut at their deadline",
    "saves_past_deadline": "parts of saves given up at their deadline",
    "copies_dropped": "copies that found no room in the queue",
    "copies_failed": "copies that ended in an error",
    "store_faults": "calls that the store failed",
}
"""What is told, of `KVStoreTier.stats`."""
GAUGES: Final = {
    "store_connected": "1 while the store can be reached",
    "keys_known": "keys whose answer is kept for requests that live",
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Their names on vLLM's /metrics (counters end with _total there)."""
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


class TierGrowth:
    """Turns counts since the start into what vLLM collects."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def since(self, now: Mapping[str, int]) -> OffloadingConnectorStats | None:
        """What has changed since the last call; None when nothing has."""
        stats = OffloadingConnectorStats()
        for name in COUNTERS:
            grown = now.get(name, 0) - self._before.get(name, 0)
            if grown:
                stats.increase_counter(PREFIX + name, grown)
        for name in GAUGES:
            if now[name] != self._before.get(name):
                stats.set_gauge(PREFIX + name, int(now[name]))
        self._before = dict(now)
        return None if stats.is_empty() else stats
