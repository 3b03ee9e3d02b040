"""A worker's side: brings blocks into vLLM's KV, and saves what has become full.

Every call comes from the worker's thread and returns at once; the copies run on a thread of their
own. A load always reports, whole, cut or not at all: vLLM computes what is missing. A save holds
its blocks until it ends, so vLLM keeps them (`finishing`), but for preemption: there the blocks
are overwritten by the very next computation, so saves under way are cut off or waited for first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvstore import kernels
from kvstore.connectors.common.copy_thread import Copy, CopyThread, Direction
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.vllm.connector.metadata import (
    CONNECTED,
    IDLE_WAIT_S,
    Blocks,
    StepPlan,
    StepReport,
)
from kvstore.connectors.vllm.namespace import in_layer_order
from kvstore.errors import ConfigError
from kvstore.interface import BlockStore, Load, Save

SAVES_MAX: Final = 256
"""Saves under way; further ones are dropped."""


@dataclass(eq=False, slots=True)
class Loading:
    """A load until its report. ready: blocks whose copy is queued."""

    plan: Blocks
    ticket: Load
    started_s: float
    copying: bool = False
    ready: int = 0


@dataclass(eq=False, slots=True)
class Saving:
    """A save until its end."""

    plan: Blocks
    ticket: Save
    started_s: float
    copying: bool = False


class WorkerSide:
    """One rank's.

    store: bound to this rank's namespace. Not closed by `close`.
    caches: vLLM's tensors by layer, `[blocks, kv_heads, block_tokens, K‖V]` each (a logical
        order: the strides tell the physical one).
    num_blocks: vLLM's blocks; its tensors may cut each into several pages.
    save_ms: how long a save may wait for its slots.

    Raises:
        ConfigError: the tensors are not what the namespace says.
    """

    def __init__(
        self,
        store: BlockStore,
        caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        *,
        save_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pool = pool_of(caches)
        form, self._pages_per_block = kernels.check_layout(store.namespace, pool)
        if pool.num_pages != num_blocks * self._pages_per_block:
            raise ConfigError(
                f"vLLM's KV has {pool.num_pages} pages of {pool.page_tokens} tokens for "
                f"{num_blocks} blocks of {store.namespace.block_tokens}; they do not agree"
            )
        self._block_bytes = store.namespace.block_bytes
        self._store = GuardedStore(store)
        self._save_ms = save_ms
        self._clock = clock
        self._copier = kernels.copier_for(pool, form)
        self._copies = CopyThread(self._copier)
        self._loading: list[Loading] = []
        self._saving: list[Saving] = []
        self._finishing: set[str] = set()
        self._report = StepReport()
        self._counts: Counter[str] = Counter()
        self._closed = False

    # One step: begin, (the computation), start_loads and start_saves, collect.

    def begin(self, plan: StepPlan) -> None:
        """Before the computation: let go of the blocks of preempted requests. Only a copy that has
        begun is waited for."""
        if not plan.preempted:
            return
        for copy in self._copies.withdraw(lambda c: c.owner.plan.request_id in plan.preempted):
            copy.owner.copying = False
        for saving in self._saves_of(plan.preempted):
            if not saving.copying:
                self._counts["saves_cut_by_preemption"] += 1
                self._end_save(saving, copied=False)
        while any(saving.copying for saving in self._saves_of(plan.preempted)):
            self._end_copies(self._copies.finished(IDLE_WAIT_S))

    def start_loads(self, plan: StepPlan) -> None:
        """Ask for this step's loads."""
        for blocks in plan.loads:
            ticket = self._store.load(blocks.hashes)
            if ticket is None:
                self._report_load(blocks, 0)
                continue
            loading = Loading(blocks, ticket, self._clock())
            self._loading.append(loading)
            self._move_load(loading)

    def start_saves(self, plan: StepPlan) -> None:
        """After the computation: offer the blocks that it filled."""
        for blocks in plan.saves:
            ticket = self._store.save(blocks.hashes) if len(self._saving) < SAVES_MAX else None
            if ticket is None:
                self._counts["saves_dropped"] += 1
                self._report.saved.append((blocks.request_id, blocks.number))
                continue
            self._counts["saves"] += 1
            saving = Saving(blocks, ticket, self._clock())
            self._saving.append(saving)
            self._move_save(saving)

    def collect(self, plan: StepPlan) -> StepReport:
        """What has ended since the last step."""
        self._finishing |= plan.finishing
        waiting = plan.idle and bool(self._loading or self._saving)
        copying = self._copies.under_way > 0
        self._store.poll(IDLE_WAIT_S if waiting and not copying else 0.0)
        for loading in [*self._loading]:
            self._move_load(loading)
        for saving in [*self._saving]:
            self._move_save(saving)
        copying = self._copies.under_way > 0
        self._end_copies(self._copies.finished(IDLE_WAIT_S if waiting and copying else 0.0))
        busy = {saving.plan.request_id for saving in self._saving}
        report, self._report = self._report, StepReport()
        report.sent = self._finishing - busy
        self._finishing &= busy
        return report

    def counts(self) -> dict[str, int]:
        """Counts since the start, and whether the store is connected."""
        return {
            **self._counts,
            "store_faults": self._store.faults,
            CONNECTED: int(self._store.store.slab is not None),
        }

    def stats(self) -> dict[str, Any]:
        """Counts, and what is under way."""
        return {
            **self._counts,
            "store_faults": self._store.faults,
            CONNECTED: self._store.store.slab is not None,
            "loads_under_way": len(self._loading),
            "saves_under_way": len(self._saving),
            "copies_under_way": self._copies.under_way,
        }

    def close(self) -> None:
        """Wait for running copies and hand back every lease; the store stays open."""
        if self._closed:
            return
        self._closed = True
        self._end_copies(self._copies.close())
        for loading in list(self._loading):
            self._end_load(loading, 0)
        for saving in list(self._saving):
            self._end_save(saving, copied=False)

    # Loads.

    def _move_load(self, loading: Loading) -> None:
        """Queue the copy once all that will come is there, or the time is over."""
        if loading.copying:
            return
        ticket = loading.ticket
        late = (self._clock() - loading.started_s) * 1e3 >= loading.plan.left_ms
        if not ticket.done and not late:
            return
        self._counts["loads_past_deadline"] += not ticket.done
        loading.ready = len(ticket.slots)
        slots = ticket.slots[: loading.ready]
        loading.copying = bool(slots)
        if not slots or not self._copy(Direction.SCATTER, loading, range(len(slots)), slots):
            self._end_load(loading, 0)

    def _end_load(self, loading: Loading, blocks: int) -> None:
        self._loading.remove(loading)
        self._store.release(loading.ticket)
        self._counts["blocks_loaded"] += blocks
        self._counts["bytes_loaded"] += blocks * self._block_bytes
        self._counts["load_us"] += int((self._clock() - loading.started_s) * 1e6)
        self._report_load(loading.plan, blocks)

    def _report_load(self, plan: Blocks, blocks: int) -> None:
        missing = plan.block_ids[blocks:]
        self._counts["blocks_failed"] += len(missing)
        self._report.recved.add(plan.request_id)
        self._report.bad_blocks.update(missing)
        if missing:
            self._report.failed.add(plan.request_id)

    # Saves.

    def _move_save(self, saving: Saving) -> None:
        """Queue the copy once the grants are there; give up without grants, or in time."""
        ticket = saving.ticket
        if saving.copying:
            return
        if ticket.done and ticket.grants and not ticket.fault:
            saving.copying = True
            indices = [index for index, _ in ticket.grants]
            slots = [slot for _, slot in ticket.grants]
            if not self._copy(Direction.GATHER, saving, indices, slots):
                self._end_save(saving, copied=False)
        elif ticket.done:
            self._end_save(saving, copied=False)
        elif (self._clock() - saving.started_s) * 1e3 >= self._save_ms:
            self._counts["saves_past_deadline"] += 1
            self._end_save(saving, copied=False)

    def _end_save(self, saving: Saving, *, copied: bool) -> None:
        """Publish what was copied, or give the grants back."""
        self._saving.remove(saving)
        self._report.saved.append((saving.plan.request_id, saving.plan.number))
        ticket = saving.ticket
        self._counts["blocks_refused"] += ticket.dropped
        self._counts["saves_failed"] += bool(ticket.fault)
        if not copied:
            self._store.release(ticket)
        elif self._store.commit(ticket):
            self._counts["blocks_saved"] += len(ticket.grants)
            self._counts["bytes_saved"] += len(ticket.grants) * self._block_bytes

    def _saves_of(self, request_ids: Iterable[str]) -> list[Saving]:
        return [saving for saving in self._saving if saving.plan.request_id in request_ids]

    # Copies.

    def _copy(
        self,
        direction: Direction,
        owner: Loading | Saving,
        indices: Iterable[int],
        slots: Sequence[int],
    ) -> bool:
        """Queue a copy of these blocks of the owner's plan; False when there is no room."""
        pages = [self._pages(owner.plan.block_ids[index]) for index in indices]
        slab = self._store.store.slab_of(owner.ticket)
        copy = Copy(direction, pages, slab, tuple(slots), self._copier.mark(), owner)
        taken = self._copies.submit(copy)
        self._counts["copies_dropped"] += not taken
        return taken

    def _end_copies(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self._counts["copies_failed"] += bool(copy.error)
            if isinstance(copy.owner, Loading):
                self._end_load(copy.owner, 0 if copy.error else copy.owner.ready)
            else:
                self._end_save(copy.owner, copied=not copy.error)

    def _pages(self, block_id: int) -> list[int]:
        """Pages of vLLM's tensors that one of its blocks is."""
        first = block_id * self._pages_per_block
        return list(range(first, first + self._pages_per_block))


def pool_of(caches: Mapping[str, torch.Tensor]) -> kernels.PoolLayout:
    """vLLM's tensors as a pool, layer by layer; layers that share one tensor count once.

    Raises ConfigError: tensors that are not `[blocks, kv_heads, block_tokens, K‖V]` of one shape.
    """
    layers: dict[int, torch.Tensor] = {}
    for name in in_layer_order(caches):
        tensor = caches[name]
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            raise ConfigError(
                f"layer {name} has KV of another kind than [blocks, kv_heads, block_tokens, K‖V]; "
                "KVStoreConnector cannot keep it (KVStoreTier can)"
            )
        layers.setdefault(tensor.data_ptr(), tensor)
    tensors = list(layers.values())
    if not tensors or any(
        tensor.shape != tensors[0].shape or tensor.stride() != tensors[0].stride()
        for tensor in tensors
    ):
        shapes = sorted({str(tuple(tensor.shape)) for tensor in tensors})
        raise ConfigError(
            f"KVStoreConnector keeps layers of one shape; these have {', '.join(shapes) or 'none'}"
            " (KVStoreTier keeps such models)"
        )
    return kernels.PoolLayout.vllm(tensors)
