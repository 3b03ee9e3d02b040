"""The sidecar's numbers as Prometheus metrics: a collector over the statistics, no second count.

Names: `kvstore_` first, the unit last, `_total` for counters. What the statistics do not have is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

Stats = Mapping[str, Any]

GAUGE: Final = "gauge"
COUNTER: Final = "counter"

# (metric, kind, help, label or "", {value of the label: name in the statistics}).
L2_METRICS: Final = (
    (
        "kvstore_l2_slots",
        GAUGE,
        "Slots of the slab by state; together they are all slots.",
        "state",
        {"free": "slots_free", "filling": "slots_filling", "ready": "slots_ready"},
    ),
    (
        "kvstore_l2_slots_leased",
        GAUGE,
        "Ready slots that somebody holds a lease on.",
        "",
        {"": "slots_leased"},
    ),
    (
        "kvstore_l2_slots_dirty",
        GAUGE,
        "Slots that must be written below before they may be evicted.",
        "",
        {"": "slots_dirty"},
    ),
    ("kvstore_l2_slots_pinned", GAUGE, "Slots that are pinned.", "", {"": "slots_pinned"}),
    ("kvstore_l2_pins_max", GAUGE, "Slots that may be pinned.", "", {"": "pins_max"}),
    ("kvstore_l2_slot_bytes", GAUGE, "Size of a slot.", "", {"": "slot_bytes"}),
    ("kvstore_l2_evictions", COUNTER, "Blocks evicted from L2.", "", {"": "evictions"}),
    ("kvstore_l2_expired", COUNTER, "Blocks evicted for their age.", "", {"": "expired"}),
    (
        "kvstore_l2_warmed",
        COUNTER,
        "Blocks brought from a tier before anybody asked.",
        "",
        {"": "warmed"},
    ),
    (
        "kvstore_l2_over_quota",
        COUNTER,
        "Times a tenant got no slot because it has its share.",
        "",
        {"": "over_quota"},
    ),
    ("kvstore_l2_flights", GAUGE, "Blocks on their way up from a tier.", "", {"": "flights"}),
    (
        "kvstore_save_blocks",
        COUNTER,
        "Blocks offered by saves: admitted, rejected (held already), busy (no slot: dropped).",
        "answer",
        {"admit": "admitted", "reject": "rejected", "busy": "busy"},
    ),
    (
        "kvstore_spill_blocks",
        COUNTER,
        "Writes of blocks to the tiers below, by how they ended.",
        "outcome",
        {"written": "spills_written", "dropped": "spills_dropped", "failed": "spills_failed"},
    ),
)

TIER_METRICS: Final = (
    ("kvstore_tier_used_bytes", GAUGE, "Bytes kept.", "", {"": "bytes_used"}),
    ("kvstore_tier_capacity_bytes", GAUGE, "Bytes it may keep.", "", {"": "bytes_capacity"}),
    ("kvstore_tier_blocks", GAUGE, "Blocks kept.", "", {"": "blocks"}),
    ("kvstore_tier_evictions", COUNTER, "Blocks evicted.", "", {"": "evictions"}),
    (
        "kvstore_tier_transfer_bytes",
        COUNTER,
        "Bytes moved, frames and all.",
        "direction",
        {"read": "read_bytes", "write": "write_bytes"},
    ),
    (
        "kvstore_tier_transfers",
        COUNTER,
        "Blocks moved.",
        "direction",
        {"read": "reads", "write": "writes"},
    ),
    (
        "kvstore_tier_queue_blocks",
        GAUGE,
        "Blocks waiting for a worker.",
        "direction",
        {"read": "queued_reads", "write": "queued_writes"},
    ),
    (
        "kvstore_tier_running",
        GAUGE,
        "Workers inside the tier.",
        "direction",
        {"read": "running_reads", "write": "running_writes"},
    ),
    ("kvstore_tier_misses", COUNTER, "Reads that found nothing.", "", {"": "misses"}),
    ("kvstore_tier_faults", COUNTER, "Calls that failed.", "", {"": "faults"}),
    (
        "kvstore_tier_checksum_failures",
        COUNTER,
        "Frames found damaged; each was forgotten and deleted.",
        "",
        {"": "checksum_failures"},
    ),
    (
        "kvstore_tier_up",
        GAUGE,
        "0 while the breaker leaves the tier alone.",
        "",
        {"": "up"},
    ),
    ("kvstore_tier_breaker_opened", COUNTER, "Times it went down.", "", {"": "breaker_opened"}),
    (
        "kvstore_tier_quota_evictions",
        COUNTER,
        "Blocks deleted because their tenant was over its quota.",
        "",
        {"": "quota_evictions"},
    ),
    (
        "kvstore_tier_write_rate_bytes_per_second",
        GAUGE,
        "Bytes of blocks that it was measured to take, all writers together.",
        "",
        {"": "write_rate"},
    ),
    ("kvstore_tier_late", COUNTER, "Calls that ended past their deadline.", "", {"": "late"}),
)

CODEC_METRICS: Final = (
    (
        "kvstore_codec_ratio",
        GAUGE,
        "Raw over stored bytes with the codec in use, by tier and namespace.",
        "",
        {"": "ratio"},
    ),
    (
        "kvstore_codec_bytes_per_second",
        GAUGE,
        "Raw bytes that a CPU second encodes or decodes (checksums and all).",
        "direction",
        {"encode": "encode_rate", "decode": "decode_rate"},
    ),
    ("kvstore_codec_changes", COUNTER, "Times another codec was chosen.", "", {"": "changed"}),
)

SERVICE_METRICS: Final = (
    ("kvstore_connections", COUNTER, "Clients welcomed.", "", {"": "connections"}),
    ("kvstore_connections_refused", COUNTER, "Clients turned away.", "", {"": "refused"}),
)

HTTP_METRICS: Final = (
    ("kvstore_http_transfers", GAUGE, "Block transfers under way.", "", {"": "transfers"}),
    (
        "kvstore_http_transfers_refused",
        COUNTER,
        "Block transfers answered 503.",
        "",
        {"": "transfers_refused"},
    ),
)


class StoreCollector(Collector):
    """Asks for the statistics whenever Prometheus scrapes.

    stats: `Store.stats()` with the service's own beside it ("service", "http").
    """

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry then does not collect on registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from _families(L2_METRICS, [({}, stats["l2"])])
        tiers = [
            ({"tier": name}, {**tier, "up": int(tier.get("state", "up") == "up")})
            for name, tier in stats["tiers"].items()
        ]
        yield from _families(TIER_METRICS, tiers)
        choices = [
            ({"tier": name, "namespace": digest, "codec": choice["name"]}, choice)
            for name, tier in stats["tiers"].items()
            for digest, choice in tier.get("codec", {}).items()
        ]
        yield from _families(CODEC_METRICS, choices)
        hits = CounterMetricFamily(
            "kvstore_hit_blocks", "Blocks served, by the tier they came from.", labels=["tier"]
        )
        for tier, blocks in stats["hits"].items():
            hits.add_metric([tier], blocks)
        yield hits
        yield _tenants(stats["l2"]["tenants"])
        yield GaugeMetricFamily("kvstore_sessions", "Sessions open.", stats["sessions"])
        if "service" in stats:
            yield from _families(SERVICE_METRICS, [({}, stats["service"])])
            yield _clients(stats["service"]["clients"])
            yield _histogram(stats["service"]["verb_seconds"])
        if "http" in stats:
            yield from _families(HTTP_METRICS, [({}, stats["http"])])


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


def _clients(clients: Stats) -> Metric:
    family = GaugeMetricFamily(
        "kvstore_client_tickets", "Tickets a client has outstanding.", labels=["client"]
    )
    for number, client in clients.items():
        family.add_metric([number], client["tickets"])
    return family


def _histogram(numbers: Stats) -> Metric:
    family = HistogramMetricFamily(
        "kvstore_verb_seconds", "Time the sidecar takes to handle one verb of a client."
    )
    running, buckets = 0, []
    for bound, count in zip([*numbers["bounds"], "+Inf"], numbers["counts"], strict=True):
        running += count
        buckets.append((str(bound), running))
    family.add_metric([], buckets=buckets, sum_value=numbers["sum"])
    return family
