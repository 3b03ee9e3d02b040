"""Real vLLM engines and sidecars for tests, each in a separate process."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.blocks.key import Namespace

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LIMIT_S = 180.0
"""A guard against hangs."""
START_LIMIT_S = 600.0
"""The same for an engine's start, whose imports take minutes on a busy machine."""
BLOCK = 32
CACHE = tempfile.TemporaryDirectory(prefix="kvstore-cache-")
"""Instead of the user's cache folder. vLLM's own part of it saves time at its start."""


def needs_vllm() -> pytest.MarkDecorator:
    """Skip a module's tests, with the reason, where vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    absent = spec is None or spec.origin is None
    return pytest.mark.skipif(absent, reason="vLLM is not installed (.ci/engines installs it)")


def environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {
        **inherited,
        "XDG_CACHE_HOME": CACHE.name,
        "VLLM_CACHE_ROOT": inherited.get("VLLM_CACHE_ROOT") or str(Path.home() / ".cache" / "vllm"),
        "PYTHONPATH": f"{ROOT}:{HERE}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two ranks need two NUMA nodes otherwise
    }


class Engine:
    """A process with vLLM in it."""

    def __init__(self, log: Path, python: str = sys.executable) -> None:
        self.log = log
        here, there = os.pipe()
        os.set_inheritable(there, True)
        self._log = log.open("w")
        program = [python, str(HERE / "vllm_program.py")]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3>&{there}', *program],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment(),
            pass_fds=[there],
            text=True,
        )
        os.close(there)
        self._answers = os.fdopen(here, "r")

    def ask(self, do: str, limit_s: float = LIMIT_S, **arguments: Any) -> dict[str, Any]:
        """The answer to a command. AssertionError: the command or the process failed."""
        answer = self.try_ask(do, limit_s, **arguments)
        assert "error" not in answer, f"{answer['error']}\n{self.tail()}"
        return answer

    def try_ask(self, do: str, limit_s: float = LIMIT_S, **arguments: Any) -> dict[str, Any]:
        """Like `ask`, but a failed command is {"error": ...}."""
        self.send(do, **arguments)
        return self.answer(limit_s)

    def send(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], limit_s)
        assert ready, f"no answer within {limit_s:g} s\n{self.tail()}"
        line = self._answers.readline()
        assert line, f"the engine's process has ended\n{self.tail()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def start(self, model: Path, **arguments: Any) -> None:
        """Start an engine of this model. arguments: of vLLM."""
        self.ask("start", START_LIMIT_S, args={"model": str(model), **arguments})

    def generate(self, prompts: Sequence[Sequence[int]], **arguments: Any) -> list[dict[str, Any]]:
        batch = [list(prompt) for prompt in prompts]
        results: list[dict[str, Any]] = self.ask("generate", prompts=batch, **arguments)["results"]
        return results

    def state(self) -> dict[str, Any]:
        return self.ask("state")

    def host_pool(self) -> Path:
        """The file of its offloading's host pool, which it maps."""
        maps = Path(f"/proc/{self._process.pid}/maps").read_text().splitlines()
        (found,) = {line.split(maxsplit=5)[-1] for line in maps if "vllm_offload_" in line}
        return Path(found)

    def tail(self) -> str:
        return self.log.read_text()[-6000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(LIMIT_S)

    def end(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(LIMIT_S)
        self._answers.close()
        self._log.close()
        return code


class Sidecar:
    """`kvstore serve` in a separate process."""

    def __init__(self, folder: Path, *options: str, config: str = "") -> None:
        self.socket = str(folder / "kv.sock")
        self._folder = folder
        arguments = ["--socket", self.socket, "--port", "0", *options]
        if config:
            (folder / "kvstore.toml").write_text(config)
            arguments += ["--config", str(folder / "kvstore.toml")]
        self._arguments = arguments
        self.start()

    def start(self) -> None:
        """Start it (again), and wait until it accepts clients."""
        log = (self._folder / "sidecar.log").open("a")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "serve", *self._arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}"},
        )
        log.close()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "kvstore ready" in line, (self._folder / "sidecar.log").read_text()
        self.url = next(word.rstrip(",") for word in line.split() if word.startswith("http"))

    def stats(self) -> dict[str, Any]:
        from kvstore.ipc.sidecar_connection import request_stats

        return request_stats(self.socket, None)

    def post(self, path: str) -> bytes:
        """Call its HTTP API."""
        request = urllib.request.Request(f"{self.url}{path}", method="POST")
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            found: bytes = answer.read()
            return found

    def suspend(self) -> None:
        """Suspend it, and wait until the kernel has stopped the last of its threads."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(LIMIT_S)

    def stop(self) -> int:
        """Stop it; returns 0 if every lease was released."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(LIMIT_S)

    @property
    def running(self) -> bool:
        return self._process.poll() is None


def connector(socket: str, **extra: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` with KVStoreConnector. extra: keys of its configuration."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": socket, **extra},
    }


def tier(host_bytes: int, *tiers: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` with its own tiering over these secondary tiers."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_offloading",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": list(tiers),
            **extra,
        },
    }


def our_tier(socket: str, **table: Any) -> dict[str, Any]:
    """The table of `KVStoreTier` over a sidecar. Tests reset vLLM's pool to see loads, so a reset
    keeps saved blocks."""
    where = {"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm"}
    return {**where, "socket": socket, "on_reset": "keep", **table}


PATIENT = {"policy": "wait_complete", "max_wait": 20_000, "min_load_tokens": 0}
"""No truncation: the number of cached tokens is exact on a machine of any speed."""
PATIENT_TIER = {"max_wait": 20_000, "response_timeout": 60_000}
"""The same for the tier."""
ROUNDING = 1e-5
"""Tolerance: a prompt split differently differs in its last bits, in vLLM's own cache too."""


def patient(socket: str, **extra: Any) -> dict[str, Any]:
    """KVStoreConnector without truncation."""
    return connector(socket, prefetch=PATIENT, response_timeout=60_000, **extra)


def check_same(
    found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], within: float = ROUNDING
) -> None:
    """Check for the same tokens, with the same log-probabilities within rounding."""
    assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=within)


def differences(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[Any]:
    """Results that do not have the same tokens with the same log-probabilities."""
    assert len(one) == len(other)
    return [
        (number, a["cached"], b["cached"], a["tokens"], b["tokens"], a["logprobs"], b["logprobs"])
        for number, (a, b) in enumerate(zip(one, other, strict=True))
        if (a["tokens"], a["logprobs"]) != (b["tokens"], b["logprobs"])
    ]


def cached(results: Sequence[dict[str, Any]]) -> list[int]:
    return [result["cached"] for result in results]


def save_zeros(socket: str, namespace: Namespace, names: Sequence[bytes]) -> None:
    """Write blocks of zeros under these hashes, with a valid checksum."""
    client = kvstore.connect(socket, namespace)
    save = client.save(names)
    wait_until(lambda: client.poll(0.1) is not None and save.done, "slots assigned")
    assert len(save.slot_assignments) == len(names)
    for _, slot in save.slot_assignments:
        client.slab_of(save).view(slot)[: namespace.block_bytes] = bytes(namespace.block_bytes)
    client.commit(save)
    assert client.sync(10)
    client.close()


def tokens(seed: int, count: int) -> list[int]:
    """Random tokens of the tiny models."""
    made = random.Random(seed)
    return [made.randrange(4, 512) for _ in range(count)]


def full_blocks(prompt: Sequence[int]) -> int:
    """Tokens of a prompt's full blocks; the last token is always computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def wait_until(true: Any, what: str, limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.02)
