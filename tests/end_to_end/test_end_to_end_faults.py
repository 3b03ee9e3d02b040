"""The engine with a real sidecar that is absent, killed, hung or has a corrupt disk: same output,
no wait beyond the maximum, no leaked slot."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from end_to_end_rig import (
    BLOCK_TOKENS,
    VOCAB,
    Baseline,
    CachedEngine,
    PromptRequest,
    flush_store,
    make_store,
    random_requests,
    tiny_model,
)

from kvstore.engine.loader import LoadedModel
from kvstore.ipc.client import Client
from kvstore.store.store import Store
from kvstore.testing.processes import Child, Sidecar

HANG_LIMIT_S = 60.0
"""Timeout of every wait. It only guards against hangs."""
MAX_WAIT_MS = 300.0
SLOT_FLAGS = ("--l2", "4MiB", "--slot-bytes", "4KiB")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def baseline(loaded: LoadedModel) -> Baseline:
    return Baseline(loaded)


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_sidecar(resources: ExitStack, folder: Path) -> Sidecar:
    disk = ("--disk", str(folder / "disk"), "--disk-capacity", "16MiB")
    sidecar = resources.enter_context(Sidecar(folder / "socket", *SLOT_FLAGS, *disk))
    sidecar.wait_ready()
    return sidecar


def connect_engine(
    loaded: LoadedModel, folder: Path, *, max_wait_ms: float = MAX_WAIT_MS, wait_s: float = 10.0
) -> CachedEngine:
    """An engine over a client of the sidecar in `folder`."""
    client = Client(
        str(folder / "socket"),
        loaded.namespace(BLOCK_TOKENS),
        response_timeout_s=1.0,
        connect_timeout_s=wait_s,
    )
    return CachedEngine(loaded, blocks=client, max_wait_ms=max_wait_ms)


def stats_of(sidecar: Sidecar) -> dict[str, Any]:
    with urllib.request.urlopen(sidecar.url + "/v1/stats", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def post(sidecar: Sidecar, path: str) -> None:
    request = urllib.request.Request(sidecar.url + path, method="POST")
    urllib.request.urlopen(request, timeout=30).close()


def wait_until(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + HANG_LIMIT_S
    while not what():
        assert time.monotonic() < end_s, "timeout"
        time.sleep(0.02)


def check_outputs(
    engine: CachedEngine, baseline: Baseline, requests: list[PromptRequest]
) -> dict[str, int]:
    """Run the requests in sequence and check their outputs. Returns hit tokens by tier."""
    by_tier: dict[str, int] = {}
    for request in requests:
        start_s = time.monotonic()
        [output] = engine.run([request])
        assert time.monotonic() - start_s < HANG_LIMIT_S
        assert output.tokens == baseline.tokens(request), request
        for tier, tokens in output.cached.items():
            by_tier[tier] = by_tier.get(tier, 0) + tokens
    return by_tier


def distinct_requests(count: int, seed: int) -> list[PromptRequest]:
    """Prompts without shared prefixes."""
    rng = np.random.default_rng(seed)
    return [PromptRequest(tuple(rng.integers(0, VOCAB, 90).tolist())) for _ in range(count)]


def test_an_absent_sidecar(loaded: LoadedModel, baseline: Baseline, tmp_path: Path) -> None:
    engine = connect_engine(loaded, tmp_path, wait_s=0.0)
    by_tier = check_outputs(engine, baseline, random_requests(np.random.default_rng(1), 6))
    assert not by_tier.get("l2")
    engine.close()


def test_a_sidecar_that_starts_later(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, resources: ExitStack
) -> None:
    engine = connect_engine(loaded, tmp_path, wait_s=0.0)
    [request] = distinct_requests(1, seed=2)
    check_outputs(engine, baseline, [request])
    start_sidecar(resources, tmp_path)
    wait_until(lambda: engine.blocks.slab is not None)
    engine.inner.reset_prefix_cache()
    check_outputs(engine, baseline, [request])
    wait_until(lambda: not engine.inner.step() and not engine.inner.busy)
    engine.inner.reset_prefix_cache()
    assert check_outputs(engine, baseline, [request])["l2"] == 88
    engine.close()


def test_a_sidecar_killed_during_loads_and_saves(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, resources: ExitStack
) -> None:
    """kill -9 at random moments of a burst. After a restart the disk tier hits."""
    rng = np.random.default_rng(3)
    engine = connect_engine(loaded, tmp_path)
    requests = distinct_requests(6, seed=4)
    for round_number in range(4):
        sidecar = start_sidecar(resources, tmp_path)
        wait_until(lambda: engine.blocks.slab is not None)
        assert engine.inner.reset_prefix_cache()
        names = engine.submit(requests)
        made: dict[str, list[int]] = {name: [] for name in names}
        kill_at = int(rng.integers(0, 12))
        for step in range(100_000):
            if not engine.inner.busy:
                break
            if step == kill_at:
                sidecar.kill()
            for output in engine.inner.step():
                made[output.request_id] += output.tokens
        for name, request in zip(names, requests, strict=True):
            assert made[name] == baseline.tokens(request), (round_number, kill_at)
        if sidecar.returncode is None:
            sidecar.kill()
        wait_until(lambda: engine.blocks.slab is None)

    sidecar = start_sidecar(resources, tmp_path)
    wait_until(lambda: engine.blocks.slab is not None)
    engine.inner.reset_prefix_cache()
    check_outputs(engine, baseline, requests)
    post(sidecar, "/v1/flush")
    post(sidecar, "/v1/clear?tier=l2")
    engine.inner.reset_prefix_cache()
    long_wait = connect_engine(loaded, tmp_path, max_wait_ms=HANG_LIMIT_S * 1e3)
    assert check_outputs(long_wait, baseline, requests)["disk"] == 6 * 88
    long_wait.close()
    engine.close()


def test_a_sidecar_killed_and_restarted_over_an_empty_disk(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, resources: ExitStack
) -> None:
    engine = connect_engine(loaded, tmp_path, wait_s=0.0, max_wait_ms=HANG_LIMIT_S * 1e3)
    requests = distinct_requests(3, seed=14)
    for hits in (0, 3 * 88):
        # In the second round the disk is intact, so it hits.
        sidecar = start_sidecar(resources, tmp_path)
        wait_until(lambda: engine.blocks.slab is not None)
        engine.inner.reset_prefix_cache()
        assert check_outputs(engine, baseline, requests).get("disk", 0) == hits
        post(sidecar, "/v1/flush")
        sidecar.kill()
        wait_until(lambda: engine.blocks.slab is None)
    shutil.rmtree(tmp_path / "disk")
    start_sidecar(resources, tmp_path)
    wait_until(lambda: engine.blocks.slab is not None)
    engine.inner.reset_prefix_cache()
    assert not check_outputs(engine, baseline, requests).get("disk")
    engine.close()


def test_a_sidecar_that_hangs(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, resources: ExitStack
) -> None:
    """After SIGSTOP, requests miss at their maximum wait, later ones at once. After SIGCONT they
    hit."""
    sidecar = start_sidecar(resources, tmp_path)
    engine = connect_engine(loaded, tmp_path)
    requests = distinct_requests(4, seed=5)
    check_outputs(engine, baseline, requests)
    wait_until(lambda: stats_of(sidecar)["l2"]["slots_ready"] >= 4 * 11)
    sidecar.suspend()
    try:
        engine.inner.reset_prefix_cache()
        by_tier = check_outputs(engine, baseline, requests)
        assert not by_tier.get("l2")
    finally:
        sidecar.resume()
    engine.inner.reset_prefix_cache()
    long_wait = connect_engine(loaded, tmp_path, max_wait_ms=HANG_LIMIT_S * 1e3)
    assert check_outputs(long_wait, baseline, requests)["l2"] == 4 * 88
    check_outputs(engine, baseline, requests)
    long_wait.close()
    engine.close()
    wait_until(lambda: stats_of(sidecar)["sessions"] == 0)
    assert stats_of(sidecar)["l2"]["slots_leased"] == 0


def test_a_silent_listener_in_place_of_the_sidecar(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path
) -> None:
    """The listener accepts connections and never sends anything."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(4)
        engine = connect_engine(loaded, tmp_path, wait_s=0.0)
        check_outputs(engine, baseline, distinct_requests(2, seed=6))
        engine.close()


def test_a_corrupt_disk_is_a_miss(loaded: LoadedModel, baseline: Baseline, tmp_path: Path) -> None:
    """Every payload on disk is corrupted while the tier is open: all blocks are recomputed."""
    store: Store = make_store(tmp_path, loaded)
    engine = CachedEngine(loaded, store)
    requests = distinct_requests(3, seed=7)
    check_outputs(engine, baseline, requests)
    flush_store(store)
    store.clear("l2")
    corrupted = 0
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        data = bytearray(path.read_bytes())
        if len(data) < 100_000:
            continue
        for position in range(4096 + 7, len(data), 512):
            corrupted += data[position] != 0
            data[position] ^= 0x40
        path.write_bytes(data)
    assert corrupted
    engine.inner.reset_prefix_cache()
    by_tier = check_outputs(engine, baseline, requests)
    assert not by_tier.get("disk")
    engine.close()
    store.close()


LEASE_HOLDER = """
import sys, time
from kvstore.blocks.key import Namespace
from kvstore.ipc.client import Client
space = Namespace(model="m", dtype="float32", layers=1, kv_heads=1, head_dim=8, block_tokens=8)
client = Client(sys.argv[1], space, connect_timeout_s=30.0)
def done(operation):
    while not operation.done:
        client.poll(0.1)
    return operation
names = [bytes([index]) * 32 for index in range(20)]
client.commit(done(client.save(names)))
load = done(client.load(names))
save = done(client.save([bytes([100 + index]) * 32 for index in range(15)]))
print("leased", len(load.slots), len(save.slot_assignments), flush=True)
time.sleep(600)
"""


def test_an_engine_killed_with_leases_leaves_every_slot_free(
    tmp_path: Path, resources: ExitStack
) -> None:
    """kill -9 of a process with leased loads and unfilled saves."""
    sidecar = start_sidecar(resources, tmp_path)
    before = stats_of(sidecar)["l2"]
    assert before["slots_free"] == before["slots"]
    owner = Child(
        [sys.executable, "-c", LEASE_HOLDER, str(tmp_path / "socket")],
        ready=lambda line: line.startswith("leased"),
    )
    resources.enter_context(owner)
    assert owner.wait_ready() == "leased 20 15"
    l2 = stats_of(sidecar)["l2"]
    assert l2["slots_leased"] == 20
    assert l2["slots_free"] == l2["slots"] - 35
    owner.signal(signal.SIGKILL)
    wait_until(lambda: stats_of(sidecar)["sessions"] == 0)
    post(sidecar, "/v1/flush")
    post(sidecar, "/v1/clear?tier=l2")
    after = stats_of(sidecar)["l2"]
    assert after["slots_free"] == after["slots"]
    assert after["slots_leased"] == 0
