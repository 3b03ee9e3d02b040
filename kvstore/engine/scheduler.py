"""Chooses what runs in the next step: decode first, then prefill, then waiting requests.

The rules, in the order in which each step applies them:

1. Each running job that lacks only its next token gets one token of the step's budget. The rest of
   the budget goes to running prefills, then to waiting jobs, as pages and slots allow.
2. A running job that finds no free page takes one from the running job that started last. That job
   goes back to the front of the queue. Its full pages stay in the tree, where it finds most of
   them again. The job that started first is never preempted, so some job always finishes.
3. Waiting jobs start in order of their longest prefix match (on the device, or believed to be in a
   lower tier), so that cached prefixes are used before they are evicted. A job that was passed over
   too often comes first, and so does a preempted one. A long queue is served in order of arrival:
   matching all of it in every step would cost more than it gains.
4. The scheduler skips a job whose KV is in progress: being loaded from a lower tier, or being
   computed by a running job in the same block. It waits for a job that lacks pages: no other job
   overtakes it, because a long prompt would starve.
5. A job can run while its later blocks are being loaded. Before each step it asks how far to
   compute. It loads the blocks that have arrived once it has computed up to them.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.engine.cache import PrefixCache
from kvstore.engine.request import Job, State
from kvstore.engine.transfers import ActiveLoad, EngineTransfers
from kvstore.interface import HookMatch, LookupStatus

PREFIX_ORDER_MAX_WAITING = 128
"""A longer queue is served first come, first served."""
MAX_PASSED_OVER = 16
"""Number of later arrivals that can start before a job that could also start."""


@dataclass(slots=True)
class Slice:
    """One job's part of a step: its next `tokens` tokens."""

    job: Job
    tokens: int


class Admission(enum.Enum):
    """Result of considering a waiting job."""

    STARTED = "started"
    LATER = "later"
    BLOCKED = "blocked"


class Scheduler:
    """Owns the queue and the running jobs. It decides and computes nothing. Loop thread only."""

    def __init__(
        self,
        cache: PrefixCache,
        transfers: EngineTransfers,
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
        """Preempted jobs in order of start, then arrivals in order."""
        self.running: list[Job] = []
        """In order of start."""
        self.loading: list[Job] = []
        self.preemptions = 0
        self._starts = 0
        self._plan: dict[Job, int] = {}
        self._filling: set[bytes] = set()
        self._budget = 0

    # ---- queue ----

    def add(self, job: Job) -> None:
        """Queue a new job, and make the hooks look up its blocks."""
        self.waiting.append(job)
        believed = self.cache.attach(job)
        self.transfers.match(job, believed, can_start=False)
        self.cache.detach(job)

    def remove(self, job: Job) -> None:
        """Remove a job in any state. Pages of a running load are freed when it ends."""
        if job.state is State.LOADING:
            self.loading.remove(job)
        elif job.state is State.RUNNING:
            self.running.remove(job)
            self.cache.detach(job)
        else:
            self.waiting.remove(job)
        job.state = State.FINISHED

    def complete_load(self, load: ActiveLoad, blocks: int) -> None:
        """Publish the first `blocks` blocks of a load that has ended. Compute the rest."""
        job = load.job
        if job.state is State.FINISHED:
            self.cache.detach(job)
            return
        self.loading.remove(job)
        hit_tokens = self._account_load(load, blocks)
        if job.counting:
            assert job.cached is not None
            for tier, tokens in hit_tokens.items():
                job.cached[tier] = job.cached.get(tier, 0) + tokens
        job.state = State.RUNNING
        bisect.insort(self.running, job, key=lambda other: other.start)

    def _account_load(self, load: ActiveLoad, blocks: int) -> dict[str, int]:
        """Advance `computed` over the loaded blocks. Returns the hit tokens by tier."""
        job, cache, size = load.job, self.cache, self.transfers.block_tokens
        hit_tokens: dict[str, int] = {}
        for index in range(blocks):
            end = min((load.first_block + index + 1) * size, cache.useful_tokens(job))
            tier = load.tiers[index]
            hit_tokens[tier] = hit_tokens.get(tier, 0) + end - job.computed
            job.computed = end
        stored_end = (load.first_block + blocks) * size
        if blocks:
            job.saved_blocks = max(job.saved_blocks, load.first_block + blocks)
            cache.publish(job)
            cache.tree.mark_stored(job.known, job.root, min(stored_end, job.computed))
        if blocks < len(load.tiers):
            cache.tree.forget_stored(job.known, job.root, max(stored_end, job.computed))
        return hit_tokens

    # ---- one step ----

    def schedule(self) -> list[Slice]:
        """Return the next step's work. Empty: nothing can run now."""
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
        """Plan a running job's next tokens and allocate their pages."""
        tokens = self._tokens_now(job)
        if job.state is not State.RUNNING or tokens < 1:
            return
        if self._make_room(job, job.computed + tokens):
            self.cache.grow(job, job.computed + tokens)
            self._plan[job] = tokens
            self._budget -= tokens

    def _tokens_now(self, job: Job) -> int:
        """Return the tokens a running job can compute now. Below 1: it waits for a load."""
        tokens = min(job.length - job.computed, self._budget)
        if not job.ahead or tokens < 1:
            return tokens
        if job.compute_to - job.computed <= tokens:
            return job.compute_to - job.computed
        # End at a block boundary if the budget reaches one: the job cannot use a partial block.
        size = self.transfers.block_tokens
        end = (job.computed + tokens) // size * size
        return end - job.computed if end > job.computed else tokens

    def _look_ahead(self, job: Job) -> None:
        """Ask the hooks how far to compute a running job whose later blocks are in progress."""
        found = self.transfers.match_ahead(job)
        if found.status is LookupStatus.HIT:
            self.running.remove(job)
            self._load(job, found)
            return
        self._note_ahead(job, found)

    def _note_ahead(self, job: Job, found: HookMatch) -> None:
        size = self.transfers.block_tokens
        job.ahead = found.status is LookupStatus.PENDING
        job.compute_to = (job.computed // size + found.compute) * size

    def _load(self, job: Job, found: HookMatch) -> None:
        """Load the found blocks into the job's pages. The job continues when they have arrived."""
        job.state = State.LOADING
        job.ahead = found.more
        self.loading.append(job)
        self.transfers.load(job, found)

    def _make_room(self, job: Job, tokens: int) -> bool:
        """Free the pages that the job lacks for its first `tokens` tokens. Returns False if not.

        False means: pages will become free when a copy ends, or the job itself was preempted
        because jobs that started earlier use all pages.
        """
        while not self.cache.reserve(self.cache.missing_pages(job, tokens)):
            latest = self.running[-1]
            if latest is not job:
                self._preempt(latest)
            elif self.transfers.busy:
                return False
            else:
                assert len(self.running) > 1, "the only job finds no page"
                self._preempt(job)
                return False
        return True

    def _preempt(self, job: Job) -> None:
        """Move a job back to the front of the queue. The tree keeps its full pages."""
        # Only decoding can lack pages (a start allocates pages for all known tokens).
        assert job not in self._plan
        self.running.remove(job)
        self.cache.detach(job)
        job.state = State.WAITING
        job.preempted, job.ahead = True, False
        self.waiting.insert(0, job)
        self.preemptions += 1

    # ---- waiting jobs ----

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
            result = self._consider(job)
            job.pending = result is Admission.LATER
            if result is Admission.BLOCKED:
                return
            if result is Admission.STARTED and self._count_passed_over(job):
                return

    def _has_slot(self) -> bool:
        return self._budget > 0 and len(self.running) + len(self.loading) < self.max_running

    def _note_filling(self, job: Job) -> None:
        """Remember the block that this job is computing, if all of its tokens are known."""
        block = job.computed // self.transfers.block_tokens
        if self.cache.enabled and block < len(job.hashes):
            self._filling.add(job.hashes[block])

    def _ordered(self) -> list[Job]:
        """Return the waiting jobs in the order of consideration."""
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
        """Count the overtaken jobs. Returns whether one of them reached the limit."""
        overdue = False
        for job in self.waiting:
            if job.arrival < started.arrival and not job.pending:
                job.passed_over += 1
                overdue |= job.passed_over >= MAX_PASSED_OVER
        return overdue

    def _consider(self, job: Job) -> Admission:
        """Start the job, or its load, if its KV and its pages allow it now."""
        believed = self.cache.attach(job)
        if self.transfers.next_hash(job) in self._filling:
            self.cache.detach(job)
            return Admission.LATER
        missing = self.cache.missing_pages(job, job.length)
        # Keep a page for every running job, or they would soon preempt the new one.
        room = self.cache.available_pages >= missing + len(self.running)
        found = self.transfers.match(job, believed, can_start=room)
        if found.status is LookupStatus.PENDING and not found.compute:
            self.cache.detach(job)
            return Admission.LATER
        if not room or not self.cache.reserve(missing):
            self.cache.detach(job)
            return Admission.BLOCKED
        self._start(job, found)
        return Admission.STARTED

    def _start(self, job: Job, found: HookMatch) -> None:
        """Allocate pages for all of the job's tokens, then load the found blocks, or compute.

        All pages are allocated at once, so that blocks loaded beyond a part still to be computed
        have their place.
        """
        self.waiting.remove(job)
        self.cache.grow(job, job.length)
        job.preempted = False
        job.start = self._starts
        self._starts += 1
        job.saved_blocks = max(job.saved_blocks, job.computed // self.transfers.block_tokens)
        if not job.times.started_s:
            job.times.started_s = self.clock()
        job.counting = job.cached is None
        if job.cached is None:
            job.cached = {"l1": job.computed}
        if found.status is LookupStatus.HIT:
            self._load(job, found)
            return
        job.state = State.RUNNING
        self.running.append(job)
        self._note_filling(job)
        self._note_ahead(job, found)
        tokens = self._tokens_now(job)
        self._plan[job] = tokens
        self._budget -= tokens
