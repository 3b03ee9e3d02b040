"""The hooks of the reference engine over a `BlockStore`: in this process, or the node's sidecar.

Everything runs on the engine's loop thread and returns at once. Only copies have a separate thread.
`PendingLookups` and `SplitLoads` wait for the store on behalf of queued requests. This module turns
a hit into a scatter, and full blocks into a gather and a commit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from kvstore import kernels
from kvstore.connectors.common.copy_thread import Copy, CopyThread, Direction
from kvstore.connectors.common.dropped_blocks import RETRY_S, first_dropped
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.pending_lookups import PendingLookups
from kvstore.connectors.common.split_load import SplitLoads
from kvstore.engine.hooks import HookEvent, LoadDone, SaveDone
from kvstore.interface import MISS, BlockStore, HookMatch, Load, Save
from kvstore.kernels import Copier, Event
from kvstore.kernels.error_meter import ErrorMeter
from kvstore.prefetch.adaptive import Adaptive
from kvstore.prefetch.policy import PrefetchPolicy

SAVES_MAX: Final = 64
"""Maximum number of saves under way. Further ones are dropped."""
WAIT_SLICE_S: Final = 0.002
"""How long `poll` waits for one of its sources before it checks the others."""


@dataclass(eq=False, slots=True)
class Loading:
    """A load whose first `blocks` blocks are being scattered. reported: the engine was notified.

    loads: in the order of their blocks, all in one slab. tiers: tier of each block.
    """

    request_id: str
    loads: list[Load]
    blocks: int
    tiers: list[str]
    reported: bool = False


@dataclass(eq=False, slots=True)
class Saving:
    """A save until its event. copying: it has its slots, and its copy is queued.

    pages: of the blocks that are not saved yet. saved: number of those that are. retry_at_s: time
    of the next save of blocks that got no slot.
    """

    save_id: int
    pages: list[list[int]]
    started_s: float
    save: Save
    copying: bool = False
    saved: int = 0
    retry_at_s: float = 0.0


class ReferenceHooks:
    """`engine.hooks.KVHooks` over a store or a client. Loop thread only.

    store: bound to the namespace of the model whose KV is in `pool`. `close` does not close it.
    pool: `[layers, 2, num_pages, page_tokens, kv_heads, head_dim]`, contiguous.
    max_wait_ms: longest wait of a request from its first match, and of a save for its slots.
    min_load_tokens: shorter prefixes are loaded from L2 only.
    clock: seconds, monotonic.
    copier: used instead of the fastest one for this pool; `close` closes it.

    Raises:
        ConfigError: the store's namespace does not describe this pool.
    """

    def __init__(
        self,
        store: BlockStore,
        pool: torch.Tensor,
        page_tokens: int,
        *,
        policy: PrefetchPolicy,
        max_wait_ms: float,
        min_load_tokens: int = 256,
        clock: Callable[[], float] = time.monotonic,
        copier: Copier | None = None,
    ) -> None:
        layout = kernels.PoolLayout.reference(pool)
        assert layout.page_tokens == page_tokens, f"pages of {layout.page_tokens} tokens"
        form, self.pages_per_block = kernels.check_layout(store.namespace, layout)
        self.block_tokens = store.namespace.block_tokens
        self._store = GuardedStore(store)
        self._max_wait_ms = max_wait_ms
        self._clock = clock
        self._policy = policy
        self.wants_times = isinstance(policy, Adaptive)
        limits: dict[str, Any] = {"max_wait_ms": max_wait_ms, "min_load_tokens": min_load_tokens}
        self._lookups: PendingLookups | SplitLoads
        if isinstance(policy, Adaptive):
            self._lookups = SplitLoads(self._store, policy=policy, clock=clock, **limits)
        else:
            self._lookups = PendingLookups(self._store, policy=policy, clock=clock, **limits)
        self._copier = copier if copier is not None else kernels.copier_for(layout, form)
        self._copies = CopyThread(self._copier)
        self._meter = ErrorMeter(layout, form) if form.storage == "int8" else None
        self._saving: dict[int, Saving] = {}
        self._events: list[HookEvent] = []
        self._counts: Counter[str] = Counter()
        self._blocks_by_tier: Counter[str] = Counter()
        self._next_save_id = 0
        self._closed = False

    def match(
        self, request_id: str, hashes: Sequence[bytes], first_block: int, *, can_start: bool
    ) -> HookMatch:
        """See `KVHooks.match`."""
        if self._closed:
            return MISS
        return self._lookups.match(request_id, hashes, first_block, can_start=can_start)

    def load(self, request_id: str, pages: Sequence[int], blocks: int) -> None:
        """See `KVHooks.load`."""
        loads = self._lookups.take(request_id, blocks)
        rows = self._rows(pages)
        assert len(rows) == blocks, f"pages of {len(rows)} blocks for {blocks}"
        slots = [slot for load in loads for slot in load.slots][:blocks]
        tiers = [tier for load in loads for tier in load.tiers[: len(load.slots)]]
        loading = Loading(request_id, loads, blocks, tiers)
        if not self._copy(Direction.SCATTER, rows, slots, loading):
            self._report_load(loading, 0)
            self._end_load(loading)

    def save(self, request_id: str, hashes: Sequence[bytes], pages: Sequence[int]) -> int:
        """See `KVHooks.save`."""
        self._next_save_id += 1
        save_id = self._next_save_id
        rows = self._rows(pages)
        assert len(rows) == len(hashes), f"pages of {len(rows)} blocks for {len(hashes)}"
        save = None
        if self._closed or len(self._saving) >= SAVES_MAX:
            self._counts["saves_dropped"] += 1
        else:
            save = self._store.save(hashes)
        if save is None:
            self._events.append(SaveDone(save_id, 0))
            return save_id
        self._counts["saves"] += 1
        saving = self._saving[save_id] = Saving(save_id, rows, self._clock(), save)
        self._advance_save(saving)
        return save_id

    def record_prefill(self, start: int, tokens: int, seconds: float) -> None:
        """See `KVHooks.computed`."""
        if isinstance(self._policy, Adaptive):
            self._policy.record_prefill(start, tokens, seconds)

    def poll(self, timeout_s: float = 0.0) -> list[HookEvent]:
        """See `KVHooks.poll`. Also returns when the wait of a lookup has ended."""
        end_s = time.monotonic() + timeout_s
        affected = self._collect(0.0)
        while not affected and not self._events:
            left_s = end_s - time.monotonic()
            if left_s <= 0.0 or self._lookups.expired():
                break
            busy = bool(self._lookups) or bool(self._saving)
            slice_s = min(left_s, WAIT_SLICE_S) if busy else left_s
            if self._copies.under_way:
                self._complete_copies(self._copies.finished(min(left_s, WAIT_SLICE_S)))
                slice_s = 0.0
            affected = self._collect(slice_s)
        events, self._events = self._events, []
        return events

    def abort(self, request_id: str) -> None:
        """See `KVHooks.abort`. Copies under way continue and report."""
        self._lookups.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and current gauges."""
        return {
            **self._lookups.counts,
            **self._counts,
            "blocks_loaded_by_tier": dict(self._blocks_by_tier),
            "store_errors": self._store.errors,
            "store_connected": self._store.store.slab is not None,
            "requests_waiting": len(self._lookups),
            "slots_leased_waiting": self._lookups.slots_leased(),
            "saves_under_way": len(self._saving),
            "copies_under_way": self._copies.under_way,
            **({"adaptive": self._policy.stats()} if isinstance(self._policy, Adaptive) else {}),
            **({"kv_int8": self._meter.stats()} if self._meter is not None else {}),
        }

    def close(self) -> None:
        """Wait for running copies and release every lease; the store stays open."""
        if self._closed:
            return
        self._closed = True
        self._lookups.close()
        self._complete_copies(self._copies.close())
        for saving in list(self._saving.values()):
            self._end_save(saving, copied=False)
        self._events.clear()

    def _collect(self, timeout_s: float) -> bool:
        """Process updates of the store and ended copies. True if they affect a waiting request."""
        updated = {operation.operation_id for operation in self._store.poll(timeout_s)}
        self._complete_copies(self._copies.finished())
        for saving in list(self._saving.values()):
            self._advance_save(saving)
        return bool(updated) and self._lookups.affected_by(updated)

    def _advance_save(self, saving: Saving) -> None:
        """Queue the copy once the slots are assigned. If no slot is, save again after a while. End
        the save if it is too late."""
        save = saving.save
        if saving.copying:
            return
        if save.done and save.slot_assignments and not save.fault:
            saving.copying = True
            rows = [saving.pages[index] for index, _ in save.slot_assignments]
            slots = [slot for _, slot in save.slot_assignments]
            if not self._copy(Direction.GATHER, rows, slots, saving):
                self._end_save(saving, copied=False)
        elif save.done and self._may_save_again(saving):
            if self._clock() >= saving.retry_at_s:
                self._store.release(save)
                self._save_again(saving)
        elif save.done:
            self._end_save(saving, copied=False)
        elif self._is_late(saving):
            self._counts["saves_timed_out"] += 1
            self._end_save(saving, copied=False)

    def _is_late(self, saving: Saving) -> bool:
        return (self._clock() - saving.started_s) * 1e3 >= self._max_wait_ms

    def _may_save_again(self, saving: Saving) -> bool:
        """Whether blocks of the save got no slot, and may still wait for one."""
        dropped = saving.save.dropped > 0 and not saving.save.fault
        return dropped and not self._closed and not self._is_late(saving)

    def _save_again(self, saving: Saving) -> None:
        """Save the blocks that got no slot. The previous save has ended."""
        start, dropped = first_dropped(saving.save), saving.save.dropped
        saving.pages = saving.pages[start:]
        save = self._store.save(saving.save.hashes[start:])
        saving.retry_at_s = self._clock() + RETRY_S
        saving.copying = False
        if save is None:
            self._counts["blocks_dropped"] += dropped
            self._forget_save(saving)
        else:
            saving.save = save

    def _end_save(self, saving: Saving, *, copied: bool) -> None:
        """Commit the copied blocks, or release the slots. Then save those that got no slot, or end
        the save."""
        save = saving.save
        again = copied and self._may_save_again(saving)
        if not copied:
            self._store.release(save)
        elif self._store.commit(save):
            saving.saved += len(save.slot_assignments)
            self._counts["blocks_saved"] += len(save.slot_assignments)
        if again:
            self._save_again(saving)
            return
        self._counts["blocks_dropped"] += save.dropped
        self._forget_save(saving)

    def _forget_save(self, saving: Saving) -> None:
        """The save has ended: report it."""
        del self._saving[saving.save_id]
        self._events.append(SaveDone(saving.save_id, saving.saved))

    def _report_load(self, loading: Loading, blocks: int, layers: Sequence[Event] = ()) -> None:
        """Report the loaded blocks to the engine, once for each load."""
        loading.reported = True
        self._blocks_by_tier.update(loading.tiers[:blocks])
        self._counts["blocks_loaded"] += blocks
        if isinstance(self._lookups, SplitLoads):
            self._lookups.complete_copy(loading.request_id)
        self._events.append(LoadDone(loading.request_id, blocks, tuple(layers)))

    def _end_load(self, loading: Loading) -> None:
        """Release the loads: no copy reads their slots any more."""
        assert loading.reported
        for load in loading.loads:
            self._store.release(load)

    def _copy(
        self,
        direction: Direction,
        rows: list[list[int]],
        slots: Sequence[int],
        owner: Loading | Saving,
    ) -> bool:
        """Queue a copy; False when the queue is full."""
        operation = owner.save if isinstance(owner, Saving) else owner.loads[0]
        slab = self._store.store.slab_of(operation)
        by_layer = direction is Direction.SCATTER
        after = self._copier.mark()
        copy = Copy(direction, rows, slab, tuple(slots), after, owner, by_layer=by_layer)
        if self._meter is not None and not by_layer:
            copy.then = partial(self._meter.sample, rows)
        queued = self._copies.submit(copy)
        self._counts["copies_dropped"] += not queued
        return queued

    def _complete_copies(self, copies: list[Copy]) -> None:
        for copy in self._copies.launched():
            if not copy.owner.reported:
                self._report_load(copy.owner, copy.owner.blocks, copy.layers)
        for copy in copies:
            self._counts["copies_failed"] += bool(copy.error)
            if isinstance(copy.owner, Loading):
                if not copy.owner.reported:
                    self._report_load(copy.owner, 0 if copy.error else copy.owner.blocks)
                self._end_load(copy.owner)
            else:
                self._end_save(copy.owner, copied=not copy.error)

    def _rows(self, pages: Sequence[int]) -> list[list[int]]:
        """Pages of each block."""
        per = self.pages_per_block
        assert len(pages) % per == 0, f"{len(pages)} pages are not a whole number of blocks"
        return [list(pages[start : start + per]) for start in range(0, len(pages), per)]
