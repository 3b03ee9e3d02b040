"""Traces replayed against the policies, without bytes: what a cache would have hit.

`traces` reads request logs, `replay` runs them through a level of cache (`levels`).
"""
