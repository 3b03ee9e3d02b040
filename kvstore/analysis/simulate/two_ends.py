"""The adaptive policy in virtual time: one request's run, computed from its front while what lies
below L2 arrives from its end.

The policy is the engine's own and is asked as the engine asks it: before each step, and whenever
something arrives while it waits. How long steps and loads truly take is the world's to say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.prefetch.adaptive import L2, Adaptive, Choice, Do, Watch

RELOOK_S: Final = 0.005
"""How soon a waiting request is looked at again though nothing came."""
LOOKS: Final = 16
"""Looks at a load that is waited for, about."""


@dataclass(frozen=True)
class World:
    """One request, and how long things truly take.

    tiers: where each block of the run lies. starts: tokens before each block, and the run's end.
    arrive_s: seconds from the request's arrival until so many blocks of those below L2
    have come, the last of the run first. computing_s(a, b): seconds of a step that computes tokens
    a..b. can_start_s: until the engine is free. slowed: how many times longer a load takes while
    the engine computes. land_s: to copy one loaded block into its pages, when all have come.
    """

    tiers: Sequence[str]
    starts: Sequence[int]
    arrive_s: Sequence[float]
    computing_s: Callable[[int, int], float]
    can_start_s: float = 0.0
    slowed: float = 1.0
    land_s: float = 0.0


@dataclass(frozen=True)
class Met:
    """How it went. seconds: until the whole run was there. computing_s: of those, computing.
    computed: blocks of the run that were computed though they were held. channel_s: until the tier
    below had nothing more to do for this request."""

    seconds: float
    computing_s: float
    computed: frozenset[int]
    channel_s: float


def run_two_ends(policy: Adaptive, world: World, limit_s: float = float("inf")) -> Met:
    """Have one run, as the policy chooses. Past limit_s nothing is waited for."""
    return _Run(policy, world, limit_s).go()


class _Run:
    def __init__(self, policy: Adaptive, world: World, limit_s: float) -> None:
        self._policy = policy
        self._world = world
        self._limit_s = limit_s
        self._below = [n for n, tier in enumerate(world.tiers) if tier != L2]
        self._now_s = 0.0
        self._computing_s = 0.0
        self._computed: set[int] = set()
        size = max(1, (world.starts[-1] - world.starts[0]) // len(world.tiers))
        self._watch = Watch(policy, Counter(world.tiers), size)
        self._come_at_most = len(self._below)
        self._load_s = 0.0

    def go(self) -> Met:
        world, at = self._world, 0
        below = [world.tiers[n] for n in self._below]
        if below and not self._watch.begin(world.starts[self._below[0]], below):
            self._come_at_most = 0
        self._pass(world.can_start_s)
        if world.can_start_s:
            self._watch.held_up()
        while at < len(world.tiers):
            self._watch.look(self._arrived(), self._now_s)
            missing = self._missing(at)
            at = self._step(at, missing) if missing and missing[0] == at else at + 1
        loaded = min(self._come_at_most, len(self._below) - len(self._computed))
        self._now_s += world.land_s * loaded
        self._watch.ended(self._now_s)
        channel_s = world.arrive_s[loaded - 1] if loaded else 0.0
        return Met(self._now_s, self._computing_s, frozenset(self._computed), channel_s)

    def _step(self, at: int, missing: list[int]) -> int:
        """Wait, compute, or let go and compute; returns where the frontier is then."""
        came = self._came()
        if came == self._come_at_most:
            return self._compute(at, len(missing))
        choice = self._choose(missing)
        ends = self._now_s >= self._limit_s or choice.do is Do.LET_GO
        if ends or choice.blocks >= len(missing):
            tiers = {self._world.tiers[n] for n in missing}
            self._watch.give_up(tiers, self._arrived(), self._now_s)
            self._come_at_most = came
            return self._compute(at, len(missing))
        if choice.do is Do.WAIT:
            # Not at every arrival of a long load, nor so often of a slow one: a replay has many.
            next_s = self._world.arrive_s[min(came + len(missing) // LOOKS, self._come_at_most - 1)]
            relook_s = max(RELOOK_S, self._now_s / LOOKS)
            self._pass(min(next_s - self._load_s, relook_s, max(self._limit_s - self._now_s, 0.0)))
            return at
        return self._compute(at, choice.blocks)

    def _compute(self, at: int, blocks: int) -> int:
        """One step of the engine; returns where it ends."""
        tiers = self._world.tiers
        end = at
        while end < len(tiers) and end - at < blocks and tiers[end] != L2:
            end += 1
        start, stop = self._world.starts[at], self._world.starts[end]
        seconds = self._world.computing_s(start, stop)
        self._pass(seconds, self._world.slowed if self._missing(at) else 1.0)
        self._computing_s += seconds
        self._policy.computed(start, stop - start, seconds)
        self._computed.update(range(at, end))
        return end

    def _choose(self, missing: Sequence[int]) -> Choice:
        tiers = [self._world.tiers[n] for n in missing]
        start = self._world.starts[missing[0]]
        return self._watch.choose(start, tiers, self._arrived(), self._now_s)

    def _pass(self, seconds: float, slowed: float = 1.0) -> None:
        """Time passes, less of it for the load."""
        self._now_s += seconds
        self._load_s += seconds / slowed

    def _came(self) -> int:
        """Blocks that have come by now, from the run's end on."""
        return min(bisect_right(self._world.arrive_s, self._load_s), self._come_at_most)

    def _arrived(self) -> Counter[str]:
        came = self._came()
        return Counter(self._world.tiers[n] for n in self._below[len(self._below) - came :])

    def _missing(self, at: int) -> list[int]:
        """Blocks from `at` on that have not come, whether or not they will."""
        return [n for n in self._below[: len(self._below) - self._came()] if n >= at]
