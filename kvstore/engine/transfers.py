"""What is on its way between the engine's pages and the hooks: matches, loads and saves.

A page that a copy reads or writes keeps a reference until the hooks report that the copy ended,
whatever becomes of the request meanwhile. A load's pages stay in its job's table; a save's are
held here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.engine.cache import PrefixCache
from kvstore.engine.hooks import KVHooks, LayerArrival, Loaded
from kvstore.engine.request import Job
from kvstore.interface import MISS, Answer, HookMatch

SAVE_PAGES_SHARE = 0.5
"""Share of the pool that saves under way may keep from being reused; beyond it, blocks are not
offered (and counted), so that a slow store cannot take the pool away from requests."""


@dataclass(slots=True)
class LoadUnderWay:
    """Blocks first_block .. first_block + len(tiers) of a job are being copied into its pages."""

    job: Job
    first_block: int
    tiers: tuple[str, ...]


@dataclass(slots=True)
class SaveUnderWay:
    """tokens: the prefix that ends with the saved blocks, int32. pages: those being read."""

    tokens: np.ndarray
    root: tuple[str, str]
    pages: np.ndarray


class Transfers:
    """The engine's books on the hooks. Loop thread only."""

    def __init__(self, hooks: KVHooks, cache: PrefixCache) -> None:
        assert hooks.block_tokens % cache.page_tokens == 0
        self.hooks = hooks
        self.cache = cache
        self.block_tokens = hooks.block_tokens
        self.pages_per_block = hooks.block_tokens // cache.page_tokens
        self.save_pages_max = int(cache.num_pages * SAVE_PAGES_SHARE)
        self.save_pages = 0
        self.blocks_offered = 0
        self.blocks_not_offered = 0
        self._loads: dict[str, LoadUnderWay] = {}
        self._saves: dict[int, SaveUnderWay] = {}
        self._hashes_loading: set[bytes] = set()
        self._arriving: list[Sequence[LayerArrival]] = []

    @property
    def busy(self) -> bool:
        """Some copy is under way, so some pages will come back without any step."""
        return bool(self._loads or self._saves)

    def is_loading(self, request_id: str) -> bool:
        """A copy into this request's pages may be running, also when it was aborted."""
        return request_id in self._loads

    def blocks_useful(self, job: Job) -> int:
        """Leading blocks of the job that could spare it at least one page."""
        useful = -(-self.cache.useful_tokens(job) // self.block_tokens)
        return min(useful, len(job.hashes))

    def next_hash(self, job: Job) -> bytes | None:
        """Hash of the first block the job lacks, when having it would spare anything."""
        first = job.computed // self.block_tokens
        if first >= self.blocks_useful(job) or job.computed >= self.cache.useful_tokens(job):
            return None
        return job.hashes[first]

    def match(self, job: Job, believed_tokens: int, *, can_start: bool) -> HookMatch:
        """Ask the hooks for the blocks after what the job has attached.

        PENDING also when another job is loading the very next block: it will be in the tree.
        The tree's belief about lower tiers is corrected by the answer.
        """
        next_hash = self.next_hash(job)
        if next_hash is None:
            self.end_match(job)
            return MISS
        if next_hash in self._hashes_loading:
            return HookMatch(Answer.PENDING)
        found = self._ask(job, can_start=can_start)
        if found.answer is Answer.PENDING or found.more:
            return found
        useful_end = self.blocks_useful(job) * self.block_tokens
        held_end = (job.computed // self.block_tokens + found.blocks) * self.block_tokens
        if min(believed_tokens, useful_end) > max(held_end, job.computed):
            self.cache.tree.forget_stored(job.known, job.root, max(held_end, job.computed))
        return found

    def match_ahead(self, job: Job) -> HookMatch:
        """Ask again for a running job, after what it has computed."""
        if self.next_hash(job) is None:
            self.end_match(job)
            return MISS
        return self._ask(job, can_start=True)

    def _ask(self, job: Job, *, can_start: bool) -> HookMatch:
        """The hooks' answer, cut to the blocks that are of use."""
        first = job.computed // self.block_tokens
        useful = self.blocks_useful(job)
        job.match_open = True
        found = self.hooks.match(job.id, job.hashes[:useful], first, can_start=can_start)
        if found.answer is Answer.PENDING:
            return found
        blocks = min(found.blocks, useful - first) if found.answer is Answer.HIT else 0
        assert len(found.tiers) >= blocks
        if not blocks:
            job.match_open = False
            return MISS
        return HookMatch(Answer.HIT, blocks, tuple(found.tiers[:blocks]), found.more)

    def end_match(self, job: Job) -> None:
        """Nothing more is wanted for this job: asking for no blocks lets the hooks let go."""
        if job.match_open:
            job.match_open = False
            self.hooks.match(job.id, job.hashes, len(job.hashes), can_start=True)

    def load(self, job: Job, found: HookMatch) -> None:
        """Start copying the blocks just found into the job's pages, leaving out those it has."""
        first = job.computed // self.block_tokens
        end_block = first + found.blocks
        have = job.computed // self.cache.page_tokens
        limit = self.cache.useful_tokens(job) // self.cache.page_tokens
        per = self.pages_per_block
        pages = [
            int(job.page_table[index]) if have <= index < limit else -1
            for index in range(first * per, end_block * per)
        ]
        job.match_open = found.more
        self._loads[job.id] = LoadUnderWay(job, first, found.tiers)
        self._hashes_loading.update(job.hashes[first:end_block])
        self.hooks.load(job.id, pages, found.blocks)

    def offer(self, job: Job) -> None:
        """Offer the blocks that became full; their pages are held until the save reports."""
        first, end = job.offered_blocks, job.computed // self.block_tokens
        if end <= first:
            return
        job.offered_blocks = end
        held = job.pages[first * self.pages_per_block : end * self.pages_per_block].copy()
        if self.save_pages + len(held) > self.save_pages_max:
            self.blocks_not_offered += end - first
            return
        self.cache.pool.hold(held)
        self.save_pages += len(held)
        self.blocks_offered += end - first
        save_id = self.hooks.save(job.id, job.hashes[first:end], held.tolist())
        tokens = job.tokens[: end * self.block_tokens]
        self._saves[save_id] = SaveUnderWay(tokens, job.root, held)

    def poll(self, timeout_s: float) -> list[tuple[LoadUnderWay, int]]:
        """Take in what ended; returns each ended load with the number of blocks that came."""
        ended = []
        for event in self.hooks.poll(timeout_s):
            if isinstance(event, Loaded):
                load = self._loads.pop(event.request_id)
                blocks = len(load.tiers)
                first = load.first_block
                self._hashes_loading.difference_update(load.job.hashes[first : first + blocks])
                ended.append((load, min(event.blocks, blocks)))
                if event.layers:
                    self._arriving.append(event.layers)
            else:
                save = self._saves.pop(event.save_id)
                self.save_pages -= len(save.pages)
                self.cache.pool.drop(save.pages)
                if event.blocks:
                    self.cache.tree.mark_stored(save.tokens, save.root, len(save.tokens))
        return ended

    def take_arriving(self) -> list[Sequence[LayerArrival]]:
        """Loads whose layers the next step must wait for, whoever its rows are: pages of a request
        that ended meanwhile may be another's by then."""
        arriving, self._arriving = self._arriving, []
        return arriving
