"""How many cached blocks a request loads, and how long it waits for them, in virtual time.

A request looks up its blocks on arrival. Blocks in L2 can be copied to the device as soon as the
engine is free. Blocks from below arrive one by one over the tier's single channel, which serves
requests in order of arrival. The prefetch policy is the store's own. It is called as the store
calls it, and ends the wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.analysis.simulate.split_load import SimulatedRequest, run_split_load
from kvstore.analysis.simulate.tiers import L2, L3
from kvstore.errors import ConfigError
from kvstore.prefetch.adaptive import Adaptive
from kvstore.prefetch.costs import CostModel
from kvstore.prefetch.factory import PREFETCH_POLICIES, prefetch_policy
from kvstore.prefetch.policy import PrefetchPolicy, WaitDecision

ALWAYS: Final = "always"
"""Load all cached blocks, however long it takes."""
NEVER: Final = "never"
"""Load nothing: compute all blocks that L1 does not have."""
LOAD_POLICIES: Final = (ALWAYS, NEVER, *PREFETCH_POLICIES)
MIN_TOKENS: Final = 256
"""Below this many tokens no prefetch policy starts a load. The store's default."""
PRECISION_MS: Final = 0.1
"""Precision of the time at which a policy ends the wait."""


@dataclass(frozen=True)
class LoadResult:
    """Result of loading for one request.

    blocks: leading blocks that are ready in the end, loaded or computed during the wait. wait_s:
    seconds from arrival until the request waits no longer. load_s: seconds from then on to copy the
    blocks to the device. computed: indices of the blocks that the engine computed during the wait.
    computed_s: seconds of that computing.
    """

    blocks: int
    wait_s: float
    load_s: float
    computed: frozenset[int] = frozenset()
    computed_s: float = 0.0


class WaitModel:
    """One prefetch policy, ALWAYS or NEVER, over tiers of given speeds."""

    def __init__(self, name: str, costs: CostModel, min_tokens: int = MIN_TOKENS) -> None:
        if name not in LOAD_POLICIES:
            known = ", ".join(LOAD_POLICIES)
            raise ConfigError(f"unknown load policy {name!r}; use one of {known}")
        self.name = name
        self._policy: PrefetchPolicy | None = None
        if name not in (ALWAYS, NEVER):
            self._policy = prefetch_policy(name)
        self._costs = costs
        self._min_tokens = min_tokens
        self._channel_free_s = 0.0

    def load(
        self,
        now_s: float,
        found: Sequence[str],
        sizes: Sequence[int],
        tokens: Sequence[int],
        can_start_s: float,
        first_token: int = 0,
    ) -> LoadResult:
        """Return how many of the found blocks a request that arrives now loads.

        sizes: bytes of each block. tokens: prompt tokens up to the end of each block. can_start_s:
        seconds until an engine is free. first_token: tokens before the first block.
        """
        if self.name == NEVER or not found:
            return LoadResult(0, 0.0, 0.0)
        arrive_s = self._arrivals(now_s, found, sizes)
        below = found.count(L3)
        if self._policy is None or not below:
            blocks, wait_s = len(found), arrive_s[-1]
        elif tokens[len(found) - 1] < self._min_tokens:
            blocks, wait_s = found.index(L3), 0.0
        elif isinstance(self._policy, Adaptive):
            starts = (first_token, *tokens[: len(found)])
            return self._split_load(self._policy, now_s, found, sizes, starts, can_start_s)
        else:
            blocks, wait_s = self._wait_for_policy(self._policy, arrive_s, tokens, can_start_s)
        if below:
            self._channel_free_s = max(
                self._channel_free_s, now_s + min(wait_s, arrive_s[len(found) - 1])
            )
        return LoadResult(blocks, wait_s, self._copy_s(found[:blocks], sizes))

    def _arrivals(self, now_s: float, found: Sequence[str], sizes: Sequence[int]) -> list[float]:
        """Return the seconds until each block, with all blocks before it, is in L2."""
        if L3 not in found:
            return [0.0] * len(found)
        arrive_s: list[float] = []
        last_s, nbytes, blocks = 0.0, 0, 0
        start_s = max(0.0, self._channel_free_s - now_s)
        for tier, size in zip(found, sizes, strict=False):
            if tier == L3:
                nbytes, blocks = nbytes + size, blocks + 1
                last_s = start_s + self._costs.tier(L3).seconds(nbytes, blocks)
            arrive_s.append(last_s)
        return arrive_s

    def record_prefill(self, start: int, end: int, seconds: float) -> None:
        """Tell the policy how long computing tokens start..end of a request took."""
        if isinstance(self._policy, Adaptive):
            self._policy.record_prefill(start, end - start, seconds)

    def _split_load(
        self,
        policy: Adaptive,
        now_s: float,
        found: Sequence[str],
        sizes: Sequence[int],
        starts: Sequence[int],
        can_start_s: float,
    ) -> LoadResult:
        """Load from the end while computing from the front; see `split_load`."""
        below = [n for n, tier in enumerate(found) if tier == L3]
        from_end = self._arrivals(now_s, [L3] * len(below), [sizes[n] for n in reversed(below)])
        prefill = self._costs.prefill
        request = SimulatedRequest(
            tiers=found,
            starts=starts,
            arrive_s=from_end,
            computing_s=prefill.seconds,
            can_start_s=can_start_s,
        )
        result = run_split_load(policy, request, policy.max_wait_ms / 1e3)
        self._channel_free_s = max(self._channel_free_s, now_s + result.channel_s)
        load_s = self._copy_s(found, sizes)
        return LoadResult(len(found), result.seconds, load_s, result.computed, result.computing_s)

    def _copy_s(self, found: Sequence[str], sizes: Sequence[int]) -> float:
        """Return the seconds to copy the blocks that are in L2 to the device."""
        blocks = found.count(L2)
        if blocks == len(found):
            nbytes = sum(sizes[:blocks])
        else:
            nbytes = sum(size for tier, size in zip(found, sizes, strict=False) if tier == L2)
        return self._costs.tier(L2).seconds(nbytes, blocks) if blocks else 0.0

    def _wait_for_policy(
        self,
        policy: PrefetchPolicy,
        arrive_s: Sequence[float],
        tokens: Sequence[int],
        can_start_s: float,
    ) -> tuple[int, float]:
        """Return the blocks that are ready when the policy ends the wait, and the wait.

        Once a policy says GO it does not change its decision, so bisection finds the time.
        """
        done_ms = arrive_s[-1] * 1e3

        def go(elapsed_ms: float) -> bool:
            ready = bisect_right(arrive_s, elapsed_ms / 1e3)
            decision = policy.decide(
                elapsed_ms=elapsed_ms,
                tokens_wanted=tokens[len(arrive_s) - 1],
                tokens_ready=tokens[ready - 1] if ready else 0,
                done=elapsed_ms >= done_ms,
                can_start=elapsed_ms >= can_start_s * 1e3,
            )
            return decision is WaitDecision.GO

        low_ms, high_ms = 0.0, done_ms
        if go(0.0):
            high_ms = 0.0
        while high_ms - low_ms > PRECISION_MS:
            middle_ms = (low_ms + high_ms) / 2
            if go(middle_ms):
                high_ms = middle_ms
            else:
                low_ms = middle_ms
        # The arrival of the last block can be slightly off after rounding.
        wait_s = arrive_s[-1] if high_ms >= done_ms else high_ms / 1e3
        return bisect_right(arrive_s, wait_s), wait_s
