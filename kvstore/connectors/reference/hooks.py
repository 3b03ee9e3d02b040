"""Our engine's hooks over any `BlockStore`: the store in this process, or the node's sidecar.

Everything runs on the engine's loop thread and returns at once, but for the copies, which have a
thread of their own. `attempts` waits for the store on behalf of queued requests; what is here
turns a hit into a scatter, and full blocks into a gather and a commit.
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
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.pending_lookups import Attempts
from kvstore.connectors.common.split_load import TwoEnds
from kvstore.engine.hooks import HookEvent, Loaded, Saved
from kvstore.interface import MISS, BlockStore, HookMatch, Load, Save
from kvstore.kernels import Copier, Event
from kvstore.kernels.error_meter import ErrorMeter
from kvstore.prefetch.adaptive import Adaptive
from kvstore.prefetch.policy import PrefetchPolicy

SAVES_MAX: Final = 64
"""Saves under way; further ones are dropped."""
WAIT_SLICE_S: Final = 0.002
"""How long `poll` waits for one of its sources before it looks at the others."""


@dataclass(eq=False, slots=True)
class Loading:
    """A load whose first `blocks` blocks are being scattered. reported: the engine was told.

    tickets: in order, all in one slab; their slots in one row are the blocks. tiers: of each."""

    request_id: str
    tickets: list[Load]
    blocks: int
    tiers: list[str]
    reported: bool = False


@dataclass(eq=False, slots=True)
class Saving:
    """A save between offer and event. copying: its grants came and its copy is queued."""

    save_id: int
    pages: list[list[int]]
    started_s: float
    ticket: Save
    copying: bool = False


class ReferenceHooks:
    """`engine.hooks.KVHooks` over a store or a client. Loop thread only.

    store: bound to the namespace of the model whose KV lies in `pool`. Not closed by `close`.
    pool: `[layers, 2, num_pages, page_tokens, kv_heads, head_dim]`, contiguous.
    deadline_ms: the most a request waits, from its first match; also how long a save may wait for
        its slots.
    min_load_tokens: shorter runs are taken from L2 only.
    clock: seconds, monotonic.
    copier: another than the fastest for this pool; closed by `close`.

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
        deadline_ms: float,
        min_load_tokens: int = 256,
        clock: Callable[[], float] = time.monotonic,
        copier: Copier | None = None,
    ) -> None:
        layout = kernels.PoolLayout.reference(pool)
        assert layout.page_tokens == page_tokens, f"pages of {layout.page_tokens} tokens"
        form, self.pages_per_block = kernels.check_layout(store.namespace, layout)
        self.block_tokens = store.namespace.block_tokens
        self._store = GuardedStore(store)
        self._deadline_ms = deadline_ms
        self._clock = clock
        self._policy = policy
        self.wants_times = isinstance(policy, Adaptive)
        limits: dict[str, Any] = {"deadline_ms": deadline_ms, "min_load_tokens": min_load_tokens}
        self._attempts: Attempts | TwoEnds
        if isinstance(policy, Adaptive):
            self._attempts = TwoEnds(self._store, policy=policy, clock=clock, **limits)
        else:
            self._attempts = Attempts(self._store, policy=policy, clock=clock, **limits)
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
        return self._attempts.match(request_id, hashes, first_block, can_start=can_start)

    def load(self, request_id: str, pages: Sequence[int], blocks: int) -> None:
        """See `KVHooks.load`."""
        tickets = self._attempts.take(request_id, blocks)
        rows = self._rows(pages)
        assert len(rows) == blocks, f"pages of {len(rows)} blocks for {blocks}"
        slots = [slot for ticket in tickets for slot in ticket.slots][:blocks]
        tiers = [tier for ticket in tickets for tier in ticket.tiers[: len(ticket.slots)]]
        loading = Loading(request_id, tickets, blocks, tiers)
        if not self._copy(Direction.SCATTER, rows, slots, loading):
            self._report_load(loading, 0)
            self._end_load(loading)

    def save(self, request_id: str, hashes: Sequence[bytes], pages: Sequence[int]) -> int:
        """See `KVHooks.save`."""
        self._next_save_id += 1
        save_id = self._next_save_id
        rows = self._rows(pages)
        assert len(rows) == len(hashes), f"pages of {len(rows)} blocks for {len(hashes)}"
        ticket = None
        if self._closed or len(self._saving) >= SAVES_MAX:
            self._counts["saves_dropped"] += 1
        else:
            ticket = self._store.save(hashes)
        if ticket is None:
            self._events.append(Saved(save_id, 0))
            return save_id
        self._counts["saves"] += 1
        saving = self._saving[save_id] = Saving(save_id, rows, self._clock(), ticket)
        self._move_save(saving)
        return save_id

    def computed(self, start: int, tokens: int, seconds: float) -> None:
        """See `KVHooks.computed`."""
        if isinstance(self._policy, Adaptive):
            self._policy.computed(start, tokens, seconds)

    def poll(self, timeout_s: float = 0.0) -> list[HookEvent]:
        """See `KVHooks.poll`. Also returns when a wait of its own has run out."""
        end_s = time.monotonic() + timeout_s
        moved = self._collect(0.0)
        while not moved and not self._events:
            left_s = end_s - time.monotonic()
            if left_s <= 0.0 or self._attempts.due():
                break
            busy = bool(self._attempts) or bool(self._saving)
            slice_s = min(left_s, WAIT_SLICE_S) if busy else left_s
            if self._copies.under_way:
                self._end_copies(self._copies.finished(min(left_s, WAIT_SLICE_S)))
                slice_s = 0.0
            moved = self._collect(slice_s)
        events, self._events = self._events, []
        return events

    def abort(self, request_id: str) -> None:
        """See `KVHooks.abort`. Copies under way run on, and report."""
        self._attempts.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is held now."""
        return {
            **self._attempts.counts,
            **self._counts,
            "blocks_loaded_by_tier": dict(self._blocks_by_tier),
            "store_faults": self._store.faults,
            "store_connected": self._store.store.slab is not None,
            "requests_waiting": len(self._attempts),
            "slots_leased_waiting": self._attempts.slots_leased(),
            "saves_under_way": len(self._saving),
            "copies_under_way": self._copies.under_way,
            **({"adaptive": self._policy.stats()} if isinstance(self._policy, Adaptive) else {}),
            **({"kv_int8": self._meter.stats()} if self._meter is not None else {}),
        }

    def close(self) -> None:
        """Wait for running copies and hand back every lease; the store stays open."""
        if self._closed:
            return
        self._closed = True
        self._attempts.close()
        self._end_copies(self._copies.close())
        for saving in list(self._saving.values()):
            self._end_save(saving, copied=False)
        self._events.clear()

    def _collect(self, timeout_s: float) -> bool:
        """Take in what the store and the copies did; whether some waiting request is concerned."""
        moved = {ticket.ticket_id for ticket in self._store.poll(timeout_s)}
        self._end_copies(self._copies.finished())
        for saving in list(self._saving.values()):
            self._move_save(saving)
        return bool(moved) and self._attempts.concerned(moved)

    def _move_save(self, saving: Saving) -> None:
        """Queue the copy once the grants are there; give up without grants, or in time."""
        ticket = saving.ticket
        if saving.copying:
            return
        if ticket.done and ticket.grants and not ticket.fault:
            saving.copying = True
            rows = [saving.pages[index] for index, _ in ticket.grants]
            if not self._copy(Direction.GATHER, rows, [slot for _, slot in ticket.grants], saving):
                self._end_save(saving, copied=False)
        elif ticket.done:
            self._end_save(saving, copied=False)
        elif (self._clock() - saving.started_s) * 1e3 >= self._deadline_ms:
            self._counts["saves_past_deadline"] += 1
            self._end_save(saving, copied=False)

    def _end_save(self, saving: Saving, *, copied: bool) -> None:
        """Publish what was copied, or give the grants back; then report."""
        del self._saving[saving.save_id]
        blocks = 0
        self._counts["blocks_refused"] += saving.ticket.dropped
        if not copied:
            self._store.release(saving.ticket)
        elif self._store.commit(saving.ticket):
            blocks = len(saving.ticket.grants)
        self._counts["blocks_saved"] += blocks
        self._events.append(Saved(saving.save_id, blocks))

    def _report_load(self, loading: Loading, blocks: int, layers: Sequence[Event] = ()) -> None:
        """Tell the engine, once, of the blocks it may count on."""
        loading.reported = True
        self._blocks_by_tier.update(loading.tiers[:blocks])
        self._counts["blocks_loaded"] += blocks
        if isinstance(self._attempts, TwoEnds):
            self._attempts.landed(loading.request_id)
        self._events.append(Loaded(loading.request_id, blocks, tuple(layers)))

    def _end_load(self, loading: Loading) -> None:
        """No copy reads the slots any more: hand the tickets back."""
        assert loading.reported
        for ticket in loading.tickets:
            self._store.release(ticket)

    def _copy(
        self,
        direction: Direction,
        rows: list[list[int]],
        slots: Sequence[int],
        owner: Loading | Saving,
    ) -> bool:
        """Queue a copy; False when there is no room for one more."""
        ticket = owner.ticket if isinstance(owner, Saving) else owner.tickets[0]
        slab = self._store.store.slab_of(ticket)
        by_layer = direction is Direction.SCATTER
        after = self._copier.mark()
        copy = Copy(direction, rows, slab, tuple(slots), after, owner, by_layer=by_layer)
        if self._meter is not None and not by_layer:
            copy.then = partial(self._meter.look, rows)
        taken = self._copies.submit(copy)
        self._counts["copies_dropped"] += not taken
        return taken

    def _end_copies(self, copies: list[Copy]) -> None:
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
        assert len(pages) % per == 0, f"{len(pages)} pages are no whole number of blocks"
        return [list(pages[start : start + per]) for start in range(0, len(pages), per)]
