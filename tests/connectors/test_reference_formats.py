"""An engine over a store whose blocks have another axis order, planes, or int8."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.connectors.reference.hooks import ReferenceHooks
from kvstore.engine.loader import LoadedModel, random_model
from kvstore.engine.loop import Engine
from kvstore.engine.runner import Runner
from kvstore.kernels import BlockFormat
from kvstore.prefetch.policy import WaitComplete
from kvstore.shm.slab import Slab
from kvstore.store.store import Store

torch.set_num_threads(1)

PAGE_TOKENS, BLOCK_TOKENS, NUM_PAGES = 4, 8, 32
LIMIT_MS = 60_000.0
LOADED = random_model(5, layers=2, hidden=64, heads=4, kv_heads=2, vocab=97, device="cpu")
PROMPT = np.random.default_rng(0).integers(0, 97, 45).tolist()


def generate(
    store: Store, form: BlockFormat, loaded: LoadedModel = LOADED
) -> tuple[Any, dict[str, Any]]:
    """A new engine over the store: its answer, and the counts of its hooks."""
    session = store.session(form.namespace(loaded.namespace(BLOCK_TOKENS)))
    runner = Runner(loaded, NUM_PAGES, PAGE_TOKENS)
    hooks = ReferenceHooks(
        session,
        runner.pool,
        PAGE_TOKENS,
        policy=WaitComplete(max_wait_ms=LIMIT_MS),
        max_wait_ms=LIMIT_MS,
        min_load_tokens=0,
    )
    engine = Engine(
        loaded, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS, hooks=hooks, runner=runner
    )
    [output] = engine.generate([PROMPT], max_tokens=6, ignore_eos=True)
    engine.check()
    stats = hooks.stats()
    engine.close()
    session.close()
    return output, stats


def make_store(form: BlockFormat) -> Store:
    block_bytes = form.namespace(LOADED.namespace(BLOCK_TOKENS)).block_bytes
    return Store(Slab.create(16, max(block_bytes, 1)), [])


@pytest.mark.parametrize("order", ["KTLHD", "LHTC"])
@pytest.mark.parametrize("storage", ["plain", "planes"])
def test_any_order_and_planes_change_nothing(order: str, storage: str) -> None:
    form = BlockFormat(order, storage)
    store = make_store(form)
    cold, _ = generate(store, form)
    hit, stats = generate(store, form)
    assert (cold.cached.get("l2", 0), hit.cached["l2"]) == (0, 40)
    assert hit.tokens == cold.tokens
    assert "kv_int8" not in stats
    store.close()


@pytest.mark.parametrize("storage", ["plain", "planes", "int8"])
def test_kv_that_another_dtype_computed_is_not_used(storage: str) -> None:
    """The same weights, and blocks of the same size, in two dtypes."""
    form, store = BlockFormat(storage=storage), make_store(BlockFormat())
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 97}
    models = [
        random_model(5, dtype=dtype, device="cpu", **sizes) for dtype in ("float16", "bfloat16")
    ]
    cold = []
    for loaded in models:
        with contextlib.closing(make_store(form)) as empty:
            cold.append(generate(empty, form, loaded)[0])
    found = [generate(store, form, loaded)[0] for loaded in models]
    assert [each.cached.get("l2", 0) for each in found] == [0, 0]
    assert [each.tokens for each in found] == [each.tokens for each in cold]
    assert generate(store, form, models[1])[0].cached["l2"] == 40, "its own"
    store.close()


def test_int8_reports_its_error_and_has_a_separate_namespace() -> None:
    """Half the bytes in a separate namespace: a lookup of exact KV is a miss."""
    lossy, exact = BlockFormat("LKTHD", "int8"), BlockFormat()
    store = make_store(exact)
    _, stats = generate(store, lossy)
    assert stats["kv_int8"]["blocks_sampled"] == 1
    assert 0.0 < stats["kv_int8"]["relative_rms"] < 0.02
    assert 0.0 < stats["kv_int8"]["max_abs"] < 0.1
    other, _ = generate(store, exact)
    assert other.cached.get("l2", 0) == 0
    again, _ = generate(store, lossy)
    assert again.cached["l2"] == 40
    store.close()
