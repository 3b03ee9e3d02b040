"""L2: which blocks are cached, which slots are leased, which blocks are evicted or written.

`manager` is the entry: every decision is made under its lock. No module here does I/O, reads a
clock or starts a thread. `slots` is the table of slots, `in_flight` the in-flight loads,
`tier_writes` the writes to tiers, `write_policy` when they start, `quotas` the slots of tenants,
`remote_locations` the keys that remote tiers have, `event_queue` the L2 events, `commands` the
records that the manager returns, `tunables` its runtime settings, `eviction` the eviction policies.
"""
