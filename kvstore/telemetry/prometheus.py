"""The sidecar's numbers as Prometheus metrics: a collector over the statistics, no second count.

Names: `kvstore_` first, the unit last, `_total` for counters. What the statistics do not have is
left out.

Labels are bounded: tiers, codecs, verbs and directions by what there is; tenants and routes by
`meters.MAX_USERS`; namespaces by `codecs.chooser.MAX_NAMESPACES` for each tier; HTTP paths by the
application's routes. No label names a client, a block or a request.
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

from kvstore import __version__
from kvstore.telemetry.prometheus_tables import (
    CODEC_METRICS,
    COUNTER,
    HTTP_METRICS,
    L2_METRICS,
    RELOAD_METRICS,
    SERVICE_METRICS,
    TIER_METRICS,
)

Stats = Mapping[str, Any]


class StoreCollector(Collector):
    """Asks for the statistics whenever Prometheus scrapes.

    stats: `Store.stats()` with the service's own beside it ("service", "http", "reloads").
    """

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry then does not collect on registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        build = GaugeMetricFamily("kvstore_build_info", "1, with the version.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        yield from _families(L2_METRICS, [({}, stats["l2"])])
        yield from _of_tiers(stats["tiers"])
        yield from _of_use(stats)
        yield _tenants(stats["l2"]["tenants"])
        yield GaugeMetricFamily("kvstore_sessions", "Sessions open.", stats["sessions"])
        if "service" in stats:
            clients = stats["service"]["clients"]
            tickets = sum(client["tickets"] for client in clients.values())
            yield from _families(SERVICE_METRICS, [({}, stats["service"])])
            yield GaugeMetricFamily("kvstore_clients", "Clients connected.", len(clients))
            yield GaugeMetricFamily(
                "kvstore_client_tickets", "Tickets that clients have outstanding.", tickets
            )
            yield _histograms(
                "kvstore_verb_seconds",
                "Time the sidecar takes to handle one verb of a client.",
                ["verb"],
                [([verb], each) for verb, each in stats["service"]["verb_seconds"].items()],
            )
        if "reloads" in stats:
            yield from _families(RELOAD_METRICS, [({}, stats["reloads"])])
        if "http" in stats:
            yield from _families(HTTP_METRICS, [({}, stats["http"])])
            yield from _requests(stats["http"].get("requests", []))


def _of_tiers(tiers: Stats) -> Iterator[Metric]:
    """What is told of each tier."""
    rows = [
        ({"tier": name}, {**tier, "up": int(tier.get("state", "up") == "up")})
        for name, tier in tiers.items()
    ]
    yield from _families(TIER_METRICS, rows)
    yield _histograms(
        "kvstore_tier_seconds",
        "Time inside a tier of one block read or written, or one batch of existence questions.",
        ["tier", "direction"],
        [
            ([name, direction], each)
            for name, tier in tiers.items()
            for direction, each in tier.get("seconds", {}).items()
        ],
    )
    breaker = GaugeMetricFamily(
        "kvstore_tier_breaker_state",
        "1 for the state the tier's breaker is in, 0 for the others.",
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


def _of_use(stats: Stats) -> Iterator[Metric]:
    """Tokens and bytes asked for, handed over and saved, by tenant, route and tier."""
    blocks = CounterMetricFamily(
        "kvstore_hit_blocks", "Blocks served, by the tier they came from.", labels=["tier"]
    )
    for tier, count in stats["hits"].items():
        blocks.add_metric([tier], count)
    yield blocks
    use, who = stats["use"], ["tenant", "route"]
    asked = CounterMetricFamily(
        "kvstore_asked_tokens", "Tokens of the runs that clients asked for.", labels=who
    )
    saved = CounterMetricFamily("kvstore_saved_tokens", "Tokens committed.", labels=who)
    hits = CounterMetricFamily(
        "kvstore_hit_tokens",
        "Tokens handed over, by the tier they came from. Over kvstore_asked_tokens: the hit rate.",
        labels=[*who, "tier"],
    )
    for user in use["users"]:
        labels = [user["tenant"], user["route"]]
        asked.add_metric(labels, user["asked"])
        saved.add_metric(labels, user["saved"])
        # Every tier from the start: a rate over a counter that appears late misses its first steps.
        for tier in stats["hits"]:
            hits.add_metric([*labels, tier], user["hits"].get(tier, 0))
    yield from (asked, hits, saved)
    served = CounterMetricFamily(
        "kvstore_served_bytes", "Bytes of blocks handed over, by where they lay.", labels=["tier"]
    )
    for tier in stats["hits"]:
        served.add_metric([tier], use["read_bytes"].get(tier, 0))
    yield served
    yield CounterMetricFamily("kvstore_saved_bytes", "Bytes of blocks saved.", use["saved_bytes"])
    yield _histograms(
        "kvstore_load_seconds",
        "From a client's load to the last block of its run in L2.",
        [],
        [([], use["load_seconds"])],
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


def _tenants(slots: Stats) -> Metric:
    family = GaugeMetricFamily(
        "kvstore_l2_tenant_slots", "Slots that are not free, by tenant.", labels=["tenant"]
    )
    for tenant, count in slots.items():
        family.add_metric([tenant], count)
    return family


def _histograms(
    name: str, text: str, labels: Sequence[str], each: Sequence[tuple[Sequence[str], Stats]]
) -> Metric:
    """A family of histograms; `each`: the labels' values and a `Histogram.snapshot`."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, numbers in each:
        running, buckets = 0, []
        for bound, count in zip([*numbers["bounds"], "+Inf"], numbers["counts"], strict=True):
            running += count
            buckets.append((str(bound), running))
        family.add_metric(values, buckets=buckets, sum_value=numbers["sum"])
    return family


def _requests(rows: Sequence[Stats]) -> Iterator[Metric]:
    """HTTP requests by method, route and status."""
    labels = ["method", "path", "status"]
    counts = CounterMetricFamily("kvstore_http_requests", "HTTP requests answered.", labels=labels)
    seconds = []
    for row in rows:
        for status, count in row["statuses"].items():
            counts.add_metric([row["method"], row["path"], status], count)
        seconds.append(([row["method"], row["path"]], row["seconds"]))
    yield counts
    text = "Time from an HTTP request's head to the end of its answer."
    yield _histograms("kvstore_http_request_seconds", text, labels[:2], seconds)
