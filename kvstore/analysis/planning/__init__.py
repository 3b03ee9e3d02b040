"""Does offloading pay, and how much of it: `kvstore plan`'s arithmetic.

The model has two terms. A request's time is prefill, of which hits spare what was computed before,
plus decode, which no cache changes. So what is saved is prefill alone: GPU seconds of it, and time
to first token less what loading takes instead. `spans` and `weights` read a model's config.json,
`budget` says what its GPU has left for a cache of its own, `outlook` replays traffic over the tiers
(`kvstore.analysis.simulate`) and values what hits, `choose` compares policies.
"""
