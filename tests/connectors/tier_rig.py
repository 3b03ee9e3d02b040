"""Lookups and transfers of the tier over a manual store."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from manual_store import ManualClock, ManualStore

from kvstore.blocks.key import Namespace
from kvstore.connectors.vllm.tier.jobs import JobEnd, Transfers
from kvstore.connectors.vllm.tier.lookups import Lookups
from kvstore.connectors.vllm.tier.offload_keys import UnitStore
from kvstore.interface import Answer

UNIT = 64
NAMESPACE = Namespace(
    model="units", dtype="int8", layers=1, kv_heads=1, head_dim=UNIT, head_dim_v=0, block_tokens=1
)
DEADLINE_MS = 500.0
HANG_LIMIT_S = 20.0
ALL = ("match", "load", "save")


def keys_of(count: int, tag: int = 0) -> list[bytes]:
    """Keys of the first group."""
    return [bytes([tag, index // 256, index % 256, 1]) * 8 + bytes(4) for index in range(count)]


def unit(value: int) -> bytes:
    return bytes([value % 251, value // 251]) * (UNIT // 2)


class Asking:
    """Lookups over a manual store."""

    def __init__(self, *auto: str) -> None:
        self.clock = ManualClock()
        self.store = ManualStore(NAMESPACE, 16, auto)
        self.guarded = UnitStore(self.store)
        self.lookups = Lookups(self.guarded, deadline_ms=DEADLINE_MS, clock=self.clock)

    def ask(
        self, keys: Sequence[bytes], name: str = "r", *, backwards: bool = False
    ) -> list[Answer]:
        """One request's lookups in a step, then its end. The answers by key."""
        order = list(enumerate(keys, start=1))
        found = {
            key: self.lookups.lookup(key, name, 0, position)
            for position, key in (reversed(order) if backwards else order)
        }
        self.lookups.send()
        return [found[key] for key in keys]

    def again(self, keys: Sequence[bytes], name: str = "r") -> list[Answer]:
        """The next step."""
        self.lookups.take_in()
        return self.ask(keys, name)


class Moving:
    """Transfers between rows of a pool and a manual store."""

    def __init__(self, *auto: str, slots: int = 16, units: int = 200) -> None:
        self.clock = ManualClock()
        self.store = ManualStore(NAMESPACE, slots, auto)
        self.rows = np.zeros((units, UNIT), np.uint8)
        self.transfers = Transfers(
            UnitStore(self.store), self.rows, deadline_ms=DEADLINE_MS, clock=self.clock
        )

    def fill(self, row: int, value: int) -> bytes:
        self.rows[row] = np.frombuffer(unit(value), np.uint8)
        return unit(value)

    def ends(self, count: int = 1) -> list[JobEnd]:
        found: list[JobEnd] = []
        end_s = time.monotonic() + HANG_LIMIT_S
        while len(found) < count:
            found += self.transfers.finished()
            assert time.monotonic() < end_s, "a job that never ends"
        return sorted(found, key=lambda each: each.job_id)

    def close(self) -> None:
        self.transfers.close()
        assert not self.transfers.busy or self.transfers.finished()
        self.store.check_idle()
