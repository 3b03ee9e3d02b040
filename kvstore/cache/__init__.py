"""L2: which blocks are cached, who leases their slots, which are evicted or written to a tier.

`manager` is the door: every decision is made under its lock, and no module here does I/O, reads a
clock or starts a thread. `slots` is the table of slots, `in_flight` the loads several requests
share, `tier_writes` and `pending_writes` the writes to tiers, `quotas` the slots of tenants,
`remote_locations` what remote tiers are known to contain, `commands` the records it returns, and
`eviction` the eviction policies.
"""
