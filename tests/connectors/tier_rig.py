"""The lookup cache and the jobs of the tier over a manual store."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from manual_store import ManualClock, ManualStore

from kvstore.blocks.key import Namespace
from kvstore.connectors.vllm.tier.jobs import JobOutcome, OffloadJobs
from kvstore.connectors.vllm.tier.lookups import LookupCache
from kvstore.connectors.vllm.tier.offload_keys import OffloadKeyMap
from kvstore.interface import LookupStatus

BLOCK_BYTES = 64
NAMESPACE = Namespace(
    model="offloaded",
    dtype="int8",
    layers=1,
    kv_heads=1,
    head_dim=BLOCK_BYTES,
    head_dim_v=0,
    block_tokens=1,
)
MAX_WAIT_MS = 500.0
HANG_LIMIT_S = 20.0
ALL = ("match", "load", "save")


def keys_of(count: int, tag: int = 0) -> list[bytes]:
    """Offload keys of the first group."""
    return [bytes([tag, index // 256, index % 256, 1]) * 8 + bytes(4) for index in range(count)]


def block_of(value: int) -> bytes:
    return bytes([value % 251, value // 251]) * (BLOCK_BYTES // 2)


class LookupRig:
    """A lookup cache over a manual store."""

    def __init__(self, *auto: str) -> None:
        self.clock = ManualClock()
        self.store = ManualStore(NAMESPACE, 16, auto)
        self.guarded = OffloadKeyMap(self.store)
        self.lookups = LookupCache(self.guarded, timeout_ms=MAX_WAIT_MS, clock=self.clock)

    def look_up(
        self, keys: Sequence[bytes], name: str = "r", *, backwards: bool = False
    ) -> list[LookupStatus]:
        """The lookups of one request in a step, then the end of the step. Returns the answers."""
        order = list(enumerate(keys, start=1))
        found = {
            key: self.lookups.lookup(key, name, 0, position)
            for position, key in (reversed(order) if backwards else order)
        }
        self.lookups.send_batches()
        return [found[key] for key in keys]

    def next_step(self, keys: Sequence[bytes], name: str = "r") -> list[LookupStatus]:
        """The lookups of the next step."""
        self.lookups.collect()
        return self.look_up(keys, name)


class JobRig:
    """Jobs between rows of a pool and a manual store."""

    def __init__(self, *auto: str, slots: int = 16, blocks: int = 200) -> None:
        self.clock = ManualClock()
        self.store = ManualStore(NAMESPACE, slots, auto)
        self.rows = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        self.jobs = OffloadJobs(
            OffloadKeyMap(self.store), self.rows, max_wait_ms=MAX_WAIT_MS, clock=self.clock
        )

    def fill(self, row: int, value: int) -> bytes:
        self.rows[row] = np.frombuffer(block_of(value), np.uint8)
        return block_of(value)

    def outcomes(self, count: int = 1) -> list[JobOutcome]:
        found: list[JobOutcome] = []
        end_s = time.monotonic() + HANG_LIMIT_S
        while len(found) < count:
            found += self.jobs.finished()
            assert time.monotonic() < end_s, "a job has not ended"
        return sorted(found, key=lambda each: each.job_id)

    def close(self) -> None:
        self.jobs.close()
        assert not self.jobs.busy or self.jobs.finished()
        self.store.check_idle()
