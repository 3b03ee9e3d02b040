"""History of the sidecar's statistics: a bounded ring of samples, taken in a background thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

log = logging.getLogger(__name__)

SAMPLE_S: Final = 5.0
"""Time between two samples."""
SAMPLES: Final = 720
"""Samples kept: an hour."""
TICK_S: Final = 1.0
"""Time between two calls of `tick`."""
MAX_POINTS: Final = 240
"""Maximum number of samples in a view; of more, every n-th and the last."""
JOIN_TIMEOUT_S: Final = 2.0


class History:
    """Samples `stats` every `sample_s`, until `close`.

    tick: called every second from the same thread. clock: seconds since the epoch.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, Any]],
        tick: Callable[[], None],
        *,
        sample_s: float = SAMPLE_S,
        samples: int = SAMPLES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stats = stats
        self._tick = tick
        self._sample_s = sample_s
        self._clock = clock
        self._ring: deque[dict[str, Any]] = deque(maxlen=samples)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def sample(self) -> None:
        """Take one sample now."""
        self._ring.append(sample_of(self._stats(), self._clock()))

    def columns(self, tenant: str | None = None) -> dict[str, Any]:
        """The samples, oldest first, as lists of equal length.

        "time_s", "lookup_tokens"; by tier: "hit_tokens", "used_bytes", "queued_writes" (blocks),
        "evictions". Counters start at the sidecar's start.

        tenant: whose tokens; None: the tokens of all tenants.
        """
        ring = thinned(list(self._ring), MAX_POINTS)
        tiers = list(ring[-1]["used_bytes"]) if ring else []
        tokens = [_sum_tokens(each["tenants"], tenant) for each in ring]

        def by_tier(name: str) -> dict[str, list[int]]:
            return {tier: [each[name].get(tier, 0) for each in ring] for tier in tiers}

        return {
            "time_s": [each["time_s"] for each in ring],
            "lookup_tokens": [lookups for lookups, _ in tokens],
            "hit_tokens": {tier: [hits.get(tier, 0) for _, hits in tokens] for tier in tiers},
            "used_bytes": by_tier("used_bytes"),
            "queued_writes": by_tier("queued_writes"),
            "evictions": by_tier("evictions"),
        }

    def _run(self) -> None:
        """The sampler's thread. An internal error in one sample must not end it."""
        due_s = time.monotonic()
        while not self._stop.wait(min(TICK_S, self._sample_s)):
            try:
                self._tick()
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + self._sample_s
                    self.sample()
            except Exception:
                log.exception("dashboard: internal error, one sample is missing")


def sample_of(stats: Mapping[str, Any], time_s: float) -> dict[str, Any]:
    """The part of the statistics that the history keeps."""
    l2, tiers = stats["l2"], stats["tiers"]
    return {
        "time_s": round(time_s, 1),
        "tenants": _by_tenant(stats["usage"]["users"]),
        "used_bytes": {
            "l2": l2["slots_ready"] * l2["slot_bytes"],
            **{name: int(tier.get("bytes_used", 0)) for name, tier in tiers.items()},
        },
        "queued_writes": {"l2": 0, **{name: tier["queued_writes"] for name, tier in tiers.items()}},
        "evictions": {
            "l2": l2["evictions"],
            **{name: int(tier.get("evictions", 0)) for name, tier in tiers.items()},
        },
    }


def _by_tenant(users: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, dict[str, int]]]:
    """(tenant, lookup tokens, hit tokens by tier).

    Traffic labels are summed: they come from outside, and there may be many.
    """
    rows: dict[str, list[tuple[str, int, Mapping[str, int]]]] = {}
    for each in users:
        row = (each["tenant"], each["lookup_tokens"], each["hit_tokens"])
        rows.setdefault(each["tenant"], []).append(row)
    return [(tenant, *_sum_tokens(of_tenant, None)) for tenant, of_tenant in rows.items()]


def thinned(samples: list[Any], most: int) -> list[Any]:
    """At most `most` of the samples, evenly spaced; the last sample is always one of them."""
    step = -(-len(samples) // most) or 1
    return samples[::-1][::step][::-1]


def _sum_tokens(
    rows: Sequence[tuple[str, int, Mapping[str, int]]], tenant: str | None
) -> tuple[int, dict[str, int]]:
    lookups, hits = 0, dict[str, int]()
    for name, tokens, by_tier in rows:
        if tenant in (None, name):
            lookups += tokens
            for tier, count in by_tier.items():
                hits[tier] = hits.get(tier, 0) + count
    return lookups, hits
