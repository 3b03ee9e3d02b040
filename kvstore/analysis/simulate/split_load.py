"""The adaptive policy in virtual time: a request computes its blocks from the front, while blocks
from below L2 arrive from the end.

The policy is the engine's own. It is called as the engine calls it: before each step, and at each
arrival while the request waits. The simulation decides how long steps and loads really take.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.prefetch.adaptive import L2, Action, Adaptive, Decision, LoadTracker

RELOOK_S: Final = 0.005
"""Seconds until a waiting request is checked again if no block arrived."""
LOOKS: Final = 16
"""Approximate number of checks during the wait for one load."""


@dataclass(frozen=True)
class SimulatedRequest:
    """One request, and the real durations of its steps and loads.

    tiers: the tier of each block. starts: tokens before each block, then the end of the last.
    arrive_s: seconds from the request's arrival until that many blocks from below L2 have arrived,
    the last block first. computing_s(a, b): seconds to compute tokens a..b. can_start_s: seconds
    until the engine is free. slowed: factor by which loads slow down while the engine computes.
    land_s: seconds to copy one loaded block into its pages, after all have arrived.
    """

    tiers: Sequence[str]
    starts: Sequence[int]
    arrive_s: Sequence[float]
    computing_s: Callable[[int, int], float]
    can_start_s: float = 0.0
    slowed: float = 1.0
    copy_s: float = 0.0


@dataclass(frozen=True)
class SplitLoadResult:
    """Result. seconds: until all blocks were ready. computing_s: of those, seconds of computing.
    computed: indices of blocks that were computed although they were cached. channel_s: seconds
    until the tier below finished this request."""

    seconds: float
    computing_s: float
    computed: frozenset[int]
    channel_s: float


def run_split_load(
    policy: Adaptive, request: SimulatedRequest, limit_s: float = float("inf")
) -> SplitLoadResult:
    """Simulate one request under the policy. After limit_s it waits for nothing more."""
    return _Run(policy, request, limit_s).run()


class _Run:
    def __init__(self, policy: Adaptive, request: SimulatedRequest, limit_s: float) -> None:
        self._policy = policy
        self._request = request
        self._limit_s = limit_s
        self._below = [n for n, tier in enumerate(request.tiers) if tier != L2]
        self._now_s = 0.0
        self._computing_s = 0.0
        self._computed: set[int] = set()
        size = max(1, (request.starts[-1] - request.starts[0]) // len(request.tiers))
        self._tracker = LoadTracker(policy, Counter(request.tiers), size)
        self._max_arrivals = len(self._below)
        self._load_s = 0.0

    def run(self) -> SplitLoadResult:
        request, at = self._request, 0
        below = [request.tiers[n] for n in self._below]
        if below and not self._tracker.choose_mode(request.starts[self._below[0]], below):
            self._max_arrivals = 0
        self._pass(request.can_start_s)
        if request.can_start_s:
            self._tracker.invalidate()
        while at < len(request.tiers):
            self._tracker.record_arrivals(self._arrived_by_tier(), self._now_s)
            missing = self._missing(at)
            at = self._step(at, missing) if missing and missing[0] == at else at + 1
        loaded = min(self._max_arrivals, len(self._below) - len(self._computed))
        self._now_s += request.copy_s * loaded
        self._tracker.record_duration(self._now_s)
        channel_s = request.arrive_s[loaded - 1] if loaded else 0.0
        return SplitLoadResult(self._now_s, self._computing_s, frozenset(self._computed), channel_s)

    def _step(self, at: int, missing: list[int]) -> int:
        """Wait, compute, or cancel the load and compute. Returns the new frontier."""
        arrived = self._arrived_blocks()
        if arrived == self._max_arrivals:
            return self._compute(at, len(missing))
        decision = self._choose(missing)
        ends = self._now_s >= self._limit_s or decision.action is Action.CANCEL
        if ends or decision.blocks >= len(missing):
            tiers = {self._request.tiers[n] for n in missing}
            self._tracker.record_missing(tiers, self._arrived_by_tier(), self._now_s)
            self._max_arrivals = arrived
            return self._compute(at, len(missing))
        if decision.action is Action.WAIT:
            # A replay has many of these: check a long or slow load less often than at each arrival.
            last = self._max_arrivals - 1
            next_s = self._request.arrive_s[min(arrived + len(missing) // LOOKS, last)]
            relook_s = max(RELOOK_S, self._now_s / LOOKS)
            self._pass(min(next_s - self._load_s, relook_s, max(self._limit_s - self._now_s, 0.0)))
            return at
        return self._compute(at, decision.blocks)

    def _compute(self, at: int, blocks: int) -> int:
        """Compute one step of the engine. Returns its end."""
        tiers = self._request.tiers
        end = at
        while end < len(tiers) and end - at < blocks and tiers[end] != L2:
            end += 1
        start, stop = self._request.starts[at], self._request.starts[end]
        seconds = self._request.computing_s(start, stop)
        self._pass(seconds, self._request.slowed if self._missing(at) else 1.0)
        self._computing_s += seconds
        self._policy.record_prefill(start, stop - start, seconds)
        self._computed.update(range(at, end))
        return end

    def _choose(self, missing: Sequence[int]) -> Decision:
        tiers = [self._request.tiers[n] for n in missing]
        start = self._request.starts[missing[0]]
        return self._tracker.decide_next(start, tiers, self._arrived_by_tier(), self._now_s)

    def _pass(self, seconds: float, slowed: float = 1.0) -> None:
        """Let time pass. A load progresses slower by `slowed`."""
        self._now_s += seconds
        self._load_s += seconds / slowed

    def _arrived_blocks(self) -> int:
        """Return the number of blocks that have arrived, counted from the end."""
        return min(bisect_right(self._request.arrive_s, self._load_s), self._max_arrivals)

    def _arrived_by_tier(self) -> Counter[str]:
        arrived = self._arrived_blocks()
        return Counter(self._request.tiers[n] for n in self._below[len(self._below) - arrived :])

    def _missing(self, at: int) -> list[int]:
        """Return the blocks from `at` on that have not arrived."""
        return [n for n in self._below[: len(self._below) - self._arrived_blocks()] if n >= at]
