"""What requests have asked the store for, when a run may be had from both ends at once.

The twin of `attempts.Attempts` for the adaptive policy: a request may be started while its later
blocks are on their way, and then goes on asking from where it has computed up to. What to do each
time is the policy's to say; what has come, and when it was seen to come, is told to it here.

A request waits for its first blocks in L2 as long as a round trip, for the rest as long as the
policy says, and never past its deadline. Past the deadline it takes what has come, and computes up
to what has come further behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.load_ranges import Segments
from kvstore.connectors.common.pending_lookups import (
    L2,
    LEASED_SHARE_MAX,
    MISS_KEPT_MS,
    PENDING,
    ROUND_TRIP_MS,
    leading_l2,
)
from kvstore.interface import MISS, Answer, HookMatch, Load, Match
from kvstore.prefetch.adaptive import Adaptive, Choice, Do, Watch

RELOOK_MS: Final = 5.0
"""How soon a waiting request is looked at again though nothing came."""


@dataclass(eq=False, slots=True)
class Ahead:
    """One request's question: the run from block `base` of a prompt with these hashes.

    run: what was asked for, once it was. watch: over it. whole: in one piece. looked_s: when it was
        last looked at. offered: (first, blocks) of the last hit. hit: there was one.
    """

    hashes: tuple[bytes, ...]
    base: int
    first_asked_s: float
    started_s: float
    match: Match | None = None
    run: Segments | None = None
    asked_s: float = 0.0
    looked_s: float = 0.0
    watch: Watch | None = None
    whole: bool = False
    missed_s: float | None = None
    offered: tuple[int, int] = (0, 0)
    hit: bool = False

    def asks(self, hashes: Sequence[bytes], first_block: int) -> bool:
        """Whether this question is still the one: the last hash names all tokens before it."""
        same = len(hashes) == len(self.hashes) and hashes[-1] == self.hashes[-1]
        return same and first_block >= self.base

    def in_round_trip(self, now_s: float) -> bool:
        """Whether the store may still be about to answer from memory."""
        return (now_s - self.started_s) * 1e3 < ROUND_TRIP_MS


class TwoEnds:
    """The questions of all requests of one engine that wait or compute ahead of their load."""

    def __init__(
        self,
        store: GuardedStore,
        *,
        policy: Adaptive,
        deadline_ms: float,
        min_load_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._block_tokens = store.store.namespace.block_tokens
        self._policy = policy
        self._limit_ms = min(deadline_ms, policy.cap_ms)
        self._min_load_tokens = min_load_tokens
        self._clock = clock
        self._asking: dict[str, Ahead] = {}
        self._landing: dict[str, Ahead] = {}
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._asking)

    def match(
        self, request_id: str, hashes: Sequence[bytes], first_block: int, *, can_start: bool
    ) -> HookMatch:
        """See `KVHooks.match`."""
        now_s = self._clock()
        ahead = self._asking.get(request_id)
        if first_block >= len(hashes):
            self._end(ahead, now_s)
            self._drop(ahead)
            return MISS
        if ahead is not None and not ahead.asks(hashes, first_block):
            self._drop(ahead)
            ahead = self._begin(request_id, hashes, first_block, ahead.first_asked_s, now_s)
        elif ahead is not None and ahead.missed_s is not None:
            if (now_s - ahead.missed_s) * 1e3 < MISS_KEPT_MS:
                return MISS
            ahead = self._begin(request_id, hashes, first_block, ahead.first_asked_s, now_s)
        elif ahead is None:
            ahead = self._begin(request_id, hashes, first_block, now_s, now_s)
        return self._answer(ahead, first_block, now_s, can_start)

    def take(self, request_id: str, blocks: int) -> list[Load]:
        """Take a request's hit; the tickets are the caller's to release. The request goes on
        asking, unless nothing more is to come."""
        ahead = self._asking.get(request_id)
        assert ahead is not None, "load without a match"
        assert ahead.run is not None, "load without a hit"
        first, offered = ahead.offered
        assert 0 < blocks <= offered, f"{blocks} blocks of a hit of {offered}"
        ahead.offered = (0, 0)
        tickets = ahead.run.take(first, blocks)
        if not ahead.run.held:
            del self._asking[request_id]
            if first + blocks >= ahead.run.base + len(ahead.run.tiers):
                self._landing[request_id] = ahead
        return tickets

    def landed(self, request_id: str) -> None:
        """What was taken last lies in its pages; unknown requests too."""
        ahead = self._landing.pop(request_id, None)
        if ahead is not None and ahead.watch is not None:
            ahead.watch.ended(self._clock() - ahead.asked_s)

    def abort(self, request_id: str) -> None:
        """Forget a request and hand back what it holds; unknown ones too."""
        self._landing.pop(request_id, None)
        self._drop(self._asking.pop(request_id, None))

    def close(self) -> None:
        """Forget every request."""
        for request_id in list(self._asking):
            self.abort(request_id)

    def concerned(self, moved: set[int]) -> bool:
        """Whether one of these tickets (by ticket_id) belongs to a request here."""
        for ahead in self._asking.values():
            if ahead.match is not None and ahead.match.ticket_id in moved:
                return True
            run = ahead.run
            if run is None or moved.isdisjoint(run.ticket_ids()):
                continue
            # Nobody is served sooner by looking at the parts of a whole.
            if not ahead.whole or not run.coming(run.base):
                return True
        return False

    def due(self) -> bool:
        """Whether time alone may have changed the answer to some request."""
        now_s = self._clock()
        waiting = [ahead for ahead in self._asking.values() if ahead.missed_s is None]
        return any((now_s - ahead.looked_s) * 1e3 >= RELOOK_MS for ahead in waiting)

    def slots_leased(self) -> int:
        """Slots that lie leased for requests here."""
        runs = [ahead.run for ahead in self._asking.values()]
        return sum(run.slots()[0] for run in runs if run is not None)

    def _begin(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        first_block: int,
        first_asked_s: float,
        now_s: float,
    ) -> Ahead:
        """A new question, within the deadline of the request's first."""
        ahead = Ahead(tuple(hashes), first_block, first_asked_s, now_s)
        ahead.match = self._store.match(ahead.hashes[first_block:])
        self._asking[request_id] = ahead
        self.counts["matches"] += 1
        return ahead

    def _answer(self, ahead: Ahead, first: int, now_s: float, can_start: bool) -> HookMatch:
        """Move a question on, and say what can be had now."""
        match = ahead.match
        if match is None:
            return self._miss(ahead, now_s)
        late = (now_s - ahead.first_asked_s) * 1e3 >= self._limit_ms
        if ahead.run is None:
            if not (match.done or late or not ahead.in_round_trip(now_s)):
                ahead.looked_s = now_s
                return PENDING
            self._ask(ahead, match, first, now_s)
        if ahead.run is None:
            if match.done and match.tiers and not late and not can_start:
                ahead.looked_s = now_s
                return PENDING  # slots may be asked for later
            return self._miss(ahead, now_s)
        self._look(ahead, ahead.run, now_s)
        if not can_start and now_s > ahead.asked_s and ahead.watch is not None:
            ahead.watch.held_up()  # a request's very first look says no in any case
        ahead.run.cut(first)
        if late:
            self._give_up(ahead, ahead.run, now_s, "waits_cut_by_deadline")
        answer = self._on_its_way(ahead, ahead.run, first, now_s, can_start)
        return answer or self._settled(ahead, ahead.run, first, now_s)

    def _on_its_way(
        self, ahead: Ahead, run: Segments, first: int, now_s: float, can_start: bool
    ) -> HookMatch | None:
        """The answer while blocks are to come; None when none is, or none is worth it."""
        ready = run.ready(first)
        start = first + ready
        coming = run.coming(start)
        if not coming:
            return None
        leading_end = run.base + leading_l2(run.tiers)
        if not can_start or (start < leading_end and ahead.in_round_trip(now_s)):
            return PENDING
        if coming[0] > start:
            blocks = min(coming[0], run.next_arrived(start) or coming[0]) - start
            return self._hit(ahead, first, ready) if ready else self._compute(blocks)
        choice = self._choose(ahead, run, coming, now_s)
        if choice.do is Do.LET_GO:
            self._give_up(ahead, run, now_s, "waits_cut_by_policy")
            return None
        if choice.do is Do.WAIT:
            return PENDING
        if ahead.whole:
            # Computing takes the front: what is still to come had better come from the end on.
            ahead.whole = False
            run.split()
            return PENDING
        if ready:
            return self._hit(ahead, first, ready)
        beyond = run.next_arrived(start)
        blocks = choice.blocks if beyond is None else min(choice.blocks, beyond - start)
        if blocks == len(coming):
            self._give_up(ahead, run, now_s, "loads_overtaken")
        run.cut(start + blocks)
        return self._compute(blocks)

    def _settled(self, ahead: Ahead, run: Segments, first: int, now_s: float) -> HookMatch:
        """The answer when all there will be is there."""
        ready = run.ready(first)
        if ready:
            return self._hit(ahead, first, ready)
        beyond = run.next_arrived(first)
        if beyond is not None:
            return self._compute(beyond - first)
        if first >= run.base + len(run.tiers):
            self._end(ahead, now_s)
        return self._miss(ahead, now_s)

    def _choose(self, ahead: Ahead, run: Segments, coming: list[int], now_s: float) -> Choice:
        """The policy's choice, on blocks that are on their way."""
        assert ahead.watch is not None
        tiers = [run.tier(block) for block in coming]
        start = coming[0] * self._block_tokens
        return ahead.watch.choose(start, tiers, run.arrived(), now_s - ahead.asked_s)

    def _ask(self, ahead: Ahead, match: Match, first: int, now_s: float) -> None:
        """Ask for the run found so far, as far as it pays and slots may be held."""
        tiers = tuple(match.tiers)
        leading = leading_l2(tiers)
        if len(tiers) * self._block_tokens < self._min_load_tokens:
            tiers = tiers[:leading]
        tiers = tiers[: self._leasable()]
        run = Segments(self._store, ahead.hashes, ahead.base, tiers)
        ahead.watch = Watch(self._policy, Counter(tiers), self._block_tokens)
        begins = max(first, ahead.base + leading)
        below = tiers[begins - ahead.base :]
        if below and not ahead.watch.begin(begins * self._block_tokens, below):
            self.counts["loads_let_go"] += 1
            run.tiers = tiers = tiers[:leading]
        if tiers:
            ahead.run, ahead.asked_s, ahead.looked_s = run, now_s, now_s
            if ahead.watch.only_loads:
                run.ask_whole()
                ahead.whole = True
            else:
                run.ask(min(leading, len(tiers)))
            self.counts["loads"] += 1

    def _leasable(self) -> int:
        """Slots one more question may ask for; a request that waits alone may have all."""
        slab = self._store.store.slab
        if slab is None:
            return 0
        runs = [ahead.run for ahead in self._asking.values()]
        wanted = sum(run.slots()[1] for run in runs if run is not None)
        return slab.slots if not wanted else max(0, int(slab.slots * LEASED_SHARE_MAX) - wanted)

    def _look(self, ahead: Ahead, run: Segments, now_s: float) -> None:
        """Tell the policy what has come since the last look."""
        ahead.looked_s = now_s
        if ahead.watch is not None:
            ahead.watch.look(run.arrived(), now_s - ahead.asked_s)

    def _give_up(self, ahead: Ahead, run: Segments, now_s: float, why: str) -> None:
        """Let go what has not come. That it has not come by now is worth knowing."""
        if ahead.watch is not None:
            tiers = {run.tier(block) for block in run.coming(run.base)} - {L2}
            ahead.watch.give_up(tiers, run.arrived(), now_s - ahead.asked_s)
        blocks = run.give_up()
        self.counts[why] += blocks > 0
        self.counts["blocks_let_go"] += blocks

    def _hit(self, ahead: Ahead, first: int, ready: int) -> HookMatch:
        assert ahead.run is not None
        run, end = ahead.run, first + ready
        if not ahead.hit:
            ahead.hit = True
            self.counts["hits"] += 1
        ahead.offered = (first, ready)
        tiers: list[str] = []
        for segment in run.held:
            tiers += segment.ticket.tiers[: len(segment.ticket.slots)]
            if segment.end >= end:
                break
        more = bool(run.coming(end)) or run.next_arrived(end) is not None
        return HookMatch(Answer.HIT, ready, tuple(tiers[:ready]), more)

    def _compute(self, blocks: int) -> HookMatch:
        assert blocks > 0
        self.counts["two_ended_steps"] += 1
        return HookMatch(Answer.PENDING, compute=blocks)

    def _miss(self, ahead: Ahead, now_s: float) -> HookMatch:
        self._drop(ahead)
        ahead.missed_s = now_s
        self.counts["misses"] += not ahead.hit
        return MISS

    def _end(self, ahead: Ahead | None, now_s: float) -> None:
        """All of the run is there."""
        if ahead is not None and ahead.run is not None and ahead.watch is not None:
            ahead.watch.ended(now_s - ahead.asked_s)

    def _drop(self, ahead: Ahead | None) -> None:
        """Hand back what a question holds."""
        if ahead is not None:
            if ahead.run is not None:
                ahead.run.close()
            ahead.match = ahead.run = None
