"""The counters of concurrent workers are exact."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from store_rig import SPACE, flush_to_tiers, hashes, make_store, save

from kvstore.tiers.memory import MemoryTier

BLOCKS = 9
ROUNDS = 40


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """The interpreter switches threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_every_write_is_counted(frequent_switches: None) -> None:
    for number in range(ROUNDS):
        tier = MemoryTier()
        with make_store(tier) as store:
            assert save(store.session(SPACE), hashes(BLOCKS)).dropped == 0
            flush_to_tiers(store)
            assert store.stats()["tiers"][tier.name]["writes"] == BLOCKS, f"round {number}"
