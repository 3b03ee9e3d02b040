"""The connector over the real store with faulty tiers: the engine's output is the same as without
kvstore, and nothing leaks."""

from __future__ import annotations

import time

import numpy as np
import pytest
from end_to_end_rig import (
    BLOCK_TOKENS,
    VOCAB,
    Baseline,
    CachedEngine,
    PromptRequest,
    check_slots_free,
    flush_store,
    tiny_model,
)

from kvstore.engine.loader import LoadedModel
from kvstore.prefetch.policy import BestEffort, PrefetchPolicy, Timeout, WaitComplete
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.tiers.memory import MemoryTier

HANG_LIMIT_S = 60.0
MAX_WAIT_MS = 250.0
POLICIES = (BestEffort(), WaitComplete(max_wait_ms=200.0), Timeout(60.0, 100.0, 200.0))


class RemoteTier(MemoryTier):
    """A tier that must be queried: its index is not in this process."""

    local_index = False


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    # Blocks of 4,096 bytes without padding, so that the corruption hits data.
    loaded = tiny_model(layers=4)
    assert loaded.namespace(BLOCK_TOKENS).block_bytes == 4096
    return loaded


@pytest.fixture(scope="module")
def baseline(loaded: LoadedModel) -> Baseline:
    return Baseline(loaded)


def asks() -> list[PromptRequest]:
    rng = np.random.default_rng(9)
    return [PromptRequest(tuple(rng.integers(0, VOCAB, 70).tolist())) for _ in range(3)]


def store_over(loaded: LoadedModel, tier: FaultyTier) -> Store:
    slot_bytes = loaded.namespace(BLOCK_TOKENS).block_bytes
    return Store(Slab.create(128, slot_bytes), [tier])


def check_asks(served: CachedEngine, baseline: Baseline) -> int:
    """Check the output, one request after another; returns the tokens loaded from below L2."""
    below = 0
    for ask in asks():
        start_s = time.monotonic()
        [output] = served.run([ask])
        assert time.monotonic() - start_s < HANG_LIMIT_S
        assert output.tokens == baseline.tokens(ask)
        below += sum(n for tier, n in output.cached.items() if tier not in ("l1", "l2"))
    return below


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("kind", [MemoryTier, RemoteTier])
@pytest.mark.parametrize(
    "fault",
    [Fault.REFUSED, Fault.ERROR, Fault.HUNG, Fault.TRUNCATED, Fault.CORRUPTED],
    ids=str,
)
def test_a_tier_that_fails_to_read(
    loaded: LoadedModel,
    baseline: Baseline,
    policy: PrefetchPolicy,
    kind: type[MemoryTier],
    fault: Fault,
) -> None:
    tier = FaultyTier(kind(name="below"))
    store = store_over(loaded, tier)
    served = CachedEngine(loaded, store, policy=policy, max_wait_ms=MAX_WAIT_MS)
    check_asks(served, baseline)
    flush_store(store)
    store.clear("l2")
    served.inner.reset_prefix_cache()
    tier.schedule = always(fault, "read")
    assert check_asks(served, baseline) == 0
    tier.schedule = None
    tier.release()
    served.close()
    check_slots_free(store)
    store.close()


@pytest.mark.parametrize("fault", [Fault.HUNG, Fault.REFUSED], ids=str)
def test_a_remote_index_that_does_not_answer(
    loaded: LoadedModel, baseline: Baseline, fault: Fault
) -> None:
    """Each request waits at most its maximum wait, once."""
    tier = FaultyTier(RemoteTier(name="below"), always(fault, "contains"))
    store = store_over(loaded, tier)
    served = CachedEngine(loaded, store, max_wait_ms=MAX_WAIT_MS)
    assert check_asks(served, baseline) == 0
    tier.release()
    served.close()
    check_slots_free(store)
    store.close()


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.FULL, Fault.ERROR], ids=str)
def test_a_tier_that_takes_nothing(loaded: LoadedModel, baseline: Baseline, fault: Fault) -> None:
    tier = FaultyTier(MemoryTier(name="below"), always(fault, "write"))
    store = store_over(loaded, tier)
    served = CachedEngine(loaded, store, max_wait_ms=MAX_WAIT_MS)
    check_asks(served, baseline)
    assert store.flush(1.0) is (fault is not Fault.REFUSED), "tried again until then"
    store.clear("l2")
    served.inner.reset_prefix_cache()
    assert check_asks(served, baseline) == 0
    served.close()
    tier.schedule = None
    check_slots_free(store)
    store.close()


@pytest.mark.parametrize("fault", [Fault.TRUNCATED, Fault.CORRUPTED], ids=str)
def test_a_block_corrupted_during_its_write_is_never_served(
    loaded: LoadedModel, baseline: Baseline, fault: Fault
) -> None:
    tier = FaultyTier(MemoryTier(name="below"), always(fault, "write"))
    store = store_over(loaded, tier)
    served = CachedEngine(loaded, store, max_wait_ms=MAX_WAIT_MS)
    check_asks(served, baseline)
    flush_store(store)
    tier.schedule = None
    store.clear("l2")
    served.inner.reset_prefix_cache()
    assert check_asks(served, baseline) == 0
    flush_store(store)
    store.clear("l2")
    served.inner.reset_prefix_cache()
    assert check_asks(served, baseline) > 0, "deleted, then written again"
    served.close()
    check_slots_free(store)
    store.close()


@pytest.mark.parametrize("kind", [MemoryTier, RemoteTier])
def test_a_tier_that_works_serves(
    loaded: LoadedModel, baseline: Baseline, kind: type[MemoryTier]
) -> None:
    """Without the faults, the tier serves hits."""
    store = store_over(loaded, FaultyTier(kind(name="below")))
    served = CachedEngine(loaded, store)
    check_asks(served, baseline)
    flush_store(store)
    store.clear("l2")
    served.inner.reset_prefix_cache()
    assert check_asks(served, baseline) == 3 * 64
    served.close()
    check_slots_free(store)
    store.close()


def test_a_small_slab_truncates_and_drops_without_errors(
    loaded: LoadedModel, baseline: Baseline
) -> None:
    """Fewer slots than a prompt has blocks, in a burst over two engines."""
    slot_bytes = loaded.namespace(BLOCK_TOKENS).block_bytes
    store = Store(Slab.create(8, slot_bytes), [FaultyTier(MemoryTier(name="below"))])
    engines = [CachedEngine(loaded, store, max_wait_ms=MAX_WAIT_MS) for _ in range(2)]
    for _ in range(3):
        for served in engines:
            served.inner.reset_prefix_cache()
            outputs = served.run(asks())
            for ask, output in zip(asks(), outputs, strict=True):
                assert output.tokens == baseline.tokens(ask)
    for served in engines:
        served.close()
    check_slots_free(store)
    store.close()
