"""Latent attention (MLA), by a tiny DeepSeek-V2. On a CPU vLLM keeps no prefix cache of its own for
it, so whatever is cached here came from the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model
from vllm_rig import (
    Engine,
    Sidecar,
    cached,
    check_same,
    differences,
    needs_vllm,
    patient,
    save_zeros,
    tokens,
    wait_until,
)

from kvstore.blocks.hashing import hash_tokens
from kvstore.blocks.key import Namespace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

BLOCK = 16
"""The only one of vLLM's MLA on a CPU."""
WELL_ROTATED = {"custom_ops": ["-rotary_embedding"]}
"""vLLM 0.32's rotary kernel for CPUs takes MLA's strided tensors for dense ones, so that positions
come out wrong, otherwise for a whole prompt than for its end. This is vLLM's other way to compute
them, which says what transformers' DeepSeek-V2 says."""
PROMPTS = [tokens(number, length) for number, length in enumerate((15, 33, 97, 200, 333, 480))]


class World:
    """Two engines and a sidecar."""

    def __init__(self, folder: Path, engines: tuple[Engine, Engine]) -> None:
        self.model = folder / "deepseek"
        write_model(self.model, "deepseek_v2", 1)
        self.sidecar = Sidecar(folder, "--l2", "128MiB", "--slot-bytes", "256KiB")
        self.a, self.b = engines
        self.start(self.a)

    def start(self, engine: Engine, **arguments: Any) -> None:
        engine.start(
            self.model,
            kv_transfer_config=patient(self.sidecar.socket),
            block_size=BLOCK,
            num_gpu_blocks_override=256,
            compilation_config=WELL_ROTATED,
            **arguments,
        )

    @property
    def blocks(self) -> int:
        ready: int = self.sidecar.stats()["l2"]["slots_ready"]
        return ready


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("vllm"), engines)
    yield made
    for engine in engines:
        engine.ask("stop")
    assert made.sidecar.stop() == 0, "leases that did not come back"


def exact(prompts: list[list[int]]) -> list[int]:
    """Tokens of the prompts' full blocks; the last token is always computed."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]


def saved(engine: Engine) -> None:
    assert engine.ask("settle")["requests"] == 0
    wait_until(lambda: engine.held()["worker"]["saves_under_way"] == 0, "saves end")


def test_latents_are_reused_and_ranks_share_them(world: World) -> None:
    """Every rank computes the same latent: one keeps it for all, however many there are."""
    a, b = world.a, world.b
    cold = a.generate(PROMPTS, tokens=8)
    assert cached(cold) == [0] * len(PROMPTS)
    saved(a)
    held = sum((len(prompt) + 8 - 1) // BLOCK for prompt in PROMPTS)  # the last is never input
    assert world.blocks == held
    again = a.generate(PROMPTS, tokens=8)
    world.start(b)
    warm = b.generate(PROMPTS, tokens=8)
    assert cached(again) == cached(warm) == exact(PROMPTS)
    assert differences(warm, again) == []
    check_same(warm, cold)

    saved(b)
    world.start(b, tensor_parallel_size=2)
    by_two = b.generate(PROMPTS, tokens=8)
    assert cached(by_two) == exact(PROMPTS)
    check_same(by_two, cold)
    other = [tokens(50, 300)]
    cold = b.generate(other, tokens=8)
    saved(b)
    assert world.blocks == held + (300 + 8 - 1) // BLOCK
    warm = a.generate(other, tokens=8)
    assert cached(warm) == exact(other)
    check_same(warm, cold)


def test_zeroed_latents_change_the_output(world: World) -> None:
    prompt = tokens(60, 200)
    namespace = Namespace(**world.a.ask("namespace")["fields"])
    assert (namespace.attention, namespace.kv_heads) == ("mla", 1)
    names = hash_tokens(prompt, block_tokens=BLOCK)
    save_zeros(world.sidecar.socket, namespace, names)
    (wrong,) = world.a.generate([prompt], tokens=8)
    (right,) = world.a.generate([prompt], tokens=8, salt="not zeroed")
    assert [wrong["cached"]] == exact([prompt])
    assert wrong["tokens"] != right["tokens"]
