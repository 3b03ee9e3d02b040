"""Engines over real stores, engines without any, and a plain model of what must hit where."""

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
"""Cap and deadline where a test wants every block that is there; a hang guard, no measure."""
VOCAB = 97
DISK_BYTES = 16 << 20
LORAS = {"": None, "fine": 11}


def tiny_model(seed: int = 1, layers: int = 2) -> LoadedModel:
    return random_model(
        seed, layers=layers, hidden=32, heads=2, kv_heads=1, vocab=VOCAB, max_positions=512
    )


@dataclass(frozen=True)
class Ask:
    """One request: prompt, root of its prefix, length of its output."""

    tokens: tuple[int, ...]
    salt: str = ""
    lora: str = ""
    max_tokens: int = 6

    def request(self, name: str) -> Request:
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
    """What the model says without any cache, one request at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._engine = Engine(
            loaded,
            num_pages=128,
            page_tokens=PAGE_TOKENS,
            hooks=NoHooks(BLOCK_TOKENS),
            runner=make_runner(loaded, 128),
            prefix_cache=False,
        )
        self._known: dict[Ask, list[int]] = {}

    def tokens(self, ask: Ask) -> list[int]:
        # A salt changes what may be shared, never what is said.
        plain = Ask(ask.tokens, "", ask.lora, ask.max_tokens)
        if plain not in self._known:
            self._engine.add(plain.request("baseline"))
            [output] = collect(self._engine.run_until_idle(), ["baseline"])
            assert not sum(output.cached.values())
            self._known[plain] = output.tokens
        return self._known[plain]


def make_store(folder: Path, loaded: LoadedModel, *, slots: int = 256) -> Store:
    """A store of its own slab over a disk tier in `folder`."""
    slot_bytes = loaded.namespace(BLOCK_TOKENS).block_bytes
    config = disk.Config(directory=str(folder), capacity=DISK_BYTES)
    return Store(Slab.create(slots, slot_bytes), [disk.open(config)])


class Served:
    """An engine over a store: its own session, hooks and pool."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: Store | None = None,
        *,
        blocks: BlockStore | None = None,
        tenant: str = "default",
        num_pages: int = 128,
        deadline_ms: float = WAIT_MS,
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
            policy=policy or WaitComplete(cap_ms=deadline_ms),
            deadline_ms=deadline_ms,
            min_load_tokens=min_load_tokens,
        )
        self.engine = Engine(
            loaded,
            num_pages=num_pages,
            page_tokens=PAGE_TOKENS,
            hooks=self.hooks,
            runner=runner,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
        )
        self._names = 0

    def ask(self, asks: Sequence[Ask]) -> list[Output]:
        """Run all at once, to their ends."""
        names = self.submit(asks)
        return collect(self.engine.run_until_idle(), names)

    def submit(self, asks: Sequence[Ask]) -> list[str]:
        names = []
        for ask in asks:
            self._names += 1
            names.append(f"r{self._names}")
            self.engine.add(ask.request(names[-1]))
        return names

    def close(self) -> None:
        """Close everything but the store; fails when pages or leases leaked."""
        self.engine.check()
        stats = self.hooks.stats()
        assert stats["requests_waiting"] == stats["saves_under_way"] == 0, stats
        assert stats["copies_under_way"] == stats.get("copies_failed", 0) == 0, stats
        self.engine.close()
        self.blocks.close()


def settle(store: Store) -> None:
    """Everything saved so far lies on the tiers below too."""
    assert store.flush(60.0)


def check_slots_free(store: Store) -> None:
    """Nobody holds a lease: once flights have landed and L2 is cleared, every slot is free."""
    settle(store)
    end_s = time.monotonic() + WAIT_MS / 1e3
    while store.stats()["l2"]["flights"]:
        assert time.monotonic() < end_s, "a flight never lands"
        time.sleep(0.01)
    store.clear("l2")
    stats = store.stats()["l2"]
    assert stats["slots_free"] == stats["slots"], stats


# What must hit where.


@dataclass
class PlainStore:
    """Which tiers hold each block; a block is named by its root and all tokens up to its end."""

    blocks: dict[tuple[Any, ...], set[str]] = field(default_factory=dict)

    def clear_l2(self) -> None:
        for tiers in self.blocks.values():
            tiers.discard("l2")


@dataclass
class PlainEngine:
    """Which prefixes of whole pages an engine keeps, where it never has to evict one."""

    store: PlainStore
    min_load_tokens: int = 0
    pages: set[tuple[Any, ...]] = field(default_factory=set)

    def hit(self, ask: Ask) -> dict[str, int]:
        """Prompt tokens spared, by tier. Blocks that are loaded lie in L2 from then on."""
        root, length = (ask.lora, ask.salt), len(ask.tokens)
        useful = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
        computed = 0
        while computed < useful and self._page(root, ask.tokens, computed) in self.pages:
            computed += PAGE_TOKENS
        spared = {"l1": computed}
        run = self._run(root, ask.tokens, computed, useful)
        for index, tier in run:
            end = min((index + 1) * BLOCK_TOKENS, useful)
            spared[tier] = spared.get(tier, 0) + end - computed
            computed = end
            self.store.blocks[self._block(root, ask.tokens, index)].add("l2")
        return {tier: tokens for tier, tokens in spared.items() if tokens}

    def _run(
        self, root: tuple[str, str], tokens: tuple[int, ...], computed: int, useful: int
    ) -> list[tuple[int, str]]:
        """(block, fastest tier) of each block that is worth loading."""
        run: list[tuple[int, str]] = []
        index = computed // BLOCK_TOKENS
        while computed < useful and index * BLOCK_TOKENS < useful:
            tiers = self.store.blocks.get(self._block(root, tokens, index))
            if not tiers or (index + 1) * BLOCK_TOKENS > len(tokens):
                break
            run.append((index, "l2" if "l2" in tiers else "disk"))
            index += 1
        if len(run) * BLOCK_TOKENS < self.min_load_tokens:
            while run and any(tier == "disk" for _, tier in run):
                run.pop()
        return run

    def served(self, ask: Ask, made: Sequence[int], hit: dict[str, int]) -> None:
        """The request has ended: its KV, but for the last token's, is kept everywhere.

        Blocks hit in L1 are not offered again; what was recomputed is, and is in L2 again.
        """
        root = (ask.lora, ask.salt)
        tokens = (*ask.tokens, *made)
        kept = len(tokens) - 1
        for start in range(0, kept // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            self.pages.add(self._page(root, tokens, start))
        for index in range(hit.get("l1", 0) // BLOCK_TOKENS, kept // BLOCK_TOKENS):
            tiers = self.store.blocks.setdefault(self._block(root, tokens, index), set())
            tiers.update(("l2", "disk"))

    def _page(self, root: tuple[str, str], tokens: tuple[int, ...], start: int) -> tuple[Any, ...]:
        return (*root, *tokens[: start + PAGE_TOKENS])

    def _block(self, root: tuple[str, str], tokens: tuple[int, ...], index: int) -> tuple[Any, ...]:
        return (*root, *tokens[: (index + 1) * BLOCK_TOKENS])


def asks_of(rng: np.random.Generator, count: int, *, longest: int = 90) -> list[Ask]:
    """Prompts that share prefixes and part anywhere, inside a page too; several roots."""
    made: list[tuple[int, ...]] = []
    asks = []
    for _ in range(count):
        stem: tuple[int, ...] = ()
        if made and rng.random() < 0.8:
            whole = made[rng.integers(len(made))]
            stem = whole[: rng.integers(len(whole) + 1)]
        room = max(1, longest - len(stem))
        tail = rng.integers(0, VOCAB, int(rng.integers(1, room + 1)) if room > 1 else 1)
        tokens = (stem + tuple(tail.tolist()))[:longest]
        made.append(tokens)
        salt = "s" if rng.random() < 0.15 else ""
        lora = "fine" if rng.random() < 0.15 else ""
        asks.append(Ask(tokens, salt, lora, int(rng.integers(1, 9))))
    return asks
