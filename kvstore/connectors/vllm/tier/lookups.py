"""The lookup cache of a tier: answers the lookups of waiting requests without waiting.

vLLM looks up one key at a time and needs an answer at once. The store answers for a sequence of
keys, a moment later. So the keys of a step are collected and sent at its end as batches; a key is
PENDING until its answer arrives. A key is looked up at most once in a step.

An answer is cached as long as a request that looked the key up lives, because a waiting request
must not get MISS and then HIT. A key that was a HIT but could not be loaded is a MISS from then on;
otherwise vLLM would look it up and load it forever. Overlapping requests could keep a MISS cached
forever, so a later request looks an old MISS up again.

vLLM loads into its host pool, where a waiting request's next load may evict what it loaded before.
If a prefix is larger than the pool, this would repeat forever. So after a load of a request has
ended, a key that was a HIT for it before is a MISS when it looks the key up again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.interface import LookupStatus, Match

SUFFIX_KEYS_MAX: Final = 256
"""Maximum number of keys sent one by one in a step, for a group that is looked up from its end.
Further ones are MISS."""
KEYS_MAX: Final = 1 << 16
"""Maximum number of cached keys. Further ones are MISS."""
MISS_CACHE_S: Final = 1.0
"""Age of a MISS after which a request that is new to the key looks it up again."""


@dataclass(eq=False, slots=True)
class LookupEntry:
    """The cached answer for one key.

    settled_s: time of the answer. requests: requests that looked the key up. missed: those that got
    MISS before the key was looked up again.
    """

    status: LookupStatus = LookupStatus.PENDING
    settled_s: float = 0.0
    requests: set[str] = field(default_factory=set)
    missed: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Requester:
    """A request: the keys it looked up, and those that were a HIT.

    load_ended: a load of it has ended. truncated: a HIT was evicted from vLLM's pool.
    """

    keys: set[bytes] = field(default_factory=set)
    hits: set[bytes] = field(default_factory=set)
    load_ended: bool = False
    truncated: bool = False


@dataclass(eq=False, slots=True)
class LookupBatch:
    """A sequence of keys sent to the store."""

    keys: Sequence[bytes]
    match: Match
    sent_s: float


class LookupCache:
    """The lookup cache of one tier. Only the scheduler's thread calls it.

    timeout_ms: an answer that takes longer is MISS.
    """

    def __init__(
        self, store: GuardedStore, *, timeout_ms: float, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._entries: dict[bytes, LookupEntry] = {}
        self._requesters: dict[str, Requester] = {}
        self._unsent: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        self._in_flight: list[LookupBatch] = []
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_in_flight(self) -> bool:
        """True while answers are pending."""
        return bool(self._in_flight)

    @property
    def batches_done(self) -> int:
        """Number of answered batches that the next `collect` processes."""
        return sum(batch.match.done for batch in self._in_flight)

    def lookup(self, key: bytes, request_id: str, group: int, position: int) -> LookupStatus:
        """HIT, MISS, or PENDING (call again in the next step).

        group, position: KV group of the key, and its position in the request. The keys of a group
            are sent as one batch, sorted by position.
        """
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= KEYS_MAX:
                self.counts["lookups_dropped"] += 1
                return LookupStatus.MISS
            entry = self._entries[key] = LookupEntry()
            self._unsent.setdefault((request_id, group), []).append((position, key))
        elif request_id not in entry.requests and self._is_expired_miss(entry):
            entry.missed |= entry.requests
            entry.status = LookupStatus.PENDING
            self._unsent.setdefault((request_id, group), []).append((position, key))
        entry.requests.add(request_id)
        requester = self._requesters.get(request_id)
        if requester is None:
            requester = self._requesters[request_id] = Requester()
        requester.keys.add(key)
        if request_id in entry.missed:
            return LookupStatus.MISS
        return (
            self._answer_hit(key, requester) if entry.status is LookupStatus.HIT else entry.status
        )

    def send_batches(self) -> None:
        """Send the new keys of a step to the store, at its end."""
        unsent, self._unsent = self._unsent, {}
        for keys in unsent.values():
            # Looked up from the end: a sliding-window group, whose earlier keys may be absent.
            if len(keys) > 1 and keys[0][0] > keys[1][0]:
                self._send_one_by_one([key for _, key in keys])
            else:
                self._send([key for _, key in sorted(keys)])

    def collect(self) -> None:
        """Process the answers that arrived. Those that take too long are MISS."""
        now_s = self._clock()
        waiting = []
        for batch in self._in_flight:
            late = (now_s - batch.sent_s) * 1e3 >= self._timeout_ms
            if not batch.match.done and not late:
                waiting.append(batch)
                continue
            self.counts["lookups_timed_out"] += not batch.match.done
            hits = len(batch.match.tiers)
            self._record(batch.keys[:hits], LookupStatus.HIT)
            self._record(batch.keys[hits:], LookupStatus.MISS)
        self._in_flight = waiting

    def end_load(self, request_id: str) -> None:
        """From now on vLLM's pool may evict the blocks that this request has loaded."""
        requester = self._requesters.get(request_id)
        if requester is not None:
            requester.load_ended = True

    def preempt_request(self, request_id: str) -> None:
        """The request starts again, so it may load the same keys again."""
        requester = self._requesters.get(request_id)
        if requester is not None:
            requester.hits.clear()
            requester.load_ended = False

    def mark_missing(self, keys: Sequence[bytes]) -> None:
        """Mark keys that could not be loaded as MISS for every live request."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.status, entry.settled_s = LookupStatus.MISS, self._clock()

    def mark_all_missing(self) -> None:
        """Mark every key as MISS for every live request. Pending answers are ignored."""
        self._unsent.clear()
        self._in_flight.clear()
        self.mark_missing(list(self._entries))

    def finish_request(self, request_id: str) -> None:
        """Drop the keys that only this request looked up."""
        requester = self._requesters.pop(request_id, None)
        for key in requester.keys if requester is not None else ():
            entry = self._entries[key]
            entry.requests.discard(request_id)
            entry.missed.discard(request_id)
            if not entry.requests:
                del self._entries[key]
        for group in [group for group in self._unsent if group[0] == request_id]:
            # Other requests may wait for these keys by now.
            self._send([key for _, key in sorted(self._unsent.pop(group)) if key in self._entries])

    def _answer_hit(self, key: bytes, requester: Requester) -> LookupStatus:
        """HIT; MISS if it was a HIT before and a load has ended since: the pool has evicted it."""
        if requester.load_ended and key in requester.hits:
            self.counts["requests_truncated"] += not requester.truncated
            requester.truncated = True
            return LookupStatus.MISS
        requester.hits.add(key)
        return LookupStatus.HIT

    def _send_one_by_one(self, keys: Sequence[bytes]) -> None:
        self._record(keys[SUFFIX_KEYS_MAX:], LookupStatus.MISS)
        for key in keys[:SUFFIX_KEYS_MAX]:
            self._send([key])

    def _send(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        match = self._store.match(keys)
        if match is None:
            self._record(keys, LookupStatus.MISS)
        else:
            self._in_flight.append(LookupBatch(keys, match, self._clock()))

    def _record(self, keys: Sequence[bytes], answer: LookupStatus) -> None:
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.status is LookupStatus.PENDING:
                entry.status, entry.settled_s = answer, self._clock()

    def _is_expired_miss(self, entry: LookupEntry) -> bool:
        return entry.status is LookupStatus.MISS and self._clock() - entry.settled_s >= MISS_CACHE_S
