"""Why a prompt does not hit: where two prompts part, what that looks like, what it costs.

`prompts` is what is compared, `content` finds what two texts share anywhere, `values`, `shapes` and
`tokens` each look for one kind of cause, `compare` puts them together for two prompts and `log` for
a whole log of requests. Pure functions of texts: no engine, no store, no I/O.
"""
