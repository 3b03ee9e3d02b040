"""Replays a trace against the cache policies, without KV bytes, to find its hit rate.

`formats` reads request logs, `replay` runs them through one cache level (`levels`).
"""
