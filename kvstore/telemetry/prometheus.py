"""The sidecar's Prometheus metrics: a collector over the statistics, which counts nothing itself.

Names start with `kvstore_` and end with the unit, counters with `_total`. A metric whose number is
missing from the statistics is left out.

Labels are bounded. Tiers, codecs, operations and directions are few. Pairs of tenant and traffic
label are bounded by `usage_counters.MAX_ROWS`, namespaces by `codecs.chooser.MAX_NAMESPACES` for
each tier, HTTP paths by the application's routes. No label names a client, a block or a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore.telemetry.prometheus_tables import (
    CODEC_METRICS,
    COUNTER,
    HTTP_METRICS,
    L2_METRICS,
    RELOAD_METRICS,
    SERVICE_METRICS,
    TIER_METRICS,
)
from kvstore.version import __version__

Stats = Mapping[str, Any]


class StoreCollector(Collector):
    """Reads the statistics at each scrape.

    stats: `Store.stats()` and the service's own statistics ("service", "http", "reloads").
    """

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Describe nothing, so that a registry does not collect on registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        build = GaugeMetricFamily("kvstore_build_info", "1, with the version.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        yield from _families(L2_METRICS, [({}, stats["l2"])])
        yield from _tier_metrics(stats["tiers"])
        yield from _usage_metrics(stats)
        yield _tenant_slots(stats["l2"]["tenants"])
        yield GaugeMetricFamily("kvstore_sessions", "Open sessions.", stats["sessions"])
        if "service" in stats:
            clients = stats["service"]["clients"]
            operations = sum(client["operations_in_flight"] for client in clients.values())
            yield from _families(SERVICE_METRICS, [({}, stats["service"])])
            yield GaugeMetricFamily("kvstore_clients", "Connected clients.", len(clients))
            yield GaugeMetricFamily(
                "kvstore_client_operations_in_flight",
                "Operations of clients in progress.",
                operations,
            )
            yield _histograms(
                "kvstore_request_seconds",
                "Time to handle one request of a client on the socket.",
                ["op"],
                [([op], each) for op, each in stats["service"]["request_seconds"].items()],
            )
        if "reloads" in stats:
            yield from _families(RELOAD_METRICS, [({}, stats["reloads"])])
        if "http" in stats:
            yield from _families(HTTP_METRICS, [({}, stats["http"])])
            yield from _http_requests(stats["http"].get("requests", []))


def _tier_metrics(tiers: Stats) -> Iterator[Metric]:
    """The metrics of each tier."""
    rows = [
        ({"tier": name}, {**tier, "up": int(tier.get("state", "up") == "up")})
        for name, tier in tiers.items()
    ]
    yield from _families(TIER_METRICS, rows)
    yield _histograms(
        "kvstore_tier_operation_seconds",
        "Time in the tier to read or write one block, or to check one batch of keys (probe).",
        ["tier", "op"],
        [
            ([name, op], each)
            for name, tier in tiers.items()
            for op, each in tier.get("seconds", {}).items()
        ],
    )
    breaker = GaugeMetricFamily(
        "kvstore_tier_breaker_state",
        "1 for the current state of the tier's circuit breaker, 0 for the others.",
        labels=["tier", "state"],
    )
    for name, tier in tiers.items():
        for state in ("up", "down", "probing"):
            breaker.add_metric([name, state], int(tier.get("state", "up") == state))
    yield breaker
    choices = [
        ({"tier": name, "namespace": digest, "codec": choice["name"]}, choice)
        for name, tier in tiers.items()
        for digest, choice in tier.get("codec", {}).items()
    ]
    yield from _families(CODEC_METRICS, choices)


def _usage_metrics(stats: Stats) -> Iterator[Metric]:
    """Tokens and bytes looked up, hit and saved, by tenant, traffic label and tier."""
    blocks = CounterMetricFamily(
        "kvstore_hit_blocks", "Blocks returned to clients, by source tier.", labels=["tier"]
    )
    for tier, count in stats["hit_blocks"].items():
        blocks.add_metric([tier], count)
    yield blocks
    usage, names = stats["usage"], ["tenant", "traffic"]
    lookups = CounterMetricFamily(
        "kvstore_lookup_tokens", "Tokens of the prefixes that clients looked up.", labels=names
    )
    saved = CounterMetricFamily("kvstore_saved_tokens", "Tokens of saved blocks.", labels=names)
    hits = CounterMetricFamily(
        "kvstore_hit_tokens",
        "Tokens returned to clients, by source tier. Hit rate: this over kvstore_lookup_tokens.",
        labels=[*names, "tier"],
    )
    for row in usage["users"]:
        labels = [row["tenant"], row["traffic"]]
        lookups.add_metric(labels, row["lookup_tokens"])
        saved.add_metric(labels, row["saved_tokens"])
        # Every tier from the start: a rate misses the first steps of a counter that appears later.
        for tier in stats["hit_blocks"]:
            hits.add_metric([*labels, tier], row["hit_tokens"].get(tier, 0))
    yield from (lookups, hits, saved)
    hit_bytes = CounterMetricFamily(
        "kvstore_hit_bytes", "Bytes of blocks returned to clients, by source tier.", labels=["tier"]
    )
    for tier in stats["hit_blocks"]:
        hit_bytes.add_metric([tier], usage["hit_bytes"].get(tier, 0))
    yield hit_bytes
    yield CounterMetricFamily("kvstore_saved_bytes", "Bytes of saved blocks.", usage["saved_bytes"])
    yield _histograms(
        "kvstore_load_seconds",
        "Time from the start of a client's load to its last block in L2.",
        [],
        [([], usage["load_seconds"])],
    )


def _families(table: Any, sources: Sequence[tuple[Stats, Stats]]) -> Iterator[Metric]:
    """One family per row of a table, with a sample for each source that has the number."""
    for name, kind, text, label, members in table:
        family_type = CounterMetricFamily if kind == COUNTER else GaugeMetricFamily
        fixed = sorted({key for labels, _ in sources for key in labels})
        family = family_type(name, text, labels=[*fixed, *([label] if label else [])])
        for labels, numbers in sources:
            for member, stat in members.items():
                if stat in numbers:
                    values = [labels[key] for key in fixed] + ([member] if label else [])
                    family.add_metric(values, numbers[stat])
        if family.samples:
            yield family


def _tenant_slots(slots: Stats) -> Metric:
    family = GaugeMetricFamily(
        "kvstore_l2_tenant_slots", "Slots in use, by tenant.", labels=["tenant"]
    )
    for tenant, count in slots.items():
        family.add_metric([tenant], count)
    return family


def _histograms(
    name: str, text: str, labels: Sequence[str], each: Sequence[tuple[Sequence[str], Stats]]
) -> Metric:
    """A family of histograms. each: the values of the labels and a `Histogram.snapshot`."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, numbers in each:
        running, buckets = 0, []
        for bound, count in zip([*numbers["bounds"], "+Inf"], numbers["counts"], strict=True):
            running += count
            buckets.append((str(bound), running))
        family.add_metric(values, buckets=buckets, sum_value=numbers["sum"])
    return family


def _http_requests(rows: Sequence[Stats]) -> Iterator[Metric]:
    """HTTP requests by method, route and status."""
    labels = ["method", "path", "status"]
    counts = CounterMetricFamily("kvstore_http_requests", "HTTP requests answered.", labels=labels)
    seconds = []
    for row in rows:
        for status, count in row["statuses"].items():
            counts.add_metric([row["method"], row["path"], status], count)
        seconds.append(([row["method"], row["path"]], row["seconds"]))
    yield counts
    text = "Time from the head of an HTTP request to the end of its response."
    yield _histograms("kvstore_http_request_seconds", text, labels[:2], seconds)
