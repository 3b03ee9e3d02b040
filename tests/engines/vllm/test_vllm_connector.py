"""The connector in real engines: what one computes, others reuse, and the output stays the same.

Two processes with vLLM, one sidecar with a disk below it. Engines are dear to start (their imports
alone take seconds), so tests share them, and prompts are new for each test.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model
from vllm_rig import (
    BLOCK,
    ROUNDING,
    Engine,
    Sidecar,
    full_blocks,
    needs_vllm,
    patient,
    tokens,
    wait_until,
)

import kvstore
from kvstore.blocks import Namespace
from kvstore.hashing import hash_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

PROMPT_SETS = 30


class World:
    """A sidecar and two engines."""

    def __init__(self, folder: Path, engines: tuple[Engine, Engine]) -> None:
        self.llama, self.qwen = folder / "llama", folder / "qwen"
        write_model(self.llama, "llama", 1)
        write_model(self.qwen, "qwen3", 2)
        self.disk = folder / "disk"
        self.sidecar = Sidecar(
            folder, "--l2", "128MiB", "--slot", "128KiB",
            "--disk", str(self.disk), "--disk-capacity", "512MiB",
        )  # fmt: skip
        self.a, self.b = engines
        for engine in engines:
            self.start(engine, self.llama)

    def start(self, engine: Engine, model: Path, **arguments: Any) -> None:
        """An engine whose own cache holds all prompts of a test."""
        transfer = patient(self.sidecar.socket)
        engine.start(model, kv_transfer_config=transfer, num_gpu_blocks_override=1024, **arguments)

    def post(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.sidecar.url}{path}", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def only_disk(self) -> None:
        """Everything is on disk, and nowhere else but in the engines."""
        assert self.post("/v1/flush")["flushed"]
        self.post("/v1/clear?tier=l2")

    def namespace(self, engine: Engine) -> Namespace:
        return Namespace(**engine.ask("namespace")["fields"])


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("vllm"), engines)
    yield made
    for engine in engines:
        engine.ask("stop")
    assert made.sidecar.stop() == 0, "leases that did not come back"


def saved(world: World, engine: Engine) -> None:
    """Every save of this engine has ended."""
    assert engine.ask("settle")["requests"] == 0
    wait_until(lambda: engine.held()["worker"]["saves_under_way"] == 0, "saves end")


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[Any]:
    """Results that do not have the same tokens with the same log-probabilities."""
    assert len(one) == len(other)
    return [
        (number, a["cached"], b["cached"], a["tokens"], b["tokens"], a["logprobs"], b["logprobs"])
        for number, (a, b) in enumerate(zip(one, other, strict=True))
        if (a["tokens"], a["logprobs"]) != (b["tokens"], b["logprobs"])
    ]


def prompt_set(number: int) -> list[list[int]]:
    """Two prompts that share a beginning, of lengths at, before and after a block's end."""
    shared = tokens(1000 + number, 32 * (1 + number % 8) + (0, 1, 31)[number % 3])
    return [shared + tokens(2000 + number, 70 + number), shared + tokens(3000 + number, number * 7)]


def cached(results: list[dict[str, Any]]) -> list[int]:
    return [result["cached"] for result in results]


def exact(prompts: list[list[int]]) -> list[int]:
    return [full_blocks(prompt) for prompt in prompts]


def test_b_reuses_what_a_computed_then_again_after_reset_restart_and_from_disk(
    world: World,
) -> None:
    prompts = [prompt for number in range(PROMPT_SETS) for prompt in prompt_set(number)]
    cold = world.a.generate(prompts, tokens=8)
    own = world.a.generate(prompts, tokens=8)
    saved(world, world.a)
    warm = world.b.generate(prompts, tokens=8)
    assert cached(warm) == cached(own) == exact(prompts)
    # A prompt computed in other pieces differs in its last bits, in vLLM's own cache too. So, bit
    # for bit: what vLLM's own cache gives. Against a cold run: the same tokens, within rounding.
    assert differences(warm, own) == []
    assert [result["tokens"] for result in warm] == [result["tokens"] for result in cold]
    for one, other in zip(warm, cold, strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=ROUNDING)

    few, cold = prompts[20:28], own[20:28]
    assert world.b.ask("reset")["reset"]
    assert cached(again := world.b.generate(few, tokens=8)) == exact(few)
    assert differences(again, cold) == []

    world.only_disk()
    assert world.b.ask("reset")["reset"]
    assert cached(again := world.b.generate(few, tokens=8)) == exact(few)
    assert differences(again, cold) == []
    by_source = world.b.ask("metrics")["metrics"]
    assert by_source["vllm:kvstore_blocks_loaded"] > 0

    assert world.sidecar.stop() == 0
    world.sidecar.start()
    wait_until(lambda: world.b.held()["scheduler"]["store_connected"], "connected again")
    wait_until(lambda: world.b.held()["worker"]["store_connected"], "connected again")
    assert world.b.ask("reset")["reset"]
    assert cached(again := world.b.generate(few, tokens=8)) == exact(few)
    assert differences(again, cold) == []


def test_what_decode_fills_is_reused_too(world: World) -> None:
    prompt = tokens(50, 100)
    wait_until(lambda: world.a.held()["worker"]["store_connected"], "connected again")
    first = world.a.generate([prompt], tokens=100)
    saved(world, world.a)
    longer = prompt + first[0]["tokens"]
    (second,) = world.b.generate([[*longer, 9]], tokens=4)
    # The last output token was never computed as an input.
    assert second["cached"] == full_blocks(longer)


def test_salt_and_prompt_logprobs(world: World) -> None:
    prompt = tokens(60, 150)
    (plain,) = world.a.generate([prompt], tokens=4)
    saved(world, world.a)
    (salted,) = world.b.generate([prompt], salt="tenant", tokens=4)
    assert salted["cached"] == 0
    assert differences([salted], [plain]) == []
    saved(world, world.b)
    (again,) = world.a.generate([prompt], salt="tenant", tokens=4)
    assert again["cached"] == full_blocks(prompt)
    (told,) = world.b.generate([prompt], tokens=4, prompt_logprobs=1)
    assert told["cached"] == 0, "log-probabilities of a prompt need all of it computed"
    assert len(told["prompt_logprobs"]) == len(prompt)
    assert differences([told], [plain]) == []


def test_zeroed_kv_with_a_valid_checksum_changes_the_output(world: World) -> None:
    """So the others see KV at all."""
    prompt = tokens(70, 200)
    namespace = world.namespace(world.b)
    hashes = hash_tokens(prompt, block_tokens=BLOCK)
    client = kvstore.connect(world.sidecar.socket, namespace)
    save = client.save(hashes)
    wait_until(lambda: client.poll(0.1) is not None and save.done, "grants")
    assert len(save.grants) == len(hashes)
    for _, slot in save.grants:
        client.slab_of(save).view(slot)[: namespace.block_bytes] = bytes(namespace.block_bytes)
    client.commit(save)
    assert client.sync(10)
    client.close()
    (wrong,) = world.b.generate([prompt], tokens=8)
    (right,) = world.a.generate([prompt], tokens=8, salt="not zeroed")
    assert wrong["cached"] == full_blocks(prompt)
    assert wrong["tokens"] != right["tokens"]


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damaged_blocks_on_disk_are_computed(world: World, damage: str) -> None:
    prompts = [tokens(80 + number + 10 * len(damage), 300) for number in range(3)]
    cold = world.a.generate(prompts, tokens=8)
    saved(world, world.a)
    world.only_disk()
    for segment in [path for path in world.disk.rglob("*") if path.is_file()]:
        size = segment.stat().st_size
        with segment.open("r+b") as file:
            if damage == "truncated":
                file.truncate(size // 2)
            else:
                for place in range(8192 + 700, size, 65536):
                    file.seek(place)
                    byte = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte[0] ^ 0xFF]))
    warm = world.b.generate(prompts, tokens=8)
    assert differences(cold, warm) == []
    assert sum(cached(warm)) < sum(exact(prompts))


def test_other_weights_and_other_dtypes_share_nothing(world: World, tmp_path: Path) -> None:
    prompt = tokens(90, 100)
    world.a.generate([prompt], tokens=4)
    saved(world, world.a)
    mine = world.namespace(world.a)
    others = tmp_path / "llama"  # the same name, other weights
    write_model(others, "llama", 77)
    world.start(world.b, others)
    assert cached(world.b.generate([prompt], tokens=4)) == [0]
    assert world.namespace(world.b).revision != mine.revision
    world.start(world.b, world.llama, dtype="bfloat16")
    assert cached(world.b.generate([prompt], tokens=4)) == [0]
    assert asdict(world.namespace(world.b)) == {**asdict(mine), "dtype": "bfloat16"}


def test_qwen3_in_bfloat16(world: World) -> None:
    prompts = [tokens(100 + number, 90 + 61 * number) for number in range(4)]
    for engine in (world.a, world.b):
        world.start(engine, world.qwen, dtype="bfloat16")
    cold = world.a.generate(prompts, tokens=8)
    saved(world, world.a)
    warm = world.b.generate(prompts, tokens=8)
    assert cached(warm) == exact(prompts)
    assert [result["tokens"] for result in warm] == [result["tokens"] for result in cold]
