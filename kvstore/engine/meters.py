"""The engine's Prometheus metrics, in a separate registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvstore.engine.request import Output
from kvstore.telemetry.traffic import OTHER

TTFT_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Time to first token: from a cached prompt of a small model to a long one computed on a CPU."""

GAUGES = {
    "running": "Requests in computation.",
    "waiting": "Requests in the queue.",
    "loading": "Requests with a KV load in progress.",
    "pages_free": "Free KV pages.",
    "pages_evictable": "KV pages that only the prefix cache uses.",
    "pages_total": "Total KV pages.",
}
COUNTERS = {
    "requests": "Accepted requests.",
    "preemptions": "Preemptions of a request by an earlier one.",
    "steps": "Steps of the model.",
    "computed_tokens": "Computed tokens, of prompts and outputs.",
    "prompt_tokens": "Tokens of prompts that reached their first output.",
    "save_blocks": "Full blocks saved to the store.",
    "save_blocks_dropped": "Full blocks not saved, because too many saves were in progress.",
}


MAX_TRAFFIC_LABELS: Final = 64
"""Traffic labels with their own series; further labels are counted as `OTHER`."""


class EngineMeters:
    """Histograms filled by `observe`, and counters and gauges read from the engine's statistics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._ttft = Histogram(
            "kvstore_engine_ttft_seconds",
            "Time to first token, by cache result (hit: any of the prompt was cached).",
            ["cache"],
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._traffic_prompt = Counter(
            "kvstore_engine_traffic_prompt_tokens",
            "Tokens of prompts that reached their first output, by traffic label.",
            ["traffic"],
            registry=self._registry,
        )
        self._traffic_hit = Counter(
            "kvstore_engine_traffic_hit_tokens",
            "Prompt tokens that hit, by traffic label and tier.",
            ["traffic", "tier"],
            registry=self._registry,
        )
        self._traffic_labels: set[str] = set()
        for cache in ("hit", "miss"):  # Exists from the start, so that rate() counts the first.
            self._ttft.labels(cache)
        self._numbers = _Numbers()
        self._registry.register(self._numbers)
        self._first_seen: set[str] = set()

    def observe(self, output: Output, traffic_label: str = "") -> None:
        """Count a request's first token; called for every output, on the event loop.

        traffic_label: the caller's label for its traffic.
        """
        if output.tokens and output.request_id not in self._first_seen:
            self._first_seen.add(output.request_id)
            cache = "hit" if sum(output.cached.values()) else "miss"
            self._ttft.labels(cache).observe(output.times.ttft_ms / 1e3)
            label = self._bounded(traffic_label)
            self._traffic_prompt.labels(label).inc(output.prompt_tokens)
            for tier, tokens in output.cached.items():
                self._traffic_hit.labels(label, tier).inc(tokens)
        if output.finish_reason is not None:
            self._first_seen.discard(output.request_id)

    def _bounded(self, traffic_label: str) -> str:
        """Return the label to count under. Callers choose labels, so their number is limited."""
        labels = self._traffic_labels
        if traffic_label not in labels and len(labels) >= MAX_TRAFFIC_LABELS:
            return OTHER
        self._traffic_labels.add(traffic_label)
        return traffic_label

    def forget(self, request_id: str) -> None:
        """Stop tracking a request whose outputs are no longer read."""
        self._first_seen.discard(request_id)

    def text(self, numbers: Mapping[str, Any]) -> bytes:
        """Return all metrics in Prometheus' text format. numbers: `Engine.stats()`."""
        self._numbers.now = numbers
        return generate_latest(self._registry)


class _Numbers:
    """A collector over the engine's statistics."""

    def __init__(self) -> None:
        self.now: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        if not self.now:
            return
        for name, text in GAUGES.items():
            # The name of a gauge must not end like a counter's.
            shown = name.removesuffix("_total")
            yield GaugeMetricFamily(f"kvstore_engine_{shown}", text, value=self.now[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvstore_engine_{name}", text, value=self.now[name])
        hits = CounterMetricFamily(
            "kvstore_engine_hit_tokens", "Prompt tokens that hit, by tier.", labels=["tier"]
        )
        for tier, tokens in self.now["cached_tokens"].items():
            hits.add_metric([tier], tokens)
        yield hits
