"""With every fault of the store, vLLM's output is that without a store, and no engine ends.

The sidecars: first none, then a good one, a hung one, a killed one, a tiny one, and one whose tier
claims blocks that it does not have.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_rig import PROMPTS, FaultWorld, told
from vllm_rig import Engine, needs_vllm, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

PREFETCH = {"policy": "wait_complete", "max_wait": 3000, "min_load_tokens": 0}
LOADS_MAX = 2
"""Maximum number of loads of one request that get no slots."""


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[FaultWorld]:
    made = FaultWorld(tmp_path_factory.mktemp("vllm"), engines[0], prefetch=PREFETCH)
    yield made
    made.engine.ask("stop")


@pytest.fixture(autouse=True)
def _idle_before_and_after(world: FaultWorld) -> Iterator[None]:
    world.check_idle()
    yield
    world.end_sidecars()
    world.check_idle()


def test_a_sidecar_that_comes_late_is_used(world: FaultWorld) -> None:
    assert world.outputs() == world.expected
    before = world.count("blocks_loaded")
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    assert world.outputs() == world.expected
    assert world.count("blocks_loaded") > before
    assert sidecar.stop() == 0


def test_a_hung_sidecar(world: FaultWorld) -> None:
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    sidecar.suspend()
    assert world.outputs() == world.expected
    sidecar.resume()
    assert world.outputs() == world.expected
    assert sidecar.stop() == 0


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.4])
def test_a_sidecar_killed_while_a_request_waits_for_it(world: FaultWorld, wait_s: float) -> None:
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    assert world.engine.ask("reset")["reset"]
    sidecar.suspend()  # so that an operation is surely under way
    world.engine.send("generate", prompts=PROMPTS, tokens=8, together=True)
    time.sleep(wait_s)
    sidecar.kill()
    results = world.engine.answer()["results"]
    assert told(results) == world.expected


def test_a_store_without_room(world: FaultWorld) -> None:
    sidecar = world.sidecar("--l2", "512KiB", "--slot-bytes", "128KiB")
    assert world.outputs() == world.expected
    assert world.outputs() == world.expected
    assert sidecar.stop() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs permission to mount a file system")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_disk_without_room_and_then_with_room(world: FaultWorld, small_disk: Path) -> None:
    """L2 is too small for the prompts, so blocks are on disk, or dropped."""
    disk = ("--disk", str(small_disk / "kv"), "--disk-capacity", "16MiB")
    sidecar = world.sidecar("--l2", "2MiB", "--slot-bytes", "128KiB", *disk)
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for _ in range(2):
        assert world.outputs() == world.expected
    wait_until(lambda: sidecar.stats()["tiers"]["disk"]["errors"] > 0, "writes fail")
    assert sidecar.stats()["tiers"]["disk"]["writes"] == 0
    (small_disk / "filler").unlink()
    before = world.count("blocks_loaded")
    for _ in range(2):
        assert world.outputs() == world.expected
        world.check_idle()
    wait_until(lambda: sidecar.stats()["tiers"]["disk"]["writes"] > 0, "writes succeed")
    assert world.count("blocks_loaded") > before
    world.nothing_is_leased(sidecar)


def test_a_tier_without_room(world: FaultWorld) -> None:
    config = '[[tiers]]\nkind = "faulty.full"\n'
    sidecar = world.sidecar("--l2", "2MiB", "--slot-bytes", "128KiB", config=config)
    for _ in range(2):
        assert world.outputs() == world.expected
    wait_until(lambda: sidecar.stats()["tiers"]["full"]["errors"] > 0, "writes fail")
    world.nothing_is_leased(sidecar)


@pytest.mark.parametrize("broken", [True, False])
def test_a_tier_that_claims_missing_blocks(world: FaultWorld, broken: bool) -> None:
    kind = 'kind = "faulty.claiming"'
    sidecar = world.sidecar(
        "--l2", "2MiB", "--slot-bytes", "128KiB",
        config=f"[[tiers]]\n{kind}\nbroken = {str(broken).lower()}\n",
    )  # fmt: skip
    before = world.engine.state()["scheduler"]
    for _ in range(2):
        assert world.outputs() == world.expected
    after = world.engine.state()["scheduler"]
    requests = 2 * len(PROMPTS)
    assert requests <= after["lookups"] - before.get("lookups", 0) <= LOADS_MAX * requests
    loads = after["loads"] - before.get("loads", 0)
    assert 0 < loads <= LOADS_MAX * requests, "tried, but not forever"
    assert sidecar.stop() == 0


def test_a_request_aborted_while_it_waits_for_an_answer(world: FaultWorld) -> None:
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    assert world.engine.ask("reset")["reset"]
    sidecar.suspend()
    name = world.engine.ask("add", prompt=PROMPTS[0])["name"]
    world.engine.ask("step")
    assert world.engine.state()["scheduler"]["requests_waiting"] == 1
    world.engine.ask("abort", name=name)
    state = world.engine.state()["scheduler"]
    assert (state["requests_waiting"], state["requests_tracked"]) == (0, 0)
    world.check_idle()
    sidecar.resume()
    world.nothing_is_leased(sidecar)


@pytest.mark.parametrize("what", ["given up", "hung", "killed"])
def test_a_load_under_way(world: FaultWorld, what: str) -> None:
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    failed = world.count("blocks_failed")
    name = world.load_under_way(sidecar)
    if what == "given up":
        world.engine.ask("abort", name=name)
        state = world.engine.state()
        assert state["free_blocks"] < state["blocks"] - 1, "still to be written to"
        sidecar.resume()
    else:
        if what == "killed":
            sidecar.kill()
        assert world.ending() == world.expected[:1]
        assert world.count("blocks_failed") - failed == 6
    world.check_idle()
    if what != "killed":
        sidecar.resume()
        world.nothing_is_leased(sidecar)


def test_pressure_preemption_and_aborts(world: FaultWorld) -> None:
    """32 requests at once in 63 blocks, a fifth of them aborted at some step."""
    requests = world.requests(32)
    expected = world.alone(requests)
    sidecar = world.sidecar()
    world.pressed(requests, expected, rounds=3)
    world.nothing_is_leased(sidecar)
