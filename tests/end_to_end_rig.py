"""Engines with and without a store, and a simple model that predicts every hit and its tier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.connectors.reference.hooks import ReferenceHooks
from kvstore.engine.hooks import NoHooks
from kvstore.engine.loader import LoadedModel, random_model
from kvstore.engine.loop import Engine, collect
from kvstore.engine.lora import random_adapter
from kvstore.engine.request import Output, Request
from kvstore.engine.runner import Runner
from kvstore.interface import BlockStore
from kvstore.prefetch.policy import PrefetchPolicy, WaitComplete
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.tiers import disk

torch.set_num_threads(1)

PAGE_TOKENS = 4
BLOCK_TOKENS = 8
WAIT_MS = 60_000.0
"""Maximum wait of tests that expect every cached block. It only guards against hangs."""
VOCAB = 97
DISK_BYTES = 16 << 20
LORAS = {"": None, "fine": 11}


def tiny_model(seed: int = 1, layers: int = 2) -> LoadedModel:
    return random_model(
        seed, layers=layers, hidden=32, heads=2, kv_heads=1, vocab=VOCAB, max_positions=512
    )


@dataclass(frozen=True)
class PromptRequest:
    """One request: prompt, cache salt, LoRA adapter and output length."""

    tokens: tuple[int, ...]
    salt: str = ""
    lora: str = ""
    max_tokens: int = 6

    def to_engine_request(self, name: str) -> Request:
        return Request(
            request_id=name,
            prompt_tokens=self.tokens,
            max_tokens=self.max_tokens,
            cache_salt=self.salt,
            lora_name=self.lora,
            ignore_eos=True,
        )


def make_runner(loaded: LoadedModel, num_pages: int) -> Runner:
    runner = Runner(loaded, num_pages, PAGE_TOKENS)
    for name, seed in LORAS.items():
        if seed is not None:
            runner.add_lora(name, random_adapter(seed, loaded.config))
    return runner


class Baseline:
    """The model's output without any cache, one request at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._engine = Engine(
            loaded,
            num_pages=128,
            page_tokens=PAGE_TOKENS,
            hooks=NoHooks(BLOCK_TOKENS),
            runner=make_runner(loaded, 128),
            prefix_cache=False,
        )
        self._outputs: dict[PromptRequest, list[int]] = {}

    def tokens(self, request: PromptRequest) -> list[int]:
        # A salt separates cache entries; it does not change the output.
        unsalted = PromptRequest(request.tokens, "", request.lora, request.max_tokens)
        if unsalted not in self._outputs:
            self._engine.add(unsalted.to_engine_request("baseline"))
            [output] = collect(self._engine.run_until_idle(), ["baseline"])
            assert not sum(output.cached.values())
            self._outputs[unsalted] = output.tokens
        return self._outputs[unsalted]


def make_store(folder: Path, loaded: LoadedModel, *, slots: int = 256) -> Store:
    """A store with a disk tier in `folder`."""
    slot_bytes = loaded.namespace(BLOCK_TOKENS).block_bytes
    config = disk.Config(directory=str(folder), capacity=DISK_BYTES)
    return Store(Slab.create(slots, slot_bytes), [disk.open(config)])


class CachedEngine:
    """An engine with a store: it has its own session, hooks and pool."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: Store | None = None,
        *,
        blocks: BlockStore | None = None,
        tenant: str = "default",
        num_pages: int = 128,
        max_wait_ms: float = WAIT_MS,
        policy: PrefetchPolicy | None = None,
        min_load_tokens: int = 0,
        max_batch_tokens: int = 64,
        max_running: int = 16,
    ) -> None:
        if blocks is None:
            assert store is not None
            blocks = store.session(loaded.namespace(BLOCK_TOKENS), tenant)
        self.store = store
        self.blocks = blocks
        runner = make_runner(loaded, num_pages)
        self.hooks = ReferenceHooks(
            blocks,
            runner.pool,
            PAGE_TOKENS,
            policy=policy or WaitComplete(max_wait_ms=max_wait_ms),
            max_wait_ms=max_wait_ms,
            min_load_tokens=min_load_tokens,
        )
        self.inner = Engine(
            loaded,
            num_pages=num_pages,
            page_tokens=PAGE_TOKENS,
            hooks=self.hooks,
            runner=runner,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
        )
        self._names = 0

    def run(self, requests: Sequence[PromptRequest]) -> list[Output]:
        """Run all requests concurrently to their ends."""
        names = self.submit(requests)
        return collect(self.inner.run_until_idle(), names)

    def submit(self, requests: Sequence[PromptRequest]) -> list[str]:
        names = []
        for request in requests:
            self._names += 1
            names.append(f"r{self._names}")
            self.inner.add(request.to_engine_request(names[-1]))
        return names

    def close(self) -> None:
        """Close everything except the store. Fails if pages or leases leaked."""
        self.inner.check()
        stats = self.hooks.stats()
        assert stats["requests_waiting"] == stats["saves_under_way"] == 0, stats
        assert stats["copies_under_way"] == stats.get("copies_failed", 0) == 0, stats
        self.inner.close()
        self.blocks.close()


def flush_store(store: Store) -> None:
    """Wait until all saved blocks are in the tiers too."""
    assert store.flush(60.0)


def check_slots_free(store: Store) -> None:
    """Check that no lease leaked: after all loads have ended and L2 is cleared, every slot is
    free."""
    flush_store(store)
    end_s = time.monotonic() + WAIT_MS / 1e3
    while store.stats()["l2"]["loads_in_flight"]:
        assert time.monotonic() < end_s, "a load never ends"
        time.sleep(0.01)
    store.clear("l2")
    stats = store.stats()["l2"]
    assert stats["slots_free"] == stats["slots"], stats


# The model of expected hits.


@dataclass
class ModelStore:
    """The tiers of each block. A block's key is its root and all tokens up to its end."""

    blocks: dict[tuple[Any, ...], set[str]] = field(default_factory=dict)

    def clear_l2(self) -> None:
        for tiers in self.blocks.values():
            tiers.discard("l2")


@dataclass
class ModelEngine:
    """The page prefixes that an engine caches if it never evicts."""

    store: ModelStore
    min_load_tokens: int = 0
    pages: set[tuple[Any, ...]] = field(default_factory=set)

    def hit(self, request: PromptRequest) -> dict[str, int]:
        """Hit tokens by tier. LoadDone blocks are in L2 afterwards."""
        root, length = (request.lora, request.salt), len(request.tokens)
        useful = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
        computed = 0
        while computed < useful and self._page(root, request.tokens, computed) in self.pages:
            computed += PAGE_TOKENS
        hits = {"l1": computed}
        prefix = self._prefix_to_load(root, request.tokens, computed, useful)
        for index, tier in prefix:
            end = min((index + 1) * BLOCK_TOKENS, useful)
            hits[tier] = hits.get(tier, 0) + end - computed
            computed = end
            self.store.blocks[self._block(root, request.tokens, index)].add("l2")
        return {tier: tokens for tier, tokens in hits.items() if tokens}

    def _prefix_to_load(
        self, root: tuple[str, str], tokens: tuple[int, ...], computed: int, useful: int
    ) -> list[tuple[int, str]]:
        """(block, fastest tier) of each block to load."""
        prefix: list[tuple[int, str]] = []
        index = computed // BLOCK_TOKENS
        while computed < useful and index * BLOCK_TOKENS < useful:
            tiers = self.store.blocks.get(self._block(root, tokens, index))
            if not tiers or (index + 1) * BLOCK_TOKENS > len(tokens):
                break
            prefix.append((index, "l2" if "l2" in tiers else "disk"))
            index += 1
        if len(prefix) * BLOCK_TOKENS < self.min_load_tokens:
            while prefix and any(tier == "disk" for _, tier in prefix):
                prefix.pop()
        return prefix

    def on_finished(self, request: PromptRequest, made: Sequence[int], hit: dict[str, int]) -> None:
        """Record a finished request: its KV, except the last token's, is in every tier.

        Blocks hit in L1 are not saved again. Recomputed blocks are, so they are in L2 again.
        """
        root = (request.lora, request.salt)
        tokens = (*request.tokens, *made)
        cached = len(tokens) - 1
        for start in range(0, cached // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            self.pages.add(self._page(root, tokens, start))
        for index in range(hit.get("l1", 0) // BLOCK_TOKENS, cached // BLOCK_TOKENS):
            tiers = self.store.blocks.setdefault(self._block(root, tokens, index), set())
            tiers.update(("l2", "disk"))

    def _page(self, root: tuple[str, str], tokens: tuple[int, ...], start: int) -> tuple[Any, ...]:
        return (*root, *tokens[: start + PAGE_TOKENS])

    def _block(self, root: tuple[str, str], tokens: tuple[int, ...], index: int) -> tuple[Any, ...]:
        return (*root, *tokens[: (index + 1) * BLOCK_TOKENS])


def random_requests(
    rng: np.random.Generator, count: int, *, longest: int = 90
) -> list[PromptRequest]:
    """Random prompts with shared prefixes. They diverge anywhere, also inside a page."""
    made: list[tuple[int, ...]] = []
    requests = []
    for _ in range(count):
        stem: tuple[int, ...] = ()
        if made and rng.random() < 0.8:
            earlier = made[rng.integers(len(made))]
            stem = earlier[: rng.integers(len(earlier) + 1)]
        room = max(1, longest - len(stem))
        tail = rng.integers(0, VOCAB, int(rng.integers(1, room + 1)) if room > 1 else 1)
        tokens = (stem + tuple(tail.tolist()))[:longest]
        made.append(tokens)
        salt = "s" if rng.random() < 0.15 else ""
        lora = "fine" if rng.random() < 0.15 else ""
        requests.append(PromptRequest(tokens, salt, lora, int(rng.integers(1, 9))))
    return requests
