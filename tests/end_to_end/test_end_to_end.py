"""End to end: output with kvstore equals output without it, and every expected hit occurs, in the
expected tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from end_to_end_rig import (
    BLOCK_TOKENS,
    VOCAB,
    Baseline,
    CachedEngine,
    ModelEngine,
    ModelStore,
    PromptRequest,
    check_slots_free,
    flush_store,
    make_store,
    random_requests,
    tiny_model,
)

from kvstore.blocks import frame
from kvstore.blocks.hashing import hash_tokens
from kvstore.blocks.key import Key
from kvstore.engine.loader import LoadedModel
from kvstore.engine.request import Output
from kvstore.store.store import Store
from kvstore.tiers.base import IO_ALIGNMENT

SETS = 50
"""Random sets of prompts, each through every tier."""
SETS_AT_ONCE = 10


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def baseline(loaded: LoadedModel) -> Baseline:
    return Baseline(loaded)


@pytest.fixture
def store(tmp_path: Path, loaded: LoadedModel) -> Iterator[Store]:
    made = make_store(tmp_path, loaded)
    yield made
    check_slots_free(made)
    made.close()


def check_same(baseline: Baseline, requests: list[PromptRequest], outputs: list[Output]) -> None:
    for request, output in zip(requests, outputs, strict=True):
        assert output.tokens == baseline.tokens(request), request
        assert sum(output.cached.values()) < len(request.tokens)


def cached(outputs: list[Output]) -> Counter[str]:
    total: Counter[str] = Counter()
    for output in outputs:
        total.update(output.cached)
    return total


# Random sets.


def one_set(loaded: LoadedModel, baseline: Baseline, folder: Path, seed: int) -> Counter[str]:
    """One random set of prompts: in sequence, in a burst with aborts, with too few pages, and from
    disk.

    Returns hit tokens by tier, and counts of preemptions, aborts and evictions.
    """
    rng = np.random.default_rng(seed)
    store = make_store(folder, loaded, slots=int(rng.choice([24, 48, 256])))
    first = CachedEngine(loaded, store, max_batch_tokens=int(rng.choice([16, 40, 256])))
    second = CachedEngine(loaded, store, num_pages=30, max_batch_tokens=int(rng.choice([16, 64])))
    requests = random_requests(rng, 7)
    counts: Counter[str] = Counter()
    for request in requests:
        outputs = first.run([request])
        check_same(baseline, [request], outputs)
        counts += cached(outputs)
    flush_store(store)

    burst = [requests[index] for index in rng.integers(0, len(requests), 8)] + random_requests(
        rng, 3
    )
    counts += burst_with_aborts(second, baseline, burst, rng)
    # Their outputs need twice the pool, so preemptions occur at any timing.
    large = [replace(request, max_tokens=60) for request in random_requests(rng, 4, longest=30)]
    outputs = second.run(large)
    check_same(baseline, large, outputs)
    counts += cached(outputs)
    counts["preemptions"] += second.inner.stats()["preemptions"]

    flush_store(store)
    store.clear("l2")
    assert first.inner.reset_prefix_cache()
    outputs = first.run(requests)
    check_same(baseline, requests, outputs)
    counts += cached(outputs)
    stats = store.stats()
    counts["l2 evictions"] += stats["l2"]["evictions"]
    first.close()
    second.close()
    check_slots_free(store)
    store.close()
    return counts


def burst_with_aborts(
    engine: CachedEngine,
    baseline: Baseline,
    requests: list[PromptRequest],
    rng: np.random.Generator,
) -> Counter[str]:
    """Run all concurrently and abort about a quarter at random moments. Checks every output."""
    names = engine.submit(requests)
    aborted = {name: int(rng.integers(0, 25)) for name in names if rng.random() < 0.25}
    made: dict[str, list[int]] = {name: [] for name in names}
    by_tier: Counter[str] = Counter()
    for step in range(100_000):
        if not engine.inner.busy:
            break
        for name in [name for name, when in aborted.items() if when == step]:
            engine.inner.abort(name)
        for output in engine.inner.step():
            made[output.request_id] += output.tokens
            if output.finish_reason in ("length", "stop"):
                aborted.pop(output.request_id, None)
                by_tier.update(output.cached)
    for name, request in zip(names, requests, strict=True):
        expected = baseline.tokens(request)
        if name in aborted:
            assert made[name] == expected[: len(made[name])], request
        else:
            assert made[name] == expected, request
    by_tier["aborts"] += len(aborted)
    return by_tier


@pytest.mark.parametrize("start", range(0, SETS, SETS_AT_ONCE))
def test_output_equals_output_without_kvstore(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, start: int
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(start, start + SETS_AT_ONCE):
        folder = tmp_path / str(seed)
        folder.mkdir()
        counts += one_set(loaded, baseline, folder, seed)
    for what in ("l1", "l2", "disk", "preemptions", "aborts", "l2 evictions"):
        assert counts[what], f"these sets never covered {what}: {counts}"


# Exact hits.


@pytest.mark.parametrize("min_load_tokens", [0, 32])
@pytest.mark.parametrize("seed", range(4))
def test_hit_tokens_by_tier_equal_those_of_the_model(
    loaded: LoadedModel, baseline: Baseline, store: Store, seed: int, min_load_tokens: int
) -> None:
    """One request at a time on two engines. Their caches are cleared at random."""
    rng = np.random.default_rng(1000 + seed)
    model_store = ModelStore()
    pairs = [
        (
            CachedEngine(loaded, store, num_pages=1024, min_load_tokens=min_load_tokens),
            ModelEngine(model_store, min_load_tokens),
        )
        for _ in range(2)
    ]
    total: Counter[str] = Counter()
    for request in random_requests(rng, 50):
        engine, model = pairs[rng.integers(2)]
        if rng.random() < 0.2:
            assert engine.inner.reset_prefix_cache()
            model.pages.clear()
        if rng.random() < 0.2:
            store.clear("l2")
            model_store.clear_l2()
        expected = model.hit(request)
        [output] = engine.run([request])
        assert {tier: n for tier, n in output.cached.items() if n} == expected, request
        assert output.tokens == baseline.tokens(request)
        model.on_finished(request, output.tokens, expected)
        flush_store(store)
        total.update(expected)
    assert all(total[tier] for tier in ("l1", "l2", "disk")), total
    for engine, _ in pairs:
        engine.close()


def test_a_second_engine_hits_every_full_block(loaded: LoadedModel, store: Store) -> None:
    request = PromptRequest(tuple(range(61)))
    first, second = CachedEngine(loaded, store), CachedEngine(loaded, store)
    [cold] = first.run([request])
    [shared] = second.run([request])
    assert sum(cold.cached.values()) == 0
    assert {tier: n for tier, n in shared.cached.items() if n} == {"l2": 56}
    assert shared.tokens == cold.tokens
    first.close()
    second.close()


def test_a_new_store_on_the_same_directory_hits_from_disk(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path
) -> None:
    requests = random_requests(np.random.default_rng(7), 6)
    before = make_store(tmp_path, loaded)
    engine = CachedEngine(loaded, before)
    for request in requests:
        engine.run([request])
    engine.close()
    flush_store(before)
    before.close()

    after = make_store(tmp_path, loaded)
    engine = CachedEngine(loaded, after)
    [output] = engine.run([requests[-1]])
    full = (len(requests[-1].tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert output.cached.get("disk", 0) >= full > 0
    check_same(baseline, [requests[-1]], [output])
    outputs = engine.run(requests)
    check_same(baseline, requests, outputs)
    engine.close()
    check_slots_free(after)
    after.close()


# Isolation.


def test_tenants_never_share(loaded: LoadedModel, store: Store) -> None:
    request = PromptRequest(tuple(range(50)))
    ours, theirs = (
        CachedEngine(loaded, store, tenant="ours"),
        CachedEngine(loaded, store, tenant="theirs"),
    )
    again = CachedEngine(loaded, store, tenant="ours")
    ours.run([request])
    [output] = theirs.run([request])
    assert sum(output.cached.values()) == 0
    [output] = again.run([request])
    assert output.cached["l2"] == 48
    for engine in (ours, theirs, again):
        engine.close()


def test_namespaces_never_share(loaded: LoadedModel, store: Store) -> None:
    """Same tokens, other weights: no hit, and the output of the other weights."""
    request = PromptRequest(tuple(range(50)))
    other = tiny_model(seed=2)
    ours, theirs = CachedEngine(loaded, store), CachedEngine(other, store)
    ours.run([request])
    [output] = theirs.run([request])
    assert sum(output.cached.values()) == 0
    assert output.tokens == Baseline(other).tokens(request)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("change", [{"salt": "s"}, {"lora": "fine"}], ids=str)
def test_salts_and_adapters_never_share(
    loaded: LoadedModel, baseline: Baseline, store: Store, change: dict[str, str]
) -> None:
    model = PromptRequest(tuple(range(50)))
    other = replace(model, **change)
    engine = CachedEngine(loaded, store)
    engine.run([model])
    [output] = engine.run([other])
    assert sum(output.cached.values()) == 0
    check_same(baseline, [other], [output])
    engine.close()


# Negative control of the tests above.


def write_zero_blocks(store: Store, keys: list[Key], block_bytes: int) -> None:
    """Write blocks of zeros under these keys, in frames with valid checksums."""
    header = frame.aligned_buffer(IO_ALIGNMENT)
    payload = frame.aligned_buffer(frame.padded_bytes(block_bytes))
    total = frame.checksum(payload[:block_bytes])
    for key in keys:
        frame.pack_header(
            header,
            key=key,
            codec="identity",
            raw_bytes=block_bytes,
            stored_bytes=block_bytes,
            raw_sum=total,
            stored_sum=total,
        )
        assert store.frames.write(key, header, payload)


def test_wrong_kv_that_verifies_changes_the_output(
    loaded: LoadedModel, baseline: Baseline, store: Store
) -> None:
    """Wrong KV data in a valid frame changes the output, so the tests above would notice it."""
    rng = np.random.default_rng(3)
    requests = [
        PromptRequest(tuple(rng.integers(0, VOCAB, 60).tolist()), max_tokens=8) for _ in range(4)
    ]
    engine = CachedEngine(loaded, store)
    namespace = loaded.namespace(BLOCK_TOKENS)
    changed = 0
    for request in requests:
        hashes = hash_tokens(list(request.tokens), block_tokens=BLOCK_TOKENS)
        keys = [Key("default", namespace.digest, name) for name in hashes]
        write_zero_blocks(store, keys, namespace.block_bytes)
        [output] = engine.run([request])
        assert output.cached["l2"] == 56
        changed += output.tokens != baseline.tokens(request)
    assert changed == len(requests)
    engine.close()
