"""The tier in vLLM's native tiering, in real engines: engines reuse the blocks of others, and the
output is that of vLLM's own cache, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis_rig
from tier_world import TierWorld, connected, counts, exact, of_vllm, only_below, prompts, settled
from tiny_models import write_adapter, write_model
from vllm_rig import (
    BLOCK,
    PATIENT_TIER,
    Engine,
    Sidecar,
    cached,
    check_same,
    differences,
    full_blocks,
    needs_vllm,
    our_tier,
    tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

PROMPTS = prompts(1, 30)
SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[TierWorld]:
    made = TierWorld(tmp_path_factory.mktemp("vllm"), engines)
    yield made
    made.end()


def by_source(engine: Engine) -> dict[str, int]:
    """Cached prompt tokens so far by source, from vLLM's metrics."""
    metrics = engine.ask("metrics")["metrics"]
    name = "vllm:prompt_tokens_cached_by_source"
    return {source: int(metrics.get(f"{name}{{{source}}}", 0)) for source in SOURCES}


def from_the_pool(batch: list[list[int]]) -> int:
    """Tokens of blocks that the first of two prompts loaded into vLLM's host pool and the second
    one loads from there: the last blocks of prompts that end with a block."""
    pairs = zip(batch[::2], batch[1::2], strict=True)
    return sum(
        BLOCK for one, other in pairs if not len(other) % BLOCK and one[: len(other)] == other
    )


def reused(world: TierWorld, own: list[dict[str, Any]], *, from_disk: bool) -> None:
    """Engine B, whose caches are empty, loads every full block of all prompts from the store."""
    before, reads, stats = by_source(world.b), world.disk_reads(), counts(world.b)
    found = world.b.generate(PROMPTS, tokens=4)
    assert cached(found) == exact(PROMPTS)
    assert differences(found, own) == []
    device, pool = sum(of_vllm(PROMPTS)), from_the_pool(PROMPTS)
    loaded = sum(exact(PROMPTS)) - device - pool
    grown = {name: count - before[name] for name, count in by_source(world.b).items()}
    assert {name: count for name, count in grown.items() if count} == {
        "device": device,
        "host": pool,
        "disk": loaded,  # vLLM's name for all blocks from a tier
    }
    after = counts(world.b)
    assert after["blocks_loaded"] - stats.get("blocks_loaded", 0) == loaded // BLOCK
    assert after["blocks_failed"] == 0
    assert world.disk_reads() - reads == (loaded // BLOCK if from_disk else 0)
    settled(world.b)


def test_b_reuses_what_a_computed_then_again_from_disk_and_after_a_restart(
    world: TierWorld,
) -> None:
    plain = world.plain(world.a, PROMPTS, tokens=4)
    world.start(world.a)
    cold = world.a.generate(PROMPTS, tokens=4)
    own = world.a.generate(PROMPTS, tokens=4)
    settled(world.a)
    assert differences(cold, plain) == []
    check_same(own, cold)
    assert cached(own) == exact(PROMPTS)
    world.start(world.b)
    reused(world, own, from_disk=False)

    assert world.b.ask("reset", connector=True)["reset"]
    world.only_disk()
    reused(world, own, from_disk=True)

    assert world.b.ask("reset", connector=True)["reset"]
    assert world.sidecar.stop() == 0
    world.sidecar.start()
    connected(world.b)
    reused(world, own, from_disk=True)


def test_engines_whose_blocks_have_other_bytes_share_nothing(
    world: TierWorld, tmp_path: Path
) -> None:
    """Other weights under the same name, another dtype, other offloaded blocks."""
    prompt = tokens(90, 300)
    world.start(world.a)
    world.a.generate([prompt], tokens=4)
    settled(world.a)
    others = tmp_path / "llama"
    write_model(others, "llama", 77)
    unlike: tuple[dict[str, Any], ...] = (
        {"model": others},
        {"dtype": "bfloat16"},
        {"offloading": {"blocks_per_chunk": 2}},
        {"table": our_tier(world.sidecar.socket, revision="mine", **PATIENT_TIER)},
    )
    for arguments in unlike:
        world.start(world.b, **arguments)
        assert cached(world.b.generate([prompt], tokens=4)) == [0], arguments
    world.start(world.b)
    assert cached(world.b.generate([prompt], tokens=4)) == [full_blocks(prompt)]


def test_requests_with_other_salts_or_adapters_share_nothing(
    world: TierWorld, tmp_path: Path
) -> None:
    prompt = tokens(91, 300)
    adapters = []
    for number in (1, 2):
        write_adapter(tmp_path / f"adapter-{number}", number)
        adapters.append([f"adapter-{number}", number, str(tmp_path / f"adapter-{number}")])
    ways: list[dict[str, Any]] = [{}, {"salt": "one"}, {"salt": "two"}]
    ways += [{"adapter": adapter} for adapter in adapters]
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    world.start(world.a, **options)
    own = []
    for way in ways:
        assert cached(world.a.generate([prompt], tokens=8, **way)) == [0], way
        own += world.a.generate([prompt], tokens=8, **way)
    settled(world.a)
    world.start(world.b, **options)
    warm = [found for way in ways for found in world.b.generate([prompt], tokens=8, **way)]
    assert cached(warm) == [full_blocks(prompt)] * len(ways)
    assert differences(warm, own) == []
    assert len({tuple(found["tokens"]) for found in warm}) == 3, "the model and each adapter"
    assert cached(world.b.generate([prompt], tokens=8, salt="three")) == [0]


def test_qwen3_in_bfloat16(world: TierWorld) -> None:
    batch = prompts(7, 3)
    world.start(world.a, "qwen3", dtype="bfloat16")
    world.a.generate(batch, tokens=8)
    own = world.a.generate(batch, tokens=8)
    settled(world.a)
    world.start(world.b, "qwen3", dtype="bfloat16")
    warm = world.b.generate(batch, tokens=8)
    assert cached(warm) == cached(own) == exact(batch)
    assert differences(warm, own) == []


def test_two_engine_blocks_per_offloaded_block(world: TierWorld) -> None:
    batch = prompts(2, 6)
    option = {"blocks_per_chunk": 2}
    world.start(world.a, offloading=option)
    cold = world.a.generate(batch, tokens=8)
    settled(world.a)
    world.start(world.b, offloading=option)
    warm = world.b.generate(batch, tokens=8)
    check_same(warm, cold)
    # Of the second of a pair, B has the blocks that it shares with the first. Less than an
    # offloaded block beyond these is not looked up.
    assert cached(warm)[::2] == exact(batch, 2 * BLOCK)[::2]
    assert cached(warm)[1::2] == of_vllm(batch)[1::2]


def test_two_groups_of_a_hybrid_model(world: TierWorld) -> None:
    batch = prompts(3, 6)
    world.start(world.a, "gemma3_text")
    world.a.generate(batch, tokens=8)
    own = world.a.generate(batch, tokens=8)
    settled(world.a)
    world.start(world.b, "gemma3_text")
    assert world.b.ask("tier")["groups"] == 2
    warm = world.b.generate(batch, tokens=8)
    assert cached(warm) == cached(own) == [full_blocks(prompt) for prompt in batch]
    assert differences(warm, own) == []
    saved, loaded = counts(world.a)["blocks_saved"], counts(world.b)
    # Every block of full attention, and some of the sliding windows.
    assert saved > sum(exact(batch)[::2]) // BLOCK
    assert (loaded["blocks_loaded"], loaded["blocks_failed"]) == (saved, 0)


def test_two_nodes_joined_by_valkey(world: TierWorld, tmp_path: Path) -> None:
    server = redis_rig.Server(tmp_path / "valkey", redis_rig.valkey_binary())
    config = f'[[tiers]]\nkind = "redis"\nurl = "redis://{server.address}"\n'
    batch = prompts(10, 3)
    nodes = []
    for name, engine in (("one", world.a), ("two", world.b)):
        (tmp_path / name).mkdir()
        nodes.append(
            Sidecar(tmp_path / name, "--l2", "32MiB", "--slot-bytes", "256KiB", config=config)
        )
        world.start(engine, table=our_tier(nodes[-1].socket, **PATIENT_TIER))
    world.a.generate(batch, tokens=8)
    own = world.a.generate(batch, tokens=8)
    settled(world.a)
    only_below(nodes[0])
    warm = world.b.generate(batch, tokens=8)
    assert cached(warm) == exact(batch)
    assert differences(warm, own) == []
    for engine in (world.a, world.b):
        engine.ask("stop")
    assert [node.stop() for node in nodes] == [0, 0]


def test_an_embedded_store_over_a_disk(world: TierWorld) -> None:
    batch = prompts(4, 3)
    table = {"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm", "max_wait": 20_000}
    disk = str(world.folder / "own")
    table["embedded"] = {"l2": "8MiB", "disk": disk, "disk_capacity": "256MiB"}
    world.start(world.a, table=table)
    world.a.generate(batch, tokens=8)
    own = world.a.generate(batch, tokens=8)
    settled(world.a)
    world.start(world.a, table=table)  # ends the first engine, which writes its queued blocks
    warm = world.a.generate(batch, tokens=8)
    assert cached(warm) == exact(batch)
    assert differences(warm, own) == []
