"""The scheduler's side: looks up prompts, decides when to load them and which blocks to save.

It runs inside vLLM's scheduler and never waits. `PendingLookups` leases the cached prefix of a
waiting request in L2, under the prefetch policy and the maximum wait. Once vLLM has allocated
blocks for it, the workers load them over their own connections; then the lease here ends. So no
block is evicted in between, and a worker or scheduler that dies loses only its own leases.

The module reads a few attributes of vLLM's requests. It does not import vllm.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.pending_lookups import ROUND_TRIP_MS, PendingLookups
from kvstore.connectors.vllm.common.idle_steps import IDLE_WAIT_S
from kvstore.connectors.vllm.connector.lora import Adapters, LoRARequest, Trust
from kvstore.connectors.vllm.connector.metadata import CONNECTED, RequestBlocks, StepMetadata
from kvstore.interface import BlockStore, Load, LookupStatus
from kvstore.prefetch.policy import PrefetchPolicy

log = logging.getLogger("vllm.kvstore")

EPOCH_BYTES: Final = 16
ALL_BLOCKS: Final = 1 << 62
"""More blocks than any request has: marks all of its blocks as saved."""
POLLS_PER_STEP: Final = 2
"""Polls in one step: for the answer to a match, then for that of the load that follows."""


class Request(Protocol):
    """Attributes of vLLM's request that are read here."""

    request_id: str
    num_tokens: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool
    lora_request: LoRARequest | None
    prompt_embeds: object | None
    prompt_token_ids: Sequence[int] | None


@dataclass(eq=False, slots=True)
class SaltedHashes:
    """Block hashes of a request in the store, by vLLM's hashes."""

    salt: bytes
    by_vllm_hash: dict[bytes, bytes]


class SchedulerSide:
    """The scheduler's side of one engine. Only the scheduler's thread calls it.

    store: bound to the namespace of the ranks (`RankStores` of several). Not closed here.
    adapters: created at the engine's start.
    hashes_per_block: number of vLLM's hashes in one block; the last one is the block's.
    workers: number of workers that save each block, or a part of it.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        policy: PrefetchPolicy,
        max_wait_ms: float,
        min_load_tokens: int,
        adapters: Adapters,
        hashes_per_block: int = 1,
        workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_tokens = store.namespace.block_tokens
        self._hashes_per_block = hashes_per_block
        self._workers = workers
        self._max_wait_ms = max_wait_ms
        self._clock = clock
        self._store = GuardedStore(store)
        self._lookups = PendingLookups(
            self._store,
            policy=policy,
            max_wait_ms=max_wait_ms,
            min_load_tokens=min_load_tokens,
            clock=clock,
        )
        self._adapters = adapters
        self._salted_hashes: dict[str, SaltedHashes] = {}
        self._prompt_hash_cache: dict[str, tuple[tuple[bytes, int, bytes], tuple[bytes, ...]]] = {}
        self._requests: dict[str, Request] = {}
        self._first_lookup_s: dict[str, float] = {}
        self._first_block: dict[str, int] = {}
        self._saved_blocks: dict[str, int] = {}
        self._saving: dict[str, dict[int, int]] = {}
        self._saves = 0
        self._loading: dict[str, Load] = {}
        self._pending: dict[str, tuple[tuple[bytes, ...], int]] = {}
        self._failed: set[str] = set()
        self._epoch = b""
        self._metadata = StepMetadata()
        self._finishing: set[str] = set()
        self._mixed_prompts = False
        self._counts: Counter[str] = Counter()

    # Matching.

    def match(self, request: Request, computed_tokens: int) -> int | None:
        """Number of tokens that can be loaded after vLLM's own hit. None: call again next step.

        computed_tokens: tokens of the full blocks in vLLM's own cache. vLLM always computes the
            last token of a prompt.
        """
        request_id = request.request_id
        if _is_mixed(request):
            self._note_mixed_prompt()
            return 0
        if request.skip_reading_prefix_cache or request_id in self._failed:
            return 0
        assert request_id not in self._loading, "a match while a load is under way"
        first_lookup_s = self._first_lookup_s.setdefault(request_id, self._clock())
        self._pending.pop(request_id, None)
        trust, salt = self._adapters.salt(request.lora_request)
        if trust is not Trust.KNOWN:
            self._lookups.abort(request_id)
            late = (self._clock() - first_lookup_s) * 1e3 >= self._max_wait_ms
            return None if trust is Trust.READING and not late else 0
        hashes = self._prompt_hashes(request, salt)
        first = computed_tokens // self._block_tokens
        self._first_block[request_id] = first
        found = self._lookups.match(request_id, hashes, first, can_start=True)
        if found.status is LookupStatus.PENDING:
            self._pending[request_id] = (hashes, first)
            return None
        return found.blocks * self._block_tokens if found.status is LookupStatus.HIT else 0

    def _note_mixed_prompt(self) -> None:
        """Blocks of a mixed prompt are neither loaded nor saved. vLLM's own cache has them under
        the hashes of other prompts too. So from now on no prompt with embeddings is saved: its
        blocks may be those of the mixed one."""
        if not self._mixed_prompts:
            self._mixed_prompts = True
            log.warning(
                "kvstore: a prompt of embeddings and token ids does not use the store, and this "
                "engine saves no prompt with embeddings any more: vLLM's block hashes do not "
                "cover which positions are embeddings"
            )

    def start_load(
        self, request: Request, block_ids: Sequence[int], external_tokens: int
    ) -> dict[str, int]:
        """Load the last `external_tokens` tokens of the hit into the blocks that vLLM allocated for
        the request. Returns the number of tokens by tier."""
        request_id = request.request_id
        self._requests[request_id] = request
        self._counts["prompts_mixed"] += _is_mixed(request)
        self._pending.pop(request_id, None)
        self._prompt_hash_cache.pop(request_id, None)
        first_lookup_s = self._first_lookup_s.pop(request_id, None)
        if not external_tokens:
            self._lookups.abort(request_id)
            return {}
        blocks = external_tokens // self._block_tokens
        assert blocks * self._block_tokens == external_tokens, "whole blocks are loaded"
        first = self._first_block[request_id]
        (load,) = self._lookups.take(request_id, blocks)
        self._loading[request_id] = load
        assert first_lookup_s is not None, "an allocation without a match"
        waited_ms = (self._clock() - first_lookup_s) * 1e3
        request_blocks = RequestBlocks(
            request_id,
            load.hashes[:blocks],
            tuple(block_ids[first : first + blocks]),
            max(ROUND_TRIP_MS, self._max_wait_ms - waited_ms),
        )
        self._metadata.loads.append(request_blocks)
        tiers = Counter(load.tiers[:blocks])
        return {tier: count * self._block_tokens for tier, count in tiers.items()}

    # Saving.

    def build_step_metadata(
        self,
        scheduled: Iterable[tuple[str, int]],
        block_ids: Callable[[str], Sequence[int]],
        preempted: Iterable[str],
    ) -> StepMetadata:
        """Metadata of this step for the workers.

        scheduled: requests, and their number of computed tokens after this step.
        block_ids: the engine's block table of a request.
        preempted: requests that lost their blocks since the last step.
        """
        metadata, self._metadata = self._metadata, StepMetadata()
        metadata.preempted = frozenset(preempted)
        for request_id in metadata.preempted:
            # Its saves may have been dropped: its blocks are saved again when it runs again.
            self._saved_blocks.pop(request_id, None)
        metadata.idle = True
        for request_id, tokens in scheduled:
            metadata.idle = False
            self._add_save(metadata, request_id, tokens, block_ids)
        metadata.finishing = frozenset(self._finishing)
        self._finishing.clear()
        self._adapters.end_step()
        self._poll_store(IDLE_WAIT_S if metadata.idle and not metadata.loads else 0.0)
        return metadata

    def _poll_store(self, wait_s: float) -> None:
        """Process answers of the store, so that the loads they lead to are answered before vLLM's
        next lookup. Waits only in a step that computes nothing, and only if a request waits."""
        for _ in range(POLLS_PER_STEP):
            updated = self._store.poll(wait_s if self._pending else 0.0)
            for request_id, (hashes, first) in self._pending.items():
                self._lookups.match(request_id, hashes, first, can_start=True)
            if not updated:
                return

    def _add_save(
        self,
        metadata: StepMetadata,
        request_id: str,
        tokens: int,
        block_ids: Callable[[str], Sequence[int]],
    ) -> None:
        """Save the blocks that are full by the end of this step. Each block of a request is sent
        once, also if it was loaded: the store skips cached blocks and saves evicted ones."""
        request = self._requests.get(request_id)
        if request is None or (self._mixed_prompts and request.prompt_embeds is not None):
            return
        hashed = len(request.block_hashes) // self._hashes_per_block
        full = min(tokens // self._block_tokens, hashed)
        start = self._saved_blocks.get(request_id, 0)
        if full <= start:
            return
        trust, salt = self._adapters.salt(request.lora_request)
        if trust is not Trust.KNOWN:
            return  # a later step may save them
        hashes = self._hashes(request, salt, full, start)
        ids = tuple(block_ids(request_id)[start:full])
        if len(ids) < len(hashes):
            return  # the block table is requested before the step is computed
        self._saved_blocks[request_id] = full
        self._saves += 1
        self._saving.setdefault(request_id, {})[self._saves] = self._workers
        metadata.saves.append(RequestBlocks(request_id, hashes, ids, save_number=self._saves))

    # Ends.

    def finish_request(self, request: Request) -> bool:
        """The request has ended or was aborted. True: its blocks must stay until the workers report
        it as sent, because not all of its saves have ended. A load under way keeps the blocks in
        any case, and reports its own end."""
        request_id = request.request_id
        self._lookups.abort(request_id)
        self._pending.pop(request_id, None)
        self._failed.discard(request_id)
        self._saved_blocks.pop(request_id, None)
        saving = self._saving.pop(request_id, None)
        for by_request in (
            self._requests,
            self._first_lookup_s,
            self._first_block,
            self._salted_hashes,
            self._prompt_hash_cache,
        ):
            by_request.pop(request_id, None)
        if request_id in self._loading or not saving:
            return False
        self._finishing.add(request_id)
        return True

    def update_from_workers(
        self,
        recved: Iterable[str],
        failed: Iterable[str],
        saved: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Process the results of the workers.

        recved: requests whose load has ended in every worker. failed: those with a missing block
        in some worker. saved: number of workers in which a save has ended, by request and number.
        """
        for (request_id, number), workers in (saved or {}).items():
            self._complete_save(request_id, number, workers)
        for request_id in failed:
            self._counts["loads_failed"] += 1
            if request_id in self._requests:
                # vLLM looks the missing blocks up again. They must be computed, not loaded again.
                self._failed.add(request_id)
        for request_id in recved:
            load = self._loading.pop(request_id, None)
            if load is not None:
                self._store.release(load)

    def _complete_save(self, request_id: str, number: int, workers: int) -> None:
        saving = self._saving.get(request_id)
        if saving is None or number not in saving:
            return  # the request has ended
        saving[number] -= workers
        if not saving[number]:
            del saving[number]

    def reset(self) -> bool:
        """Never load blocks saved before this call. vLLM calls this when the weights may have
        changed in place, which the namespace does not contain. From now on the engine's block
        hashes are salted with a random epoch, so no other engine has the same ones.

        False: running requests still load blocks from before.
        """
        if self._loading.keys() & self._requests.keys():
            return False
        self._lookups.close()
        self._pending.clear()
        for request_id in self._requests:
            # It keeps its old blocks; after a preemption all of them are computed again.
            self._saved_blocks[request_id] = ALL_BLOCKS
        self._epoch = os.urandom(EPOCH_BYTES)
        return True

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and current gauges."""
        return {
            **self._lookups.counts,
            **self._counts,
            "store_errors": self._store.errors,
            CONNECTED: self._store.store.slab is not None,
            "requests_waiting": len(self._lookups),
            "loads_under_way": len(self._loading),
            "slots_leased": self._lookups.slots_leased(),
            "requests_tracked": len(self._requests),
        }

    def counts(self) -> dict[str, int]:
        """The counters of `stats`, and whether the store is connected."""
        return {
            **self._lookups.counts,
            **self._counts,
            "store_errors": self._store.errors,
            CONNECTED: int(self._store.store.slab is not None),
        }

    def close(self) -> None:
        """Release every lease; the store stays open."""
        self._adapters.close()
        self._lookups.close()
        for load in self._loading.values():
            self._store.release(load)
        self._loading.clear()

    def _prompt_hashes(self, request: Request, salt: bytes) -> tuple[bytes, ...]:
        """Hashes of the blocks that a waiting request may load. They are cached, because vLLM looks
        them up in every step. The cache key has only vLLM's last hash, which covers all others."""
        stop = (request.num_tokens - 1) // self._block_tokens
        count = min(stop * self._hashes_per_block, len(request.block_hashes))
        if count <= 0:
            return ()
        key = (self._epoch + salt, count, request.block_hashes[count - 1])
        cached = self._prompt_hash_cache.get(request.request_id)
        if cached is None or cached[0] != key:
            cached = (key, self._hashes(request, salt, stop))
            self._prompt_hash_cache[request.request_id] = cached
        return cached[1]

    def _hashes(
        self, request: Request, salt: bytes, stop: int, start: int = 0
    ) -> tuple[bytes, ...]:
        """Hashes of a request's blocks from `start` up to `stop`, as far as vLLM has them."""
        per = self._hashes_per_block
        vllm_hashes = request.block_hashes[start * per : stop * per]
        vllm_hashes = vllm_hashes if per == 1 else vllm_hashes[per - 1 :: per]
        salt = self._epoch + salt
        if not salt:
            return tuple(vllm_hashes)
        salted = self._salted_hashes.get(request.request_id)
        if salted is None or salted.salt != salt:
            salted = self._salted_hashes[request.request_id] = SaltedHashes(salt, {})
        for each in vllm_hashes:
            if each not in salted.by_vllm_hash:
                salted.by_vllm_hash[each] = hashlib.sha256(salt + each).digest()
        return tuple(salted.by_vllm_hash[each] for each in vllm_hashes)


def _is_mixed(request: Request) -> bool:
    """True for a prompt of embeddings and token ids. vLLM's hashes cover both, but not which
    positions of the prompt are which."""
    return request.prompt_embeds is not None and request.prompt_token_ids is not None
