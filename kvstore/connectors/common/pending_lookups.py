"""Lookups and loads of the requests that wait in an engine's queue, from first match to load.

A request may wait for three reasons, each measured on the clock passed in:

- a round trip (`ROUND_TRIP_MS`): the time the store may take to answer and to lease the blocks in
  L2. Every policy allows it; without it, no answer of a sidecar would come in time;
- the prefetch policy: the time blocks of lower tiers may take;
- the maximum wait: after it a request never waits, whatever the policy decides.

A lookup is a match, then a load of the matched prefix. The slots of the load are leased while the
request is still queued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.interface import MISS, HookMatch, Load, LookupStatus, Match
from kvstore.prefetch.policy import PrefetchPolicy, WaitDecision

ROUND_TRIP_MS: Final = 50.0
"""Time the store may take to answer from memory: 40 us over an idle socket, plus the scheduling
delay of a busy node."""
MISS_CACHE_MS: Final = 250.0
"""How long a miss is the answer to the same lookup before the store is asked again."""
LEASED_FRACTION_MAX: Final = 0.5
"""Maximum fraction of the slab's slots that the lookups of several requests may lease."""

PENDING = HookMatch(LookupStatus.PENDING)
L2 = "l2"


@dataclass(eq=False, slots=True)
class PendingLookup:
    """One lookup: `hashes` are those of the prompt from block `first_block` on.

    missed_s: time of its miss. offered: number of blocks of the last hit. checked_s: time of the
    last answer or check, with the `can_start` of the last answer: see `PendingLookups.expired`.
    """

    hashes: tuple[bytes, ...]
    first_block: int
    started_s: float
    match: Match | None = None
    load: Load | None = None
    missed_s: float | None = None
    offered: int = 0
    checked_s: float = 0.0
    can_start: bool = False

    def is_for(self, hashes: Sequence[bytes], first_block: int) -> bool:
        """True if this is the lookup of these hashes from this block on."""
        same = first_block == self.first_block and len(hashes) - first_block == len(self.hashes)
        return same and hashes[-1] == self.hashes[-1]

    @property
    def complete(self) -> bool:
        """True when no more blocks will arrive."""
        done = self.match is not None and self.match.done
        return done and self.load is not None and self.load.done

    @property
    def blocks_ready(self) -> int:
        """Number of blocks that have arrived."""
        return len(self.load.slots) if self.load is not None else 0

    def in_round_trip(self, at_s: float) -> bool:
        """True while the store may still answer from memory."""
        return (at_s - self.started_s) * 1e3 < ROUND_TRIP_MS

    @property
    def slots_wanted(self) -> int:
        """Number of slots that are leased or may still be."""
        if self.load is None:
            return 0
        return len(self.load.slots) if self.load.done else len(self.load.hashes)


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request between its first match and its load."""

    first_lookup_s: float
    lookup: PendingLookup | None = None


class PendingLookups:
    """The lookups of all waiting requests of one engine."""

    def __init__(
        self,
        store: GuardedStore,
        *,
        policy: PrefetchPolicy,
        max_wait_ms: float,
        min_load_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._block_tokens = store.store.namespace.block_tokens
        self._policy = policy
        self._max_wait_ms = max_wait_ms
        self._min_load_tokens = min_load_tokens
        self._clock = clock
        self._waiting: dict[str, WaitingRequest] = {}
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def match(
        self, request_id: str, hashes: Sequence[bytes], first_block: int, *, can_start: bool
    ) -> HookMatch:
        """See `KVHooks.match`. A hash covers all tokens before it, so only the last one is compared
        with the previous lookup: an engine with a long queue repeats its lookups in every step."""
        now_s = self._clock()
        waiting = self._waiting.get(request_id)
        if len(hashes) <= first_block:
            self._drop(waiting)
            return MISS
        if waiting is None:
            waiting = self._waiting[request_id] = WaitingRequest(first_lookup_s=now_s)
        lookup = waiting.lookup
        if lookup is not None and not lookup.is_for(hashes, first_block):
            self._drop(waiting)
            lookup = None
        if lookup is not None and lookup.missed_s is not None:
            if (now_s - lookup.missed_s) * 1e3 < MISS_CACHE_MS:
                return MISS
            lookup = None
        if lookup is None:
            lookup = PendingLookup(tuple(hashes[first_block:]), first_block, now_s)
            waiting.lookup = lookup
            lookup.match = self._store.match(lookup.hashes)
            self.counts["lookups"] += 1
        return self._answer(waiting, lookup, now_s, can_start)

    def take(self, request_id: str, blocks: int) -> list[Load]:
        """Take the load of a request's hit and forget the request; the caller releases the load."""
        waiting = self._waiting.pop(request_id, None)
        lookup = waiting.lookup if waiting is not None else None
        load = lookup.load if lookup is not None else None
        assert lookup is not None, "load without a match"
        assert load is not None, "load without a hit"
        assert 0 < blocks <= lookup.offered, f"{blocks} blocks of a hit of {lookup.offered}"
        return [load]

    def abort(self, request_id: str) -> None:
        """Forget a request and release its leases. Unknown requests are ignored."""
        self._drop(self._waiting.pop(request_id, None))

    def close(self) -> None:
        """Forget every request."""
        for request_id in list(self._waiting):
            self.abort(request_id)

    def affected_by(self, operation_ids: set[int]) -> bool:
        """True if one of these operations belongs to a lookup."""
        for waiting in self._waiting.values():
            if waiting.lookup is None:
                continue
            for operation in (waiting.lookup.match, waiting.lookup.load):
                if operation is not None and operation.operation_id in operation_ids:
                    return True
        return False

    def expired(self) -> bool:
        """True if the passage of time alone may have changed the answer to some request.

        Each change is reported once, by a match or by the first call after it. A request that
        stays PENDING is not reported again until the next change.
        """
        now_s = self._clock()
        changed = False
        for waiting in self._waiting.values():
            lookup = waiting.lookup
            if lookup is None or lookup.match is None:
                continue
            before = self._time_dependent_state(waiting, lookup, lookup.match, lookup.checked_s)
            changed |= self._time_dependent_state(waiting, lookup, lookup.match, now_s) != before
            lookup.checked_s = now_s
        return changed

    def slots_leased(self) -> int:
        """Number of slots leased for waiting requests."""
        lookups = [waiting.lookup for waiting in self._waiting.values()]
        return sum(len(each.load.slots) for each in lookups if each and each.load)

    def _answer(
        self, waiting: WaitingRequest, lookup: PendingLookup, now_s: float, can_start: bool
    ) -> HookMatch:
        """Advance a lookup and return the present answer."""
        match = lookup.match
        if match is None:
            return self._miss(lookup, now_s)
        lookup.checked_s, lookup.can_start = now_s, can_start
        late = self._is_late(waiting, now_s)
        in_round_trip = lookup.in_round_trip(now_s)
        if lookup.load is None and (match.done or late or not in_round_trip):
            self._start_load(lookup, match)
        load = lookup.load
        if load is None and match.done and (late or can_start or not self._blocks_to_load(match)):
            return self._miss(lookup, now_s)
        ready = lookup.blocks_ready
        if not lookup.complete and not late:
            if load is None and match.done:
                return PENDING  # slots may become free later
            if in_round_trip and (load is None or ready < leading_l2(match.tiers)):
                return PENDING
            if self._decide(waiting, lookup, match, now_s) is WaitDecision.WAIT:
                return PENDING
        if not lookup.complete and not lookup.offered:
            self.counts["waits_timed_out" if late else "waits_ended_by_policy"] += 1
        if load is None or not ready:
            return self._miss(lookup, now_s)
        if not lookup.offered:
            self.counts["hits"] += 1
        lookup.offered = ready
        return HookMatch(LookupStatus.HIT, ready, tuple(load.tiers[:ready]))

    def _is_late(self, waiting: WaitingRequest, at_s: float) -> bool:
        return (at_s - waiting.first_lookup_s) * 1e3 >= self._max_wait_ms

    def _decide(
        self, waiting: WaitingRequest, lookup: PendingLookup, match: Match, at_s: float
    ) -> WaitDecision:
        """The policy's decision at this time, on the blocks that have arrived so far."""
        return self._policy.decide(
            elapsed_ms=(at_s - waiting.first_lookup_s) * 1e3,
            tokens_wanted=self._tokens_wanted(lookup, match),
            tokens_ready=lookup.blocks_ready * self._block_tokens,
            done=False,
            can_start=lookup.can_start,
        )

    def _time_dependent_state(
        self, waiting: WaitingRequest, lookup: PendingLookup, match: Match, at_s: float
    ) -> tuple[bool, bool, WaitDecision]:
        """Everything in `_answer` that depends on the time."""
        decision = self._decide(waiting, lookup, match, at_s)
        return self._is_late(waiting, at_s), lookup.in_round_trip(at_s), decision

    def _tokens_wanted(self, lookup: PendingLookup, match: Match) -> int:
        known = match.done and lookup.load is not None
        blocks = len(lookup.load.hashes) if known and lookup.load else len(lookup.hashes)
        return blocks * self._block_tokens

    def _start_load(self, lookup: PendingLookup, match: Match) -> None:
        """Load the prefix matched so far, as far as it is worth loading and slots may be leased."""
        blocks = min(self._blocks_to_load(match), self._leasable_slots())
        if blocks:
            lookup.load = self._store.load(lookup.hashes[:blocks])
            self.counts["loads"] += lookup.load is not None

    def _blocks_to_load(self, match: Match) -> int:
        """Number of blocks to load: all, or of a short prefix only those that are already in L2."""
        blocks = len(match.tiers)
        if blocks * self._block_tokens >= self._min_load_tokens:
            return blocks
        return leading_l2(match.tiers)

    def _leasable_slots(self) -> int:
        """Slots that one more lookup may lease: all of them if no other request waits."""
        slab = self._store.store.slab
        if slab is None:
            return 0
        lookups = [waiting.lookup for waiting in self._waiting.values()]
        wanted = sum(lookup.slots_wanted for lookup in lookups if lookup is not None)
        return slab.slots if not wanted else max(0, int(slab.slots * LEASED_FRACTION_MAX) - wanted)

    def _miss(self, lookup: PendingLookup, now_s: float) -> HookMatch:
        self.counts["lookups_failed"] += lookup.match is None or bool(lookup.match.fault)
        if lookup.load is not None:
            self._store.release(lookup.load)
        lookup.match = lookup.load = None
        lookup.missed_s = now_s
        self.counts["misses"] += 1
        return MISS

    def _drop(self, waiting: WaitingRequest | None) -> None:
        """Release the leases of a request's lookup. Its waiting time continues to count."""
        if waiting is None or waiting.lookup is None:
            return
        if waiting.lookup.load is not None:
            self._store.release(waiting.lookup.load)
        waiting.lookup = None


def leading_l2(tiers: Sequence[str]) -> int:
    """Number of leading blocks that are in L2."""
    for index, tier in enumerate(tiers):
        if tier != L2:
            return index
    return len(tiers)
