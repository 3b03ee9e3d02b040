"""A worker's side: loads blocks into vLLM's KV, and saves full blocks.

Only the worker's thread calls it, and every call returns at once; a separate thread runs the
copies. Each load reports its end, also if it is truncated or failed: vLLM computes the missing
blocks. vLLM keeps the blocks of a save until it ends (`finishing`), except on a preemption: the
next computation overwrites them, so their saves are dropped or waited for first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from kvstore import kernels
from kvstore.connectors.common.copy_thread import Copy, CopyThread, Direction
from kvstore.connectors.common.dropped_blocks import RETRY_S, first_dropped
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.vllm.common.idle_steps import IDLE_WAIT_S
from kvstore.connectors.vllm.connector.metadata import (
    CONNECTED,
    RequestBlocks,
    StepMetadata,
    StepResult,
)
from kvstore.connectors.vllm.connector.namespace import in_layer_order
from kvstore.errors import ConfigError
from kvstore.interface import BlockStore, Load, Save

SAVES_MAX: Final = 256
"""Maximum number of saves under way. Further ones are dropped."""


@dataclass(eq=False, slots=True)
class Loading:
    """A load until its end. ready: number of blocks whose copy is queued."""

    blocks: RequestBlocks
    load: Load
    started_s: float
    copying: bool = False
    ready: int = 0


@dataclass(eq=False, slots=True)
class Saving:
    """A save until its end.

    blocks: those that are not saved yet. retry_at_s: time of the next save of blocks that got no
    slot. preempted: the blocks will be overwritten, so they are not saved again.
    """

    blocks: RequestBlocks
    save: Save
    started_s: float
    copying: bool = False
    retry_at_s: float = 0.0
    preempted: bool = False


class WorkerSide:
    """The worker's side of one rank.

    store: bound to this rank's namespace. `close` does not close it.
    caches: vLLM's tensors by layer, each `[blocks, kv_heads, block_tokens, K‖V]`. This is the
        logical order; the strides give the physical one.
    num_blocks: number of vLLM's blocks; its tensors may split each into several pages.
    max_save_wait_ms: how long a save may wait for its slots.

    Raises:
        ConfigError: the tensors do not match the namespace.
    """

    def __init__(
        self,
        store: BlockStore,
        caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        *,
        max_save_wait_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pool = pool_of(caches)
        form, self._pages_per_block = kernels.check_layout(store.namespace, pool)
        if pool.num_pages != num_blocks * self._pages_per_block:
            raise ConfigError(
                f"vLLM's KV has {pool.num_pages} pages of {pool.page_tokens} tokens for "
                f"{num_blocks} blocks of {store.namespace.block_tokens} tokens; these do not match"
            )
        self._block_bytes = store.namespace.block_bytes
        self._store = GuardedStore(store)
        self._max_save_wait_ms = max_save_wait_ms
        self._clock = clock
        self._copier = kernels.copier_for(pool, form)
        self._copies = CopyThread(self._copier)
        self._loading: list[Loading] = []
        self._saving: list[Saving] = []
        self._finishing: set[str] = set()
        self._result = StepResult()
        self._counts: Counter[str] = Counter()
        self._closed = False

    # One step: handle_preemptions, (the computation), start_loads and start_saves, collect.

    def handle_preemptions(self, metadata: StepMetadata) -> None:
        """Before the computation: end the saves of preempted requests. Waits only for copies that
        have started."""
        if not metadata.preempted:
            return
        for copy in self._copies.withdraw(
            lambda c: c.owner.blocks.request_id in metadata.preempted
        ):
            copy.owner.copying = False
        for saving in self._saves_of(metadata.preempted):
            saving.preempted = True
            if not saving.copying:
                self._counts["saves_preempted"] += 1
                self._end_save(saving, copied=False)
        while any(saving.copying for saving in self._saves_of(metadata.preempted)):
            self._complete_copies(self._copies.finished(IDLE_WAIT_S))

    def start_loads(self, metadata: StepMetadata) -> None:
        """Start the loads of this step."""
        for blocks in metadata.loads:
            load = self._store.load(blocks.hashes)
            if load is None:
                self._record_load(blocks, 0)
                continue
            loading = Loading(blocks, load, self._clock())
            self._loading.append(loading)
            self._advance_load(loading)

    def start_saves(self, metadata: StepMetadata) -> None:
        """After the computation: save the blocks that it filled. Earlier saves that wait for slots
        go first."""
        for saving in [*self._saving]:
            self._advance_save(saving)
        for blocks in metadata.saves:
            save = self._store.save(blocks.hashes) if len(self._saving) < SAVES_MAX else None
            if save is None:
                self._counts["saves_dropped"] += 1
                self._result.saved.append((blocks.request_id, blocks.save_number))
                continue
            self._counts["saves"] += 1
            saving = Saving(blocks, save, self._clock())
            self._saving.append(saving)
            self._advance_save(saving)

    def collect(self, metadata: StepMetadata) -> StepResult:
        """Loads and saves that ended since the last step."""
        self._finishing |= metadata.finishing
        waiting = metadata.idle and bool(self._loading or self._saving)
        copying = self._copies.under_way > 0
        self._store.poll(IDLE_WAIT_S if waiting and not copying else 0.0)
        for loading in [*self._loading]:
            self._advance_load(loading)
        for saving in [*self._saving]:
            self._advance_save(saving)
        copying = self._copies.under_way > 0
        self._complete_copies(self._copies.finished(IDLE_WAIT_S if waiting and copying else 0.0))
        busy = {saving.blocks.request_id for saving in self._saving}
        result, self._result = self._result, StepResult()
        result.sent = self._finishing - busy
        self._finishing &= busy
        return result

    def counts(self) -> dict[str, int]:
        """Counts since the start, and whether the store is connected."""
        return {
            **self._counts,
            "store_errors": self._store.errors,
            CONNECTED: int(self._store.store.slab is not None),
        }

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and current gauges."""
        return {
            **self._counts,
            "store_errors": self._store.errors,
            CONNECTED: self._store.store.slab is not None,
            "loads_under_way": len(self._loading),
            "saves_under_way": len(self._saving),
            "copies_under_way": self._copies.under_way,
        }

    def close(self) -> None:
        """Wait for running copies and release every lease; the store stays open."""
        if self._closed:
            return
        self._closed = True
        self._complete_copies(self._copies.close())
        for loading in list(self._loading):
            self._end_load(loading, 0)
        for saving in list(self._saving):
            self._end_save(saving, copied=False)

    # Loads.

    def _advance_load(self, loading: Loading) -> None:
        """Queue the copy once no more blocks will arrive, or after the maximum wait."""
        if loading.copying:
            return
        load = loading.load
        late = (self._clock() - loading.started_s) * 1e3 >= loading.blocks.max_wait_ms
        if not load.done and not late:
            return
        self._counts["loads_timed_out"] += not load.done
        loading.ready = len(load.slots)
        slots = load.slots[: loading.ready]
        loading.copying = bool(slots)
        if not slots or not self._copy(Direction.SCATTER, loading, range(len(slots)), slots):
            self._end_load(loading, 0)

    def _end_load(self, loading: Loading, blocks: int) -> None:
        self._loading.remove(loading)
        self._store.release(loading.load)
        self._counts["blocks_loaded"] += blocks
        self._counts["bytes_loaded"] += blocks * self._block_bytes
        self._counts["load_us"] += int((self._clock() - loading.started_s) * 1e6)
        self._record_load(loading.blocks, blocks)

    def _record_load(self, load: RequestBlocks, blocks: int) -> None:
        missing = load.block_ids[blocks:]
        self._counts["blocks_failed"] += len(missing)
        self._result.recved.add(load.request_id)
        self._result.bad_blocks.update(missing)
        if missing:
            self._result.failed.add(load.request_id)

    # Saves.

    def _advance_save(self, saving: Saving) -> None:
        """Queue the copy once the slots are assigned. If no slot is, save again after a while. End
        the save if it is too late."""
        save = saving.save
        if saving.copying:
            return
        if save.done and save.slot_assignments and not save.fault:
            saving.copying = True
            indices = [index for index, _ in save.slot_assignments]
            slots = [slot for _, slot in save.slot_assignments]
            if not self._copy(Direction.GATHER, saving, indices, slots):
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
        return (self._clock() - saving.started_s) * 1e3 >= self._max_save_wait_ms

    def _may_save_again(self, saving: Saving) -> bool:
        """Whether blocks of the save got no slot, and may still wait for one."""
        save = saving.save
        dropped = save.dropped > 0 and not save.fault
        return dropped and not saving.preempted and not self._closed and not self._is_late(saving)

    def _save_again(self, saving: Saving) -> None:
        """Save the blocks that got no slot. The previous save has ended."""
        start, blocks = first_dropped(saving.save), saving.blocks
        saving.blocks = replace(
            blocks, hashes=blocks.hashes[start:], block_ids=blocks.block_ids[start:]
        )
        dropped = saving.save.dropped
        save = self._store.save(saving.blocks.hashes)
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
        self._counts["saves_failed"] += bool(save.fault)
        if not copied:
            self._store.release(save)
        elif self._store.commit(save):
            self._counts["blocks_saved"] += len(save.slot_assignments)
            self._counts["bytes_saved"] += len(save.slot_assignments) * self._block_bytes
        if again:
            self._save_again(saving)
            return
        self._counts["blocks_dropped"] += save.dropped
        self._forget_save(saving)

    def _forget_save(self, saving: Saving) -> None:
        self._saving.remove(saving)
        self._result.saved.append((saving.blocks.request_id, saving.blocks.save_number))

    def _saves_of(self, request_ids: Iterable[str]) -> list[Saving]:
        return [saving for saving in self._saving if saving.blocks.request_id in request_ids]

    # Copies.

    def _copy(
        self,
        direction: Direction,
        owner: Loading | Saving,
        indices: Iterable[int],
        slots: Sequence[int],
    ) -> bool:
        """Queue a copy of these blocks of the owner; False when the queue is full."""
        pages = [self._pages(owner.blocks.block_ids[index]) for index in indices]
        operation = owner.load if isinstance(owner, Loading) else owner.save
        slab = self._store.store.slab_of(operation)
        copy = Copy(direction, pages, slab, tuple(slots), self._copier.mark(), owner)
        queued = self._copies.submit(copy)
        self._counts["copies_dropped"] += not queued
        return queued

    def _complete_copies(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self._counts["copies_failed"] += bool(copy.error)
            if isinstance(copy.owner, Loading):
                self._end_load(copy.owner, 0 if copy.error else copy.owner.ready)
            else:
                self._end_save(copy.owner, copied=not copy.error)

    def _pages(self, block_id: int) -> list[int]:
        """Pages of vLLM's tensors that make up one of its blocks."""
        first = block_id * self._pages_per_block
        return list(range(first, first + self._pages_per_block))


def pool_of(caches: Mapping[str, torch.Tensor]) -> kernels.PoolLayout:
    """vLLM's tensors as a pool, layer by layer. Layers that share one tensor count once.

    Raises ConfigError: tensors that are not `[blocks, kv_heads, block_tokens, K‖V]` of one shape.
    """
    layers: dict[int, torch.Tensor] = {}
    for name in in_layer_order(caches):
        tensor = caches[name]
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            raise ConfigError(
                f"the KV of layer {name} is not [blocks, kv_heads, block_tokens, K‖V]: "
                "KVStoreConnector does not support it; use KVStoreTier"
            )
        layers.setdefault(tensor.data_ptr(), tensor)
    tensors = list(layers.values())
    if not tensors or any(
        tensor.shape != tensors[0].shape or tensor.stride() != tensors[0].stride()
        for tensor in tensors
    ):
        shapes = sorted({str(tuple(tensor.shape)) for tensor in tensors})
        raise ConfigError(
            "KVStoreConnector requires layers of one shape, but these have "
            f"{', '.join(shapes) or 'no shape'}; use KVStoreTier"
        )
    return kernels.PoolLayout.vllm(tensors)
