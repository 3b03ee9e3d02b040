"""The tier in vLLM's native tiering, in real engines: reuse across processes, faults, and what a
killed engine leaves."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model
from vllm_rig import (
    LIMIT_S,
    PATIENT_TIER,
    Engine,
    Sidecar,
    check_same,
    needs_vllm,
    our_tier,
    tier,
    tokens,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

HOST_BYTES = 16 << 20
HASH = {"prefix_caching_hash_algo": "sha256_cbor"}
PROMPT_SETS = 30


class World:
    """A sidecar with a disk, and two engines."""

    def __init__(self, folder: Path, engines: tuple[Engine, Engine]) -> None:
        self.folder = folder
        self.models = {family: folder / family for family in ("llama", "gemma3_text", "qwen3")}
        for seed, (family, path) in enumerate(self.models.items()):
            write_model(path, family, seed)
        self.sidecar = Sidecar(
            folder, "--l2", "128MiB", "--slot", "256KiB", "--disk", str(folder / "disk")
        )
        self.a, self.b = engines

    def start(
        self,
        engine: Engine,
        family: str = "llama",
        table: Any = None,
        dtype: str = "float32",
        **extra: Any,
    ) -> None:
        table = table or our_tier(self.sidecar.socket, **PATIENT_TIER)
        engine.start(
            self.models[family],
            kv_transfer_config=tier(HOST_BYTES, table, **extra),
            disable_hybrid_kv_cache_manager=False,
            num_gpu_blocks_override=1024,
            dtype=dtype,
            **HASH,
        )


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("vllm"), engines)
    yield made
    for engine in engines:
        engine.ask("stop")
    if made.sidecar.running:
        assert made.sidecar.stop() == 0, "leases that did not come back"


def prompts(family: int, count: int = PROMPT_SETS) -> list[list[int]]:
    """Pairs that share a beginning."""
    made = []
    for number in range(count):
        shared = tokens(5000 * family + number, 64 + 32 * (number % 5))
        made.append(shared + tokens(5000 * family + 1000 + number, 70 + number))
        made.append(shared + tokens(5000 * family + 2000 + number, 7 * number))
    return made


def whole(prompt: list[int], unit: int) -> int:
    """Tokens of a prompt's full units; vLLM computes the last token."""
    return (len(prompt) - 1) // unit * unit


def settled(engine: Engine) -> None:
    assert engine.ask("settle")["requests"] == 0


def test_b_reuses_what_a_computed(world: World) -> None:
    asked = prompts(1)
    world.start(world.a)
    cold = world.a.generate(asked, tokens=8)
    settled(world.a)
    world.start(world.b)
    warm = world.b.generate(asked, tokens=8)
    check_same(warm, cold)
    check_cached(warm, asked)

    few, expected = asked[10:18], cold[10:18]
    settled(world.b)
    world.b.ask("reset", connector=True)
    for path in ("/v1/flush", "/v1/clear?tier=l2"):
        request = urllib.request.Request(f"{world.sidecar.url}{path}", method="POST")
        urllib.request.urlopen(request, timeout=LIMIT_S).close()
    assert world.sidecar.stop() == 0
    world.sidecar.start()
    wait_until(lambda: world.b.ask("tier")["stats"]["store_connected"], "connected again")
    check_same(again := world.b.generate(few, tokens=8), expected)
    check_cached(again, few)


def check_cached(results: list[dict[str, Any]], asked: list[list[int]]) -> None:
    """All whole units; vLLM's offloading may use one more where a prompt ends with it."""
    for prompt, result in zip(asked, results, strict=True):
        assert result["cached"] in (whole(prompt, 32), len(prompt) // 32 * 32)


def test_qwen3_in_bfloat16(world: World) -> None:
    asked = prompts(7, 3)
    for engine in (world.a, world.b):
        world.start(engine, "qwen3", dtype="bfloat16")
    cold = world.a.generate(asked, tokens=8)
    settled(world.a)
    warm = world.b.generate(asked, tokens=8)
    assert [each["tokens"] for each in warm] == [each["tokens"] for each in cold]
    check_cached(warm, asked)


def test_a_store_without_room(world: World, tmp_path: Path) -> None:
    """Four slots for prompts of many units."""
    sidecar = Sidecar(tmp_path, "--l2", "1MiB", "--slot", "256KiB")
    asked = prompts(8, 3)
    world.start(world.a, table=our_tier(sidecar.socket))
    expected = world.a.generate(asked, tokens=8)
    settled(world.a)
    assert world.a.ask("tier")["stats"]["units_saved"] > 4, "they have driven each other out"
    world.a.ask("reset", connector=True)
    check_same(world.a.generate(asked, tokens=8), expected)
    settled(world.a)
    world.a.ask("stop")
    assert sidecar.stop() == 0


@pytest.mark.parametrize("fault", ["hung", "killed"])
def test_a_sidecar_that_fails_while_units_are_loaded(
    world: World, tmp_path: Path, fault: str
) -> None:
    sidecar = Sidecar(tmp_path, "--l2", "32MiB", "--slot", "256KiB")
    world.start(world.a, table=our_tier(sidecar.socket, deadline_ms=1000))
    prompt = prompts(9, 1)[0]
    expected = world.a.generate([prompt], tokens=8)
    settled(world.a)
    world.a.ask("reset", connector=True)
    world.a.ask("add", prompt=prompt)
    world.a.ask("step", pause_s=0.3)  # the tier has asked, and its answer lies in the socket
    sidecar.suspend()
    world.a.ask("step")
    assert world.a.ask("tier")["stats"]["busy"], "units on their way"
    if fault == "killed":
        sidecar.kill()
    ended: list[Any] = []
    wait_until(
        lambda: ended.extend(world.a.ask("step", pause_s=0.01)["ended"]) or ended,
        "the request ends",
    )
    check_same(ended, expected)
    settled(world.a)
    assert world.a.ask("tier")["stats"].get("units_loaded", 0) == 0
    if fault == "hung":
        sidecar.resume()
        world.a.ask("stop")
        assert sidecar.stop() == 0


def test_two_blocks_per_unit(world: World) -> None:
    asked = prompts(2, 6)
    option = {"blocks_per_chunk": 2}
    world.start(world.a, **option)
    cold = world.a.generate(asked, tokens=8)
    settled(world.a)
    world.start(world.b, **option)
    warm = world.b.generate(asked, tokens=8)
    check_same(warm, cold)
    # B has computed the first of each pair itself as far as it goes beyond whole units.
    for prompt, result in zip(asked[::2], warm[::2], strict=True):
        assert result["cached"] in (whole(prompt, 64), len(prompt) // 64 * 64)


def test_two_groups_of_a_hybrid_model(world: World) -> None:
    asked = prompts(3, 6)
    world.start(world.a, "gemma3_text")
    cold = world.a.generate(asked, tokens=8)
    settled(world.a)
    world.start(world.b, "gemma3_text")
    warm = world.b.generate(asked, tokens=8)
    check_same(warm, cold)
    assert sum(result["cached"] for result in warm) >= sum(
        whole(prompt, 32) for prompt in asked[::2]
    )


def test_a_store_of_its_own_over_a_disk(world: World) -> None:
    asked = prompts(4, 3)
    disk = str(world.folder / "own")
    table = {"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm"}
    table["embedded"] = {"l2": "8MiB", "disk": disk, "disk_capacity": "256MiB"}
    world.start(world.a, table=table)
    cold = world.a.generate(asked, tokens=8)
    settled(world.a)
    world.start(world.a, table=table)  # ends the first, which writes what is queued
    warm = world.a.generate(asked, tokens=8)
    check_same(warm, cold)
    assert sum(result["cached"] for result in warm) > 0


@pytest.mark.parametrize("broken", [True, False])
def test_a_tier_that_claims_what_it_has_not_is_no_livelock(
    world: World, tmp_path: Path, broken: bool
) -> None:
    config = f'[[tiers]]\nkind = "faulty.claiming"\nbroken = {str(broken).lower()}\n'
    sidecar = Sidecar(tmp_path, "--l2", "4MiB", "--slot", "256KiB", config=config)
    world.start(world.b, table=our_tier(sidecar.socket))
    asked = prompts(5, 2)
    found = world.b.generate(asked, tokens=8)
    assert {result["finish"] for result in found} == {"length"}
    world.start(world.b)  # another namespace of leases: the first engine has gone
    check_same(found, world.b.generate(asked, tokens=8))
    assert sidecar.stop() == 0


def test_a_sidecar_that_is_absent_hung_or_killed(world: World, tmp_path: Path) -> None:
    asked = prompts(6, 2)
    world.start(world.a, table=our_tier(str(tmp_path / "kv.sock"), deadline_ms=500))
    expected = world.a.generate(asked, tokens=8)
    sidecar = Sidecar(tmp_path, "--l2", "32MiB", "--slot", "256KiB")
    for fault in ("none", "hung", "killed"):
        if fault == "hung":
            sidecar.suspend()
        if fault == "killed":
            sidecar.kill()
        world.a.ask("reset")
        check_same(world.a.generate(asked, tokens=8), expected)
        settled(world.a)
        if fault == "hung":
            sidecar.resume()


def test_the_pool_of_a_killed_engine_is_removed_by_the_next(world: World, tmp_path: Path) -> None:
    from kvstore.connectors.vllm.host_pool import STALE_S, abandoned

    victim = Engine(tmp_path / "victim.log")
    world.start(victim)
    left = victim.host_pool()
    old = time.time() - 2 * STALE_S
    os.utime(left, (old, old))
    assert left not in abandoned(), "an engine maps it"
    victim.kill()
    wait_until(lambda: left in abandoned(), "it is nobody's")
    world.start(world.b)
    assert not left.exists()
