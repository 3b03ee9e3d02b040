"""The scheduler's side: what is held of a prompt, when to load it, which blocks to save.

It runs inside vLLM's scheduler and never waits. A waiting request's run is brought into L2 under
lease by `Attempts` (the policy and the deadline live there); once vLLM has given it blocks, the
workers load those by their own connections, and the lease here ends when they have. So nothing is
evicted between the two, and a worker or a scheduler that dies takes only its own leases along.

Requests are vLLM's, of which a few attributes are read; there is no vLLM in here.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.pending_lookups import ROUND_TRIP_MS, Attempts
from kvstore.connectors.vllm.connector.metadata import CONNECTED, IDLE_WAIT_S, Blocks, StepPlan
from kvstore.connectors.vllm.lora import Adapters, LoRARequest, Trust
from kvstore.interface import Answer, BlockStore, Load
from kvstore.prefetch.policy import PrefetchPolicy

EPOCH_BYTES: Final = 16
NEVER: Final = 1 << 62
"""More blocks than any request has: as if all were offered."""
ANSWERS_OF_A_STEP: Final = 2
"""Answers that are waited for in one step: a match's, then that of the load it leads to."""


class Request(Protocol):
    """What is read of vLLM's request."""

    request_id: str
    num_tokens: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool
    lora_request: LoRARequest | None


@dataclass(eq=False, slots=True)
class Names:
    """What the store calls a request's blocks, by vLLM's hashes."""

    salt: bytes
    ours: dict[bytes, bytes]


class SchedulerSide:
    """One engine's. Every call comes from the scheduler's thread.

    store: bound to the namespace of the ranks (`ranks.RankStores` of several). Not closed here.
    adapters: made at the engine's start.
    hashes_per_block: vLLM's hashes within one block; the last of them names it.
    workers: how many save each block, or a part of it.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        policy: PrefetchPolicy,
        deadline_ms: float,
        min_load_tokens: int,
        adapters: Adapters,
        hashes_per_block: int = 1,
        workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_tokens = store.namespace.block_tokens
        self._hashes_per_block = hashes_per_block
        self._workers = workers
        self._deadline_ms = deadline_ms
        self._clock = clock
        self._store = GuardedStore(store)
        self._attempts = Attempts(
            self._store,
            policy=policy,
            deadline_ms=deadline_ms,
            min_load_tokens=min_load_tokens,
            clock=clock,
        )
        self._adapters = adapters
        self._names: dict[str, Names] = {}
        self._prompts: dict[str, tuple[tuple[bytes, int, bytes], tuple[bytes, ...]]] = {}
        self._requests: dict[str, Request] = {}
        self._asked_s: dict[str, float] = {}
        self._first_block: dict[str, int] = {}
        self._offered: dict[str, int] = {}
        self._saving: dict[str, dict[int, int]] = {}
        self._saves = 0
        self._held: dict[str, Load] = {}
        self._pending: dict[str, tuple[tuple[bytes, ...], int]] = {}
        self._failed: set[str] = set()
        self._epoch = b""
        self._plan = StepPlan()
        self._finishing: set[str] = set()
        self._counts: Counter[str] = Counter()

    # Matching.

    def match(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens that can be loaded past vLLM's own hit; None: ask again next step.

        computed_tokens: whole blocks that vLLM has itself. The last token is always computed.
        """
        request_id = request.request_id
        if request.skip_reading_prefix_cache or request_id in self._failed:
            return 0
        assert request_id not in self._held, "a match while a load is under way"
        asked_s = self._asked_s.setdefault(request_id, self._clock())
        self._pending.pop(request_id, None)
        trust, salt = self._adapters.salt(request.lora_request)
        if trust is not Trust.KNOWN:
            self._attempts.abort(request_id)
            late = (self._clock() - asked_s) * 1e3 >= self._deadline_ms
            return None if trust is Trust.READING and not late else 0
        hashes = self._prompt_hashes(request, salt)
        first = computed_tokens // self._block_tokens
        self._first_block[request_id] = first
        found = self._attempts.match(request_id, hashes, first, can_start=True)
        if found.answer is Answer.PENDING:
            self._pending[request_id] = (hashes, first)
            return None
        return found.blocks * self._block_tokens if found.answer is Answer.HIT else 0

    def allocated(
        self, request: Request, block_ids: Sequence[int], external_tokens: int
    ) -> dict[str, int]:
        """vLLM has given the request blocks, of which the last `external_tokens` of its hit are to
        be loaded. Returns the tokens by the tier that holds them."""
        request_id = request.request_id
        self._requests[request_id] = request
        self._pending.pop(request_id, None)
        self._prompts.pop(request_id, None)
        asked_s = self._asked_s.pop(request_id, None)
        if not external_tokens:
            self._attempts.abort(request_id)
            return {}
        blocks = external_tokens // self._block_tokens
        assert blocks * self._block_tokens == external_tokens, "whole blocks are loaded"
        first = self._first_block[request_id]
        (ticket,) = self._attempts.take(request_id, blocks)
        self._held[request_id] = ticket
        assert asked_s is not None, "an allocation without a match"
        waited_ms = (self._clock() - asked_s) * 1e3
        plan = Blocks(
            request_id,
            ticket.hashes[:blocks],
            tuple(block_ids[first : first + blocks]),
            max(ROUND_TRIP_MS, self._deadline_ms - waited_ms),
        )
        self._plan.loads.append(plan)
        tiers = Counter(ticket.tiers[:blocks])
        return {tier: count * self._block_tokens for tier, count in tiers.items()}

    # Saving.

    def plan(
        self,
        scheduled: Iterable[tuple[str, int]],
        block_ids: Callable[[str], Sequence[int]],
        preempted: Iterable[str],
    ) -> StepPlan:
        """This step's plan.

        scheduled: request and the tokens that it has computed once this step has ended.
        block_ids: the engine's block table of a request.
        preempted: requests that lost their blocks since the last plan.
        """
        plan, self._plan = self._plan, StepPlan()
        plan.preempted = frozenset(preempted)
        for request_id in plan.preempted:
            # What it offered may have been given up; it offers again when it runs again.
            self._offered.pop(request_id, None)
        plan.idle = True
        for request_id, tokens in scheduled:
            plan.idle = False
            self._offer(plan, request_id, tokens, block_ids)
        plan.finishing = frozenset(self._finishing)
        self._finishing.clear()
        self._adapters.stepped()
        self._move_on(IDLE_WAIT_S if plan.idle and not plan.loads else 0.0)
        return plan

    def _move_on(self, wait_s: float) -> None:
        """Take in answers, so that what they lead to is asked, and answered too, before vLLM asks
        again. Waits only in a step in which nothing is computed, and only for requests that wait
        themselves."""
        for _ in range(ANSWERS_OF_A_STEP):
            moved = self._store.poll(wait_s if self._pending else 0.0)
            for request_id, (hashes, first) in self._pending.items():
                self._attempts.match(request_id, hashes, first, can_start=True)
            if not moved:
                return

    def _offer(
        self,
        plan: StepPlan,
        request_id: str,
        tokens: int,
        block_ids: Callable[[str], Sequence[int]],
    ) -> None:
        """Blocks that are full by the end of this step. All of a request's are offered once,
        loaded ones too: the store drops what it holds, and takes what it has lost."""
        request = self._requests.get(request_id)
        if request is None:
            return
        known = len(request.block_hashes) // self._hashes_per_block
        full = min(tokens // self._block_tokens, known)
        start = self._offered.get(request_id, 0)
        if full <= start:
            return
        trust, salt = self._adapters.salt(request.lora_request)
        if trust is not Trust.KNOWN:
            return  # a later step may offer them
        hashes = self._hashes(request, salt, full, start)
        ids = tuple(block_ids(request_id)[start:full])
        if len(ids) < len(hashes):
            return  # a step that is not computed yet by the time its blocks are asked for
        self._offered[request_id] = full
        self._saves += 1
        self._saving.setdefault(request_id, {})[self._saves] = self._workers
        plan.saves.append(Blocks(request_id, hashes, ids, number=self._saves))

    # Ends.

    def finished(self, request: Request) -> bool:
        """The request is over, or given up. True: its blocks must stay until the workers have
        reported it as sent, for not all of its saves are known to have ended. A load under way
        keeps them in any case, and is reported itself."""
        request_id = request.request_id
        self._attempts.abort(request_id)
        self._pending.pop(request_id, None)
        self._failed.discard(request_id)
        self._offered.pop(request_id, None)
        saving = self._saving.pop(request_id, None)
        for known in (
            self._requests,
            self._asked_s,
            self._first_block,
            self._names,
            self._prompts,
        ):
            known.pop(request_id, None)
        if request_id in self._held or not saving:
            return False
        self._finishing.add(request_id)
        return True

    def heard(
        self,
        recved: Iterable[str],
        failed: Iterable[str],
        saved: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Loads have ended in every worker; those of `failed` lack a block somewhere. saved: of
        saves, by request and number, in how many workers they have ended."""
        for (request_id, number), workers in (saved or {}).items():
            self._heard_saved(request_id, number, workers)
        for request_id in failed:
            self._counts["loads_failed"] += 1
            if request_id in self._requests:
                # vLLM asks anew for what is missing; it shall be computed, not tried for ever.
                self._failed.add(request_id)
        for request_id in recved:
            ticket = self._held.pop(request_id, None)
            if ticket is not None:
                self._store.release(ticket)

    def _heard_saved(self, request_id: str, number: int, workers: int) -> None:
        saving = self._saving.get(request_id)
        if saving is None or number not in saving:
            return  # of a request that is over
        saving[number] -= workers
        if not saving[number]:
            del saving[number]

    def reset(self) -> bool:
        """Nothing that was saved up to now is loaded any more. vLLM asks for it when the weights
        may have changed in place, which nothing in a namespace tells. From here on the engine's
        blocks have names of their own, that no other engine knows.

        False: loads are under way for requests that live, with blocks from before.
        """
        if self._held.keys() & self._requests.keys():
            return False
        self._attempts.close()
        self._pending.clear()
        for request_id in self._requests:
            # Runs on with blocks of before, unless it is preempted: then all is computed anew.
            self._offered[request_id] = NEVER
        self._epoch = os.urandom(EPOCH_BYTES)
        return True

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is held now."""
        return {
            **self._attempts.counts,
            **self._counts,
            "store_faults": self._store.faults,
            CONNECTED: self._store.store.slab is not None,
            "requests_waiting": len(self._attempts),
            "loads_under_way": len(self._held),
            "slots_leased": self._attempts.slots_leased(),
            "requests_known": len(self._requests),
        }

    def counts(self) -> dict[str, int]:
        """The growing ones of `stats`, and whether the store is connected."""
        return {
            **self._attempts.counts,
            **self._counts,
            "store_faults": self._store.faults,
            CONNECTED: int(self._store.store.slab is not None),
        }

    def close(self) -> None:
        """Hand back every lease; the store stays open."""
        self._adapters.close()
        self._attempts.close()
        for ticket in self._held.values():
            self._store.release(ticket)
        self._held.clear()

    def _prompt_hashes(self, request: Request, salt: bytes) -> tuple[bytes, ...]:
        """Names of the blocks that a waiting request may load. It asks in every step, so they are
        kept: vLLM's last name stands for all of them."""
        stop = (request.num_tokens - 1) // self._block_tokens
        named = min(stop * self._hashes_per_block, len(request.block_hashes))
        if named <= 0:
            return ()
        asked = (self._epoch + salt, named, request.block_hashes[named - 1])
        kept = self._prompts.get(request.request_id)
        if kept is None or kept[0] != asked:
            kept = (asked, self._hashes(request, salt, stop))
            self._prompts[request.request_id] = kept
        return kept[1]

    def _hashes(
        self, request: Request, salt: bytes, stop: int, start: int = 0
    ) -> tuple[bytes, ...]:
        """Names of a request's blocks from `start` up to `stop`, as far as they have one."""
        per = self._hashes_per_block
        names = request.block_hashes[start * per : stop * per]
        names = names if per == 1 else names[per - 1 :: per]
        salt = self._epoch + salt
        if not salt:
            return tuple(names)
        known = self._names.get(request.request_id)
        if known is None or known.salt != salt:
            known = self._names[request.request_id] = Names(salt, {})
        for name in names:
            if name not in known.ours:
                known.ours[name] = hashlib.sha256(salt + name).digest()
        return tuple(known.ours[name] for name in names)
