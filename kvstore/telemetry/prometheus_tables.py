"""Which number of the statistics is which metric: tables for `exposition`.

A row is (metric, kind, help, label or "", {value of the label: name in the statistics}).
"""

from __future__ import annotations

from typing import Final

GAUGE: Final = "gauge"
COUNTER: Final = "counter"

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
    ("kvstore_tier_expired", COUNTER, "Blocks deleted for their age.", "", {"": "expired"}),
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
    (
        "kvstore_tier_queue_dropped",
        COUNTER,
        "What found no place in a full queue: blocks to write, batches of existence questions.",
        "direction",
        {"write": "dropped_writes", "probe": "dropped_probes"},
    ),
    (
        "kvstore_tier_workers",
        GAUGE,
        "Threads of the tier, by what they do first.",
        "direction",
        {"read": "workers_read", "write": "workers_write"},
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
    (
        "kvstore_tier_breaker_refused",
        COUNTER,
        "Calls answered with a miss at once, because the tier is down.",
        "",
        {"": "breaker_refused"},
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

RELOAD_METRICS: Final = (
    (
        "kvstore_config_reloads",
        COUNTER,
        "Times the configuration was read anew, by what came of it.",
        "outcome",
        {"applied": "applied", "refused": "refused"},
    ),
    (
        "kvstore_config_last_reload_successful",
        GAUGE,
        "0 while the file is not what is in force: the last reload was refused.",
        "",
        {"": "in_force"},
    ),
    (
        "kvstore_config_last_reload_success_timestamp_seconds",
        GAUGE,
        "When a reload last took effect; 0 before the first.",
        "",
        {"": "applied_at_s"},
    ),
)
