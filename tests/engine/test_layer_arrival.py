"""KV that is copied layer by layer: the runner computes a layer only after that layer's copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from kvstore.connectors.reference.hooks import ReferenceHooks
from kvstore.engine.loader import LoadedModel, random_model
from kvstore.engine.loop import Engine
from kvstore.engine.request import Request
from kvstore.engine.runner import Runner
from kvstore.kernels import Event
from kvstore.kernels.torch_copier import HostCopier
from kvstore.prefetch.policy import WaitComplete
from kvstore.shm.slab import Slab
from kvstore.store.store import Store

torch.set_num_threads(1)

PAGE_TOKENS = 4
BLOCK_TOKENS = 8
NUM_PAGES = 64
LIMIT_S = 60.0


class LateLayer:
    """A layer that is copied when `order` is called, as a device stream would do."""

    def __init__(self, copier: LateCopier, layer: int, pages: list[int]) -> None:
        self._copier, self._layer, self._pages = copier, layer, pages
        self._there = threading.Event()

    def order(self) -> None:
        pool, shadow = self._copier.pool[self._layer], self._copier.shadow[self._layer]
        pool[:, self._pages] = shadow[:, self._pages]
        self._copier.ordered.append(self._layer)
        self._there.set()

    def done(self) -> bool:
        return self._there.is_set()

    def wait(self) -> None:
        assert self._there.wait(LIMIT_S), f"layer {self._layer} was not ordered"


class LateCopier(HostCopier):
    """Scatters into a shadow of the pool. A layer is copied when it is ordered; until then its
    pages are NaN."""

    def __init__(self, pool: torch.Tensor) -> None:
        super().__init__(pool)
        self.pool = pool
        self.shadow = torch.zeros_like(pool)
        self.ordered: list[int] = []

    def scatter_layers(
        self, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Sequence[Event]:
        HostCopier(self.shadow).scatter(pages, slots)
        kept = [page for row in pages for page in row if page >= 0]
        self.pool[:, :, kept] = float("nan")
        return [LateLayer(self, layer, kept) for layer in range(len(self.pool))]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_model(5, layers=3, hidden=64, heads=4, kv_heads=2, vocab=97, device="cpu")


@pytest.fixture
def store(loaded: LoadedModel) -> Iterator[Store]:
    slab = Slab.create(64, loaded.namespace(BLOCK_TOKENS).block_bytes)
    made = Store(slab, [])
    yield made
    made.close()


class Rig:
    def __init__(self, loaded: LoadedModel, store: Store, *, late: bool) -> None:
        self.session = store.session(loaded.namespace(BLOCK_TOKENS))
        runner = Runner(loaded, NUM_PAGES, PAGE_TOKENS)
        self.copier = LateCopier(runner.pool) if late else HostCopier(runner.pool)
        hooks = ReferenceHooks(
            self.session,
            runner.pool,
            PAGE_TOKENS,
            policy=WaitComplete(max_wait_ms=LIMIT_S * 1e3),
            max_wait_ms=LIMIT_S * 1e3,
            min_load_tokens=0,
            copier=self.copier,
        )
        self.engine = Engine(
            loaded, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS, hooks=hooks, runner=runner
        )

    def close(self) -> None:
        self.engine.check()
        self.engine.close()
        self.session.close()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 97, length).tolist() for length in (50, 33, 41)]


def test_layers_that_arrive_late_change_nothing(loaded: LoadedModel, store: Store) -> None:
    first = Rig(loaded, store, late=False)
    wanted = first.engine.generate(prompts(), max_tokens=8, ignore_eos=True)
    first.close()
    second = Rig(loaded, store, late=True)
    found = second.engine.generate(prompts(), max_tokens=8, ignore_eos=True)
    assert [output.cached["l2"] for output in found] == [48, 32, 40]
    assert [output.tokens for output in found] == [output.tokens for output in wanted]
    ordered = second.copier.ordered
    assert len(ordered) == 3 * 3, "each load's layers, once"
    assert ordered[0] == 0
    assert ordered[-1] == 2
    second.close()


def test_a_request_that_ends_while_its_load_runs_leaves_the_order_to_the_next(
    loaded: LoadedModel, store: Store
) -> None:
    """The next step may reuse its pages and must not write them before the copy."""
    known, new, _ = prompts()
    bare = Engine(loaded, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS)
    [wanted] = bare.generate([new], max_tokens=4, ignore_eos=True)
    first = Rig(loaded, store, late=False)
    first.engine.generate([known], max_tokens=4, ignore_eos=True)
    first.close()
    second = Rig(loaded, store, late=True)
    engine = second.engine
    engine.add(Request(request_id="gone", prompt_tokens=known, max_tokens=4, ignore_eos=True))
    ended = []
    while not ended:  # steps up to the report, and no further
        assert engine.scheduler.schedule() == []
        ended = engine.transfers.poll(0.05)
    for load, blocks in ended:
        engine.scheduler.complete_load(load, blocks)
    engine.abort("gone")
    assert second.copier.ordered == []
    [found] = engine.generate([new], max_tokens=4, ignore_eos=True)
    assert found.tokens == wanted.tokens
    assert second.copier.ordered == [0, 1, 2]
    second.close()
