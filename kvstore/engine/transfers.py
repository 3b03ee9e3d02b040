"""Matches, loads and saves in progress between the engine's pages and the hooks.

A page that a copy reads or writes keeps a reference until the hooks report the end of the copy,
even if its request ends before. Pages of a load stay in its job's table. Pages of a save are
referenced here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.engine.cache import PrefixCache
from kvstore.engine.hooks import KVHooks, LayerArrival, LoadDone
from kvstore.engine.request import Job
from kvstore.interface import MISS, HookMatch, LookupStatus

MAX_SAVE_PAGES_FRACTION = 0.5
"""Maximum fraction of the pool in saves in progress. Further blocks are dropped and counted, so
that a slow store cannot take the pool from requests."""


@dataclass(slots=True)
class ActiveLoad:
    """A copy of blocks first_block .. first_block + len(tiers) of a job into its pages."""

    job: Job
    first_block: int
    tiers: tuple[str, ...]


@dataclass(slots=True)
class ActiveSave:
    """tokens: the prefix that ends with the saved blocks, int32. pages: pages being read."""

    tokens: np.ndarray
    root: tuple[str, str]
    pages: np.ndarray


class EngineTransfers:
    """Tracks the engine's operations on the hooks. Loop thread only."""

    def __init__(self, hooks: KVHooks, cache: PrefixCache) -> None:
        assert hooks.block_tokens % cache.page_tokens == 0
        self.hooks = hooks
        self.cache = cache
        self.block_tokens = hooks.block_tokens
        self.pages_per_block = hooks.block_tokens // cache.page_tokens
        self.save_pages_max = int(cache.num_pages * MAX_SAVE_PAGES_FRACTION)
        self.save_pages = 0
        self.save_blocks = 0
        self.save_blocks_dropped = 0
        self._loads: dict[str, ActiveLoad] = {}
        self._saves: dict[int, ActiveSave] = {}
        self._hashes_loading: set[bytes] = set()
        self._arriving: list[Sequence[LayerArrival]] = []

    @property
    def busy(self) -> bool:
        """Whether a copy is in progress, which will free pages without a step."""
        return bool(self._loads or self._saves)

    def is_loading(self, request_id: str) -> bool:
        """Return whether a copy into this request's pages may run, even after an abort."""
        return request_id in self._loads

    def blocks_useful(self, job: Job) -> int:
        """Return the leading blocks of the job that could save it at least one page."""
        useful = -(-self.cache.useful_tokens(job) // self.block_tokens)
        return min(useful, len(job.hashes))

    def next_hash(self, job: Job) -> bytes | None:
        """Return the hash of the first block the job lacks, or None if a hit would save nothing."""
        first = job.computed // self.block_tokens
        if first >= self.blocks_useful(job) or job.computed >= self.cache.useful_tokens(job):
            return None
        return job.hashes[first]

    def match(self, job: Job, believed_tokens: int, *, can_start: bool) -> HookMatch:
        """Match the blocks after the job's attached prefix.

        Also PENDING if another job is loading the next block: it will be in the tree. The result
        corrects what the tree believes about lower tiers.
        """
        next_hash = self.next_hash(job)
        if next_hash is None:
            self.end_match(job)
            return MISS
        if next_hash in self._hashes_loading:
            return HookMatch(LookupStatus.PENDING)
        found = self._match_hooks(job, can_start=can_start)
        if found.status is LookupStatus.PENDING or found.more:
            return found
        useful_end = self.blocks_useful(job) * self.block_tokens
        found_end = (job.computed // self.block_tokens + found.blocks) * self.block_tokens
        if min(believed_tokens, useful_end) > max(found_end, job.computed):
            self.cache.tree.forget_stored(job.known, job.root, max(found_end, job.computed))
        return found

    def match_ahead(self, job: Job) -> HookMatch:
        """Match again for a running job, after its computed tokens."""
        if self.next_hash(job) is None:
            self.end_match(job)
            return MISS
        return self._match_hooks(job, can_start=True)

    def _match_hooks(self, job: Job, *, can_start: bool) -> HookMatch:
        """Return the hooks' match, truncated to the useful blocks."""
        first = job.computed // self.block_tokens
        useful = self.blocks_useful(job)
        job.match_open = True
        found = self.hooks.match(job.id, job.hashes[:useful], first, can_start=can_start)
        if found.status is LookupStatus.PENDING:
            return found
        blocks = min(found.blocks, useful - first) if found.status is LookupStatus.HIT else 0
        assert len(found.tiers) >= blocks
        if not blocks:
            job.match_open = False
            return MISS
        return HookMatch(LookupStatus.HIT, blocks, tuple(found.tiers[:blocks]), found.more)

    def end_match(self, job: Job) -> None:
        """End the job's match. A match of no blocks lets the hooks release their leases."""
        if job.match_open:
            job.match_open = False
            self.hooks.match(job.id, job.hashes, len(job.hashes), can_start=True)

    def load(self, job: Job, found: HookMatch) -> None:
        """Start copying the found blocks into the job's pages, except pages it already has."""
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
        self._loads[job.id] = ActiveLoad(job, first, found.tiers)
        self._hashes_loading.update(job.hashes[first:end_block])
        self.hooks.load(job.id, pages, found.blocks)

    def save_full_blocks(self, job: Job) -> None:
        """Save the blocks that became full. Their pages are referenced until the save ends."""
        first, end = job.saved_blocks, job.computed // self.block_tokens
        if end <= first:
            return
        job.saved_blocks = end
        pages = job.pages[first * self.pages_per_block : end * self.pages_per_block].copy()
        if self.save_pages + len(pages) > self.save_pages_max:
            self.save_blocks_dropped += end - first
            return
        self.cache.pool.add_ref(pages)
        self.save_pages += len(pages)
        self.save_blocks += end - first
        save_id = self.hooks.save(job.id, job.hashes[first:end], pages.tolist())
        tokens = job.tokens[: end * self.block_tokens]
        self._saves[save_id] = ActiveSave(tokens, job.root, pages)

    def poll(self, timeout_s: float) -> list[tuple[ActiveLoad, int]]:
        """Process the hooks' events. Returns each ended load with its number of loaded blocks."""
        ended = []
        for event in self.hooks.poll(timeout_s):
            if isinstance(event, LoadDone):
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
                self.cache.pool.drop_ref(save.pages)
                if event.blocks:
                    self.cache.tree.mark_stored(save.tokens, save.root, len(save.tokens))
        return ended

    def take_arriving(self) -> list[Sequence[LayerArrival]]:
        """Return the loads whose layers the next step must wait for, whatever its rows: pages of a
        request that has ended may belong to another."""
        arriving, self._arriving = self._arriving, []
        return arriving
