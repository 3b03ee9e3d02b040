"""What KV depends on besides tokens and weights: the computing dtype, the drafter, and which
positions of a prompt are embeddings. Engines that differ in these share nothing, and their output
is that of an engine without kvstore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tier_world import TierWorld, exact
from tiny_models import write_model
from vllm_rig import (
    PATIENT_TIER,
    START_LIMIT_S,
    Engine,
    cached,
    check_same,
    full_blocks,
    needs_vllm,
    our_tier,
    patient,
    tier,
    tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

PROMPTS = [tokens(700 + number, 120 + 30 * number) for number in range(6)]


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[TierWorld]:
    made = TierWorld(tmp_path_factory.mktemp("vllm"), engines)
    yield made
    made.end()


def start(world: TierWorld, engine: Engine, integration: str, **arguments: Any) -> None:
    """integration: "connector" or "tier". "": without kvstore."""
    if integration == "tier":
        world.start(engine, **arguments)
        return
    if integration:
        arguments["kv_transfer_config"] = patient(world.sidecar.socket)
    engine.start(world.models["llama"], **arguments)


def all_cached(integration: str, batch: list[list[int]]) -> list[int]:
    return exact(batch) if integration == "tier" else [full_blocks(prompt) for prompt in batch]


def reset(engine: Engine, integration: str) -> None:
    """Empty vLLM's own caches: what is cached then comes from the store."""
    assert engine.ask("reset", connector=integration == "tier")["reset"]


@pytest.mark.parametrize("integration", ["connector", "tier"])
@pytest.mark.parametrize(
    ("stored", "asking"),
    [
        (
            {"dtype": "float16", "kv_cache_dtype": "float16"},
            {"dtype": "bfloat16", "kv_cache_dtype": "float16"},
        ),
        (
            {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
            {"dtype": "float32", "kv_cache_dtype": "fp8"},
        ),
    ],
    ids=["float16", "fp8"],
)
def test_kv_that_another_dtype_computed_is_not_used(
    world: TierWorld, integration: str, stored: dict[str, Any], asking: dict[str, Any]
) -> None:
    start(world, world.b, "", **asking)
    cold = world.b.generate(PROMPTS, tokens=8)
    start(world, world.a, integration, **stored)
    own = world.a.generate(PROMPTS, tokens=8)
    assert world.a.ask("settle")["requests"] == 0
    start(world, world.b, integration, **asking)
    found = world.b.generate(PROMPTS, tokens=8)
    check_same(found, cold)
    assert cached(found) == [0] * len(PROMPTS)
    reset(world.a, integration)
    again = world.a.generate(PROMPTS, tokens=8)
    assert cached(again) == all_cached(integration, PROMPTS), "engines of the same dtype share"
    assert [each["tokens"] for each in again] == [each["tokens"] for each in own]


def accepted(engine: Engine) -> tuple[int, int]:
    """Drafted tokens that the model accepted so far, and all drafted tokens."""
    metrics = engine.ask("metrics")["metrics"]
    names = ("num_accepted_tokens", "num_draft_tokens")
    first, second = (int(metrics[f"vllm:spec_decode_{name}"]) for name in names)
    return first, second


@pytest.mark.parametrize("integration", ["connector", "tier"])
def test_drafters_of_one_shape_do_not_share_kv(
    world: TierWorld, integration: str, tmp_path: Path
) -> None:
    """A drafter with the model's weights is always right, if it has the KV of its own weights."""
    batch = [tokens(800 + number, 130 + 40 * number) for number in range(3)]
    for folder, seed in (("bad", 7), ("good", 0)):
        write_model(tmp_path / folder / "drafter", "llama", seed)

    def with_drafter(engine: Engine, folder: str) -> list[dict[str, Any]]:
        drafter = {"method": "draft_model", "model": str(tmp_path / folder / "drafter")}
        start(
            world, engine, integration, speculative_config={**drafter, "num_speculative_tokens": 3}
        )
        return engine.generate(batch, tokens=16)

    with_drafter(world.a, "bad")
    assert world.a.ask("settle")["requests"] == 0
    found = with_drafter(world.b, "good")
    right, drafted = accepted(world.b)
    assert right == drafted > 0, "drafts from the KV of other weights"
    assert cached(found) == [0] * len(batch)
    reset(world.b, integration)
    assert cached(world.b.generate(batch, tokens=16)) == all_cached(integration, batch)
    again, drafted = accepted(world.b)
    assert again == drafted > right, "its own KV from the store"


EMBEDS = {"enable_prompt_embeds": True}
LENGTH, FULL = 150, 128
MASKS: list[list[int] | None] = [None, [0, 32], [0, 64]]
"""Positions of tokens in a prompt of embeddings. vLLM's hashes are the same for all of these."""


def ask(engine: Engine, mask: list[int] | None) -> dict[str, Any]:
    answer = engine.ask("embeds", seed=1, length=LENGTH, token_positions=mask)
    result: dict[str, Any] = answer["result"]
    return result


def test_a_prompt_of_embeddings_and_tokens_does_not_use_the_store(
    world: TierWorld,
) -> None:
    start(world, world.b, "", enable_prefix_caching=False, **EMBEDS)
    pure, first, second = cold = [ask(world.b, mask) for mask in MASKS]
    assert len({tuple(each["tokens"]) for each in cold}) == 3, "the mask has no effect"
    start(world, world.a, "connector", **EMBEDS)
    check_same([ask(world.a, MASKS[2])], [second])
    ask(world.a, None)  # vLLM itself answers from the cache of the first prompt
    assert world.a.ask("settle")["requests"] == 0

    start(world, world.b, "connector", **EMBEDS)
    found = ask(world.b, None)
    check_same([found], [pure])
    assert found["cached"] == 0
    assert world.b.ask("reset")["reset"]
    found = ask(world.b, MASKS[1])
    check_same([found], [first])
    assert found["cached"] == 0
    assert world.a.state()["worker"].get("blocks_saved", 0) == 0
    assert world.a.ask("metrics")["metrics"]["vllm:kvstore_prompts_mixed"] == 1

    start(world, world.a, "connector", **EMBEDS)
    found = ask(world.a, None)
    assert found["cached"] == FULL, "prompts of embeddings only are shared"
    check_same([found], [pure])


def test_the_tier_rejects_prompts_with_embeddings(world: TierWorld) -> None:
    """It sees hashes only, not prompts."""
    table = our_tier(world.sidecar.socket, **PATIENT_TIER)
    transfer = tier(16 << 20, table)
    arguments = {"model": str(world.models["llama"]), "kv_transfer_config": transfer, **EMBEDS}
    refused = world.b.try_ask("start", START_LIMIT_S, args=arguments)
    assert "KVStoreTier does not support --enable-prompt-embeds" in refused["error"]
