"""Tables of metrics: the name of each metric, and the statistics that it shows.

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
        "Slots of the slab by state. The sum is the number of slots.",
        "state",
        {"free": "slots_free", "filling": "slots_filling", "ready": "slots_ready"},
    ),
    ("kvstore_l2_slots_leased", GAUGE, "Ready slots with a lease.", "", {"": "slots_leased"}),
    (
        "kvstore_l2_slots_dirty",
        GAUGE,
        "Slots that must be written to a tier before they can be evicted.",
        "",
        {"": "slots_dirty"},
    ),
    ("kvstore_l2_slots_pinned", GAUGE, "Pinned slots.", "", {"": "slots_pinned"}),
    (
        "kvstore_l2_max_pinned_slots",
        GAUGE,
        "Maximum number of pinned slots.",
        "",
        {"": "max_pinned"},
    ),
    ("kvstore_l2_slot_bytes", GAUGE, "Size of a slot in bytes.", "", {"": "slot_bytes"}),
    ("kvstore_l2_evictions", COUNTER, "Blocks evicted from L2.", "", {"": "evictions"}),
    ("kvstore_l2_expired", COUNTER, "Blocks evicted because of their age.", "", {"": "expired"}),
    ("kvstore_l2_warmed", COUNTER, "Blocks loaded without a request.", "", {"": "warmed"}),
    (
        "kvstore_l2_over_quota",
        COUNTER,
        "Slot allocations denied because the tenant was at its quota.",
        "",
        {"": "over_quota"},
    ),
    (
        "kvstore_l2_loads_in_flight",
        GAUGE,
        "Blocks being loaded from a tier into L2.",
        "",
        {"": "loads_in_flight"},
    ),
    (
        "kvstore_save_blocks",
        COUNTER,
        "Blocks of saves by result: stored, already_cached (or in flight), no_slot (dropped).",
        "result",
        {"stored": "stored", "already_cached": "already_cached", "no_slot": "no_slot"},
    ),
    (
        "kvstore_tier_write_blocks",
        COUNTER,
        "Blocks written from L2 to a tier, by result.",
        "result",
        {
            "written": "tier_writes_written",
            "dropped": "tier_writes_dropped",
            "failed": "tier_writes_failed",
        },
    ),
)

TIER_METRICS: Final = (
    ("kvstore_tier_used_bytes", GAUGE, "Bytes stored.", "", {"": "bytes_used"}),
    ("kvstore_tier_capacity_bytes", GAUGE, "Maximum bytes stored.", "", {"": "bytes_capacity"}),
    ("kvstore_tier_blocks", GAUGE, "Blocks stored.", "", {"": "blocks"}),
    ("kvstore_tier_evictions", COUNTER, "Blocks evicted.", "", {"": "evictions"}),
    ("kvstore_tier_expired", COUNTER, "Blocks deleted because of their age.", "", {"": "expired"}),
    (
        "kvstore_tier_transfer_bytes",
        COUNTER,
        "Bytes of frames read from or written to the tier.",
        "direction",
        {"read": "read_bytes", "write": "write_bytes"},
    ),
    (
        "kvstore_tier_transfers",
        COUNTER,
        "Blocks read from or written to the tier.",
        "direction",
        {"read": "reads", "write": "writes"},
    ),
    (
        "kvstore_tier_queue_blocks",
        GAUGE,
        "Blocks in the tier's queue, waiting for a worker.",
        "direction",
        {"read": "queued_reads", "write": "queued_writes"},
    ),
    (
        "kvstore_tier_workers_busy",
        GAUGE,
        "Workers in a call to the tier.",
        "direction",
        {"read": "workers_busy_read", "write": "workers_busy_write"},
    ),
    (
        "kvstore_tier_queue_dropped",
        COUNTER,
        "Dropped because the queue was full: blocks to write, batches of existence checks (probe).",
        "op",
        {"write": "dropped_writes", "probe": "dropped_probes"},
    ),
    (
        "kvstore_tier_workers",
        GAUGE,
        "Worker threads of the tier, by the direction that they serve first.",
        "direction",
        {"read": "workers_read", "write": "workers_write"},
    ),
    ("kvstore_tier_misses", COUNTER, "Reads that found no block.", "", {"": "misses"}),
    ("kvstore_tier_errors", COUNTER, "Calls to the tier that failed.", "", {"": "errors"}),
    (
        "kvstore_tier_checksum_failures",
        COUNTER,
        "Corrupt frames found; each was deleted.",
        "",
        {"": "checksum_failures"},
    ),
    (
        "kvstore_tier_unsupported_frames",
        COUNTER,
        "Frames of another release found; each is a miss and is not deleted.",
        "",
        {"": "unsupported_frames"},
    ),
    (
        "kvstore_tier_unsupported_writes",
        COUNTER,
        "Blocks not written because the tier has a frame of another release.",
        "",
        {"": "unsupported_writes"},
    ),
    (
        "kvstore_tier_unsupported_segments",
        GAUGE,
        "Segments of a later version; they are left as they are.",
        "",
        {"": "segments_unsupported"},
    ),
    (
        "kvstore_tier_up",
        GAUGE,
        "1 while the tier is up, 0 while its circuit breaker is open.",
        "",
        {"": "up"},
    ),
    (
        "kvstore_tier_breaker_rejected",
        COUNTER,
        "Calls rejected by the open circuit breaker; a read is then a miss.",
        "",
        {"": "breaker_rejected"},
    ),
    (
        "kvstore_tier_breaker_opened",
        COUNTER,
        "Times the circuit breaker opened.",
        "",
        {"": "breaker_opened"},
    ),
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
        "Measured write rate of all workers together.",
        "",
        {"": "write_rate"},
    ),
    (
        "kvstore_tier_deadline_exceeded",
        COUNTER,
        "Calls that ended after their deadline.",
        "",
        {"": "deadline_exceeded"},
    ),
)

CODEC_METRICS: Final = (
    (
        "kvstore_codec_ratio",
        GAUGE,
        "Raw over stored bytes with the current codec, by tier and namespace.",
        "",
        {"": "ratio"},
    ),
    (
        "kvstore_codec_bytes_per_second",
        GAUGE,
        "Raw bytes encoded or decoded per CPU second, checksums included.",
        "direction",
        {"encode": "encode_rate", "decode": "decode_rate"},
    ),
    ("kvstore_codec_changes", COUNTER, "Times another codec was chosen.", "", {"": "changed"}),
)

SERVICE_METRICS: Final = (
    ("kvstore_connections", COUNTER, "Clients accepted.", "", {"": "connections"}),
    ("kvstore_connections_rejected", COUNTER, "Clients rejected.", "", {"": "rejected"}),
)

HTTP_METRICS: Final = (
    ("kvstore_http_transfers", GAUGE, "Block transfers in progress.", "", {"": "transfers"}),
    (
        "kvstore_http_transfers_rejected",
        COUNTER,
        "Block transfers rejected with status 503.",
        "",
        {"": "transfers_rejected"},
    ),
)

RELOAD_METRICS: Final = (
    (
        "kvstore_config_reloads",
        COUNTER,
        "Configuration reloads by result.",
        "result",
        {"applied": "applied", "rejected": "rejected"},
    ),
    (
        "kvstore_config_last_reload_successful",
        GAUGE,
        "1 if the last reload was applied, 0 if it was rejected.",
        "",
        {"": "in_force"},
    ),
    (
        "kvstore_config_last_reload_success_timestamp_seconds",
        GAUGE,
        "Time of the last applied reload; 0 before the first.",
        "",
        {"": "applied_at_s"},
    ),
)
