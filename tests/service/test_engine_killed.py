"""An engine process killed during its work: every slot is released."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from json import dumps, loads
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.processes import Child, Sidecar

LIMIT_S = 120.0
DELAYS_S = (0.05, 0.3, 0.8)
"""After the first saved block, while the engine still computes, saves and loads."""


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    flags = ["--l2", "16MiB", "--slot-bytes", "64KiB", "--disk", str(tmp_path / "disk")]
    made = Sidecar(tmp_path / "kv.sock", *flags, "--disk-capacity", "64MiB")
    made.wait_ready(LIMIT_S)
    yield made
    made.kill()


def start_engine(sidecar: Sidecar) -> Child:
    flags = {
        "--model": "random",
        "--port": "0",
        "--threads": "1",
        "--store": sidecar.socket,
        "--store-connect-timeout": "30s",
        "--max-batch-tokens": "64",
        "--min-load-tokens": "0",
    }
    argv = [part for flag in flags.items() for part in flag]
    child = Child(
        [sys.executable, "-m", "kvstore", "engine", *argv],
        ready=lambda line: line.startswith("kvstore engine: "),
    )
    child.wait_ready(LIMIT_S)
    return child


def ask(engine: Child, tokens: list[int]) -> None:
    """One long request, which ends when the engine is killed."""
    url = engine.ready_line.split(" at ")[-1].strip() + "/completions"
    body = {"prompt": tokens, "max_tokens": 64, "ignore_eos": True, "model": "random-llama-4x256-0"}
    request = urllib.request.Request(url, dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request, timeout=LIMIT_S).read()


def l2(sidecar: Sidecar) -> dict[str, Any]:
    with urllib.request.urlopen(f"{sidecar.url}/v1/stats", timeout=LIMIT_S) as answer:
        found: dict[str, Any] = loads(answer.read())
    return {"sessions": found["sessions"], **found["l2"]}


def until(sidecar: Sidecar, what: str, *, at_most: int = -1, at_least: int = -1) -> None:
    end_s = time.monotonic() + LIMIT_S
    while True:
        value = l2(sidecar)[what]
        if (at_most < 0 or value <= at_most) and (at_least < 0 or value >= at_least):
            return
        assert time.monotonic() < end_s, f"{what} is {value}"
        time.sleep(0.02)


def test_every_slot_of_a_killed_engine_is_released(sidecar: Sidecar) -> None:
    slots = l2(sidecar)["slots"]
    for number, delay_s in enumerate(DELAYS_S):
        engine = start_engine(sidecar)
        stored = l2(sidecar)["stored"]
        # The previous engine saved the first half, so there are blocks to load.
        tokens = [(7 * i + number * (i > 600)) % 256 for i in range(1200)]
        asking = threading.Thread(target=ask, args=(engine, tokens))
        asking.start()
        until(sidecar, "stored", at_least=stored + 1)
        time.sleep(delay_s)
        engine.kill()
        asking.join()
        for held in ("sessions", "slots_filling", "slots_leased"):
            until(sidecar, held, at_most=0)
    urllib.request.urlopen(
        urllib.request.Request(f"{sidecar.url}/v1/flush", method="POST"), timeout=LIMIT_S
    )
    urllib.request.urlopen(
        urllib.request.Request(f"{sidecar.url}/v1/clear?tier=l2", method="POST"), timeout=LIMIT_S
    )
    assert l2(sidecar)["slots_free"] == slots
