"""Explains why a prompt does not hit: where two prompts differ, the likely cause, and its cost.

`prompts` represents prompts and `content` finds text that two prompts share anywhere. `values`,
`shapes` and `tokens` each detect one kind of cause. `compare` combines them for two prompts, and
`log` for a log of requests. All are pure functions of texts: no engine, no store, no I/O.
"""
