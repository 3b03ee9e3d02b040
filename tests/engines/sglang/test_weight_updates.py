"""A real SGLang engine whose weights are updated while it runs: no KV of the old weights comes
back, and none of the new weights is stored under the name of the old ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rig import PAGE_BYTES, TOKENS, Engine, write_model
from hicache_rig import absent
from sidecar_rig import ForkedSidecar, wait_until

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent()), reason=absent()),
]

PROMPTS, PAGES = 4, 30
LENGTH = PROMPTS * PAGES * TOKENS
"""Tokens of all prompts that the storage backend can have: 1,920."""


def prompts(seed: int) -> list[list[int]]:
    """Random prompts of full pages and one token more, which is never a hit."""
    chosen = random.Random(seed)
    return [[chosen.randrange(4, 500) for _ in range(PAGES * TOKENS + 1)] for _ in range(PROMPTS)]


def storage_hits(results: list[dict[str, Any]]) -> int:
    return sum(each["storage"] for each in results)


def assert_same(results: list[dict[str, Any]], cold: list[dict[str, Any]]) -> None:
    """Same tokens, and log-probabilities that differ by rounding only."""
    for result, right in zip(results, cold, strict=True):
        assert result["tokens"] == right["tokens"]
        assert result["logprobs"] == pytest.approx(right["logprobs"], abs=1e-3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shape with other weights."""
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / f"m{seed}", seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    slab = {"l2": {"bytes": 1024 * PAGE_BYTES, "slot_bytes": PAGE_BYTES}}
    sidecar = ForkedSidecar(tmp_path_factory.mktemp("sidecar"), slab)
    yield sidecar
    sidecar.kill()


@pytest.fixture(scope="module")
def engine(
    sidecar: ForkedSidecar, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine") / "log", sidecar.socket, models[0])
    yield engine
    engine.stop()


def stored(sidecar: ForkedSidecar) -> int:
    return int(sidecar.stats()["l2"]["stored"])


def save(engine: Engine, sidecar: ForkedSidecar, seed: int) -> list[dict[str, Any]]:
    """Compute prompts, and check that they come back from the store with the same outputs."""
    engine.flush()
    before = stored(sidecar)
    cold = engine.generate(prompts(seed))
    assert storage_hits(cold) == 0
    wait_until(lambda: stored(sidecar) >= before + PROMPTS * PAGES, "the prompts are stored")
    engine.flush()
    warm = engine.generate(prompts(seed))
    assert storage_hits(warm) == LENGTH
    assert_same(warm, cold)
    return cold


def assert_not_shared(engine: Engine, sidecar: ForkedSidecar, seed: int) -> list[dict[str, Any]]:
    """The store gives this engine nothing, and takes nothing from it."""
    before = stored(sidecar)
    rejected = engine.metric("sglang:kvstore_pages_rejected_total")
    first = engine.generate(prompts(seed))
    engine.flush()
    again = engine.generate(prompts(seed))
    assert (storage_hits(first), storage_hits(again)) == (0, 0)
    assert_same(again, first)
    assert stored(sidecar) == before
    counted = engine.metric("sglang:kvstore_pages_rejected_total")
    assert counted - rejected >= PROMPTS * PAGES
    return first


def test_weights_from_disk(
    engine: Engine, sidecar: ForkedSidecar, models: list[Path], tmp_path: Path
) -> None:
    old = save(engine, sidecar, 1)
    done = engine.ask("update_from_disk", path=str(models[1]))
    assert done["success"], done
    updated = assert_not_shared(engine, sidecar, 1)
    assert [each["tokens"] for each in updated] != [each["tokens"] for each in old]
    assert "set 'revision'" in engine.attach()["message"], "its new weights are not known"

    another = Engine(tmp_path / "log", sidecar.socket, models[1])
    try:
        cold = save(another, sidecar, 1)
        assert_same(updated, cold)
    finally:
        another.stop()

    assert engine.attach(revision="second")["success"]
    save(engine, sidecar, 1)


def test_weights_from_tensors(engine: Engine, sidecar: ForkedSidecar) -> None:
    assert engine.attach(revision="third")["success"]
    save(engine, sidecar, 2)
    done = engine.ask("update_from_tensor", name="model.norm.weight", factor=-1.0)
    assert done["success"], done
    assert_not_shared(engine, sidecar, 2)
    answer = engine.attach(revision="third")
    assert not answer["success"]
    assert "'third'" in answer["message"], "it names the weights before the update"
    assert engine.attach(revision="fourth")["success"]
    save(engine, sidecar, 2)
