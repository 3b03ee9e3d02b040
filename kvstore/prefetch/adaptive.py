"""The adaptive prefetch policy: load as much as arrives sooner than it could be computed.

A run that a lower tier holds can be had from both ends at once: the engine computes its leading
blocks while the trailing ones are loaded, the last first. Where the two meet need not be known
beforehand. What has to be decided is first whether to do so at all, or to load or to compute the
whole run: by what each of the three ways promises and how it turned out before (`ways`). Then, each
time the engine asks: compute on, and how far before asking again; or wait, because the rest will be
there sooner than a step would end; or let the rest of the load go, because it spares nothing.

Each answer comes from estimates (`estimates`), corrected by how this very load has progressed. A
step of the engine cannot be cut short, so it is sent only about half of the way to where the two
should meet, and is asked again there: a wrong estimate costs little, and none at all is needed to
begin with.
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
from kvstore.prefetch.load_modes import COMPUTE_GAIN_MIN, LOAD_GAIN_MIN, Way, Ways
from kvstore.prefetch.policy import DEFAULT_CAP_MS, Timeout, Verdict

QUANTUM_TOKENS: Final = 64
"""Fewer are not computed in a step of their own while more is to come."""
UNSEEN: Final = 4.0
"""So many times sooner than believed may be a step longer than any seen."""
PATIENCE: Final = 1.5
"""A load that was to bring all is left alone for so many times what it usually takes."""
SLOWER: Final = 1.5
"""A load that was to bring all, and is so many times behind both ends at once, is helped."""
STEP_WASTE: Final = 1.1
"""How much longer a prefill in two steps may take than in one to be cut in two."""
LATE: Final = 1.5
"""A load that has brought nothing for this many times what was believed is late."""
FEW: Final = 8
"""Blocks that have come of a load before its own pace counts as much as what was believed."""
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
    """blocks: how many to compute before asking again; 0 unless COMPUTE."""

    do: Do
    blocks: int = 0


WAIT: Final = Choice(Do.WAIT)
LET_GO: Final = Choice(Do.LET_GO)


@dataclass(frozen=True)
class Outlook:
    """What is known of one request's load at one moment.

    start: tokens before the first missing block. missing: the tier of each block that is on its
    way, in token order; they arrive from the last one on. arrived: blocks that have come since the
    load began, by tier. elapsed_s: since then. way: how this run was to be had; None: not decided.
    explores: it was taken to see how long it takes.
    """

    start: int
    block_tokens: int
    missing: Sequence[str]
    arrived: Mapping[str, int]
    elapsed_s: float
    way: Way | None = None
    explores: bool = False


@dataclass(frozen=True)
class Begin:
    """How a run is to be had, and how many seconds that should take; None: unsure.

    explores: it is taken only to see how long it takes.
    """

    way: Way
    takes_s: float | None = None
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
    """By tier, while nothing was computed beside."""
    beside: dict[str, LoadTimes] = field(default_factory=dict)
    """By tier, beside computing, which may want the same cores and looks rarely."""
    ways: Ways = field(default_factory=Ways)
    counts: Counter[str] = field(default_factory=Counter)

    # What was measured.

    def computed(self, start: int, tokens: int, seconds: float) -> None:
        """The engine took a step of so many seconds over `tokens` tokens behind `start` others."""
        self.prefill.add(start, tokens, seconds)

    def arrived(
        self, tier: str, blocks: int, low_s: float, high_s: float, *, beside: bool = False
    ) -> None:
        """The last of so many blocks of a load came from this tier between these times from its
        beginning; high_s is infinite where it has not come. beside: computing."""
        kept = self.beside if beside else self.loads
        times = kept.get(tier)
        if times is None:
            if len(kept) >= TIERS_MAX:
                return
            times = kept[tier] = LoadTimes()
        times.add(blocks, low_s, high_s)

    # What to do.

    def begin(self, outlook: Outlook) -> Begin:
        """How to have a run that nothing was asked for yet; all of it is missing."""
        both = _BothEnds(self, replace(outlook, way=Way.BOTH))
        if not both.known:
            return Begin(Way.BOTH)
        _, both_s = both.meet()
        load_s = _BothEnds(self, replace(outlook, way=Way.LOAD)).loading_s(0)
        size, end = outlook.block_tokens, outlook.start + both.blocks * outlook.block_tokens
        # What lies behind the run is computed in any case, but takes a step of its own unless all
        # is computed. How much it is nobody says; a block is taken for it.
        own_s = self.prefill.seconds(end, end + size)
        joined_s = max(0.0, self.prefill.seconds(outlook.start, end + size) - own_s)
        promised_s = {Way.LOAD: load_s, Way.BOTH: both_s, Way.COMPUTE: joined_s}
        # A tier that became fast is seen beside computing first.
        hoped_s = {**promised_s, Way.LOAD: min(load_s, both.loading_s(0))}
        if not all(tier in self.loads for tier in both.remaining):
            hoped_s[Way.LOAD] = 0.0  # what is seen beside computing may be anything
        if end - outlook.start > 2 * self.prefill.longest:
            hoped_s[Way.COMPUTE] /= UNSEEN  # believed to take several steps
        way, takes_s, explores = self.ways.pick(both.blocks, promised_s, hoped_s)
        self.counts[f"way_{way.value}"] += 1
        self.counts["explored"] += explores
        return Begin(way, takes_s, explores)

    def ended(self, way: Way, blocks: int, took_s: float) -> None:
        """A run of so many blocks that was begun this way has taken so long, to its last copy."""
        self.ways.ended(way, blocks, took_s)

    def choose(self, outlook: Outlook) -> Choice:
        """What to do about the blocks that are missing now; there is at least one."""
        choice = self._choose(outlook)
        self.counts[choice.do.value] += 1
        return choice

    def _choose(self, outlook: Outlook) -> Choice:
        if outlook.way is Way.COMPUTE:
            return LET_GO
        both = _BothEnds(self, outlook)
        blocks, quantum = both.blocks, both.quantum
        if not both.known:
            return Choice(Do.COMPUTE, quantum)
        best, both_s = both.meet()
        if outlook.way is Way.LOAD and both.loading_s(0) <= SLOWER * both_s:
            return self._wait(both)
        if both.computing_s(blocks) <= both_s * (1 + LOAD_GAIN_MIN):
            # Loading spares nothing: let it go, unless it is to be seen how long it takes.
            half = max(quantum, -(-blocks // 2))
            return Choice(Do.COMPUTE, half) if outlook.explores else LET_GO
        if not best or both.loading_s(0) <= both_s * (1 + COMPUTE_GAIN_MIN):
            return self._wait(both)
        half = max(quantum, -(-best // 2))
        if half < best and 2 * both.computing_s(half) > STEP_WASTE * both.computing_s(best):
            half = best
        return Choice(Do.COMPUTE, min(half, best))

    def _wait(self, both: _BothEnds) -> Choice:
        """Wait for the load. Nobody knows when what is late will come; to compute meanwhile costs a
        step at most."""
        patience_s = both.computing_s(both.quantum) / 2
        late = any(self._late(tier, both.outlook, patience_s) for tier in both.remaining)
        return Choice(Do.COMPUTE, both.quantum) if late else WAIT

    def _times(self, tier: str, way: Way | None) -> LoadTimes | None:
        """What is known of this tier, best of loads made in this way."""
        order = [self.loads.get(tier), self.beside.get(tier)]
        if way is not Way.LOAD:
            order.reverse()
        return next((times for times in order if times is not None and times.known), None)

    def _late(self, tier: str, outlook: Outlook, patience_s: float = 0.0) -> bool:
        """Nothing has come, and it should have."""
        times = self._times(tier, outlook.way)
        if times is None or outlook.arrived.get(tier):
            return False
        return outlook.elapsed_s > LATE * times.seconds(1) + patience_s

    def _remaining(self, tier: str, outlook: Outlook) -> tuple[float, float] | None:
        """(a, b): n blocks more of this tier come in a + n b seconds from now. None: no idea."""
        elapsed_s, came = outlook.elapsed_s, outlook.arrived.get(tier, 0)
        times = self._times(tier, outlook.way)
        if times is None:
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
        for tier in {**self.loads, **self.beside}:
            times = self._times(tier, Way.LOAD)
            if times is not None:
                first_s, block_s = times.line
                tiers[tier] = {"first_ms": first_s * 1e3, "block_ms": block_s * 1e3}
        known = self.prefill.known
        rate = 1024 / self.prefill.seconds(0, 1024) if known else 0.0
        return {"chosen": dict(self.counts), "prefill_tokens_per_s": rate, "tiers": tiers}


class _BothEnds:
    """An outlook in seconds, as they are believed."""

    def __init__(self, policy: Adaptive, outlook: Outlook) -> None:
        self._prefill = policy.prefill
        self.outlook = outlook
        self.blocks = len(outlook.missing)
        self.quantum = min(self.blocks, -(-QUANTUM_TOKENS // outlook.block_tokens))
        self.remaining = {tier: policy._remaining(tier, outlook) for tier in set(outlook.missing)}
        self.known = policy.prefill.known and None not in self.remaining.values()
        self._places: dict[str, list[int]] = {tier: [] for tier in self.remaining}
        for place, tier in enumerate(outlook.missing):
            self._places[tier].append(place)

    def computing_s(self, compute: int) -> float:
        """To compute so many of the missing blocks, the first."""
        start = self.outlook.start
        return self._prefill.seconds(start, start + compute * self.outlook.block_tokens)

    def loading_s(self, compute: int) -> float:
        """Until all but so many of them, the first, have come."""
        longest_s = 0.0
        for tier, line in self.remaining.items():
            places = self._places[tier]
            count = len(places) - bisect_left(places, compute)
            if count and line is not None:
                longest_s = max(longest_s, line[0] + count * line[1])
        return longest_s

    def meet(self) -> tuple[int, float]:
        """How many to compute for both to end at once, and when that is."""
        return meet(self.blocks, self.computing_s, self.loading_s)


class Watch:
    """One run, from how it is begun to its end: asks the policy about it, and tells it of it.

    wanted: blocks of the run, by tier. block_tokens: of each.
    """

    def __init__(self, policy: Adaptive, wanted: Mapping[str, int], block_tokens: int) -> None:
        self._policy = policy
        self._wanted = wanted
        self._block_tokens = block_tokens
        self._told: Counter[str] = Counter()
        self._looked_s = 0.0
        self._begin: Begin | None = None
        self._blocks = 0
        self._over = False
        """How long it took is told, or not worth telling."""
        self.only_loads = False
        """All of it is to be loaded: nothing is to be decided before it is there, or late."""

    def begin(self, start: int, missing: Sequence[str]) -> bool:
        """Decide how to have the blocks missing behind `start` tokens; False: by computing them."""
        outlook = Outlook(start, self._block_tokens, missing, {}, 0.0)
        self._begin, self._blocks = self._policy.begin(outlook), len(missing)
        self.only_loads = self._begin.way is Way.LOAD
        return self._begin.way is not Way.COMPUTE

    def choose(
        self, start: int, missing: Sequence[str], arrived: Mapping[str, int], elapsed_s: float
    ) -> Choice:
        """See `Adaptive.choose`."""
        begin = self._begin or Begin(Way.BOTH)
        if self.only_loads and elapsed_s <= PATIENCE * (begin.takes_s or 0.0):
            return WAIT
        outlook = Outlook(
            start, self._block_tokens, missing, arrived, elapsed_s, begin.way, begin.explores
        )
        choice = self._policy.choose(outlook)
        if choice.do is Do.COMPUTE:
            self.only_loads = False
        came = any(count for tier, count in arrived.items() if tier != L2)
        if choice.do is Do.LET_GO and not came and self._policy.prefill.known:
            # Nobody will ask again.
            end = start + len(missing) * self._block_tokens
            self.ended(elapsed_s + self._policy.prefill.seconds(start, end))
        return choice

    def held_up(self) -> None:
        """The engine was busy with others: how long this run takes says nothing of its way."""
        self._over = True

    def look(self, arrived: Mapping[str, int], elapsed_s: float) -> None:
        """So many blocks have come from each tier, so long after the load began."""
        low_s, self._looked_s = self._looked_s, elapsed_s
        for tier, count in arrived.items():
            told = self._told[tier]
            if count > told and (count >= TOLD_STEP * told or count >= self._wanted[tier]):
                self._told[tier] = count
                beside = not self.only_loads
                self._policy.arrived(tier, count, low_s, elapsed_s, beside=beside)

    def give_up(self, tiers: Iterable[str], arrived: Mapping[str, int], elapsed_s: float) -> None:
        """The next block of these tiers has not come by now, and will not be seen to."""
        for tier in tiers:
            count = arrived.get(tier, 0) + 1
            self._policy.arrived(tier, count, elapsed_s, math.inf, beside=not self.only_loads)

    def ended(self, elapsed_s: float) -> None:
        """All of the run is there, loaded or computed. Only the first word counts."""
        begin, over, self._over = self._begin, self._over, True
        if begin is None or begin.takes_s is None or over:
            return
        if begin.way is not Way.COMPUTE:  # its steps are told one by one
            self._policy.ended(begin.way, self._blocks, elapsed_s)
