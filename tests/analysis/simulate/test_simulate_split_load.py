"""A replay with the adaptive policy: times of loading and computing in parallel."""

from __future__ import annotations

from statistics import median

import pytest

from kvstore.analysis.simulate.waits import ALWAYS, NEVER, WaitModel
from kvstore.prefetch.costs import CostModel, PrefillCurve, TierSpeed

BLOCK_TOKENS = 512
BLOCK_BYTES = BLOCK_TOKENS * 131_072
RATE = 15_000.0


def waits(name: str, bytes_per_s: float) -> WaitModel:
    tiers = (TierSpeed("l2", 1e12), TierSpeed("l3", bytes_per_s, 0.001))
    costs = CostModel(PrefillCurve.at_rate(RATE), tiers, BLOCK_BYTES, BLOCK_TOKENS)
    return WaitModel(name, costs)


def seconds(name: str, bytes_per_s: float, blocks: int, leading: int = 0) -> list[float]:
    """Return the waits of 20 requests far apart, with all but the leading blocks below L2."""
    made = waits(name, bytes_per_s)
    found = ["l2"] * leading + ["l3"] * (blocks - leading)
    ends = [BLOCK_TOKENS * (n + 1) for n in range(blocks)]
    waited = []
    for index in range(20):
        result = made.load(1000.0 * index, found, [BLOCK_BYTES] * blocks, ends, 0.0)
        rest_s = (blocks - result.blocks) * BLOCK_TOKENS / RATE
        made.record_prefill(0, BLOCK_TOKENS, BLOCK_TOKENS / RATE)
        waited.append(result.wait_s + rest_s)
    return waited


@pytest.mark.parametrize("gigabytes", [0.02, 0.2, 1.0, 2.0, 4.0, 40.0])
@pytest.mark.parametrize("leading", [0, 9])
def test_never_slower_than_the_better_of_the_two(gigabytes: float, leading: int) -> None:
    blocks = 40
    always = seconds(ALWAYS, gigabytes * 1e9, blocks, leading)[-1]
    # Blocks in L2 are loaded whatever the policy.
    never = seconds(NEVER, gigabytes * 1e9, blocks - leading)[-1]
    # Some requests only explore another mode.
    adaptive = median(seconds("adaptive", gigabytes * 1e9, blocks, leading)[-9:])
    assert adaptive <= 1.05 * min(always, never)
    if gigabytes == 2.0:
        assert adaptive < 0.65 * min(always, never)


def test_computed_blocks_are_not_read() -> None:
    made = waits("adaptive", 2e9)
    found, ends = ["l3"] * 40, [BLOCK_TOKENS * (n + 1) for n in range(40)]
    for index in range(10):
        result = made.load(1000.0 * index, found, [BLOCK_BYTES] * 40, ends, 0.0)
    assert result.blocks == 40
    assert 10 < len(result.computed) < 30
    assert result.computed == frozenset(range(len(result.computed)))
    assert result.computed_s == pytest.approx(len(result.computed) * BLOCK_TOKENS / RATE)
