"""vLLM's OpenAI-compatible server over HTTP with only the flag of the README: two users, blocks
from L2 and from disk."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis_rig
from tiny_models import write_model
from vllm_rig import (
    HERE,
    LIMIT_S,
    START_LIMIT_S,
    Sidecar,
    connector,
    environment,
    full_blocks,
    needs_vllm,
    tokens,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

TRIES_MAX = 20
"""Maximum number of attempts with the default policy, which computes blocks that a busy machine
does not load in time."""


class Server:
    """vLLM's OpenAI-compatible server: front end, scheduler and worker as vLLM starts them."""

    def __init__(self, model: Path, transfer: dict[str, Any], log: Path) -> None:
        self.port = redis_rig.free_port()
        self._log = log.open("w")
        self.log = log
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager",
            "--block-size", "32", "--num-gpu-blocks-override", "128",
            "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip
        env = {**environment(), "VLLM_SERVER_DEV_MODE": "1"}
        del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=env, cwd=HERE
        )

    def wait(self) -> None:
        wait_until(self._ready, "the server is ready", START_LIMIT_S)

    def _ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()[-4000:]
        try:
            self.ask("/health")
        except OSError:
            return False
        return True

    def ask(self, path: str, body: Any = None, method: str = "GET") -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data,
            {"content-type": "application/json"},
            method="POST" if body is not None else method,
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            found: bytes = answer.read()
            return found

    def complete(self, prompt: list[int], salt: str) -> tuple[str, int]:
        """The text, and the number of cached prompt tokens."""
        body = {
            "model": None, "prompt": prompt, "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "cache_salt": salt,
        }  # fmt: skip
        body["model"] = json.loads(self.ask("/v1/models"))["data"][0]["id"]
        answer = json.loads(self.ask("/v1/completions", body))
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def cached_from(self, source: str) -> float:
        """Cached prompt tokens of this source so far, from vLLM's metrics."""
        lines = self.ask("/metrics").decode().splitlines()
        of_source = [line for line in lines if f'source="{source}"' in line]
        name = "vllm:prompt_tokens_cached_by_source_total"
        return sum(float(line.split()[-1]) for line in of_source if line.startswith(name))

    def reset(self) -> None:
        wait_until(lambda: self._reset_once(), "vLLM's own cache is empty")

    def _reset_once(self) -> bool:
        self.ask("/reset_prefix_cache", method="POST")
        return True

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(LIMIT_S)
        self._log.close()


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("sidecar")
    disk = ("--disk", str(folder / "disk"), "--disk-capacity", "512MiB")
    made = Sidecar(folder, "--l2", "32MiB", "--slot-bytes", "128KiB", *disk)
    yield made
    assert made.stop() == 0, "leases were not released"


@pytest.fixture(scope="module")
def server(sidecar: Sidecar, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    write_model(folder / "llama", "llama", 1)
    made = Server(folder / "llama", connector(sidecar.socket), folder / "server.log")
    try:
        made.wait()
        yield made
    finally:
        made.end()


def saved(sidecar: Sidecar, blocks: int) -> None:
    wait_until(lambda: sidecar.stats()["l2"]["slots_ready"] >= blocks, "the blocks are saved")


@pytest.mark.parametrize("source", ["host", "disk"])
def test_a_long_prompt_is_reused(server: Server, sidecar: Sidecar, source: str) -> None:
    prompt = tokens(10 if source == "host" else 11, 700)
    text, cached = server.complete(prompt, "user")
    assert cached == 0
    saved(sidecar, full_blocks(prompt) // 32)
    before = server.cached_from(source)
    for _ in range(TRIES_MAX):
        server.reset()
        if source == "disk":
            sidecar.post("/v1/flush")
            sidecar.post("/v1/clear?tier=l2")
        again, cached = server.complete(prompt, "user")
        assert again == text
        if cached == full_blocks(prompt):
            break
    assert cached == full_blocks(prompt)
    assert server.cached_from(source) - before >= full_blocks(prompt)


def test_two_users_share_nothing(server: Server, sidecar: Sidecar) -> None:
    prompt = tokens(1, 400)
    text, cached = server.complete(prompt, "user a")
    assert cached == 0
    saved(sidecar, full_blocks(prompt) // 32)
    for _ in range(TRIES_MAX):
        server.reset()
        again, cached = server.complete(prompt, "user a")
        assert again == text
        if cached == full_blocks(prompt):
            break
    assert cached == full_blocks(prompt), "user a's own"
    assert server.complete(prompt, "user b") == (text, 0)
    metrics = server.ask("/metrics").decode().splitlines()
    loaded = next(line for line in metrics if line.startswith("vllm:kvstore_blocks_loaded_t"))
    assert float(loaded.split()[-1]) >= full_blocks(prompt) / 32
