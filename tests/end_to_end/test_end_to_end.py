"""The promise, end to end: with kvstore the output is what it is without, and what should hit
does, on the tier it should."""

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
    Ask,
    Baseline,
    PlainEngine,
    PlainStore,
    Served,
    asks_of,
    check_slots_free,
    make_store,
    settle,
    tiny_model,
)

from kvstore.blocks import frame
from kvstore.blocks.hashing import hash_tokens
from kvstore.blocks.key import Key
from kvstore.engine.loader import LoadedModel
from kvstore.engine.request import Output
from kvstore.store.store import Store
from kvstore.tiers.base import PAGE_BYTES

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


def check_same(baseline: Baseline, asks: list[Ask], outputs: list[Output]) -> None:
    for ask, output in zip(asks, outputs, strict=True):
        assert output.tokens == baseline.tokens(ask), ask
        assert sum(output.cached.values()) < len(ask.tokens)


def cached(outputs: list[Output]) -> Counter[str]:
    total: Counter[str] = Counter()
    for output in outputs:
        total.update(output.cached)
    return total


# Random sets.


def one_set(loaded: LoadedModel, baseline: Baseline, folder: Path, seed: int) -> Counter[str]:
    """One random set of prompts: in turn, in a burst with aborts, with too few pages, from disk.

    Returns tokens by tier, and how often pressure was felt.
    """
    rng = np.random.default_rng(seed)
    store = make_store(folder, loaded, slots=int(rng.choice([24, 48, 256])))
    first = Served(loaded, store, max_batch_tokens=int(rng.choice([16, 40, 256])))
    second = Served(loaded, store, num_pages=30, max_batch_tokens=int(rng.choice([16, 64])))
    asks = asks_of(rng, 7)
    seen: Counter[str] = Counter()
    for ask in asks:
        outputs = first.ask([ask])
        check_same(baseline, [ask], outputs)
        seen += cached(outputs)
    settle(store)

    burst = [asks[index] for index in rng.integers(0, len(asks), 8)] + asks_of(rng, 3)
    seen += burst_with_aborts(second, baseline, burst, rng)
    # Their outputs alone take twice the pool, so one takes pages from another, whatever the timing.
    pressing = [replace(ask, max_tokens=60) for ask in asks_of(rng, 4, longest=30)]
    outputs = second.ask(pressing)
    check_same(baseline, pressing, outputs)
    seen += cached(outputs)
    seen["preemptions"] += second.engine.stats()["preemptions"]

    settle(store)
    store.clear("l2")
    assert first.engine.reset_prefix_cache()
    outputs = first.ask(asks)
    check_same(baseline, asks, outputs)
    seen += cached(outputs)
    stats = store.stats()
    seen["l2 evictions"] += stats["l2"]["evictions"]
    first.close()
    second.close()
    check_slots_free(store)
    store.close()
    return seen


def burst_with_aborts(
    served: Served, baseline: Baseline, asks: list[Ask], rng: np.random.Generator
) -> Counter[str]:
    """All at once; about a quarter is aborted at random moments. Whatever came out is right."""
    names = served.submit(asks)
    doomed = {name: int(rng.integers(0, 25)) for name in names if rng.random() < 0.25}
    made: dict[str, list[int]] = {name: [] for name in names}
    by_tier: Counter[str] = Counter()
    for step in range(100_000):
        if not served.engine.busy:
            break
        for name in [name for name, when in doomed.items() if when == step]:
            served.engine.abort(name)
        for output in served.engine.step():
            made[output.request_id] += output.tokens
            if output.finish_reason in ("length", "stop"):
                doomed.pop(output.request_id, None)
                by_tier.update(output.cached)
    for name, ask in zip(names, asks, strict=True):
        expected = baseline.tokens(ask)
        if name in doomed:
            assert made[name] == expected[: len(made[name])], ask
        else:
            assert made[name] == expected, ask
    by_tier["aborts"] += len(doomed)
    return by_tier


@pytest.mark.parametrize("start", range(0, SETS, SETS_AT_ONCE))
def test_output_is_what_it_is_without_kvstore(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, start: int
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(start, start + SETS_AT_ONCE):
        folder = tmp_path / str(seed)
        folder.mkdir()
        seen += one_set(loaded, baseline, folder, seed)
    for what in ("l1", "l2", "disk", "preemptions", "aborts", "l2 evictions"):
        assert seen[what], f"these sets never met {what}: {seen}"


# Exactly what should hit.


@pytest.mark.parametrize("min_load_tokens", [0, 32])
@pytest.mark.parametrize("seed", range(4))
def test_hit_tokens_by_tier_are_those_of_a_plain_model(
    loaded: LoadedModel, baseline: Baseline, store: Store, seed: int, min_load_tokens: int
) -> None:
    """One request at a time on two engines, with caches emptied now and then."""
    rng = np.random.default_rng(1000 + seed)
    plain_store = PlainStore()
    pairs = [
        (
            Served(loaded, store, num_pages=1024, min_load_tokens=min_load_tokens),
            PlainEngine(plain_store, min_load_tokens),
        )
        for _ in range(2)
    ]
    total: Counter[str] = Counter()
    for ask in asks_of(rng, 50):
        served, plain = pairs[rng.integers(2)]
        if rng.random() < 0.2:
            assert served.engine.reset_prefix_cache()
            plain.pages.clear()
        if rng.random() < 0.2:
            store.clear("l2")
            plain_store.clear_l2()
        expected = plain.hit(ask)
        [output] = served.ask([ask])
        assert {tier: n for tier, n in output.cached.items() if n} == expected, ask
        assert output.tokens == baseline.tokens(ask)
        plain.served(ask, output.tokens, expected)
        settle(store)
        total.update(expected)
    assert all(total[tier] for tier in ("l1", "l2", "disk")), total
    for served, _ in pairs:
        served.close()


def test_a_second_engine_hits_every_full_block(loaded: LoadedModel, store: Store) -> None:
    ask = Ask(tuple(range(61)))
    first, second = Served(loaded, store), Served(loaded, store)
    [cold] = first.ask([ask])
    [shared] = second.ask([ask])
    assert sum(cold.cached.values()) == 0
    assert {tier: n for tier, n in shared.cached.items() if n} == {"l2": 56}
    assert shared.tokens == cold.tokens
    first.close()
    second.close()


def test_a_new_store_on_the_same_directory_hits_from_disk(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path
) -> None:
    asks = asks_of(np.random.default_rng(7), 6)
    before = make_store(tmp_path, loaded)
    engine = Served(loaded, before)
    for ask in asks:
        engine.ask([ask])
    engine.close()
    settle(before)
    before.close()

    after = make_store(tmp_path, loaded)
    engine = Served(loaded, after)
    [output] = engine.ask([asks[-1]])
    full = (len(asks[-1].tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert output.cached.get("disk", 0) >= full > 0
    check_same(baseline, [asks[-1]], [output])
    outputs = engine.ask(asks)
    check_same(baseline, asks, outputs)
    engine.close()
    check_slots_free(after)
    after.close()


# Who shares with whom.


def test_tenants_never_share(loaded: LoadedModel, store: Store) -> None:
    ask = Ask(tuple(range(50)))
    ours, theirs = Served(loaded, store, tenant="ours"), Served(loaded, store, tenant="theirs")
    again = Served(loaded, store, tenant="ours")
    ours.ask([ask])
    [output] = theirs.ask([ask])
    assert sum(output.cached.values()) == 0
    [output] = again.ask([ask])
    assert output.cached["l2"] == 48
    for engine in (ours, theirs, again):
        engine.close()


def test_namespaces_never_share(loaded: LoadedModel, store: Store) -> None:
    """Other weights, same tokens: nothing hits, and the output is their own."""
    ask = Ask(tuple(range(50)))
    other = tiny_model(seed=2)
    ours, theirs = Served(loaded, store), Served(other, store)
    ours.ask([ask])
    [output] = theirs.ask([ask])
    assert sum(output.cached.values()) == 0
    assert output.tokens == Baseline(other).tokens(ask)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("change", [{"salt": "s"}, {"lora": "fine"}], ids=str)
def test_salts_and_adapters_never_share(
    loaded: LoadedModel, baseline: Baseline, store: Store, change: dict[str, str]
) -> None:
    plain = Ask(tuple(range(50)))
    other = replace(plain, **change)
    engine = Served(loaded, store)
    engine.ask([plain])
    [output] = engine.ask([other])
    assert sum(output.cached.values()) == 0
    check_same(baseline, [other], [output])
    engine.close()


# That the tests above see KV at all.


def zeroed(store: Store, keys: list[Key], block_bytes: int) -> None:
    """Put blocks of zeros under these keys, in frames whose checksums are right."""
    header = frame.aligned_buffer(PAGE_BYTES)
    payload = frame.aligned_buffer(frame.padded(block_bytes))
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
    """The negative control: only the checksum and the key stand between bytes and output."""
    rng = np.random.default_rng(3)
    asks = [Ask(tuple(rng.integers(0, VOCAB, 60).tolist()), max_tokens=8) for _ in range(4)]
    engine = Served(loaded, store)
    namespace = loaded.namespace(BLOCK_TOKENS)
    changed = 0
    for ask in asks:
        hashes = hash_tokens(list(ask.tokens), block_tokens=BLOCK_TOKENS)
        keys = [Key("default", namespace.digest, name) for name in hashes]
        zeroed(store, keys, namespace.block_bytes)
        [output] = engine.ask([ask])
        assert output.cached["l2"] == 56
        changed += output.tokens != baseline.tokens(ask)
    assert changed == len(asks)
    engine.close()
