"""The store: L2 with its tiers, including the threads and the I/O that `cache` does not do.

`assembly` builds a `store.Store` from a configuration. `session.Session` is an engine's view of it.
"""
