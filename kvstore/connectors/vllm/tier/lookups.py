"""What a tier knows of the keys that waiting requests ask for: never asked twice in one step, never
waited for.

vLLM asks key by key and wants an answer at once; the store answers runs, a moment later. So the
keys of a step are gathered, sent at its end as runs, and PENDING until their answer has come. A
verdict is kept as long as a request that asked for it lives: a request that goes on waiting must
not be told MISS, then HIT. A key that said HIT and could not be loaded is MISS from then on, else
vLLM would ask and load for ever. Requests that overlap without end would keep a MISS for ever too,
so one that comes later asks again, for itself.

vLLM loads into its host pool, where what a waiting request has loaded may be driven out by what it
loads next. Where a prefix is larger than the pool, that would go round without end: so once a load
of a request has ended, what it was told to be a HIT before, and asks for again, is MISS for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.interface import Answer, Match

SUFFIX_KEYS_MAX: Final = 256
"""Keys asked for one by one in one step, of a group that is looked up from its end; more are
MISS."""
KEYS_MAX: Final = 1 << 16
"""Keys known at once; further ones are MISS."""
MISS_KEPT_S: Final = 1.0
"""Age from which a MISS is asked again for a request that comes new to the key."""


@dataclass(eq=False, slots=True)
class Asked:
    """One key: its verdict, since when, and the requests that wait for it or go by it.

    missed: those of them that were told MISS before it was asked again.
    """

    answer: Answer = Answer.PENDING
    settled_s: float = 0.0
    requests: set[str] = field(default_factory=set)
    missed: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Asker:
    """One request: the keys it asked for, and which of them were said to be a HIT.

    loaded: a load of it has ended. cut: of what it was told, something is not in vLLM's pool.
    """

    keys: set[bytes] = field(default_factory=set)
    told: set[bytes] = field(default_factory=set)
    loaded: bool = False
    cut: bool = False


@dataclass(eq=False, slots=True)
class Question:
    """A run of keys under way."""

    keys: Sequence[bytes]
    ticket: Match
    asked_s: float


class Lookups:
    """One tier's. Every call comes from the scheduler's thread.

    deadline_ms: an answer that takes longer is MISS.
    """

    def __init__(
        self, store: GuardedStore, *, deadline_ms: float, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._deadline_ms = deadline_ms
        self._clock = clock
        self._keys: dict[bytes, Asked] = {}
        self._askers: dict[str, Asker] = {}
        self._batch: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        self._questions: list[Question] = []
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def waiting(self) -> bool:
        """Answers are under way."""
        return bool(self._questions)

    @property
    def answered(self) -> int:
        """Questions whose answers the next `take_in` takes in."""
        return sum(question.ticket.done for question in self._questions)

    def lookup(self, key: bytes, request_id: str, group: int, position: int) -> Answer:
        """HIT, MISS, or PENDING: ask again next step.

        group, position: of the key in its request; keys of one group are asked as runs by position.
        """
        known = self._keys.get(key)
        if known is None:
            if len(self._keys) >= KEYS_MAX:
                self.counts["lookups_refused"] += 1
                return Answer.MISS
            known = self._keys[key] = Asked()
            self._batch.setdefault((request_id, group), []).append((position, key))
        elif request_id not in known.requests and self._is_old_miss(known):
            known.missed |= known.requests
            known.answer = Answer.PENDING
            self._batch.setdefault((request_id, group), []).append((position, key))
        known.requests.add(request_id)
        asker = self._askers.get(request_id)
        if asker is None:
            asker = self._askers[request_id] = Asker()
        asker.keys.add(key)
        if request_id in known.missed:
            return Answer.MISS
        return self._hit(key, asker) if known.answer is Answer.HIT else known.answer

    def send(self) -> None:
        """The end of a step: ask for what is new."""
        batch, self._batch = self._batch, {}
        for asked in batch.values():
            # From the end on: a window of a sliding-window group; what precedes it may be absent.
            if len(asked) > 1 and asked[0][0] > asked[1][0]:
                self._send_alone([key for _, key in asked])
            else:
                self._send([key for _, key in sorted(asked)])

    def take_in(self) -> None:
        """Take in the answers that have come, and give up those that take too long."""
        now_s = self._clock()
        waiting = []
        for question in self._questions:
            late = (now_s - question.asked_s) * 1e3 >= self._deadline_ms
            if not question.ticket.done and not late:
                waiting.append(question)
                continue
            self.counts["lookups_past_deadline"] += not question.ticket.done
            run = len(question.ticket.tiers)
            self._settle(question.keys[:run], Answer.HIT)
            self._settle(question.keys[run:], Answer.MISS)
        self._questions = waiting

    def load_ended(self, request_id: str) -> None:
        """vLLM's pool may drop from now on what this request has loaded."""
        asker = self._askers.get(request_id)
        if asker is not None:
            asker.loaded = True

    def preempted(self, request_id: str) -> None:
        """It ran, and begins again: it may load again what it had."""
        asker = self._askers.get(request_id)
        if asker is not None:
            asker.told.clear()
            asker.loaded = False

    def forget(self, keys: Sequence[bytes]) -> None:
        """These could not be loaded: MISS for every request that lives."""
        for key in keys:
            known = self._keys.get(key)
            if known is not None:
                known.answer, known.settled_s = Answer.MISS, self._clock()

    def forget_all(self) -> None:
        """Every key is MISS for every request that lives, and no answer under way counts."""
        self._batch.clear()
        self._questions.clear()
        self.forget(list(self._keys))

    def request_finished(self, request_id: str) -> None:
        """Drop what only this request asked for."""
        asker = self._askers.pop(request_id, None)
        for key in asker.keys if asker is not None else ():
            known = self._keys[key]
            known.requests.discard(request_id)
            known.missed.discard(request_id)
            if not known.requests:
                del self._keys[key]
        for asked in [asked for asked in self._batch if asked[0] == request_id]:
            # Others may wait for these by now.
            self._send([key for _, key in sorted(self._batch.pop(asked)) if key in self._keys])

    def _hit(self, key: bytes, asker: Asker) -> Answer:
        """HIT, but a second time only while no load has ended: till then the pool had no room."""
        if asker.loaded and key in asker.told:
            self.counts["requests_cut"] += not asker.cut
            asker.cut = True
            return Answer.MISS
        asker.told.add(key)
        return Answer.HIT

    def _send_alone(self, keys: Sequence[bytes]) -> None:
        self._settle(keys[SUFFIX_KEYS_MAX:], Answer.MISS)
        for key in keys[:SUFFIX_KEYS_MAX]:
            self._send([key])

    def _send(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        ticket = self._store.match(keys)
        if ticket is None:
            self._settle(keys, Answer.MISS)
        else:
            self._questions.append(Question(keys, ticket, self._clock()))

    def _settle(self, keys: Sequence[bytes], answer: Answer) -> None:
        for key in keys:
            known = self._keys.get(key)
            if known is not None and known.answer is Answer.PENDING:
                known.answer, known.settled_s = answer, self._clock()

    def _is_old_miss(self, known: Asked) -> bool:
        return known.answer is Answer.MISS and self._clock() - known.settled_s >= MISS_KEPT_S
