"""Lookups and loads under the adaptive policy: the tail is loaded while the head is computed.

This replaces `PendingLookups` for the adaptive policy. A request may start while its later blocks
are in flight; it then repeats its lookup from the first block it has not computed. The policy
decides each step. This module reports to the policy which blocks arrived, and when.

A request waits at most a round trip for its first blocks in L2, and for the others as long as the
policy decides. It never waits longer than the maximum wait: then it takes the blocks that have
arrived, and computes the gap before any later block that has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.load_ranges import LoadRanges
from kvstore.connectors.common.pending_lookups import (
    L2,
    LEASED_FRACTION_MAX,
    MISS_CACHE_MS,
    PENDING,
    ROUND_TRIP_MS,
    leading_l2,
)
from kvstore.interface import MISS, HookMatch, Load, LookupStatus, Match
from kvstore.prefetch.adaptive import Action, Adaptive, Decision, LoadTracker

RECHECK_MS: Final = 5.0
"""How soon a waiting request is checked again if no block arrived."""


@dataclass(eq=False, slots=True)
class SplitRequest:
    """The lookup of one request: the blocks from `base` on of a prompt with these hashes.

    ranges: the loads, once started. tracker: reports them to the policy. whole: one range only.
    checked_s: time of the last check. offered: (first, blocks) of the last hit. hit: there was one.
    """

    hashes: tuple[bytes, ...]
    base: int
    first_lookup_s: float
    started_s: float
    match: Match | None = None
    ranges: LoadRanges | None = None
    load_started_s: float = 0.0
    checked_s: float = 0.0
    tracker: LoadTracker | None = None
    whole: bool = False
    missed_s: float | None = None
    offered: tuple[int, int] = (0, 0)
    hit: bool = False

    def is_for(self, hashes: Sequence[bytes], first_block: int) -> bool:
        """True if the lookup is for these hashes: the last hash covers all tokens before it."""
        same = len(hashes) == len(self.hashes) and hashes[-1] == self.hashes[-1]
        return same and first_block >= self.base

    def in_round_trip(self, now_s: float) -> bool:
        """True while the store may still answer from memory."""
        return (now_s - self.started_s) * 1e3 < ROUND_TRIP_MS


class SplitLoads:
    """The lookups of all requests of one engine that wait, or compute before their loads end."""

    def __init__(
        self,
        store: GuardedStore,
        *,
        policy: Adaptive,
        max_wait_ms: float,
        min_load_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._block_tokens = store.store.namespace.block_tokens
        self._policy = policy
        self._max_wait_ms = min(max_wait_ms, policy.max_wait_ms)
        self._min_load_tokens = min_load_tokens
        self._clock = clock
        self._requests: dict[str, SplitRequest] = {}
        self._copying: dict[str, SplitRequest] = {}
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def match(
        self, request_id: str, hashes: Sequence[bytes], first_block: int, *, can_start: bool
    ) -> HookMatch:
        """See `KVHooks.match`."""
        now_s = self._clock()
        request = self._requests.get(request_id)
        if first_block >= len(hashes):
            self._end_tracker(request, now_s)
            self._drop(request)
            return MISS
        if request is not None and not request.is_for(hashes, first_block):
            self._drop(request)
            request = self._begin(request_id, hashes, first_block, request.first_lookup_s, now_s)
        elif request is not None and request.missed_s is not None:
            if (now_s - request.missed_s) * 1e3 < MISS_CACHE_MS:
                return MISS
            request = self._begin(request_id, hashes, first_block, request.first_lookup_s, now_s)
        elif request is None:
            request = self._begin(request_id, hashes, first_block, now_s, now_s)
        return self._answer(request, first_block, now_s, can_start)

    def take(self, request_id: str, blocks: int) -> list[Load]:
        """Take the loads of a request's hit; the caller releases them. The request stays here while
        more of its blocks are leased or pending."""
        request = self._requests.get(request_id)
        assert request is not None, "load without a match"
        assert request.ranges is not None, "load without a hit"
        first, offered = request.offered
        assert 0 < blocks <= offered, f"{blocks} blocks of a hit of {offered}"
        request.offered = (0, 0)
        loads = request.ranges.take(first, blocks)
        if not request.ranges.ranges:
            del self._requests[request_id]
            if first + blocks >= request.ranges.base + len(request.ranges.tiers):
                self._copying[request_id] = request
        return loads

    def complete_copy(self, request_id: str) -> None:
        """The last blocks taken are in the engine's pages. Unknown requests are ignored."""
        request = self._copying.pop(request_id, None)
        if request is not None and request.tracker is not None:
            request.tracker.record_duration(self._clock() - request.load_started_s)

    def abort(self, request_id: str) -> None:
        """Forget a request and release its leases. Unknown requests are ignored."""
        self._copying.pop(request_id, None)
        self._drop(self._requests.pop(request_id, None))

    def close(self) -> None:
        """Forget every request."""
        for request_id in list(self._requests):
            self.abort(request_id)

    def affected_by(self, operation_ids: set[int]) -> bool:
        """True if one of these operations belongs to a request here and may change its answer."""
        for request in self._requests.values():
            if request.match is not None and request.match.operation_id in operation_ids:
                return True
            ranges = request.ranges
            if ranges is None or operation_ids.isdisjoint(ranges.operation_ids()):
                continue
            # A load in one range changes the answer only when all of it has arrived.
            if not request.whole or not ranges.pending(ranges.base):
                return True
        return False

    def expired(self) -> bool:
        """True if the passage of time alone may have changed the answer to some request."""
        now_s = self._clock()
        waiting = [request for request in self._requests.values() if request.missed_s is None]
        return any((now_s - request.checked_s) * 1e3 >= RECHECK_MS for request in waiting)

    def slots_leased(self) -> int:
        """Number of slots leased for requests here."""
        loads = [request.ranges for request in self._requests.values()]
        return sum(ranges.slot_counts()[0] for ranges in loads if ranges is not None)

    def _begin(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        first_block: int,
        first_lookup_s: float,
        now_s: float,
    ) -> SplitRequest:
        """Start a new lookup. The maximum wait counts from the request's first lookup."""
        request = SplitRequest(tuple(hashes), first_block, first_lookup_s, now_s)
        request.match = self._store.match(request.hashes[first_block:])
        self._requests[request_id] = request
        self.counts["lookups"] += 1
        return request

    def _answer(
        self, request: SplitRequest, first: int, now_s: float, can_start: bool
    ) -> HookMatch:
        """Advance a lookup and return the present answer."""
        match = request.match
        if match is None:
            return self._miss(request, now_s)
        late = (now_s - request.first_lookup_s) * 1e3 >= self._max_wait_ms
        if request.ranges is None:
            if not (match.done or late or not request.in_round_trip(now_s)):
                request.checked_s = now_s
                return PENDING
            self._start_load(request, match, first, now_s)
        if request.ranges is None:
            if match.done and match.tiers and not late and not can_start:
                request.checked_s = now_s
                return PENDING  # slots may become free later
            return self._miss(request, now_s)
        self._update_tracker(request, request.ranges, now_s)
        # The call that starts the load does not count: the first one never has can_start.
        if not can_start and now_s > request.load_started_s and request.tracker is not None:
            request.tracker.invalidate()
        request.ranges.release_before(first)
        if late:
            self._cancel_pending(request, request.ranges, now_s, "waits_timed_out")
        answer = self._answer_in_flight(request, request.ranges, first, now_s, can_start)
        return answer or self._final_answer(request, request.ranges, first, now_s)

    def _answer_in_flight(
        self, request: SplitRequest, ranges: LoadRanges, first: int, now_s: float, can_start: bool
    ) -> HookMatch | None:
        """The answer while blocks are pending. None: no block is, or the policy cancels them."""
        ready = ranges.blocks_ready(first)
        start = first + ready
        pending = ranges.pending(start)
        if not pending:
            return None
        leading_end = ranges.base + leading_l2(ranges.tiers)
        if not can_start or (start < leading_end and request.in_round_trip(now_s)):
            return PENDING
        if pending[0] > start:
            blocks = min(pending[0], ranges.next_arrived(start) or pending[0]) - start
            return self._hit(request, first, ready) if ready else self._compute(blocks)
        decision = self._decide(request, ranges, pending, now_s)
        if decision.action is Action.CANCEL:
            self._cancel_pending(request, ranges, now_s, "waits_ended_by_policy")
            return None
        if decision.action is Action.WAIT:
            return PENDING
        if request.whole:
            # The engine computes the head now: load the pending blocks from the end backwards.
            request.whole = False
            ranges.split()
            return PENDING
        if ready:
            return self._hit(request, first, ready)
        beyond = ranges.next_arrived(start)
        blocks = decision.blocks if beyond is None else min(decision.blocks, beyond - start)
        if blocks == len(pending):
            self._cancel_pending(request, ranges, now_s, "loads_overtaken")
        ranges.release_before(start + blocks)
        return self._compute(blocks)

    def _final_answer(
        self, request: SplitRequest, ranges: LoadRanges, first: int, now_s: float
    ) -> HookMatch:
        """The answer when no more blocks will arrive."""
        ready = ranges.blocks_ready(first)
        if ready:
            return self._hit(request, first, ready)
        beyond = ranges.next_arrived(first)
        if beyond is not None:
            return self._compute(beyond - first)
        if first >= ranges.base + len(ranges.tiers):
            self._end_tracker(request, now_s)
        return self._miss(request, now_s)

    def _decide(
        self, request: SplitRequest, ranges: LoadRanges, pending: list[int], now_s: float
    ) -> Decision:
        """The policy's decision about the pending blocks."""
        assert request.tracker is not None
        tiers = [ranges.tier(block) for block in pending]
        start = pending[0] * self._block_tokens
        return request.tracker.decide_next(
            start, tiers, ranges.arrived_by_tier(), now_s - request.load_started_s
        )

    def _start_load(self, request: SplitRequest, match: Match, first: int, now_s: float) -> None:
        """Load the prefix matched so far, as far as it is worth loading and slots may be leased."""
        tiers = tuple(match.tiers)
        leading = leading_l2(tiers)
        if len(tiers) * self._block_tokens < self._min_load_tokens:
            tiers = tiers[:leading]
        tiers = tiers[: self._leasable_slots()]
        ranges = LoadRanges(self._store, request.hashes, request.base, tiers)
        request.tracker = LoadTracker(self._policy, Counter(tiers), self._block_tokens)
        tail_start = max(first, request.base + leading)
        tail = tiers[tail_start - request.base :]
        if tail and not request.tracker.choose_mode(tail_start * self._block_tokens, tail):
            self.counts["loads_skipped_by_policy"] += 1
            ranges.tiers = tiers = tiers[:leading]
        if tiers:
            request.ranges, request.load_started_s, request.checked_s = ranges, now_s, now_s
            if request.tracker.only_loads:
                ranges.start_whole()
                request.whole = True
            else:
                ranges.start(min(leading, len(tiers)))
            self.counts["loads"] += 1

    def _leasable_slots(self) -> int:
        """Slots that one more lookup may lease: all of them if no other request waits."""
        slab = self._store.store.slab
        if slab is None:
            return 0
        loads = [request.ranges for request in self._requests.values()]
        wanted = sum(ranges.slot_counts()[1] for ranges in loads if ranges is not None)
        return slab.slots if not wanted else max(0, int(slab.slots * LEASED_FRACTION_MAX) - wanted)

    def _update_tracker(self, request: SplitRequest, ranges: LoadRanges, now_s: float) -> None:
        """Report the blocks that arrived since the last check to the policy."""
        request.checked_s = now_s
        if request.tracker is not None:
            request.tracker.record_arrivals(
                ranges.arrived_by_tier(), now_s - request.load_started_s
            )

    def _cancel_pending(
        self, request: SplitRequest, ranges: LoadRanges, now_s: float, why: str
    ) -> None:
        """Cancel the pending blocks. The policy learns that they had not arrived by now."""
        if request.tracker is not None:
            tiers = {ranges.tier(block) for block in ranges.pending(ranges.base)} - {L2}
            request.tracker.record_missing(
                tiers, ranges.arrived_by_tier(), now_s - request.load_started_s
            )
        blocks = ranges.cancel_pending()
        self.counts[why] += blocks > 0
        self.counts["blocks_cancelled"] += blocks

    def _hit(self, request: SplitRequest, first: int, ready: int) -> HookMatch:
        assert request.ranges is not None
        ranges, end = request.ranges, first + ready
        if not request.hit:
            request.hit = True
            self.counts["hits"] += 1
        request.offered = (first, ready)
        tiers: list[str] = []
        for part in ranges.ranges:
            tiers += part.load.tiers[: len(part.load.slots)]
            if part.end >= end:
                break
        more = bool(ranges.pending(end)) or ranges.next_arrived(end) is not None
        return HookMatch(LookupStatus.HIT, ready, tuple(tiers[:ready]), more)

    def _compute(self, blocks: int) -> HookMatch:
        assert blocks > 0
        self.counts["split_load_steps"] += 1
        return HookMatch(LookupStatus.PENDING, compute=blocks)

    def _miss(self, request: SplitRequest, now_s: float) -> HookMatch:
        self._drop(request)
        request.missed_s = now_s
        self.counts["misses"] += not request.hit
        return MISS

    def _end_tracker(self, request: SplitRequest | None, now_s: float) -> None:
        """Report that all blocks of the request are loaded or computed."""
        if request is not None and request.ranges is not None and request.tracker is not None:
            request.tracker.record_duration(now_s - request.load_started_s)

    def _drop(self, request: SplitRequest | None) -> None:
        """Release the leases of a lookup."""
        if request is not None:
            if request.ranges is not None:
                request.ranges.close()
            request.match = request.ranges = None
