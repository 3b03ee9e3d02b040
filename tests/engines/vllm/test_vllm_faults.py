"""Every fault of the store leaves vLLM's output what it is without a store, and ends no engine.

One engine, and one socket path at which sidecars come and go: first none, then a good one, a hung
one, one that is killed, a tiny one, one whose tier claims what it has not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model
from vllm_rig import Engine, Sidecar, connector, needs_vllm, tokens, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

PREFETCH = {"policy": "wait_complete", "cap_ms": 3000, "min_tokens": 0}
PROMPTS = [tokens(1, 200), tokens(1, 128) + tokens(2, 70), tokens(3, 333), tokens(4, 300)]
POOL = 64
ENOUGH = ("--l2", "64MiB", "--slot", "128KiB")


class World:
    """The engine, its output without a store, and the folder where sidecars listen."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.model = folder / "llama"
        write_model(self.model, "llama", 1)
        self.socket = str(folder / "kv.sock")
        self.engine = engine
        self.sidecars: list[Sidecar] = []
        engine.start(
            self.model,
            kv_transfer_config=connector(self.socket, prefetch=PREFETCH),
            num_gpu_blocks_override=POOL,
        )
        # Rounding differs with how a prompt is cut into pieces.
        self.expected = [
            (tokens_, pytest.approx(logprobs, abs=1e-5)) for tokens_, logprobs in self.outputs()
        ]

    def outputs(self) -> list[Any]:
        """Of the prompts, with vLLM's own prefix cache empty at first."""
        assert self.engine.ask("reset")["reset"]
        results = self.engine.generate(PROMPTS, tokens=8)
        assert {result["finish"] for result in results} == {"length"}
        return told(results)

    def sidecar(self, *options: str, config: str = "") -> Sidecar:
        """A sidecar to which both of the engine's connections have come."""
        made = Sidecar(self.folder, *(options or ENOUGH), config=config)
        self.sidecars.append(made)
        for side in ("scheduler", "worker"):
            wait_until(lambda side=side: self.engine.held()[side]["store_connected"], "connected")
        return made

    def end_sidecars(self) -> None:
        """Those that a failed test left, hung ones too: they hold the socket's path."""
        for sidecar in self.sidecars:
            if sidecar.running:
                sidecar.kill()
        self.sidecars.clear()

    def loaded(self) -> float:
        metrics: dict[str, float] = self.engine.ask("metrics")["metrics"]
        return metrics.get("vllm:kvstore_blocks_loaded", 0)

    def failed(self) -> float:
        metrics: dict[str, float] = self.engine.ask("metrics")["metrics"]
        return metrics.get("vllm:kvstore_blocks_failed", 0)

    def nothing_is_held(self) -> None:
        assert self.engine.ask("settle")["requests"] == 0
        held = self.engine.held()
        assert held["free_blocks"] == held["blocks"] - 1, "all but vLLM's null block"
        assert held["scheduler"]["loads_under_way"] == held["scheduler"]["requests_waiting"] == 0
        assert held["worker"]["loads_under_way"] == held["worker"]["saves_under_way"] == 0


def told(results: list[dict[str, Any]]) -> list[Any]:
    """Tokens and log-probabilities."""
    return [(each["tokens"], each["logprobs"]) for each in results]


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("vllm"), engines[0])
    yield made
    made.engine.ask("stop")


@pytest.fixture(autouse=True)
def _idle_before_and_after(world: World) -> Iterator[None]:
    world.nothing_is_held()
    yield
    world.end_sidecars()
    world.nothing_is_held()


def test_a_sidecar_that_comes_late_is_used(world: World) -> None:
    before = world.loaded()
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    assert world.outputs() == world.expected
    assert world.loaded() > before
    assert sidecar.stop() == 0


def test_a_hung_sidecar(world: World) -> None:
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    sidecar.suspend()
    assert world.outputs() == world.expected
    sidecar.resume()
    assert world.outputs() == world.expected
    assert sidecar.stop() == 0


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.4])
def test_a_sidecar_killed_while_a_request_waits_for_it(world: World, wait_s: float) -> None:
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    assert world.engine.ask("reset")["reset"]
    sidecar.suspend()  # so that it is surely in the middle of something
    world.engine.send("generate", prompts=PROMPTS, tokens=8, together=True)
    time.sleep(wait_s)
    sidecar.kill()
    results = world.engine.answer()["results"]
    assert told(results) == world.expected


def test_a_store_without_room(world: World) -> None:
    sidecar = world.sidecar("--l2", "512KiB", "--slot", "128KiB")
    assert world.outputs() == world.expected
    assert world.outputs() == world.expected
    assert sidecar.stop() == 0


@pytest.mark.parametrize("broken", [True, False])
def test_a_tier_that_claims_what_it_has_not(world: World, broken: bool) -> None:
    kind = 'kind = "faulty.claiming"'
    sidecar = world.sidecar(
        "--l2", "2MiB", "--slot", "128KiB",
        config=f"[[tiers]]\n{kind}\nbroken = {str(broken).lower()}\n",
    )  # fmt: skip
    for _ in range(2):
        assert world.outputs() == world.expected
    assert sidecar.stop() == 0


def test_a_request_given_up_while_it_waits_for_an_answer(world: World) -> None:
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    assert world.engine.ask("reset")["reset"]
    sidecar.suspend()
    name = world.engine.ask("add", prompt=PROMPTS[0])["name"]
    world.engine.ask("step")
    assert world.engine.held()["scheduler"]["requests_waiting"] == 1
    world.engine.ask("abort", name=name)
    held = world.engine.held()["scheduler"]
    assert (held["requests_waiting"], held["requests_known"]) == (0, 0)
    world.nothing_is_held()
    sidecar.resume()
    wait_until(lambda: sidecar.stats()["l2"]["slots_leased"] == 0, "leases come back")
    assert sidecar.stop() == 0


@pytest.mark.parametrize("what", ["given up", "hung", "killed"])
def test_a_load_under_way(world: World, what: str) -> None:
    """The sidecar is stopped after it has handed the slots to the scheduler's side, before a
    worker asks for them."""
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    assert world.engine.ask("reset")["reset"]
    failed = world.failed()
    name = world.engine.ask("add", prompt=PROMPTS[0])["name"]

    def slots_have_come() -> bool:
        nonlocal name
        if world.engine.ask("step", pause_s=0.02)["ended"]:  # the load was quicker than we looked
            assert world.engine.ask("reset")["reset"]
            name = world.engine.ask("add", prompt=PROMPTS[0])["name"]
        return bool(world.engine.held()["scheduler"]["slots_leased"] == 6)

    wait_until(slots_have_come, "slots for a load")
    sidecar.suspend()
    world.engine.ask("step")
    held = world.engine.held()
    assert (held["scheduler"]["loads_under_way"], held["worker"]["loads_under_way"]) == (1, 1)
    if what == "given up":
        world.engine.ask("abort", name=name)
        assert world.engine.held()["free_blocks"] < held["blocks"] - 1, "still to be written to"
        sidecar.resume()
    else:
        if what == "killed":
            sidecar.kill()
        ended: list[Any] = []
        wait_until(
            lambda: ended.extend(world.engine.ask("step", pause_s=0.01)["ended"]) or ended,
            "the request ends",
        )
        assert told(ended) == world.expected[:1]
        assert world.failed() - failed == 6
    world.nothing_is_held()
    if what != "killed":
        sidecar.resume()
        wait_until(lambda: sidecar.stats()["l2"]["slots_leased"] == 0, "leases come back")
        assert sidecar.stop() == 0


def test_pressure_preemption_and_aborts(world: World) -> None:
    """32 requests at once in 63 blocks, a fifth of them aborted at some step."""
    shared = [tokens(20 + number, 96) for number in range(4)]
    requests = [
        {
            "id": f"r{number}",
            "prompt": shared[number % 4] + tokens(100 + number, 40 + 7 * number),
            "tokens": 40,
        }
        for number in range(32)
    ]
    alone = world.engine.generate([each["prompt"] for each in requests], tokens=40)
    expected = {each["id"]: one["tokens"] for each, one in zip(requests, alone, strict=True)}
    sidecar = world.sidecar()
    before = world.engine.ask("metrics")["metrics"].get("vllm:num_preemptions", 0)
    aborts = {f"r{number}": 3 + 9 * number for number in range(0, 32, 5)}
    for round_ in range(3):
        assert world.engine.ask("reset")["reset"]
        renamed = [{**each, "id": f"{each['id']}-{round_}"} for each in requests]
        names = {f"{name}-{round_}": step for name, step in aborts.items()}
        done = world.engine.ask("run", requests=renamed, aborts=names, within_s=120)["done"]
        told = {name.rpartition("-")[0]: each for name, each in done.items()}
        assert set(expected) - set(aborts) <= set(told)
        for name, each in told.items():
            full = expected[name]
            assert each["tokens"] == full[: len(each["tokens"])], name
            assert len(each["tokens"]) == len(full) or name in aborts
    assert world.engine.ask("metrics")["metrics"]["vllm:num_preemptions"] > before
    world.nothing_is_held()
    wait_until(lambda: sidecar.stats()["l2"]["slots_leased"] == 0, "leases come back")
    assert sidecar.stop() == 0
