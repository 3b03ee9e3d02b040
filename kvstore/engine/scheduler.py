"""Who runs in the next step: decode first, then prefill, then whoever waits.

The rules, in the order in which they are applied each step:

1. Every running job that only lacks its next token gets one token of the step's budget; what is
   left goes to running prefills, then to waiting jobs, as far as pages and slots reach.
2. A running job that finds no page takes it from the latest-started running job, which goes back
   to the front of the queue; its full pages stay in the tree, where it will find most of them
   again. The earliest-started job is never preempted, so some job always ends.
3. Waiting jobs are started longest prefix match first (on the device, or believed to be in a lower
   tier), so that what is cached is used before it is evicted. A job that was passed over too often
   comes first, as does a preempted one. A long queue is served in order of arrival: matching all
   of it in every step would cost more than it gains.
4. A job whose KV is on its way (from a lower tier, or because a running job is computing the same
   block just now) is skipped, not waited for. A job that lacks pages is waited for: nobody
   overtakes it, or a long prompt would starve.
5. A job may run while its later blocks are on their way. It then asks before each step how far to
   compute, and loads what has come where it has computed up to it.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.engine.cache import PrefixCache
from kvstore.engine.request import Job, State
from kvstore.engine.transfers import LoadUnderWay, Transfers
from kvstore.interface import Answer, HookMatch

PREFIX_ORDER_MAX_WAITING = 128
"""A queue longer than this is served first come, first served."""
MAX_PASSED_OVER = 16
"""How many later arrivals may be started before a job that could start as well."""


@dataclass(slots=True)
class Slice:
    """One job's share of a step: its next `tokens` tokens."""

    job: Job
    tokens: int


class Verdict(enum.Enum):
    """What came of considering a waiting job."""

    STARTED = "started"
    LATER = "later"
    BLOCKED = "blocked"


class Scheduler:
    """Owns the queue and the running jobs. Decides; computes nothing. Loop thread only."""

    def __init__(
        self,
        cache: PrefixCache,
        transfers: Transfers,
        *,
        max_batch_tokens: int,
        max_running: int,
        clock: Callable[[], float],
    ) -> None:
        assert max_batch_tokens >= max_running >= 1
        self.cache = cache
        self.transfers = transfers
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.clock = clock
        self.waiting: list[Job] = []
        """Preempted jobs, earliest-started first; then arrivals in order."""
        self.running: list[Job] = []
        """In the order of their starts."""
        self.loading: list[Job] = []
        self.preemptions = 0
        self._starts = 0
        self._plan: dict[Job, int] = {}
        self._filling: set[bytes] = set()
        self._budget = 0

    # ---- in and out ----

    def add(self, job: Job) -> None:
        """Queue a new job and let the hooks look for its blocks already."""
        self.waiting.append(job)
        believed = self.cache.attach(job)
        self.transfers.match(job, believed, can_start=False)
        self.cache.detach(job)

    def remove(self, job: Job) -> None:
        """Take a job out, whatever its state. Pages under a running load come back when it ends."""
        if job.state is State.LOADING:
            self.loading.remove(job)
        elif job.state is State.RUNNING:
            self.running.remove(job)
            self.cache.detach(job)
        else:
            self.waiting.remove(job)
        job.state = State.FINISHED

    def loaded(self, load: LoadUnderWay, blocks: int) -> None:
        """A load ended with its first `blocks` blocks: publish them, compute the rest."""
        job = load.job
        if job.state is State.FINISHED:
            self.cache.detach(job)
            return
        self.loading.remove(job)
        spared = self._account_load(load, blocks)
        if job.counting:
            assert job.cached is not None
            for tier, tokens in spared.items():
                job.cached[tier] = job.cached.get(tier, 0) + tokens
        job.state = State.RUNNING
        bisect.insort(self.running, job, key=lambda other: other.start)

    def _account_load(self, load: LoadUnderWay, blocks: int) -> dict[str, int]:
        """Move `computed` over what was loaded; returns the tokens spared, by tier."""
        job, cache, size = load.job, self.cache, self.transfers.block_tokens
        spared: dict[str, int] = {}
        for index in range(blocks):
            end = min((load.first_block + index + 1) * size, cache.useful_tokens(job))
            tier = load.tiers[index]
            spared[tier] = spared.get(tier, 0) + end - job.computed
            job.computed = end
        stored_end = (load.first_block + blocks) * size
        if blocks:
            job.offered_blocks = max(job.offered_blocks, load.first_block + blocks)
            cache.publish(job)
            cache.tree.mark_stored(job.known, job.root, min(stored_end, job.computed))
        if blocks < len(load.tiers):
            cache.tree.forget_stored(job.known, job.root, max(stored_end, job.computed))
        return spared

    # ---- one step ----

    def schedule(self) -> list[Slice]:
        """The next step's work; empty when nothing can run now."""
        self._plan = {}
        self._budget = self.max_batch_tokens
        for job in [job for job in self.running if job.ahead]:
            self._look_ahead(job)
        decoding = [job for job in self.running if job.length - job.computed == 1]
        filling = [job for job in self.running if job.length - job.computed > 1]
        for job in decoding + filling:
            self._continue(job)
        self._admit()
        return [Slice(job, tokens) for job, tokens in self._plan.items()]

    def _continue(self, job: Job) -> None:
        """Plan a running job's next tokens, with pages for them."""
        tokens = self._tokens_now(job)
        if job.state is not State.RUNNING or tokens < 1:
            return
        if self._make_room(job, job.computed + tokens):
            self.cache.grow(job, job.computed + tokens)
            self._plan[job] = tokens
            self._budget -= tokens

    def _tokens_now(self, job: Job) -> int:
        """Tokens a running job may compute in this step; below 1 when it waits for its load."""
        tokens = min(job.length - job.computed, self._budget)
        if not job.ahead or tokens < 1:
            return tokens
        if job.compute_to - job.computed <= tokens:
            return job.compute_to - job.computed
        # Up to a block's end where the budget reaches one: a part of a block is of no use to it.
        size = self.transfers.block_tokens
        end = (job.computed + tokens) // size * size
        return end - job.computed if end > job.computed else tokens

    def _look_ahead(self, job: Job) -> None:
        """Ask how far a running job whose later blocks are on their way is to compute."""
        found = self.transfers.match_ahead(job)
        if found.answer is Answer.HIT:
            self.running.remove(job)
            self._load(job, found)
            return
        self._note_ahead(job, found)

    def _note_ahead(self, job: Job, found: HookMatch) -> None:
        size = self.transfers.block_tokens
        job.ahead = found.answer is Answer.PENDING
        job.compute_to = (job.computed // size + found.compute) * size

    def _load(self, job: Job, found: HookMatch) -> None:
        """Have the blocks found copied into the job's pages; it runs on when they are there."""
        job.state = State.LOADING
        job.ahead = found.more
        self.loading.append(job)
        self.transfers.load(job, found)

    def _make_room(self, job: Job, tokens: int) -> bool:
        """Have the pages free that the job lacks for its first `tokens` tokens, or say no.

        No means: pages are on their way back (a copy is ending), or the job itself was preempted
        because the earlier-started ones hold everything.
        """
        while not self.cache.reserve(self.cache.missing_pages(job, tokens)):
            latest = self.running[-1]
            if latest is not job:
                self._preempt(latest)
            elif self.transfers.busy:
                return False
            else:
                assert len(self.running) > 1, "a job alone finds no page"
                self._preempt(job)
                return False
        return True

    def _preempt(self, job: Job) -> None:
        """Back to the front of the queue; the tree keeps the full pages."""
        # Only decoding finds no page (a start takes pages for all known tokens), in start order.
        assert job not in self._plan
        self.running.remove(job)
        self.cache.detach(job)
        job.state = State.WAITING
        job.preempted, job.ahead = True, False
        self.waiting.insert(0, job)
        self.preemptions += 1

    # ---- who waits ----

    def _admit(self) -> None:
        """Start waiting jobs while budget and slots last."""
        if not self.waiting or not self._has_slot():
            return
        self._filling.clear()
        for job in self.running:
            self._note_filling(job)
        for job in self._ordered():
            if not self._has_slot():
                return
            verdict = self._consider(job)
            job.pending = verdict is Verdict.LATER
            if verdict is Verdict.BLOCKED:
                return
            if verdict is Verdict.STARTED and self._count_passed_over(job):
                return

    def _has_slot(self) -> bool:
        return self._budget > 0 and len(self.running) + len(self.loading) < self.max_running

    def _note_filling(self, job: Job) -> None:
        """Remember the block this running job is computing, where all of its tokens are known."""
        block = job.computed // self.transfers.block_tokens
        if self.cache.enabled and block < len(job.hashes):
            self._filling.add(job.hashes[block])

    def _ordered(self) -> list[Job]:
        """Waiting jobs in the order in which to consider them."""
        if len(self.waiting) > PREFIX_ORDER_MAX_WAITING:
            return list(self.waiting)

        def rank(job: Job) -> tuple[int, int]:
            if job.preempted:
                return (0, 0)
            if job.passed_over >= MAX_PASSED_OVER:
                return (1, 0)
            return (2, -self.cache.believed_tokens(job))

        return sorted(self.waiting, key=rank)

    def _count_passed_over(self, started: Job) -> bool:
        """Note who was overtaken; True when one of them may not be overtaken again."""
        overdue = False
        for job in self.waiting:
            if job.arrival < started.arrival and not job.pending:
                job.passed_over += 1
                overdue |= job.passed_over >= MAX_PASSED_OVER
        return overdue

    def _consider(self, job: Job) -> Verdict:
        """Start the job, or have it load, if its KV and its pages allow it now."""
        believed = self.cache.attach(job)
        if self.transfers.next_hash(job) in self._filling:
            self.cache.detach(job)
            return Verdict.LATER
        missing = self.cache.missing_pages(job, job.length)
        # A page in hand for every running job, or the newcomer would soon be preempted by them.
        room = self.cache.available_pages >= missing + len(self.running)
        found = self.transfers.match(job, believed, can_start=room)
        if found.answer is Answer.PENDING and not found.compute:
            self.cache.detach(job)
            return Verdict.LATER
        if not room or not self.cache.reserve(missing):
            self.cache.detach(job)
            return Verdict.BLOCKED
        self._start(job, found)
        return Verdict.STARTED

    def _start(self, job: Job, found: HookMatch) -> None:
        """Give the job pages for all its tokens; then load what was found, or compute.

        All its pages at once: what is loaded behind a part still to be computed has its place."""
        self.waiting.remove(job)
        self.cache.grow(job, job.length)
        job.preempted = False
        job.start = self._starts
        self._starts += 1
        job.offered_blocks = max(job.offered_blocks, job.computed // self.transfers.block_tokens)
        if not job.times.started_s:
            job.times.started_s = self.clock()
        job.counting = job.cached is None
        if job.cached is None:
            job.cached = {"l1": job.computed}
        if found.answer is Answer.HIT:
            self._load(job, found)
            return
        job.state = State.RUNNING
        self.running.append(job)
        self._note_filling(job)
        self._note_ahead(job, found)
        tokens = self._tokens_now(job)
        self._plan[job] = tokens
        self._budget -= tokens
