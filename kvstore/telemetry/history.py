"""What the sidecar's numbers were: a bounded ring of samples, taken in the background."""

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
"""How often what waits for the sampler's thread is taken in."""
MAX_POINTS: Final = 240
"""Samples that are told at most: of more, every n-th and the last."""
END_S: Final = 2.0


class History:
    """Takes a sample of `stats` every `sample_s`, until `close`.

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
        """Begin to sample."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def sample(self) -> None:
        """Take one now."""
        self._ring.append(sample_of(self._stats(), self._clock()))

    def columns(self, tenant: str | None = None) -> dict[str, Any]:
        """The samples, oldest first, as lists of equal length: "time_s", "asked" (tokens), "hits"
        (tokens by tier), "used" (bytes by tier), "queued" (blocks by tier), "evictions" (by tier).

        tenant: whose tokens; None: everybody's. Counters count from the sidecar's start.
        """
        ring = thinned(list(self._ring), MAX_POINTS)
        tiers = list(ring[-1]["used"]) if ring else []
        used = [_tokens_of(each["users"], tenant) for each in ring]

        def by_tier(name: str) -> dict[str, list[int]]:
            return {tier: [each[name].get(tier, 0) for each in ring] for tier in tiers}

        return {
            "time_s": [each["time_s"] for each in ring],
            "asked": [asked for asked, _ in used],
            "hits": {tier: [hits.get(tier, 0) for _, hits in used] for tier in tiers},
            "used": by_tier("used"),
            "queued": by_tier("queued"),
            "evictions": by_tier("evictions"),
        }

    def _run(self) -> None:
        """The sampler. A mistake of ours in one sample must not end it."""
        due_s = time.monotonic()
        while not self._stop.wait(min(TICK_S, self._sample_s)):
            try:
                self._tick()
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + self._sample_s
                    self.sample()
            except Exception:
                log.exception("a sample for the dashboard failed")


def sample_of(stats: Mapping[str, Any], time_s: float) -> dict[str, Any]:
    """What is kept of the statistics."""
    l2, tiers = stats["l2"], stats["tiers"]
    return {
        "time_s": round(time_s, 1),
        "users": _by_tenant(stats["use"]["users"]),
        "used": {
            "l2": l2["slots_ready"] * l2["slot_bytes"],
            **{name: int(tier.get("bytes_used", 0)) for name, tier in tiers.items()},
        },
        "queued": {"l2": 0, **{name: tier["queued_writes"] for name, tier in tiers.items()}},
        "evictions": {
            "l2": l2["evictions"],
            **{name: int(tier.get("evictions", 0)) for name, tier in tiers.items()},
        },
    }


def _by_tenant(users: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, dict[str, int]]]:
    """(tenant, tokens asked for, hits by tier): routes come from outside, and there may be many."""
    of_tenant: dict[str, list[tuple[str, int, Mapping[str, int]]]] = {}
    for each in users:
        row = (each["tenant"], each["asked"], each["hits"])
        of_tenant.setdefault(each["tenant"], []).append(row)
    return [(tenant, *_tokens_of(rows, None)) for tenant, rows in of_tenant.items()]


def thinned(samples: list[Any], most: int) -> list[Any]:
    """At most so many of the samples, evenly spaced, the last among them."""
    step = -(-len(samples) // most) or 1
    return samples[::-1][::step][::-1]


def _tokens_of(
    users: Sequence[tuple[str, int, Mapping[str, int]]], tenant: str | None
) -> tuple[int, dict[str, int]]:
    asked, hits = 0, dict[str, int]()
    for name, tokens, by_tier in users:
        if tenant in (None, name):
            asked += tokens
            for tier, count in by_tier.items():
                hits[tier] = hits.get(tier, 0) + count
    return asked, hits
