"""Tensor parallelism: two ranks, each a process with its part of the KV heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from fault_rig import PROMPTS, FaultWorld
from vllm_rig import (
    BLOCK,
    Engine,
    Sidecar,
    cached,
    check_same,
    differences,
    full_blocks,
    needs_vllm,
    patient,
    save_zeros,
    tokens,
)

from kvstore.blocks.hashing import hash_tokens
from kvstore.blocks.key import Namespace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

RANKS = 2
SETTINGS = {
    "prefetch": {"policy": "wait_complete", "max_wait": 3000, "min_load_tokens": 0},
    "response_timeout": 60_000,
}


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[FaultWorld]:
    folder = tmp_path_factory.mktemp("vllm")
    made = FaultWorld(folder, engines[0], ranks=RANKS, **SETTINGS)
    yield made
    made.engine.ask("stop")


@pytest.fixture
def sidecar(world: FaultWorld) -> Iterator[Sidecar]:
    yield world.sidecar()
    world.end_sidecars()
    world.check_idle()


def parts(world: FaultWorld) -> list[Namespace]:
    """The namespace of each rank."""
    first = Namespace(**world.engine.ask("namespace")["fields"])
    assert (first.tp_size, first.tp_rank, first.kv_heads) == (RANKS, 0, 1)
    return [replace(first, tp_rank=rank) for rank in range(RANKS)]


def zeros(sidecar: Sidecar, prompt: Sequence[int], namespaces: Sequence[Namespace]) -> None:
    for namespace in namespaces:
        save_zeros(sidecar.socket, namespace, hash_tokens(prompt, block_tokens=BLOCK))


def test_ranks_reuse_what_ranks_computed(
    world: FaultWorld, sidecar: Sidecar, engines: tuple[Engine, Engine]
) -> None:
    """Again in the same engine and in others: one with two ranks, and one that shares nothing."""
    a, b = engines
    prompts = [tokens(10 + number, length) for number, length in enumerate((31, 64, 200, 333, 500))]
    cold = a.generate(prompts, tokens=8)
    assert cached(cold) == [0] * len(prompts)
    own = a.generate(prompts, tokens=8)
    world.check_idle()
    blocks = sum((len(prompt) + 8 - 1) // BLOCK for prompt in prompts)  # the last is never input
    assert sidecar.stats()["l2"]["slots_ready"] == RANKS * blocks
    assert a.ask("reset")["reset"]
    again = a.generate(prompts, tokens=8)
    b.start(world.model, kv_transfer_config=patient(world.socket), tensor_parallel_size=RANKS)
    warm = b.generate(prompts, tokens=8)
    b.start(world.model, kv_transfer_config=patient(world.socket))
    alone = b.generate(prompts, tokens=8)
    b.ask("stop")
    for found in (again, warm):
        assert cached(found) == cached(own) == [full_blocks(prompt) for prompt in prompts]
        assert differences(found, own) == []
    assert cached(alone) == [0] * len(prompts), "one rank has other heads than two ranks"
    for found in (cold, own):
        check_same(found, alone)


def test_a_block_that_one_rank_lacks_is_computed(world: FaultWorld, sidecar: Sidecar) -> None:
    """Zeros with a valid checksum: with one rank's block they are not read; with both ranks' blocks
    they change the output, so the test depends on the KV."""
    prompt, other = tokens(20, 200), tokens(21, 200)
    zeros(sidecar, prompt, parts(world)[1:])
    zeros(sidecar, other, parts(world))
    failed = world.count("blocks_failed")
    (right,) = world.engine.generate([prompt], tokens=8, salt="not zeroed")
    (found,) = world.engine.generate([prompt], tokens=8)
    assert (found["cached"], world.count("blocks_failed") - failed) == (0, 0), "not even tried"
    check_same([found], [right])
    (wrong,) = world.engine.generate([other], tokens=8)
    (right,) = world.engine.generate([other], tokens=8, salt="not zeroed")
    assert wrong["cached"] == full_blocks(other)
    assert wrong["tokens"] != right["tokens"]


@pytest.mark.parametrize("what", ["given up", "hung", "killed"])
def test_a_load_under_way(world: FaultWorld, sidecar: Sidecar, what: str) -> None:
    assert world.outputs() == world.expected
    names = ("blocks_failed", "loads_timed_out")
    before = {name: world.count(name) for name in names}
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
        grown = [world.count(name) - before[name] for name in names]
        assert grown == [RANKS * 6, RANKS if what == "hung" else 0]
    world.check_idle()
    if what == "hung":
        sidecar.resume()
    if what != "killed":
        assert world.outputs() == world.expected
        world.check_idle()
        world.nothing_is_leased(sidecar)


def test_requests_that_wait_for_an_answer(world: FaultWorld, sidecar: Sidecar) -> None:
    assert world.outputs() == world.expected
    sidecar.suspend()
    before = world.count("waits_timed_out")
    assert world.outputs(together=True) == world.expected
    assert world.count("waits_timed_out") - before >= len(PROMPTS)
    sidecar.resume()
    world.check_idle()
    world.nothing_is_leased(sidecar)


def test_pressure_preemption_and_aborts(world: FaultWorld) -> None:
    requests = world.requests(16)
    expected = world.alone(requests)
    sidecar = world.sidecar()
    world.pressed(requests, expected, rounds=1)
    world.nothing_is_leased(sidecar)
