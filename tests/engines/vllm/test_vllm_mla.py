"""Latent attention (MLA), with a tiny DeepSeek-V2. On a CPU vLLM has no prefix cache for it, so all
cached tokens here come from the store."""

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
"""The only block size of vLLM's MLA on a CPU."""
WELL_ROTATED = {"custom_ops": ["-rotary_embedding"]}
"""vLLM 0.32's rotary kernel for CPUs treats MLA's strided tensors as dense. Positions are wrong,
and different for a whole prompt and for its end. This selects vLLM's other implementation, whose
output equals that of transformers' DeepSeek-V2."""
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
            attention_backend="CPU_MLA",  # a CPU with AMX would get a backend for bfloat16 only
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
    assert made.sidecar.stop() == 0, "leases were not released"


def exact(prompts: list[list[int]]) -> list[int]:
    """Tokens of the prompts' full blocks; the last token is always computed."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]


def saved(engine: Engine) -> None:
    assert engine.ask("settle")["requests"] == 0
    wait_until(lambda: engine.state()["worker"]["saves_under_way"] == 0, "saves end")


def test_latents_are_reused_and_ranks_share_them(world: World) -> None:
    """Every rank computes the same latent, so all ranks share one block."""
    a, b = world.a, world.b
    cold = a.generate(PROMPTS, tokens=8)
    assert cached(cold) == [0] * len(PROMPTS)
    saved(a)
    stored = sum((len(prompt) + 8 - 1) // BLOCK for prompt in PROMPTS)  # the last is never input
    assert world.blocks == stored
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
    assert world.blocks == stored + (300 + 8 - 1) // BLOCK
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
