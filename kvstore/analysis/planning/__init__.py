"""The arithmetic of `kvstore plan`: whether offloading pays, and how much.

The model has two terms. A request's time is prefill, which hits shorten, plus decode, which no
cache changes. So only prefill is saved: its GPU seconds, and its part of the time to first token,
less the time to load. `spans` and `weights` read a model's config.json. `budget` computes the GPU
memory left for cached prefixes. `forecast` replays traffic over the tiers
(`kvstore.analysis.simulate`) and computes what the hits save. `choose` compares policies.
"""
