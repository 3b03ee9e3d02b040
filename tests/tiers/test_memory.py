"""The in-memory reference implementation passes the common tier tests."""

from __future__ import annotations

from pathlib import Path

from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers import memory
from kvstore.tiers.base import Tier


class TestMemory(TierSuite):
    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return memory.open(memory.Config(capacity=capacity_bytes))

    def test_the_least_recently_used_goes_first(self, tmp_path: Path) -> None:
        tier, buffer = self.open_tier(tmp_path, 3 * 8192), FrameBuffer(4096)
        for number in range(3):
            tier.write(*buffer.fill(key_of(number), 4096))
        tier.read(key_of(0), buffer.header, buffer.payload)
        tier.write(*buffer.fill(key_of(3), 4096))
        assert tier.contains([key_of(n) for n in range(4)]) == [True, False, True, True]
