"""Tiers: stores of blocks outside L2. `base` is the contract, `wrappers` bound their failures."""
