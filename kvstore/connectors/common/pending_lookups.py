"""What waiting requests have asked the store for: from the first match until the load.

Three kinds of waiting are kept apart, all read from the clock that is passed in:

- a round trip (`ROUND_TRIP_MS`): what the store may take to say what it knows, and to hand over
  what already lies in L2. Every policy grants it, else no sidecar would ever be asked in vain;
- the prefetch policy: how long blocks of lower tiers may take;
- the deadline: past it a request never waits, whatever the policy says.

An attempt is the store's match, then a load of the run it names, whose slots arrive under lease
while the request is still queued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.interface import MISS, Answer, HookMatch, Load, Match
from kvstore.prefetch.policy import PrefetchPolicy, Verdict

ROUND_TRIP_MS: Final = 50.0
"""What the store may take to answer from memory: 40 us over a quiet socket, and a busy node's
scheduling on top."""
MISS_KEPT_MS: Final = 250.0
"""How long a miss answers for the same question without asking the store again."""
LEASED_SHARE_MAX: Final = 0.5
"""Share of the slab's slots that the attempts of several requests may hold or ask for."""

PENDING = HookMatch(Answer.PENDING)
L2 = "l2"


@dataclass(eq=False, slots=True)
class Attempt:
    """One question: the run of `hashes`, which begins at the prompt's block `first_block`.

    missed_s: when it ended in a miss. offered: blocks of the last hit. looked_s: up to when time's
    own effect on the answer is known, and can_start of the last question: see `Attempts.due`.
    """

    hashes: tuple[bytes, ...]
    first_block: int
    started_s: float
    match: Match | None = None
    load: Load | None = None
    missed_s: float | None = None
    offered: int = 0
    looked_s: float = 0.0
    can_start: bool = False

    def asks(self, hashes: Sequence[bytes], first_block: int) -> bool:
        """Whether it is the question for these from this block on."""
        same = first_block == self.first_block and len(hashes) - first_block == len(self.hashes)
        return same and hashes[-1] == self.hashes[-1]

    @property
    def settled(self) -> bool:
        """Nothing more will come."""
        done = self.match is not None and self.match.done
        return done and self.load is not None and self.load.done

    @property
    def ready(self) -> int:
        """Blocks that have arrived."""
        return len(self.load.slots) if self.load is not None else 0

    def in_round_trip(self, at_s: float) -> bool:
        """Whether the store may still be about to answer from memory."""
        return (at_s - self.started_s) * 1e3 < ROUND_TRIP_MS

    @property
    def slots_wanted(self) -> int:
        """Slots it holds or may still get."""
        if self.load is None:
            return 0
        return len(self.load.slots) if self.load.done else len(self.load.hashes)


@dataclass(eq=False, slots=True)
class Waiting:
    """A request between its first match and its load."""

    first_asked_s: float
    attempt: Attempt | None = None


class Attempts:
    """The attempts of all waiting requests of one engine."""

    def __init__(
        self,
        store: GuardedStore,
        *,
        policy: PrefetchPolicy,
        deadline_ms: float,
        min_load_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._block_tokens = store.store.namespace.block_tokens
        self._policy = policy
        self._deadline_ms = deadline_ms
        self._min_load_tokens = min_load_tokens
        self._clock = clock
        self._waiting: dict[str, Waiting] = {}
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def match(
        self, request_id: str, hashes: Sequence[bytes], first_block: int, *, can_start: bool
    ) -> HookMatch:
        """See `KVHooks.match`. Each hash stands for all before it: the last tells whether they are
        those of the last question, which a long queue asks in every step."""
        now_s = self._clock()
        waiting = self._waiting.get(request_id)
        if len(hashes) <= first_block:
            self._drop(waiting)
            return MISS
        if waiting is None:
            waiting = self._waiting[request_id] = Waiting(first_asked_s=now_s)
        attempt = waiting.attempt
        if attempt is not None and not attempt.asks(hashes, first_block):
            self._drop(waiting)
            attempt = None
        if attempt is not None and attempt.missed_s is not None:
            if (now_s - attempt.missed_s) * 1e3 < MISS_KEPT_MS:
                return MISS
            attempt = None
        if attempt is None:
            attempt = Attempt(tuple(hashes[first_block:]), first_block, now_s)
            waiting.attempt = attempt
            attempt.match = self._store.match(attempt.hashes)
            self.counts["matches"] += 1
        return self._answer(waiting, attempt, now_s, can_start)

    def take(self, request_id: str, blocks: int) -> list[Load]:
        """End a request's waiting with its hit; the ticket is the caller's to release."""
        waiting = self._waiting.pop(request_id, None)
        attempt = waiting.attempt if waiting is not None else None
        load = attempt.load if attempt is not None else None
        assert attempt is not None, "load without a match"
        assert load is not None, "load without a hit"
        assert 0 < blocks <= attempt.offered, f"{blocks} blocks of a hit of {attempt.offered}"
        return [load]

    def abort(self, request_id: str) -> None:
        """Forget a request and hand back what it holds; unknown ones too."""
        self._drop(self._waiting.pop(request_id, None))

    def close(self) -> None:
        """Forget every request."""
        for request_id in list(self._waiting):
            self.abort(request_id)

    def concerned(self, moved: set[int]) -> bool:
        """Whether one of these tickets (by ticket_id) belongs to an attempt."""
        for waiting in self._waiting.values():
            if waiting.attempt is None:
                continue
            for ticket in (waiting.attempt.match, waiting.attempt.load):
                if ticket is not None and ticket.ticket_id in moved:
                    return True
        return False

    def due(self) -> bool:
        """Whether time alone may have changed the answer to some request.

        Each change is reported once, when it comes: by a match, or by the first call after it. A
        request that goes on being PENDING is not due again until the next.
        """
        now_s = self._clock()
        due = False
        for waiting in self._waiting.values():
            attempt = waiting.attempt
            if attempt is None or attempt.match is None:
                continue
            before = self._by_time(waiting, attempt, attempt.match, attempt.looked_s)
            due |= self._by_time(waiting, attempt, attempt.match, now_s) != before
            attempt.looked_s = now_s
        return due

    def slots_leased(self) -> int:
        """Slots that lie leased for waiting requests."""
        attempts = [waiting.attempt for waiting in self._waiting.values()]
        return sum(len(a.load.slots) for a in attempts if a is not None and a.load is not None)

    def _answer(
        self, waiting: Waiting, attempt: Attempt, now_s: float, can_start: bool
    ) -> HookMatch:
        """Move an attempt on, and say what can be had now."""
        match = attempt.match
        if match is None:
            return self._miss(attempt, now_s)
        attempt.looked_s, attempt.can_start = now_s, can_start
        late = self._late(waiting, now_s)
        in_round_trip = attempt.in_round_trip(now_s)
        if attempt.load is None and (match.done or late or not in_round_trip):
            self._start_load(attempt, match)
        load = attempt.load
        if load is None and match.done and (late or can_start or not self._worth_loading(match)):
            return self._miss(attempt, now_s)
        ready = attempt.ready
        if not attempt.settled and not late:
            if load is None and match.done:
                return PENDING  # slots may be asked for later
            if in_round_trip and (load is None or ready < leading_l2(match.tiers)):
                return PENDING
            if self._verdict(waiting, attempt, match, now_s) is Verdict.WAIT:
                return PENDING
        if not attempt.settled and not attempt.offered:
            self.counts["waits_cut_by_deadline" if late else "waits_cut_by_policy"] += 1
        if load is None or not ready:
            return self._miss(attempt, now_s)
        if not attempt.offered:
            self.counts["hits"] += 1
        attempt.offered = ready
        return HookMatch(Answer.HIT, ready, tuple(load.tiers[:ready]))

    def _late(self, waiting: Waiting, at_s: float) -> bool:
        return (at_s - waiting.first_asked_s) * 1e3 >= self._deadline_ms

    def _verdict(self, waiting: Waiting, attempt: Attempt, match: Match, at_s: float) -> Verdict:
        """The policy's, on what has come so far, were it asked at this time."""
        return self._policy.verdict(
            elapsed_ms=(at_s - waiting.first_asked_s) * 1e3,
            tokens_wanted=self._tokens_wanted(attempt, match),
            tokens_ready=attempt.ready * self._block_tokens,
            done=False,
            can_start=attempt.can_start,
        )

    def _by_time(
        self, waiting: Waiting, attempt: Attempt, match: Match, at_s: float
    ) -> tuple[bool, bool, Verdict]:
        """All by which the time enters into `_answer`."""
        verdict = self._verdict(waiting, attempt, match, at_s)
        return self._late(waiting, at_s), attempt.in_round_trip(at_s), verdict

    def _tokens_wanted(self, attempt: Attempt, match: Match) -> int:
        known = match.done and attempt.load is not None
        blocks = len(attempt.load.hashes) if known and attempt.load else len(attempt.hashes)
        return blocks * self._block_tokens

    def _start_load(self, attempt: Attempt, match: Match) -> None:
        """Ask for the slots of the run found so far, as far as it pays and slots may be held."""
        blocks = min(self._worth_loading(match), self._leasable())
        if blocks:
            attempt.load = self._store.load(attempt.hashes[:blocks])
            self.counts["loads"] += attempt.load is not None

    def _worth_loading(self, match: Match) -> int:
        """Blocks of the run to load: all, or of a short run those that lie in L2 already."""
        run = len(match.tiers)
        if run * self._block_tokens >= self._min_load_tokens:
            return run
        return leading_l2(match.tiers)

    def _leasable(self) -> int:
        """Slots one more attempt may ask for; a request that waits alone may have all."""
        slab = self._store.store.slab
        if slab is None:
            return 0
        attempts = [waiting.attempt for waiting in self._waiting.values()]
        wanted = sum(attempt.slots_wanted for attempt in attempts if attempt is not None)
        return slab.slots if not wanted else max(0, int(slab.slots * LEASED_SHARE_MAX) - wanted)

    def _miss(self, attempt: Attempt, now_s: float) -> HookMatch:
        self.counts["matches_failed"] += attempt.match is None or bool(attempt.match.fault)
        if attempt.load is not None:
            self._store.release(attempt.load)
        attempt.match = attempt.load = None
        attempt.missed_s = now_s
        self.counts["misses"] += 1
        return MISS

    def _drop(self, waiting: Waiting | None) -> None:
        """Hand back what a request's attempt holds. Its deadline goes on running."""
        if waiting is None or waiting.attempt is None:
            return
        if waiting.attempt.load is not None:
            self._store.release(waiting.attempt.load)
        waiting.attempt = None


def leading_l2(tiers: Sequence[str]) -> int:
    """Blocks at the front of a run that lie in L2."""
    for index, tier in enumerate(tiers):
        if tier != L2:
            return index
    return len(tiers)
