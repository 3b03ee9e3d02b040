"""Real SGLang engines on a CPU, each in a separate process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from hicache_rig import extra

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LIMIT_S = 180.0
"""A guard against hangs."""
START_LIMIT_S = 600.0
"""The same for an engine's start, whose imports take minutes on a busy machine."""
TOKENS = 16
PAGE_BYTES = TOKENS * 4 * 2 * 64 * 2 * 4
"""Bytes of one page of the tiny model in float32."""


def write_model(folder: Path, seed: int) -> Path:
    """A tiny Llama with random weights."""
    program = HERE.parent / "vllm" / "tiny_models.py"
    subprocess.run([sys.executable, str(program), str(folder), "llama", str(seed)], check=True)
    return folder


class Engine:
    """A process with an SGLang engine over the sidecar at `socket`. See `sglang_program`."""

    def __init__(self, log: Path, socket: str, model: Path, **arguments: Any) -> None:
        self._log = log
        here, there = os.pipe()
        os.set_inheritable(there, True)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}:{ROOT / 'tests'}"}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        program = [sys.executable, str(HERE / "sglang_program.py")]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3>&{there}', *program],
            stdin=subprocess.PIPE,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[there],
            text=True,
        )
        os.close(there)
        self._answers = os.fdopen(here, "r")
        self._extra = extra(socket)
        del self._extra["revision"]  # its weights are identified by their files
        chosen = {"hicache_storage_backend_extra_config": json.dumps(self._extra)}
        args = {"model_path": str(model), **chosen, **arguments}
        self.ask("start", START_LIMIT_S, args=args)

    def ask(self, do: str, limit_s: float = LIMIT_S, **arguments: Any) -> dict[str, Any]:
        """The answer to a command. AssertionError: the command or the process failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], limit_s)
        assert ready, f"no answer within {limit_s:g} s\n{self.tail()}"
        line = self._answers.readline()
        assert line, f"the engine's process has ended\n{self.tail()}"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, f"{answer['error']}\n{self.tail()}"
        return answer

    def generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = self.ask("generate", prompts=prompts)["results"]
        return results

    def flush(self) -> None:
        """Empty SGLang's own caches on the device and in host memory."""
        assert self.ask("flush")["success"], self.tail()

    def attach(self, **changed: Any) -> dict[str, Any]:
        """Detach the storage backend and attach it again. changed: keys of its extra config."""
        return self.ask("attach", extra={**self._extra, **changed})

    def metric(self, name: str) -> float:
        """The sum of a metric's samples on SGLang's /metrics."""
        lines = self.ask("metrics")["text"].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def tail(self) -> str:
        return self._log.read_text()[-6000:]

    def stop(self) -> None:
        if self._process.poll() is None:
            self.ask("stop")
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(LIMIT_S)
