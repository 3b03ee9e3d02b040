"""What many workers do at once is counted whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from store_rig import SPACE, hashes, make_store, save, spill_to_tiers

from kvstore.tiers.memory import MemoryTier

BLOCKS = 9
ROUNDS = 40


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_no_write_is_left_out_of_the_count(restless: None) -> None:
    for number in range(ROUNDS):
        tier = MemoryTier()
        with make_store(tier) as store:
            assert save(store.session(SPACE), hashes(BLOCKS)).dropped == 0
            spill_to_tiers(store)
            assert store.stats()["tiers"][tier.name]["writes"] == BLOCKS, f"round {number}"
