"""The adaptive prefetch policy: load as much as arrives sooner than it could be computed.

A run that a lower tier holds can be had from both ends at once: the engine computes its leading
blocks while the trailing ones are loaded, the last first. Where the two meet need not be known
beforehand. What has to be decided is, each time the engine asks: compute on, and how far before
asking again; or wait, because the rest will be there sooner than a step would end; or let the rest
of the load go, because it spares nothing.

Each answer comes from estimates (`estimates`), corrected by how this very load has progressed. A
step of the engine cannot be cut short, so it is sent only about half of the way to where the two
should meet, and is asked again there: a wrong estimate costs little, and none at all is needed to
begin with. A tier found too slow is given another try now and then.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.costs import meet
from kvstore.tiers.policies.estimates import LoadTimes, PrefillTimes
from kvstore.tiers.policies.prefetch import DEFAULT_CAP_MS, Timeout, Verdict

QUANTUM_TOKENS: Final = 64
"""Fewer are not computed in a step of their own while more is to come."""
LOAD_GAIN_MIN: Final = 0.03
"""What loading beside computing must spare to be worth it."""
COMPUTE_GAIN_MIN: Final = 0.1
"""What computing beside a load must spare: more, since a step begun is not cut short."""
STEP_WASTE: Final = 1.1
"""How much longer a prefill in two steps may take than in one to be cut in two."""
LATE: Final = 1.5
"""A load that has brought nothing for this many times what was believed is late."""
FEW: Final = 8
"""Blocks that have come of a load before its own pace counts as much as what was believed."""
EXPLORE_EVERY: Final = 16
"""Of so many loads that seemed to be not worth it, one is made all the same, beside computing."""
TINY_S: Final = 1e-6
"""What is shorter is no time to compare with."""
TOLD_STEP: Final = 1.5
"""The arrivals of one load are worth knowing when there are so many times as many as before."""
TIERS_MAX: Final = 32
"""Tiers that times are kept of."""
L2: Final = "l2"


class Do(enum.Enum):
    """What the engine had best do now."""

    WAIT = "wait"
    COMPUTE = "compute"
    LET_GO = "let_go"


@dataclass(frozen=True)
class Choice:
    """blocks: how many to compute before asking again; 0 unless COMPUTE. explores: the load is made
    to see how long it takes; say so in later outlooks on it."""

    do: Do
    blocks: int = 0
    explores: bool = False


WAIT: Final = Choice(Do.WAIT)
LET_GO: Final = Choice(Do.LET_GO)


@dataclass(frozen=True)
class Outlook:
    """What is known of one request's load at one moment.

    start: tokens before the first missing block. missing: the tier of each block that is on its
    way, in token order; they arrive from the last one on. arrived: blocks that have come since the
    load began, by tier. elapsed_s: since then. explores: see `Choice`.
    """

    start: int
    block_tokens: int
    missing: Sequence[str]
    arrived: Mapping[str, int]
    elapsed_s: float
    explores: bool = False


@dataclass(eq=False)
class Adaptive:
    """See the module's text. Not thread-safe: the engine's loop thread only."""

    cap_ms: float = DEFAULT_CAP_MS
    unsure: Timeout = field(default_factory=Timeout)
    """What `verdict` says while there is nothing to go by."""
    name: str = "adaptive"
    prefill: PrefillTimes = field(default_factory=PrefillTimes)
    loads: dict[str, LoadTimes] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _let_go: int = 0

    # What was measured.

    def computed(self, start: int, tokens: int, seconds: float) -> None:
        """The engine took a step of so many seconds over `tokens` tokens behind `start` others."""
        self.prefill.add(start, tokens, seconds)

    def arrived(self, tier: str, blocks: int, low_s: float, high_s: float) -> None:
        """The last of so many blocks of a load came from this tier between these times from its
        beginning; high_s is infinite where it has not come."""
        times = self.loads.get(tier)
        if times is None:
            if len(self.loads) >= TIERS_MAX:
                return
            times = self.loads[tier] = LoadTimes()
        times.add(blocks, low_s, high_s)

    # What to do.

    def choose(self, outlook: Outlook) -> Choice:
        """What to do about the blocks that are missing now; there is at least one."""
        choice = self._choose(outlook)
        self.counts[choice.do.value] += 1
        return choice

    def _choose(self, outlook: Outlook) -> Choice:
        size, missing = outlook.block_tokens, outlook.missing
        blocks = len(missing)
        quantum = min(blocks, -(-QUANTUM_TOKENS // size))
        remaining = {tier: self._remaining(tier, outlook) for tier in set(missing)}
        if not self.prefill.known or None in remaining.values():
            return Choice(Do.COMPUTE, quantum)
        places: dict[str, list[int]] = {tier: [] for tier in remaining}
        for place, tier in enumerate(missing):
            places[tier].append(place)

        def computing_s(compute: int) -> float:
            return self.prefill.seconds(outlook.start, outlook.start + compute * size)

        def loading_s(compute: int) -> float:
            longest_s = 0.0
            for tier, line in remaining.items():
                count = len(places[tier]) - bisect_left(places[tier], compute)
                if count and line is not None:
                    longest_s = max(longest_s, line[0] + count * line[1])
            return longest_s

        best, both_s = meet(blocks, computing_s, loading_s)
        if computing_s(blocks) <= both_s * (1 + LOAD_GAIN_MIN):
            return self._without(blocks, quantum, outlook.explores)
        if not best or loading_s(0) <= both_s * (1 + COMPUTE_GAIN_MIN):
            # Nobody knows when what is late will come; to compute meanwhile costs a step at most.
            patience_s = computing_s(quantum) / 2
            late = any(self._late(tier, outlook, patience_s) for tier in remaining)
            return Choice(Do.COMPUTE, quantum) if late else WAIT
        half = max(quantum, -(-best // 2))
        if half < best and 2 * computing_s(half) > STEP_WASTE * computing_s(best):
            half = best
        return Choice(Do.COMPUTE, min(half, best))

    def _without(self, blocks: int, quantum: int, explores: bool) -> Choice:
        """Loading spares nothing: let it go, unless it is time to look how long it takes."""
        if not explores:
            self._let_go += 1
            if self._let_go % EXPLORE_EVERY:
                return LET_GO
            self.counts["explored"] += 1
        return Choice(Do.COMPUTE, max(quantum, -(-blocks // 2)), explores=True)

    def _late(self, tier: str, outlook: Outlook, patience_s: float = 0.0) -> bool:
        """Nothing has come, and it should have."""
        times = self.loads.get(tier)
        if times is None or not times.known or outlook.arrived.get(tier):
            return False
        return outlook.elapsed_s > LATE * times.seconds(1) + patience_s

    def _remaining(self, tier: str, outlook: Outlook) -> tuple[float, float] | None:
        """(a, b): n blocks more of this tier come in a + n b seconds from now. None: no idea."""
        elapsed_s, came = outlook.elapsed_s, outlook.arrived.get(tier, 0)
        times = self.loads.get(tier)
        if times is None or not times.known:
            if tier == L2:
                return (0.0, 0.0)
            return (0.0, elapsed_s / came) if came else None
        first_s, block_s = times.line
        if not came:
            # What is late may be as late again as it is already.
            late = self._late(tier, outlook)
            return (elapsed_s if late else first_s - elapsed_s), block_s
        pace = 1.0
        if elapsed_s < times.seconds(came):
            pace = elapsed_s / max(times.seconds(came), TINY_S)
        elif elapsed_s > times.seconds(came + 1):
            pace = elapsed_s / max(times.seconds(came + 1), TINY_S)
        # The first few arrivals say more about the beginning of this load than about its pace.
        return 0.0, block_s * pace ** (came / (came + FEW))

    # As a policy that only says how long to wait, for engines that load a prefix or nothing.

    def verdict(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> Verdict:
        """Wait while the rest, at the pace so far, comes sooner than it could be computed.

        While nothing has come, or nothing is known about computing, what `unsure` says.
        """
        if done or elapsed_ms >= self.cap_ms:
            return Verdict.GO
        rest = tokens_wanted - tokens_ready
        if not self.prefill.known or not tokens_ready:
            return self.unsure.verdict(
                elapsed_ms=elapsed_ms,
                tokens_wanted=tokens_wanted,
                tokens_ready=tokens_ready,
                done=done,
                can_start=can_start,
            )
        loading_s = elapsed_ms / 1e3 * rest / tokens_ready
        computing_s = self.prefill.seconds(tokens_ready, tokens_wanted)
        return Verdict.WAIT if loading_s < computing_s else Verdict.GO

    def stats(self) -> dict[str, Any]:
        """What was chosen how often, and what is believed."""
        tiers = {}
        for tier, times in self.loads.items():
            if times.known:
                first_s, block_s = times.line
                tiers[tier] = {"first_ms": first_s * 1e3, "block_ms": block_s * 1e3}
        known = self.prefill.known
        rate = 1024 / self.prefill.seconds(0, 1024) if known else 0.0
        return {"chosen": dict(self.counts), "prefill_tokens_per_s": rate, "tiers": tiers}


class Watch:
    """What the policy is told of one load: from one look at it to the next.

    wanted: blocks asked for, by tier.
    """

    def __init__(self, policy: Adaptive, wanted: Mapping[str, int]) -> None:
        self._policy = policy
        self._wanted = wanted
        self._told: Counter[str] = Counter()
        self._looked_s = 0.0

    def look(self, arrived: Mapping[str, int], elapsed_s: float) -> None:
        """So many blocks have come from each tier, so long after the load began."""
        low_s, self._looked_s = self._looked_s, elapsed_s
        for tier, count in arrived.items():
            told = self._told[tier]
            if count > told and (count >= TOLD_STEP * told or count >= self._wanted[tier]):
                self._told[tier] = count
                self._policy.arrived(tier, count, low_s, elapsed_s)

    def give_up(self, tiers: Iterable[str], arrived: Mapping[str, int], elapsed_s: float) -> None:
        """The next block of these tiers has not come by now, and will not be seen to."""
        for tier in tiers:
            self._policy.arrived(tier, arrived.get(tier, 0) + 1, elapsed_s, math.inf)
