"""The engine's Prometheus metrics, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvstore.engine.request import Output
from kvstore.telemetry.histogram import OTHER

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
    "running": "Requests being computed.",
    "waiting": "Requests in the queue.",
    "loading": "Requests whose KV is being loaded.",
    "pages_free": "Pages of KV that nobody holds.",
    "pages_evictable": "Pages of KV that only the prefix cache holds.",
    "pages_total": "Pages of KV.",
}
COUNTERS = {
    "requests": "Requests taken.",
    "preemptions": "Times a request gave its pages to an earlier one.",
    "steps": "Steps of the model.",
    "computed_tokens": "Tokens computed, prompts and output.",
    "prompt_tokens": "Tokens of prompts that reached their first output.",
    "blocks_offered": "Full blocks offered to the store.",
    "blocks_not_offered": "Full blocks not offered, because too many saves were under way.",
}


MAX_ROUTES: Final = 64
"""Routes that are told apart; what comes later is counted as another."""


class EngineMeters:
    """Histograms observed here, counters and gauges read from the engine's numbers."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._ttft = Histogram(
            "kvstore_engine_ttft_seconds",
            "Time to first token, by whether any of the prompt was cached.",
            ["cache"],
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._route_prompt = Counter(
            "kvstore_engine_route_prompt_tokens",
            "Tokens of prompts that reached their first output, by the caller's route.",
            ["route"],
            registry=self._registry,
        )
        self._route_hit = Counter(
            "kvstore_engine_route_hit_tokens",
            "Prompt tokens not computed, by the caller's route and by tier.",
            ["route", "tier"],
            registry=self._registry,
        )
        self._routes: set[str] = set()
        for cache in ("hit", "miss"):  # there from the start, so that a rate sees the first
            self._ttft.labels(cache)
        self._numbers = _Numbers()
        self._registry.register(self._numbers)
        self._first_seen: set[str] = set()

    def observe(self, output: Output, route: str = "") -> None:
        """Count a request's first token; called for every output, on the event loop.

        route: what the caller says its traffic is.
        """
        if output.tokens and output.request_id not in self._first_seen:
            self._first_seen.add(output.request_id)
            cache = "hit" if sum(output.cached.values()) else "miss"
            self._ttft.labels(cache).observe(output.times.ttft_ms / 1e3)
            route = self._known(route)
            self._route_prompt.labels(route).inc(output.prompt_tokens)
            for tier, tokens in output.cached.items():
                self._route_hit.labels(route, tier).inc(tokens)
        if output.finish_reason is not None:
            self._first_seen.discard(output.request_id)

    def _known(self, route: str) -> str:
        """The label of a route: labels come from callers, so there is a bound on them."""
        if route not in self._routes and len(self._routes) >= MAX_ROUTES:
            return OTHER
        self._routes.add(route)
        return route

    def forget(self, request_id: str) -> None:
        """The request's outputs are no longer read."""
        self._first_seen.discard(request_id)

    def text(self, numbers: Mapping[str, Any]) -> bytes:
        """Everything in Prometheus' text format. numbers: `Engine.stats()`."""
        self._numbers.now = numbers
        return generate_latest(self._registry)


class _Numbers:
    """A collector over the engine's own counters."""

    def __init__(self) -> None:
        self.now: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        if not self.now:
            return
        for name, text in GAUGES.items():
            # A gauge's name may not end like a counter's.
            shown = name.removesuffix("_total")
            yield GaugeMetricFamily(f"kvstore_engine_{shown}", text, value=self.now[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvstore_engine_{name}", text, value=self.now[name])
        hits = CounterMetricFamily(
            "kvstore_engine_hit_tokens", "Prompt tokens not computed, by tier.", labels=["tier"]
        )
        for tier, tokens in self.now["cached_tokens"].items():
            hits.add_metric([tier], tokens)
        yield hits
