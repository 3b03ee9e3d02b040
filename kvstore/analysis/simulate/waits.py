"""How much of what is held a request takes, and what it waits for it: in virtual time.

A request arrives and asks at once. What lies in L2 can be copied to the device whenever the engine
gets to it; what lies below arrives block by block over the tier's one channel, which serves
requests in the order of their arrival. The prefetch policy is the store's own: it is asked as the
store asks it, and ends the waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.analysis.simulate.tiers import L2, L3
from kvstore.analysis.simulate.two_ends import World, run_two_ends
from kvstore.errors import ConfigError
from kvstore.prefetch.adaptive import Adaptive
from kvstore.prefetch.costs import CostModel
from kvstore.prefetch.policy import PREFETCH_POLICIES, PrefetchPolicy, Verdict, prefetch_policy

ALWAYS: Final = "always"
"""Load whatever is held, however long it takes."""
NEVER: Final = "never"
"""Load nothing: compute all that L1 lacks."""
LOADING: Final = (ALWAYS, NEVER, *PREFETCH_POLICIES)
MIN_TOKENS: Final = 256
"""Below it no prefetch policy starts one; the store's default."""
PRECISION_MS: Final = 0.1
"""To which the moment of a policy's verdict is found."""


@dataclass(frozen=True)
class Taken:
    """What a request took.

    blocks: leading blocks that it has in the end, loaded or computed ahead of the rest. wait_s:
    from its arrival until it waits for them no more; load_s: from then on, with the engine, to copy
    them to the device. computed: those of them that it computed, while it waited for others, and
    computed_s: how long it did.
    """

    blocks: int
    wait_s: float
    load_s: float
    computed: frozenset[int] = frozenset()
    computed_s: float = 0.0


class Waits:
    """One prefetch policy, or ALWAYS or NEVER, over tiers of given speeds."""

    def __init__(self, name: str, costs: CostModel, min_tokens: int = MIN_TOKENS) -> None:
        if name not in LOADING:
            raise ConfigError(f"unknown prefetch policy {name!r}; one of {', '.join(LOADING)}")
        self.name = name
        self._policy: PrefetchPolicy | None = None
        if name not in (ALWAYS, NEVER):
            self._policy = prefetch_policy(name)
        self._costs = costs
        self._min_tokens = min_tokens
        self._channel_free_s = 0.0

    def take(
        self,
        now_s: float,
        found: Sequence[str],
        sizes: Sequence[int],
        tokens: Sequence[int],
        can_start_s: float,
        first_token: int = 0,
    ) -> Taken:
        """What a request that arrives now takes of the blocks found.

        sizes, tokens: bytes of each block, and prompt tokens up to the end of each. can_start_s:
        from now until an engine is free. first_token: where the run begins.
        """
        if self.name == NEVER or not found:
            return Taken(0, 0.0, 0.0)
        arrive_s = self._arrivals(now_s, found, sizes)
        below = found.count(L3)
        if self._policy is None or not below:
            blocks, wait_s = len(found), arrive_s[-1]
        elif tokens[len(found) - 1] < self._min_tokens:
            blocks, wait_s = found.index(L3), 0.0
        elif isinstance(self._policy, Adaptive):
            starts = (first_token, *tokens[: len(found)])
            return self._two_ends(self._policy, now_s, found, sizes, starts, can_start_s)
        else:
            blocks, wait_s = self._verdict(self._policy, arrive_s, tokens, can_start_s)
        if below:
            self._channel_free_s = max(
                self._channel_free_s, now_s + min(wait_s, arrive_s[len(found) - 1])
            )
        return Taken(blocks, wait_s, self._copy_s(found[:blocks], sizes))

    def _arrivals(self, now_s: float, found: Sequence[str], sizes: Sequence[int]) -> list[float]:
        """Seconds from now until each block, and all before it, lie in L2."""
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

    def computed(self, start: int, end: int, seconds: float) -> None:
        """So long did tokens start..end of a request take."""
        if isinstance(self._policy, Adaptive):
            self._policy.computed(start, end - start, seconds)

    def _two_ends(
        self,
        policy: Adaptive,
        now_s: float,
        found: Sequence[str],
        sizes: Sequence[int],
        starts: Sequence[int],
        can_start_s: float,
    ) -> Taken:
        """The run from both ends at once; see `two_ends`."""
        below = [n for n, tier in enumerate(found) if tier == L3]
        from_end = self._arrivals(now_s, [L3] * len(below), [sizes[n] for n in reversed(below)])
        prefill = self._costs.prefill
        world = World(
            tiers=found,
            starts=starts,
            arrive_s=from_end,
            computing_s=prefill.seconds,
            can_start_s=can_start_s,
        )
        met = run_two_ends(policy, world, policy.cap_ms / 1e3)
        self._channel_free_s = max(self._channel_free_s, now_s + met.channel_s)
        load_s = self._copy_s(found, sizes)
        return Taken(len(found), met.seconds, load_s, met.computed, met.computing_s)

    def _copy_s(self, found: Sequence[str], sizes: Sequence[int]) -> float:
        """Seconds to copy those of the blocks that lie in L2 to the device."""
        blocks = found.count(L2)
        if blocks == len(found):
            nbytes = sum(sizes[:blocks])
        else:
            nbytes = sum(size for tier, size in zip(found, sizes, strict=False) if tier == L2)
        return self._costs.tier(L2).seconds(nbytes, blocks) if blocks else 0.0

    def _verdict(
        self,
        policy: PrefetchPolicy,
        arrive_s: Sequence[float],
        tokens: Sequence[int],
        can_start_s: float,
    ) -> tuple[int, float]:
        """Blocks that are here when the policy says go, and when it does.

        A policy that says go at some moment says so ever after, so the moment is found by halving.
        """
        done_ms = arrive_s[-1] * 1e3

        def go(elapsed_ms: float) -> bool:
            ready = bisect_right(arrive_s, elapsed_ms / 1e3)
            verdict = policy.verdict(
                elapsed_ms=elapsed_ms,
                tokens_wanted=tokens[len(arrive_s) - 1],
                tokens_ready=tokens[ready - 1] if ready else 0,
                done=elapsed_ms >= done_ms,
                can_start=elapsed_ms >= can_start_s * 1e3,
            )
            return verdict is Verdict.GO

        low_ms, high_ms = 0.0, done_ms
        if go(0.0):
            high_ms = 0.0
        while high_ms - low_ms > PRECISION_MS:
            middle_ms = (low_ms + high_ms) / 2
            if go(middle_ms):
                high_ms = middle_ms
            else:
                low_ms = middle_ms
        # The last block's own arrival is a moment of its own, a hair after rounding.
        wait_s = arrive_s[-1] if high_ms >= done_ms else high_ms / 1e3
        return bisect_right(arrive_s, wait_s), wait_s
