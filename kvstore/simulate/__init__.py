"""Traces replayed against the policies, without bytes: what a cache would have hit.

`traces` reads request logs, `replay` runs them through levels of cache, `optimal` says what the
best possible order of eviction would have hit.
"""
