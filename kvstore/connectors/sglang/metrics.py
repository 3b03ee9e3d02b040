"""The backend's counters on SGLang's /metrics, as `sglang:kvstore_<name>_total`.

SGLang's own storage metrics count pages of successful batches. A batch that failed is one line in
its log, so what was not saved is counted here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

COUNTERS: Final = {
    "pages_loaded": "pages loaded into SGLang's host memory",
    "pages_missed": "requested pages that were not loaded",
    "pages_saved": "pages saved, or already cached",
    "pages_dropped": "pages not saved because no slot was free within the maximum wait",
    "pages_failed": "pages not saved because the sidecar was absent or did not respond",
    "pages_rejected": "pages not saved because the weights were updated online",
}
"""Names of `PagePool.stats`, with their help."""
LABELS: Final = ("pool", "tp_rank", "pp_rank")


class StorageCounters:
    """Adds what the page pools have counted to SGLang's counters.

    config: SGLang's HiCacheStorageConfig.
    """

    def __init__(self, config: Any) -> None:
        self._ranks = {"tp_rank": str(config.tp_rank), "pp_rank": str(config.pp_rank)}
        self._before: dict[tuple[str, str], int] = {}
        self._counters = _counters()

    def add(self, stats: Mapping[str, Mapping[str, int]]) -> None:
        """stats: `PagePools.stats()`."""
        for pool, counts in stats.items():
            for name, count in counts.items():
                more = count - self._before.get((pool, name), 0)
                if more > 0:
                    self._counters[name].labels(pool=pool, **self._ranks).inc(more)
                    self._before[pool, name] = count


@functools.cache
def _counters() -> dict[str, Any]:
    """One of each in a process: SGLang may attach a storage backend several times."""
    from prometheus_client import Counter

    return {
        name: Counter(f"sglang:kvstore_{name}", help_text, LABELS)
        for name, help_text in COUNTERS.items()
    }
