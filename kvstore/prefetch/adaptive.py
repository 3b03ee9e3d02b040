"""The adaptive prefetch policy: load the blocks that arrive sooner than they could be computed.

A cached prefix can be had from both ends at once: the engine computes its first blocks while the
others are loaded, the last one first. The meeting point need not be known beforehand. The policy
decides two things:

- Once, before the load starts, its mode: load all, compute all, or both. It compares the estimates
  of the three modes with how long they took before (`load_modes`).
- At each engine step: compute a number of blocks and ask again; or wait, because the others arrive
  before a step would end; or cancel the rest of the load, because it saves nothing.

Every decision uses estimates (`estimates`), corrected by the progress of this load. An engine step
cannot be interrupted. So the engine computes only about half of the way to the expected meeting
point and then asks again: a wrong estimate costs little, and no estimate is needed at first.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvstore.prefetch.costs import meet
from kvstore.prefetch.estimates import LoadTimes, PrefillTimes
from kvstore.prefetch.load_modes import COMPUTE_GAIN_MIN, LOAD_GAIN_MIN, LoadMode, LoadModes
from kvstore.prefetch.policy import DEFAULT_MAX_WAIT_MS, Timeout, WaitDecision

QUANTUM_TOKENS: Final = 64
"""Minimum tokens of an engine step while blocks are pending."""
UNSEEN_STEP_FACTOR: Final = 4.0
"""A step longer than any seen may be this many times faster than estimated."""
PATIENCE_FACTOR: Final = 1.5
"""With mode LOAD, wait this many times the expected time before deciding anew."""
SLOW_LOAD_FACTOR: Final = 1.5
"""With mode LOAD, compute as well if loading alone takes this many times as long as both."""
STEP_WASTE: Final = 1.1
"""Split a prefill into two steps if they take at most this many times as long as one."""
LATE_FACTOR: Final = 1.5
"""A load without any block after this many times the estimate is late."""
FEW_BLOCKS: Final = 8
"""Number of arrived blocks at which a load's own pace weighs as much as the estimate."""
MIN_S: Final = 1e-6
"""Shorter times are not compared."""
REPORT_STEP: Final = 1.5
"""The arrivals of one load are recorded each time their number has grown by this factor."""
MAX_TIERS: Final = 32
"""Maximum tiers with recorded times."""
L2: Final = "l2"


class Action(enum.Enum):
    """What the engine should do now. CANCEL: stop the load and compute the rest."""

    WAIT = "wait"
    COMPUTE = "compute"
    CANCEL = "cancel"


@dataclass(frozen=True)
class Decision:
    """blocks: number of blocks to compute before asking again; 0 unless COMPUTE."""

    action: Action
    blocks: int = 0


WAIT: Final = Decision(Action.WAIT)
CANCEL: Final = Decision(Action.CANCEL)


@dataclass(frozen=True)
class LoadState:
    """State of one request's load at one moment.

    start: tokens before the first pending block. pending: the tier of each pending block, in token
    order; the last one arrives first. arrived: blocks that arrived since the load began, by tier.
    elapsed_s: seconds since the load began. mode: chosen mode; None: not chosen. is_trial: the mode
    was chosen only to measure it.
    """

    start: int
    block_tokens: int
    pending: Sequence[str]
    arrived: Mapping[str, int]
    elapsed_s: float
    mode: LoadMode | None = None
    is_trial: bool = False


@dataclass(frozen=True)
class ModeChoice:
    """The chosen mode of a load and its expected time; None: unknown.

    is_trial: the mode is chosen only to measure it.
    """

    mode: LoadMode
    expected_s: float | None = None
    is_trial: bool = False


@dataclass(eq=False)
class Adaptive:
    """Not thread-safe: only the engine's loop thread may use it.

    unsure: the policy that decides while nothing is known.
    """

    max_wait_ms: float = DEFAULT_MAX_WAIT_MS
    unsure: Timeout = field(default_factory=Timeout)
    name: str = "adaptive"
    prefill: PrefillTimes = field(default_factory=PrefillTimes)
    loads: dict[str, LoadTimes] = field(default_factory=dict)
    """Load times by tier while the engine did not compute."""
    loads_while_computing: dict[str, LoadTimes] = field(default_factory=dict)
    """Load times by tier while the engine computed. Computing may use the same cores, and arrivals
    are seen only between steps."""
    modes: LoadModes = field(default_factory=LoadModes)
    counts: Counter[str] = field(default_factory=Counter)

    # Measurements.

    def record_prefill(self, start: int, tokens: int, seconds: float) -> None:
        """The engine computed `tokens` tokens after `start` others in one step of `seconds`."""
        self.prefill.add(start, tokens, seconds)

    def record_arrival(
        self, tier: str, blocks: int, low_s: float, high_s: float, *, while_computing: bool = False
    ) -> None:
        """Block number `blocks` of a load arrived from this tier between low_s and high_s.

        Both are seconds since the load began; high_s is infinite if the block has not arrived.
        """
        by_tier = self.loads_while_computing if while_computing else self.loads
        times = by_tier.get(tier)
        if times is None:
            if len(by_tier) >= MAX_TIERS:
                return
            times = by_tier[tier] = LoadTimes()
        times.add(blocks, low_s, high_s)

    # Decisions.

    def choose_mode(self, state: LoadState) -> ModeChoice:
        """Choose the mode of a load that has not started: all its blocks are pending."""
        both = _SplitEstimate(self, replace(state, mode=LoadMode.BOTH))
        if not both.known:
            return ModeChoice(LoadMode.BOTH)
        _, both_s = both.meet()
        load_s = _SplitEstimate(self, replace(state, mode=LoadMode.LOAD)).loading_s(0)
        size, end = state.block_tokens, state.start + both.blocks * state.block_tokens
        # The tokens after the prefix are computed in any case. They take a separate step unless
        # the prefix is computed too. Their number is unknown; one block is assumed.
        separate_s = self.prefill.seconds(end, end + size)
        joined_s = max(0.0, self.prefill.seconds(state.start, end + size) - separate_s)
        estimate_s = {LoadMode.LOAD: load_s, LoadMode.BOTH: both_s, LoadMode.COMPUTE: joined_s}
        # A tier that became faster is noticed first while the engine computes.
        best_case_s = {**estimate_s, LoadMode.LOAD: min(load_s, both.loading_s(0))}
        if not all(tier in self.loads for tier in both.remaining):
            best_case_s[LoadMode.LOAD] = 0.0  # times seen while computing may be far off
        if end - state.start > 2 * self.prefill.longest:
            best_case_s[LoadMode.COMPUTE] /= UNSEEN_STEP_FACTOR  # estimated as several steps
        mode, expected_s, is_trial = self.modes.choose(both.blocks, estimate_s, best_case_s)
        self.counts[f"mode_{mode.value}"] += 1
        self.counts["trials"] += is_trial
        return ModeChoice(mode, expected_s, is_trial)

    def record_duration(self, mode: LoadMode, blocks: int, took_s: float) -> None:
        """Record how long a load of this mode took, from its start to its last copy."""
        self.modes.record_duration(mode, blocks, took_s)

    def decide_next(self, state: LoadState) -> Decision:
        """Decide about the pending blocks; there is at least one."""
        decision = self._decide_next(state)
        self.counts[decision.action.value] += 1
        return decision

    def _decide_next(self, state: LoadState) -> Decision:
        if state.mode is LoadMode.COMPUTE:
            return CANCEL
        both = _SplitEstimate(self, state)
        blocks, quantum = both.blocks, both.quantum
        if not both.known:
            return Decision(Action.COMPUTE, quantum)
        best, both_s = both.meet()
        if state.mode is LoadMode.LOAD and both.loading_s(0) <= SLOW_LOAD_FACTOR * both_s:
            return self._wait(both)
        if both.computing_s(blocks) <= both_s * (1 + LOAD_GAIN_MIN):
            # Loading saves nothing: cancel it, unless the load is a trial.
            half = max(quantum, -(-blocks // 2))
            return Decision(Action.COMPUTE, half) if state.is_trial else CANCEL
        if not best or both.loading_s(0) <= both_s * (1 + COMPUTE_GAIN_MIN):
            return self._wait(both)
        half = max(quantum, -(-best // 2))
        if half < best and 2 * both.computing_s(half) > STEP_WASTE * both.computing_s(best):
            half = best
        return Decision(Action.COMPUTE, min(half, best))

    def _wait(self, both: _SplitEstimate) -> Decision:
        """Wait for the load. If it is late, compute a step: its arrival time is unknown then, and a
        step costs little."""
        patience_s = both.computing_s(both.quantum) / 2
        late = any(self._is_late(tier, both.state, patience_s) for tier in both.remaining)
        return Decision(Action.COMPUTE, both.quantum) if late else WAIT

    def _times(self, tier: str, mode: LoadMode | None) -> LoadTimes | None:
        """Load times of this tier, preferably of loads with this mode."""
        order = [self.loads.get(tier), self.loads_while_computing.get(tier)]
        if mode is not LoadMode.LOAD:
            order.reverse()
        return next((times for times in order if times is not None and times.known), None)

    def _is_late(self, tier: str, state: LoadState, patience_s: float = 0.0) -> bool:
        """Whether no block of the tier has arrived although one should have."""
        times = self._times(tier, state.mode)
        if times is None or state.arrived.get(tier):
            return False
        return state.elapsed_s > LATE_FACTOR * times.seconds(1) + patience_s

    def _remaining(self, tier: str, state: LoadState) -> tuple[float, float] | None:
        """(a, b): the next n blocks of this tier arrive in a + n * b seconds. None: unknown."""
        elapsed_s, came = state.elapsed_s, state.arrived.get(tier, 0)
        times = self._times(tier, state.mode)
        if times is None:
            if tier == L2:
                return (0.0, 0.0)
            return (0.0, elapsed_s / came) if came else None
        first_s, block_s = times.line
        if not came:
            # A late load may take as long again.
            late = self._is_late(tier, state)
            return (elapsed_s if late else first_s - elapsed_s), block_s
        pace = 1.0
        if elapsed_s < times.seconds(came):
            pace = elapsed_s / max(times.seconds(came), MIN_S)
        elif elapsed_s > times.seconds(came + 1):
            pace = elapsed_s / max(times.seconds(came + 1), MIN_S)
        # The first few arrivals depend more on the start of this load than on its pace.
        return 0.0, block_s * pace ** (came / (came + FEW_BLOCKS))

    # The interface of `PrefetchPolicy`, for engines that load a prefix or nothing.

    def decide(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> WaitDecision:
        """Wait while the rest, at the current pace, arrives sooner than it could be computed.

        While no block has arrived, or nothing is known about computing, `unsure` decides.
        """
        if done or elapsed_ms >= self.max_wait_ms:
            return WaitDecision.GO
        rest = tokens_wanted - tokens_ready
        if not self.prefill.known or not tokens_ready:
            return self.unsure.decide(
                elapsed_ms=elapsed_ms,
                tokens_wanted=tokens_wanted,
                tokens_ready=tokens_ready,
                done=done,
                can_start=can_start,
            )
        loading_s = elapsed_ms / 1e3 * rest / tokens_ready
        computing_s = self.prefill.seconds(tokens_ready, tokens_wanted)
        return WaitDecision.WAIT if loading_s < computing_s else WaitDecision.GO

    def stats(self) -> dict[str, Any]:
        """Number of decisions by kind, and the current estimates."""
        tiers = {}
        for tier in {**self.loads, **self.loads_while_computing}:
            times = self._times(tier, LoadMode.LOAD)
            if times is not None:
                first_s, block_s = times.line
                tiers[tier] = {"first_ms": first_s * 1e3, "block_ms": block_s * 1e3}
        known = self.prefill.known
        rate = 1024 / self.prefill.seconds(0, 1024) if known else 0.0
        return {"chosen": dict(self.counts), "prefill_tokens_per_s": rate, "tiers": tiers}


class _SplitEstimate:
    """Estimated seconds of computing and loading from one state on."""

    def __init__(self, policy: Adaptive, state: LoadState) -> None:
        self._prefill = policy.prefill
        self.state = state
        self.blocks = len(state.pending)
        self.quantum = min(self.blocks, -(-QUANTUM_TOKENS // state.block_tokens))
        self.remaining = {tier: policy._remaining(tier, state) for tier in set(state.pending)}
        self.known = policy.prefill.known and None not in self.remaining.values()
        self._places: dict[str, list[int]] = {tier: [] for tier in self.remaining}
        for place, tier in enumerate(state.pending):
            self._places[tier].append(place)

    def computing_s(self, compute: int) -> float:
        """Seconds to compute the first `compute` pending blocks."""
        start = self.state.start
        return self._prefill.seconds(start, start + compute * self.state.block_tokens)

    def loading_s(self, compute: int) -> float:
        """Seconds until all but the first `compute` pending blocks have arrived."""
        longest_s = 0.0
        for tier, line in self.remaining.items():
            places = self._places[tier]
            count = len(places) - bisect_left(places, compute)
            if count and line is not None:
                longest_s = max(longest_s, line[0] + count * line[1])
        return longest_s

    def meet(self) -> tuple[int, float]:
        """Number of blocks to compute so that both end together, and the seconds until then."""
        return meet(self.blocks, self.computing_s, self.loading_s)


class LoadTracker:
    """Follows one load: asks the policy for decisions and reports measurements to it.

    wanted: number of blocks to load, by tier. block_tokens: tokens per block.
    """

    def __init__(self, policy: Adaptive, wanted: Mapping[str, int], block_tokens: int) -> None:
        self._policy = policy
        self._wanted = wanted
        self._block_tokens = block_tokens
        self._reported: Counter[str] = Counter()
        self._looked_s = 0.0
        self._choice: ModeChoice | None = None
        self._blocks = 0
        self._recorded = False
        """The duration is recorded, or is not worth recording."""
        self.only_loads = False
        """The mode is LOAD: no decision is needed until the load has ended or is late."""

    def choose_mode(self, start: int, pending: Sequence[str]) -> bool:
        """Choose the mode for the pending blocks after `start` tokens; False: compute them all."""
        state = LoadState(start, self._block_tokens, pending, {}, 0.0)
        self._choice, self._blocks = self._policy.choose_mode(state), len(pending)
        self.only_loads = self._choice.mode is LoadMode.LOAD
        return self._choice.mode is not LoadMode.COMPUTE

    def decide_next(
        self, start: int, pending: Sequence[str], arrived: Mapping[str, int], elapsed_s: float
    ) -> Decision:
        """See `Adaptive.decide_next`."""
        chosen = self._choice or ModeChoice(LoadMode.BOTH)
        if self.only_loads and elapsed_s <= PATIENCE_FACTOR * (chosen.expected_s or 0.0):
            return WAIT
        state = LoadState(
            start, self._block_tokens, pending, arrived, elapsed_s, chosen.mode, chosen.is_trial
        )
        decision = self._policy.decide_next(state)
        if decision.action is Action.COMPUTE:
            self.only_loads = False
        came = any(count for tier, count in arrived.items() if tier != L2)
        if decision.action is Action.CANCEL and not came and self._policy.prefill.known:
            # There is no later call for this load.
            end = start + len(pending) * self._block_tokens
            self.record_duration(elapsed_s + self._policy.prefill.seconds(start, end))
        return decision

    def invalidate(self) -> None:
        """The engine was busy with other requests: do not record the duration of this load."""
        self._recorded = True

    def record_arrivals(self, arrived: Mapping[str, int], elapsed_s: float) -> None:
        """Report the number of arrived blocks per tier, elapsed_s after the load began."""
        low_s, self._looked_s = self._looked_s, elapsed_s
        for tier, count in arrived.items():
            before = self._reported[tier]
            if count > before and (count >= REPORT_STEP * before or count >= self._wanted[tier]):
                self._reported[tier] = count
                computes = not self.only_loads
                self._policy.record_arrival(tier, count, low_s, elapsed_s, while_computing=computes)

    def record_missing(
        self, tiers: Iterable[str], arrived: Mapping[str, int], elapsed_s: float
    ) -> None:
        """Report that the next block of these tiers has not arrived, and will not be observed."""
        for tier in tiers:
            count = arrived.get(tier, 0) + 1
            self._policy.record_arrival(
                tier, count, elapsed_s, math.inf, while_computing=not self.only_loads
            )

    def record_duration(self, elapsed_s: float) -> None:
        """The last block is ready, loaded or computed. Only the first call counts."""
        choice, recorded, self._recorded = self._choice, self._recorded, True
        if choice is None or choice.expected_s is None or recorded:
            return
        if choice.mode is not LoadMode.COMPUTE:  # its steps are recorded one by one
            self._policy.record_duration(choice.mode, self._blocks, elapsed_s)
