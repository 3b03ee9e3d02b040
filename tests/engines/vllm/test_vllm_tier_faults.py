"""The tier in vLLM's native tiering when its sidecar or the engine fails: the output is that of a
vLLM without kvstore, and no request waits or retries forever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tier_world import TierWorld, counts, exact, only_below, prompts, settled
from vllm_rig import (
    BLOCK,
    PATIENT_TIER,
    Engine,
    Sidecar,
    cached,
    check_same,
    needs_vllm,
    our_tier,
    tokens,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

PROMPTS = prompts(5, 3)
ENOUGH = ("--l2", "32MiB", "--slot-bytes", "256KiB")
UNIT_BYTES = 131_072
"""Bytes of a row of vLLM's host pool for the tiny Llama: the KV of a block."""
NEVER_HUNG = {"response_timeout": 600_000}
"""Only max_wait ends a wait: a hung sidecar does not count as not responding."""


class FaultyWorld(TierWorld):
    """A TierWorld with the results of a plain vLLM."""

    def __init__(self, folder: Path, engines: tuple[Engine, Engine]) -> None:
        super().__init__(folder, engines)
        self.expected = self.plain(self.a, PROMPTS, tokens=8)

    def check(self, engine: Engine) -> None:
        """Check the output. vLLM's own caches are empty at first."""
        assert engine.ask("reset", connector=True)["reset"]
        results = engine.generate(PROMPTS, tokens=8)
        assert {result["finish"] for result in results} == {"length"}
        check_same(results, self.expected)
        settled(engine)

    def load_under_way(self, engine: Engine, sidecar: Sidecar) -> None:
        """Start a request for the first prompt, whose blocks the sidecar has. The sidecar is
        suspended after its answer to the lookup, before the load."""
        assert engine.ask("reset", connector=True)["reset"]
        engine.ask("add", prompt=PROMPTS[0])
        engine.ask("step")
        wait_until(lambda: counts(engine)["lookup_batches_done"], "the answer has arrived")
        sidecar.suspend()
        engine.ask("step")
        assert counts(engine)["busy"], "blocks in flight"

    def ending(self, engine: Engine) -> list[Any]:
        ended: list[Any] = []
        wait_until(
            lambda: ended.extend(engine.ask("step", pause_s=0.01)["ended"]) or ended,
            "the request ends",
        )
        return ended


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[FaultyWorld]:
    made = FaultyWorld(tmp_path_factory.mktemp("vllm"), engines)
    yield made
    made.end()


@pytest.fixture
def new_sidecar(tmp_path: Path) -> Iterator[Callable[..., Sidecar]]:
    """Starts sidecars, and kills those that a failed test left."""
    made: list[Sidecar] = []

    def make(*options: str, config: str = "") -> Sidecar:
        made.append(Sidecar(tmp_path, *options, config=config))
        return made[-1]

    yield make
    for sidecar in made:
        if sidecar.running:
            sidecar.kill()


@pytest.fixture
def sidecar(new_sidecar: Callable[..., Sidecar], tmp_path: Path) -> Sidecar:
    return new_sidecar(*ENOUGH, "--disk", str(tmp_path / "disk"))


def test_a_store_without_room(world: FaultyWorld, new_sidecar: Callable[..., Sidecar]) -> None:
    """Four slots for prompts of many blocks."""
    sidecar = new_sidecar("--l2", "1MiB", "--slot-bytes", "256KiB")
    world.start(world.a, table=our_tier(sidecar.socket))
    for _ in range(2):
        world.check(world.a)
    assert counts(world.a)["blocks_saved"] > 4, "they have evicted one another"
    world.a.ask("stop")
    assert sidecar.stop() == 0


@pytest.mark.parametrize("fault", ["hung", "killed"])
def test_a_sidecar_that_fails_during_a_load(
    world: FaultyWorld, sidecar: Sidecar, fault: str
) -> None:
    world.start(world.a, table=our_tier(sidecar.socket, max_wait=1000))
    world.check(world.a)
    before = counts(world.a)
    world.load_under_way(world.a, sidecar)
    if fault == "killed":
        sidecar.kill()
    check_same(world.ending(world.a), world.expected[:1])
    settled(world.a)
    after = counts(world.a)
    assert after.get("blocks_loaded", 0) == before.get("blocks_loaded", 0)
    assert after["blocks_failed"] - before["blocks_failed"] == exact(PROMPTS)[0] // 32
    if fault == "hung":
        sidecar.resume()
        world.a.ask("stop")
        assert sidecar.stop() == 0


def test_no_request_waits_longer_than_max_wait(world: FaultyWorld, sidecar: Sidecar) -> None:
    """Neither for an answer nor for blocks."""
    world.start(world.a, table=our_tier(sidecar.socket, max_wait=1000, **NEVER_HUNG))
    world.check(world.a)
    world.load_under_way(world.a, sidecar)
    check_same(world.ending(world.a), world.expected[:1])
    settled(world.a)
    stats = counts(world.a)
    assert (stats["loads_timed_out"], stats["lookups_timed_out"]) == (1, 0)
    assert stats["store_connected"], "it never counted as not responding"
    sidecar.resume()

    settled(world.a)
    only_below(sidecar)  # the shared index shows the blocks in L2 without a message
    sidecar.suspend()
    world.check(world.a)
    stats = counts(world.a)
    assert stats["lookups_timed_out"] == len(PROMPTS) // 2, "vLLM has the blocks of the others"
    assert (stats["loads_timed_out"], stats["store_connected"]) == (1, True)
    sidecar.resume()
    world.a.ask("stop")
    assert sidecar.stop() == 0


def test_a_reset_waits_for_blocks_in_flight(world: FaultyWorld, sidecar: Sidecar) -> None:
    """vLLM asserts that no job is left, and reuses the rows of its pool."""
    world.start(world.a, table=our_tier(sidecar.socket, max_wait=1000, **NEVER_HUNG))
    world.check(world.a)
    world.load_under_way(world.a, sidecar)
    world.a.ask("reset", connector=True, settle=False)
    assert not counts(world.a)["busy"]
    sidecar.resume()
    check_same(world.ending(world.a), world.expected[:1])
    settled(world.a)
    world.check(world.a)
    world.a.ask("stop")
    assert sidecar.stop() == 0


def test_a_reset_hides_blocks_saved_before(world: FaultyWorld, sidecar: Sidecar) -> None:
    """vLLM resets the pool when weights are changed in place; "forget" is the default."""
    table = our_tier(sidecar.socket, **PATIENT_TIER)
    forgetful = {name: value for name, value in table.items() if name != "on_reset"}
    firsts = PROMPTS[::2]
    world.start(world.a, table=forgetful)
    world.a.generate(firsts, tokens=8)
    settled(world.a)
    world.a.ask("add", prompt=prompts(11, 1)[0], tokens=60)
    world.a.ask("step")
    dropped = counts(world.a)["blocks_dropped"]
    world.a.ask("reset", connector=True, settle=False)
    world.ending(world.a)
    settled(world.a)
    assert counts(world.a)["blocks_dropped"] > dropped, "blocks of a request from before"
    world.a.ask("reset")
    found = world.a.generate(firsts, tokens=8)
    assert cached(found) == [0] * len(firsts)
    check_same(found, world.expected[::2])
    settled(world.a)
    assert counts(world.a)["blocks_saved"] == 2 * sum(exact(firsts)) // 32
    # No other engine uses the blocks that it saves from now on.
    world.start(world.b, table=table)
    assert cached(world.b.generate(firsts, tokens=8)) == exact(firsts)
    for engine in (world.a, world.b):
        engine.ask("stop")
    assert sidecar.stop() == 0


@pytest.mark.parametrize("rows", [15, 14])
def test_a_prefix_larger_than_vllms_pool_is_used_as_far_as_it_fits(
    world: FaultyWorld, sidecar: Sidecar, rows: int
) -> None:
    """The last load would evict the first one, again and again."""
    blocks = 15
    table = our_tier(sidecar.socket, **PATIENT_TIER)
    batch = [tokens(77, blocks * BLOCK + 5)]
    world.start(world.a, table=table)
    expected = world.a.generate(batch, tokens=8)
    settled(world.a)
    only_below(sidecar)
    world.start(world.b, table=table, offloading={"cpu_bytes_to_use": rows * UNIT_BYTES})
    found = world.b.generate(batch, tokens=8)
    settled(world.b)
    check_same(found, expected)
    assert cached(found) == [rows * BLOCK]
    stats = counts(world.b)
    assert (stats["blocks_loaded"], stats.get("requests_truncated", 0)) == (
        rows,
        int(rows < blocks),
    )
    for engine in (world.a, world.b):
        engine.ask("stop")
    assert sidecar.stop() == 0


@pytest.mark.parametrize("broken", [True, False])
def test_a_tier_that_claims_missing_blocks_causes_no_livelock(
    world: FaultyWorld, new_sidecar: Callable[..., Sidecar], broken: bool
) -> None:
    config = f'[[tiers]]\nkind = "faulty.claiming"\nbroken = {str(broken).lower()}\n'
    sidecar = new_sidecar("--l2", "4MiB", "--slot-bytes", "256KiB", config=config)
    world.start(world.b, table=our_tier(sidecar.socket))
    world.check(world.b)
    stats = counts(world.b)
    assert 0 < stats["load_jobs"] <= sum(exact(PROMPTS)) // 32, "tried, but not forever"
    assert 0 < stats["blocks_failed"] <= sum(exact(PROMPTS)) // 32
    world.b.ask("stop")
    assert sidecar.stop() == 0


def test_a_sidecar_that_is_absent_hung_or_killed_shows_in_vllms_metrics(
    world: FaultyWorld, new_sidecar: Callable[..., Sidecar], tmp_path: Path
) -> None:
    def metric(name: str) -> float:
        found: dict[str, float] = world.a.ask("metrics")["metrics"]
        return found.get(f"vllm:kvstore_tier_{name}", 0)

    world.start(world.a, table=our_tier(str(tmp_path / "kv.sock"), max_wait=500))
    world.check(world.a)
    assert (metric("store_connected"), metric("blocks_saved")) == (0, 0)
    sidecar = new_sidecar(*ENOUGH)
    wait_until(lambda: counts(world.a)["store_connected"], "connected")
    for _ in range(2):
        world.check(world.a)
    stats = counts(world.a)
    assert metric("store_connected") == 1
    for name in ("blocks_saved", "blocks_loaded", "load_jobs", "save_jobs"):
        assert metric(name) == stats[name] > 0, name
    sidecar.suspend()
    world.check(world.a)
    assert metric("loads_timed_out") > 0
    sidecar.resume()
    sidecar.kill()
    world.check(world.a)
    assert metric("store_connected") == 0


def test_the_pool_of_a_killed_engine_is_removed_by_the_next(
    world: FaultyWorld, tmp_path: Path
) -> None:
    from kvstore.connectors.vllm.tier.stale_pools import STALE_S, find_stale_pools

    victim = Engine(tmp_path / "victim.log")
    world.start(victim, prefix_caching_hash_algo="xxhash")
    victim.generate(PROMPTS[:1], tokens=2)
    victim.generate(PROMPTS[1:2], tokens=2)
    assert victim.log.read_text().count("use --prefix-caching-hash-algo sha256_cbor") == 1, (
        "nothing will be found again"
    )
    left = victim.host_pool()
    old = time.time() - 2 * STALE_S
    os.utime(left, (old, old))
    assert left not in find_stale_pools(), "an engine maps it"
    victim.kill()
    wait_until(lambda: left in find_stale_pools(), "no process maps it")
    world.start(world.b)
    assert not left.exists()
