"""One store: L2 over its tiers, with the threads and the I/O that `cache` does not do.

`assembly` builds a `store.Store` from a configuration; `session.Session` is one engine in it.
"""
