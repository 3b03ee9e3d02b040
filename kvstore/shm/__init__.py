"""Shared memory that the sidecar makes and engines map: the slab of slots, and the index of L2."""
