"""Corrupt blocks below L2, at rest in a real Valkey: vLLM computes them, with the connector and
with the tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis_rig
from tiny_models import write_model
from vllm_rig import (
    BLOCK,
    PATIENT_TIER,
    Engine,
    Sidecar,
    check_same,
    needs_vllm,
    our_tier,
    patient,
    save_zeros,
    tier,
    tokens,
)

from kvstore.blocks.hashing import hash_tokens
from kvstore.blocks.key import Namespace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

HEADER_BYTES = 4096
DAMAGES = (
    "none",
    "a bit flipped",
    "truncated",
    "zeroed",
    "payload zeroed",
    "another block's",
    "another layout's",
)


class World:
    """A sidecar over a Valkey, and an engine with the connector or with the tier."""

    def __init__(self, folder: Path, engine: Engine, by: str) -> None:
        self.by, self.engine = by, engine
        server = redis_rig.Server(folder / "valkey", redis_rig.valkey_binary())
        self.frames = server.client()
        config = f'[[tiers]]\nkind = "redis"\nurl = "redis://{server.address}"\n'
        self.sidecar = Sidecar(folder, "--l2", "16MiB", "--slot-bytes", "128KiB", config=config)
        write_model(folder / "llama", "llama", 1)
        socket = self.sidecar.socket
        transfer = (
            patient(socket)
            if by == "connector"
            else (tier(16 << 20, our_tier(socket, **PATIENT_TIER)))
        )
        engine.start(
            folder / "llama", kv_transfer_config=transfer, prefix_caching_hash_algo="sha256_cbor"
        )

    @property
    def namespace(self) -> Namespace:
        fields = self.engine.ask("namespace" if self.by == "connector" else "tier")["fields"]
        return Namespace(**fields)

    def loaded(self) -> float:
        """Number of blocks loaded from the store so far."""
        if self.by == "tier":
            return self.engine.ask("tier")["stats"].get("blocks_loaded", 0)
        return self.engine.ask("metrics")["metrics"].get("vllm:kvstore_blocks_loaded", 0)

    def only_valkey(self) -> None:
        """Write all blocks to Valkey and clear L2."""
        assert self.engine.ask("settle")["requests"] == 0
        # With the tier this clears vLLM's host pool; the connector has none.
        assert self.engine.ask("reset", connector=self.by == "tier")["reset"]
        for path in ("/v1/flush", "/v1/clear?tier=l2"):
            self.sidecar.post(path)

    def hashes(self, prompt: list[int]) -> list[bytes]:
        group = b"" if self.by == "connector" else bytes(4)
        return [name + group for name in hash_tokens(prompt, block_tokens=BLOCK)]

    def save_zeros(self, prompt: list[int], namespace: Namespace) -> None:
        """Write valid blocks of zeros under a prompt's hashes."""
        save_zeros(self.sidecar.socket, namespace, self.hashes(prompt))

    def damage(self, how: str, prompt: list[int]) -> None:
        namespace = self.namespace
        if how == "another layout's":
            self.save_zeros(prompt, other := replace(namespace, layout="another"))
            self.only_valkey()
        names = {
            digest: [self.name(digest, each) for each in self.hashes(prompt)]
            for digest in {namespace.digest, *([other.digest] if "layout" in how else [])}
        }
        mine = names[namespace.digest]
        frames = [self.frames.get(name) for name in mine]
        assert all(frames), "blocks that are not in Valkey"
        if how == "another block's":
            frames = frames[1:] + frames[:1]
        elif how == "another layout's":
            frames = [self.frames.get(name) for name in names[other.digest]]
        for name, frame in zip(mine, frames, strict=True):
            assert frame
            self.frames.set(name, damaged(frame, how))

    def name(self, digest: str, block: bytes) -> bytes:
        (found,) = self.frames.keys(f"*:{digest}:{block.hex()}")
        return bytes(found)


def damaged(frame: bytes, how: str) -> bytes:
    if how == "a bit flipped":
        at = HEADER_BYTES + (len(frame) - HEADER_BYTES) // 2
        return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]
    if how == "truncated":
        return frame[: len(frame) // 2]
    if how == "zeroed":
        return bytes(len(frame))
    if how == "payload zeroed":
        return frame[:HEADER_BYTES] + bytes(len(frame) - HEADER_BYTES)
    return frame


@pytest.fixture(scope="module", params=["connector", "tier"])
def world(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    engines: tuple[Engine, Engine],
) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("damage"), engines[0], request.param)
    yield made
    engines[0].ask("stop")
    assert made.sidecar.stop() == 0, "leases were not released"


@pytest.mark.parametrize("how", DAMAGES)
def test_corrupt_blocks_are_computed(world: World, how: str) -> None:
    prompt = tokens(100 + DAMAGES.index(how), 200)
    cold = world.engine.generate([prompt], tokens=8)
    world.only_valkey()
    world.damage(how, prompt)
    before = world.loaded()
    found = world.engine.generate([prompt], tokens=8)
    check_same(found, cold)
    assert found[0]["finish"] == "length"
    assert world.loaded() - before == (6 if how == "none" else 0)


def test_valid_zeros_change_the_output(world: World) -> None:
    """Proves that the other tests would detect a wrong block."""
    prompt = tokens(200, 200)
    right = world.engine.generate([prompt], tokens=8, salt="not zeroed")
    world.save_zeros(prompt, world.namespace)
    before = world.loaded()
    wrong = world.engine.generate([prompt], tokens=8)
    assert world.loaded() - before == 6
    assert wrong[0]["tokens"] != right[0]["tokens"]
