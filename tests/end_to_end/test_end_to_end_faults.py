"""The engine beside a real sidecar that is absent, killed, hung or damaged: same output, no wait
past the deadline, nothing leaked."""

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
    Ask,
    Baseline,
    Served,
    asks_of,
    make_store,
    settle,
    tiny_model,
)

from kvstore.engine.loader import LoadedModel
from kvstore.ipc.client import Client
from kvstore.store.store import Store
from kvstore.testing.processes import Child, Sidecar

HANG_LIMIT_S = 60.0
"""No test measures time; this catches what would never end."""
DEADLINE_MS = 300.0
SLOT_FLAGS = ("--l2", "4MiB", "--slot", "4KiB")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def baseline(loaded: LoadedModel) -> Baseline:
    return Baseline(loaded)


@pytest.fixture
def endings() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_sidecar(endings: ExitStack, folder: Path) -> Sidecar:
    disk = ("--disk", str(folder / "disk"), "--disk-capacity", "16MiB")
    sidecar = endings.enter_context(Sidecar(folder / "socket", *SLOT_FLAGS, *disk))
    sidecar.wait_ready()
    return sidecar


def join(
    loaded: LoadedModel, folder: Path, *, deadline_ms: float = DEADLINE_MS, wait_s: float = 10.0
) -> Served:
    """An engine over a client of the sidecar in `folder`."""
    client = Client(
        str(folder / "socket"),
        loaded.namespace(BLOCK_TOKENS),
        reply_limit_s=1.0,
        wait_ready_s=wait_s,
    )
    return Served(loaded, blocks=client, deadline_ms=deadline_ms)


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
        assert time.monotonic() < end_s, "it never came about"
        time.sleep(0.02)


def check_run(served: Served, baseline: Baseline, asks: list[Ask]) -> dict[str, int]:
    """One after another: same output, well within the hang limit. Returns tokens by tier."""
    by_tier: dict[str, int] = {}
    for ask in asks:
        start_s = time.monotonic()
        [output] = served.ask([ask])
        assert time.monotonic() - start_s < HANG_LIMIT_S
        assert output.tokens == baseline.tokens(ask), ask
        for tier, tokens in output.cached.items():
            by_tier[tier] = by_tier.get(tier, 0) + tokens
    return by_tier


def long_asks(count: int, seed: int) -> list[Ask]:
    """Prompts that share nothing."""
    rng = np.random.default_rng(seed)
    return [Ask(tuple(rng.integers(0, VOCAB, 90).tolist())) for _ in range(count)]


def test_a_sidecar_that_is_absent(loaded: LoadedModel, baseline: Baseline, tmp_path: Path) -> None:
    served = join(loaded, tmp_path, wait_s=0.0)
    by_tier = check_run(served, baseline, asks_of(np.random.default_rng(1), 6))
    assert not by_tier.get("l2")
    served.close()


def test_a_sidecar_that_comes_later(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, endings: ExitStack
) -> None:
    served = join(loaded, tmp_path, wait_s=0.0)
    [ask] = long_asks(1, seed=2)
    check_run(served, baseline, [ask])
    start_sidecar(endings, tmp_path)
    wait_until(lambda: served.blocks.slab is not None)
    served.engine.reset_prefix_cache()
    check_run(served, baseline, [ask])
    wait_until(lambda: not served.engine.step() and not served.engine.busy)
    served.engine.reset_prefix_cache()
    assert check_run(served, baseline, [ask])["l2"] == 88
    served.close()


def test_a_sidecar_killed_in_the_midst_of_loads_and_saves(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, endings: ExitStack
) -> None:
    """kill -9 at random moments of a burst; then it returns, and its disk hits."""
    rng = np.random.default_rng(3)
    served = join(loaded, tmp_path)
    asks = long_asks(6, seed=4)
    for round_number in range(4):
        sidecar = start_sidecar(endings, tmp_path)
        wait_until(lambda: served.blocks.slab is not None)
        assert served.engine.reset_prefix_cache()
        names = served.submit(asks)
        made: dict[str, list[int]] = {name: [] for name in names}
        kill_at = int(rng.integers(0, 12))
        for step in range(100_000):
            if not served.engine.busy:
                break
            if step == kill_at:
                sidecar.kill()
            for output in served.engine.step():
                made[output.request_id] += output.tokens
        for name, ask in zip(names, asks, strict=True):
            assert made[name] == baseline.tokens(ask), (round_number, kill_at)
        if sidecar.returncode is None:
            sidecar.kill()
        wait_until(lambda: served.blocks.slab is None)

    sidecar = start_sidecar(endings, tmp_path)
    wait_until(lambda: served.blocks.slab is not None)
    served.engine.reset_prefix_cache()
    check_run(served, baseline, asks)
    post(sidecar, "/v1/flush")
    post(sidecar, "/v1/clear?tier=l2")
    served.engine.reset_prefix_cache()
    patient = join(loaded, tmp_path, deadline_ms=HANG_LIMIT_S * 1e3)
    assert check_run(patient, baseline, asks)["disk"] == 6 * 88
    patient.close()
    served.close()


def test_a_sidecar_killed_and_restarted_over_an_empty_disk(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, endings: ExitStack
) -> None:
    served = join(loaded, tmp_path, wait_s=0.0, deadline_ms=HANG_LIMIT_S * 1e3)
    asks = long_asks(3, seed=14)
    for hits in (0, 3 * 88):
        # The second time round nothing was taken away: it hits.
        sidecar = start_sidecar(endings, tmp_path)
        wait_until(lambda: served.blocks.slab is not None)
        served.engine.reset_prefix_cache()
        assert check_run(served, baseline, asks).get("disk", 0) == hits
        post(sidecar, "/v1/flush")
        sidecar.kill()
        wait_until(lambda: served.blocks.slab is None)
    shutil.rmtree(tmp_path / "disk")
    start_sidecar(endings, tmp_path)
    wait_until(lambda: served.blocks.slab is not None)
    served.engine.reset_prefix_cache()
    assert not check_run(served, baseline, asks).get("disk")
    served.close()


def test_a_sidecar_that_hangs(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path, endings: ExitStack
) -> None:
    """SIGSTOP: requests miss at their deadline; later ones at once; after SIGCONT they hit."""
    sidecar = start_sidecar(endings, tmp_path)
    served = join(loaded, tmp_path)
    asks = long_asks(4, seed=5)
    check_run(served, baseline, asks)
    wait_until(lambda: stats_of(sidecar)["l2"]["slots_ready"] >= 4 * 11)
    sidecar.suspend()
    try:
        served.engine.reset_prefix_cache()
        by_tier = check_run(served, baseline, asks)
        assert not by_tier.get("l2")
    finally:
        sidecar.resume()
    served.engine.reset_prefix_cache()
    patient = join(loaded, tmp_path, deadline_ms=HANG_LIMIT_S * 1e3)
    assert check_run(patient, baseline, asks)["l2"] == 4 * 88
    check_run(served, baseline, asks)
    patient.close()
    served.close()
    wait_until(lambda: stats_of(sidecar)["sessions"] == 0)
    assert stats_of(sidecar)["l2"]["slots_leased"] == 0


def test_a_silent_listener_in_place_of_the_sidecar(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path
) -> None:
    """Something takes the connection and never says a word."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(4)
        served = join(loaded, tmp_path, wait_s=0.0)
        check_run(served, baseline, long_asks(2, seed=6))
        served.close()


def test_a_damaged_disk_is_a_miss(loaded: LoadedModel, baseline: Baseline, tmp_path: Path) -> None:
    """Every payload on disk is damaged behind the tier's back: all recomputed, none served."""
    store: Store = make_store(tmp_path, loaded)
    served = Served(loaded, store)
    asks = long_asks(3, seed=7)
    check_run(served, baseline, asks)
    settle(store)
    store.clear("l2")
    damaged = 0
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        data = bytearray(path.read_bytes())
        if len(data) < 100_000:
            continue
        for position in range(4096 + 7, len(data), 512):
            damaged += data[position] != 0
            data[position] ^= 0x40
        path.write_bytes(data)
    assert damaged
    served.engine.reset_prefix_cache()
    by_tier = check_run(served, baseline, asks)
    assert not by_tier.get("disk")
    served.close()
    store.close()


HOLDER = """
import sys, time
from kvstore.blocks.key import Namespace
from kvstore.ipc.client import Client
space = Namespace(model="m", dtype="float32", layers=1, kv_heads=1, head_dim=8, block_tokens=8)
client = Client(sys.argv[1], space, wait_ready_s=30.0)
def done(ticket):
    while not ticket.done:
        client.poll(0.1)
    return ticket
names = [bytes([index]) * 32 for index in range(20)]
client.commit(done(client.save(names)))
load = done(client.load(names))
save = done(client.save([bytes([100 + index]) * 32 for index in range(15)]))
print("holds", len(load.slots), len(save.grants), flush=True)
time.sleep(600)
"""


def test_an_engine_killed_with_leases_leaves_every_slot_free(
    tmp_path: Path, endings: ExitStack
) -> None:
    """kill -9 of a process that holds loads and unfilled grants."""
    sidecar = start_sidecar(endings, tmp_path)
    before = stats_of(sidecar)["l2"]
    assert before["slots_free"] == before["slots"]
    holder = Child(
        [sys.executable, "-c", HOLDER, str(tmp_path / "socket")],
        ready=lambda line: line.startswith("holds"),
    )
    endings.enter_context(holder)
    assert holder.wait_ready() == "holds 20 15"
    held = stats_of(sidecar)["l2"]
    assert held["slots_leased"] == 20
    assert held["slots_free"] == held["slots"] - 35
    holder.signal(signal.SIGKILL)
    wait_until(lambda: stats_of(sidecar)["sessions"] == 0)
    post(sidecar, "/v1/flush")
    post(sidecar, "/v1/clear?tier=l2")
    after = stats_of(sidecar)["l2"]
    assert after["slots_free"] == after["slots"]
    assert after["slots_leased"] == 0
