"""The connector in real engines: engines reuse the blocks of others, and the output is the same.

Two processes with vLLM, one sidecar with a disk below it. Starting an engine is slow (its imports
alone take seconds), so tests share engines, and each test has new prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model
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
    wait_until,
)

from kvstore.blocks.hashing import hash_tokens
from kvstore.blocks.key import Namespace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

PROMPT_SETS = 30
OF_A_PROMPT = tokens(60, 150)
"""Prompt whose own log-probabilities are requested."""


def prompt_set(number: int) -> list[list[int]]:
    """Two prompts that share a prefix, with lengths at, before and after a block's end."""
    shared = tokens(1000 + number, 32 * (1 + number % 8) + (0, 1, 31)[number % 3])
    return [shared + tokens(2000 + number, 70 + number), shared + tokens(3000 + number, number * 7)]


PROMPTS = [prompt for number in range(PROMPT_SETS) for prompt in prompt_set(number)]
SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")


class World:
    """A sidecar and two engines."""

    def __init__(self, folder: Path, engines: tuple[Engine, Engine]) -> None:
        self.llama, self.qwen = folder / "llama", folder / "qwen"
        write_model(self.llama, "llama", 1)
        write_model(self.qwen, "qwen3", 2)
        self.disk = folder / "disk"
        self.sidecar = Sidecar(
            folder, "--l2", "128MiB", "--slot-bytes", "128KiB",
            "--disk", str(self.disk), "--disk-capacity", "512MiB",
        )  # fmt: skip
        self.a, self.b = engines
        self.a.start(self.llama, num_gpu_blocks_override=1024)
        self.plain = self.a.generate(PROMPTS, tokens=8)
        """The results of a vLLM without kvstore."""
        (self.plain_of_a_prompt,) = self.a.generate([OF_A_PROMPT], tokens=4, prompt_logprobs=1)
        for engine in engines:
            self.start(engine, self.llama)

    def start(self, engine: Engine, model: Path, **arguments: Any) -> None:
        """An engine whose own cache holds all prompts of a test."""
        transfer = patient(self.sidecar.socket)
        engine.start(model, kv_transfer_config=transfer, num_gpu_blocks_override=1024, **arguments)

    def only_disk(self) -> None:
        """Write all blocks to disk and clear L2."""
        assert json.loads(self.sidecar.post("/v1/flush"))["flushed"]
        self.sidecar.post("/v1/clear?tier=l2")

    def by_source(self, engine: Engine) -> dict[str, float]:
        """Cached prompt tokens so far by source, from vLLM's metrics."""
        metrics = engine.ask("metrics")["metrics"]
        name = "vllm:prompt_tokens_cached_by_source"
        return {source: metrics.get(f"{name}{{{source}}}", 0) for source in SOURCES}

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
    assert made.sidecar.stop() == 0, "leases were not released"


def saved(world: World, engine: Engine) -> None:
    """Wait until every save of this engine has ended."""
    assert engine.ask("settle")["requests"] == 0
    wait_until(lambda: engine.state()["worker"]["saves_under_way"] == 0, "saves end")


def exact(prompts: list[list[int]]) -> list[int]:
    return [full_blocks(prompt) for prompt in prompts]


def own_hits() -> int:
    """Tokens in vLLM's own cache when it was empty at first: those that the second of two prompts
    shares with the first."""
    shared = 0
    for one, other in zip(PROMPTS[::2], PROMPTS[1::2], strict=True):
        blocks = range(0, full_blocks(other) + 1, BLOCK)
        shared += max(stop for stop in blocks if one[:stop] == other[:stop])
    return shared


def reused(world: World, own: list[dict[str, Any]], source: str) -> None:
    """Engine B, whose own cache is empty, loads every full block of all prompts from this source.
    Its output equals that with vLLM's own cache."""
    assert world.b.ask("reset")["reset"]
    before = world.by_source(world.b)
    found = world.b.generate(PROMPTS, tokens=4)
    assert cached(found) == exact(PROMPTS)
    shortened = [
        {**each, "tokens": each["tokens"][:4], "logprobs": each["logprobs"][:4]} for each in own
    ]
    assert differences(found, shortened) == []
    after = world.by_source(world.b)
    grown = {name: after[name] - before[name] for name in SOURCES if after[name] != before[name]}
    assert grown == {"device": own_hits(), source: sum(exact(PROMPTS)) - own_hits()}


def test_b_reuses_what_a_computed_then_again_after_reset_restart_and_from_disk(
    world: World,
) -> None:
    cold = world.a.generate(PROMPTS, tokens=8)
    own = world.a.generate(PROMPTS, tokens=8)
    saved(world, world.a)
    warm = world.b.generate(PROMPTS, tokens=8)
    assert cached(warm) == cached(own) == exact(PROMPTS)
    # A prompt computed in other pieces differs in its last bits, in vLLM's own cache too. So, bit
    # for bit: what vLLM's own cache gives, or a vLLM without kvstore. Against a cold run: the same
    # tokens, within rounding.
    assert differences(cold, world.plain) == []
    assert differences(warm, own) == []
    check_same(warm, cold)
    saved(world, world.b)
    reused(world, own, "host")

    saved(world, world.b)
    world.only_disk()
    reused(world, own, "disk")

    assert world.sidecar.stop() == 0
    world.sidecar.start()
    for side in ("scheduler", "worker"):
        wait_until(lambda side=side: world.b.state()[side]["store_connected"], "connected again")
    reused(world, own, "disk")


def test_what_decode_fills_is_reused_too(world: World) -> None:
    prompt = tokens(50, 100)
    wait_until(lambda: world.a.state()["worker"]["store_connected"], "connected again")
    first = world.a.generate([prompt], tokens=100)
    saved(world, world.a)
    longer = prompt + first[0]["tokens"]
    (second,) = world.b.generate([[*longer, 9]], tokens=4)
    # The last output token was never an input.
    assert second["cached"] == full_blocks(longer)


def test_salt_and_prompt_logprobs(world: World) -> None:
    prompt = OF_A_PROMPT
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
    assert told["prompt_logprobs"] == world.plain_of_a_prompt["prompt_logprobs"]
    assert differences([told], [plain]) == []


def test_zeroed_kv_with_a_valid_checksum_changes_the_output(world: World) -> None:
    """Proves that the other tests depend on the KV."""
    prompt = tokens(70, 200)
    namespace = world.namespace(world.b)
    hashes = hash_tokens(prompt, block_tokens=BLOCK)
    save_zeros(world.sidecar.socket, namespace, hashes)
    (wrong,) = world.b.generate([prompt], tokens=8)
    (right,) = world.a.generate([prompt], tokens=8, salt="not zeroed")
    assert wrong["cached"] == full_blocks(prompt)
    assert wrong["tokens"] != right["tokens"]


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_corrupt_blocks_on_disk_are_computed(world: World, damage: str) -> None:
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
    world.a.generate(prompts, tokens=8)
    own = world.a.generate(prompts, tokens=8)
    saved(world, world.a)
    warm = world.b.generate(prompts, tokens=8)
    assert cached(warm) == cached(own) == exact(prompts)
    # In bfloat16 a prompt computed in other pieces may even get other tokens.
    assert differences(warm, own) == []
