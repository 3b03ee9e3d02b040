"""Every fault at every tier, under a real engine. The output equals output without kvstore, no
request waits for a hung tier, the fault is counted, and the tier recovers by itself.

The tiers are real (a directory, a Valkey server, an S3 server). Faults are injected between the
store and the tier, or the server is killed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis_rig
import s3_rig
from end_to_end_rig import (
    BLOCK_TOKENS,
    VOCAB,
    Baseline,
    CachedEngine,
    PromptRequest,
    tiny_model,
)

from kvstore.engine.loader import LoadedModel
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.tiers import disk, redis
from kvstore.tiers.base import Tier
from kvstore.tiers.wrappers import CallTimeout, CircuitBreaker

LIMIT_S = 60.0
"""Timeout of every wait. It only guards against hangs."""
MAX_WAIT_MS = 300.0
"""Maximum wait of a request."""
CALL_LIMIT_S = 1.0
"""Timeout of a tier call. A healthy tier under load answers sooner."""
PROMPT_TOKENS = 50
HIT = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
SLOTS = 256
KINDS = ("disk", "redis", "s3")
FAULTS = [(fault, call) for fault in Fault for call in ("read", "write") if fault is not Fault.FULL]
FAULTS.append((Fault.FULL, "write"))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def baseline(loaded: LoadedModel) -> Baseline:
    return Baseline(loaded)


@pytest.fixture(scope="module")
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def valkey(resources: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> redis_rig.Server:
    server = redis_rig.Server(tmp_path_factory.mktemp("valkey"), redis_rig.valkey_binary())
    resources.callback(server.stop)
    return server


@pytest.fixture(scope="module")
def seaweed(resources: ExitStack) -> s3_rig.S3Server:
    return resources.enter_context(s3_rig.running_server())


@pytest.fixture
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Tier]:
    """Creates an empty tier of a kind. Its server starts when the first test needs it."""

    def make(kind: str) -> Tier:
        if kind == "disk":
            return disk.open(disk.Config(directory=str(tmp_path / "disk"), capacity=16 << 20))
        if kind == "redis":
            server: redis_rig.Server = request.getfixturevalue("valkey")
            config = redis.Config(url=f"redis://{server.address}", prefix=tmp_path.name)
            return redis.open(config)
        s3_server: s3_rig.S3Server = request.getfixturevalue("seaweed")
        return s3_server.open(s3_server.new_bucket())

    return make


class FaultRig:
    """Two engines over a store with one tier that fails on demand."""

    def __init__(self, loaded: LoadedModel, tier: Tier) -> None:
        self.faulty = FaultyTier(tier, slow_s=1.2 * CALL_LIMIT_S)
        self.name = tier.name
        wrapped = CircuitBreaker(CallTimeout(self.faulty, CALL_LIMIT_S), failures=2, reset_s=0.05)
        slab = Slab.create(SLOTS, loaded.namespace(BLOCK_TOKENS).block_bytes)
        self.store = Store(slab, [wrapped])
        self.short_wait = CachedEngine(loaded, self.store, max_wait_ms=MAX_WAIT_MS)
        self.long_wait = CachedEngine(loaded, self.store, max_wait_ms=LIMIT_S * 1e3)

    def flush(self) -> None:
        """Wait until all saved blocks are in the tier."""
        until(lambda: self.store.flush(5.0), "never written")

    def clear_caches(self) -> None:
        """Clear L2 and the engines' caches. Only the tier keeps its blocks."""
        self.store.clear("l2")
        for engine in (self.short_wait, self.long_wait):
            assert engine.inner.reset_prefix_cache()

    def error_count(self) -> int:
        """Sum of all error counters of the tier."""
        stats = self.store.stats()["tiers"][self.name]
        names = (
            "errors",
            "checksum_failures",
            "breaker_rejected",
            "breaker_opened",
            "deadline_exceeded",
        )
        return sum(int(stats.get(name, 0)) for name in names)

    def close(self) -> None:
        self.faulty.release()
        for engine in (self.short_wait, self.long_wait):
            engine.close()
        # A recent timeout may keep the circuit breaker open for another moment.
        self.flush()
        until(lambda: not self.store.stats()["l2"]["loads_in_flight"], "a load never ends")
        self.store.clear("l2")
        stats = self.store.stats()["l2"]
        assert stats["slots_free"] == stats["slots"], stats
        self.store.close()


def prompts(count: int, seed: int) -> list[PromptRequest]:
    rng = np.random.default_rng(seed)
    return [
        PromptRequest(tuple(rng.integers(0, VOCAB, PROMPT_TOKENS).tolist())) for _ in range(count)
    ]


def check_output(
    engine: CachedEngine, baseline: Baseline, requests: list[PromptRequest]
) -> dict[str, int]:
    """Check for the same tokens as without kvstore. Returns hit tokens by tier."""
    hits: dict[str, int] = {}
    for request in requests:
        [output] = engine.run([request])
        assert output.tokens == baseline.tokens(request), request
        for tier, tokens in output.cached.items():
            hits[tier] = hits.get(tier, 0) + tokens
    return hits


def until(true: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def check_recovery(rig: FaultRig, baseline: Baseline, requests: list[PromptRequest]) -> None:
    """The tier recovers by itself: it accepts writes, and the prompts hit again."""

    def hits_all() -> bool:
        rig.clear_caches()
        check_output(rig.long_wait, baseline, requests)
        rig.store.flush(1.0)
        rig.clear_caches()
        return (
            check_output(rig.long_wait, baseline, requests).get(rig.name, 0) == len(requests) * HIT
        )

    until(hits_all, "the tier never recovers")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fault", "call"), FAULTS)
def test_a_fault_is_a_miss(
    loaded: LoadedModel,
    baseline: Baseline,
    make_tier: Callable[[str], Tier],
    kind: str,
    fault: Fault,
    call: str,
) -> None:
    rig = FaultRig(loaded, make_tier(kind))
    saved, new = prompts(2, seed=1), prompts(2, seed=2)
    check_output(rig.short_wait, baseline, saved)
    rig.flush()
    rig.clear_caches()
    before = rig.error_count()

    rig.faulty.schedule = always(fault, call)
    # Every request ends during the fault. A hung call hangs until `release` below.
    check_output(rig.short_wait, baseline, saved + new)
    rig.store.flush(0.2)
    rig.clear_caches()
    hits = check_output(rig.short_wait, baseline, saved + new)
    if call == "read" and fault is not Fault.SLOW:
        assert not hits.get(rig.name), "a hit in a tier that cannot be read"
    if call == "write" and fault in (Fault.TRUNCATED, Fault.CORRUPTED):
        # A block corrupted by a write is detected when it is read.
        rig.flush()
        rig.clear_caches()
        check_output(rig.long_wait, baseline, new)
    until(lambda: rig.error_count() > before, "nothing was counted")

    rig.faulty.schedule = None
    rig.faulty.release()
    check_recovery(rig, baseline, saved + new)
    rig.close()


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.HUNG, Fault.ERROR, Fault.SLOW])
def test_a_fault_of_a_probe_is_a_miss(
    loaded: LoadedModel, baseline: Baseline, make_tier: Callable[[str], Tier], fault: Fault
) -> None:
    """Only a tier without a local index can fail here."""
    rig = FaultRig(loaded, make_tier("redis"))
    requests = prompts(2, seed=3)
    rig.faulty.schedule = always(fault, "contains")
    before = rig.error_count()
    check_output(rig.short_wait, baseline, requests)
    until(lambda: rig.error_count() > before, "nothing was counted")
    rig.faulty.schedule = None
    rig.faulty.release()
    check_recovery(rig, baseline, requests)
    rig.close()


def burst(
    rig: FaultRig, baseline: Baseline, requests: list[PromptRequest], inject: Callable[[], None]
) -> None:
    """Run all requests concurrently and inject a fault after a few steps."""
    names = rig.short_wait.submit(requests)
    made: dict[str, list[int]] = {name: [] for name in names}
    step = 0
    while rig.short_wait.inner.busy:
        step += 1
        if step == 4:
            inject()
        for output in rig.short_wait.inner.step():
            made[output.request_id] += output.tokens
    assert step > 4
    for name, request in zip(names, requests, strict=True):
        assert made[name] == baseline.tokens(request)


def test_redis_killed_during_writes_and_restarted_empty(
    loaded: LoadedModel, baseline: Baseline, valkey: redis_rig.Server, tmp_path: Path
) -> None:
    config = redis.Config(url=f"redis://{valkey.address}", prefix=tmp_path.name)
    rig = FaultRig(loaded, redis.open(config))
    saved, new = prompts(3, seed=4), prompts(5, seed=5)
    check_output(rig.short_wait, baseline, saved)
    rig.flush()
    rig.clear_caches()
    burst(rig, baseline, saved + new, valkey.kill)
    check_output(rig.short_wait, baseline, prompts(2, seed=6))
    assert rig.error_count()
    valkey.start()
    client = valkey.client()
    assert client.dbsize() == 0
    client.close()
    rig.clear_caches()
    # A known location without its block is a miss too.
    check_output(rig.long_wait, baseline, saved)
    check_recovery(rig, baseline, saved + new)
    rig.close()


def test_redis_hangs_and_recovers(
    loaded: LoadedModel, baseline: Baseline, valkey: redis_rig.Server, tmp_path: Path
) -> None:
    """SIGSTOP of the server: its connections stay open, and it answers nothing."""
    config = redis.Config(url=f"redis://{valkey.address}", prefix=tmp_path.name)
    rig = FaultRig(loaded, redis.open(config))
    saved, new = prompts(3, seed=7), prompts(3, seed=8)
    check_output(rig.short_wait, baseline, saved)
    rig.flush()
    rig.clear_caches()
    valkey.freeze()
    try:
        check_output(rig.short_wait, baseline, saved + new)
    finally:
        valkey.thaw()
    assert rig.error_count()
    check_recovery(rig, baseline, saved + new)
    rig.close()


def test_s3_killed_during_writes_and_restarted_empty(
    loaded: LoadedModel, baseline: Baseline, seaweed: s3_rig.S3Server
) -> None:
    bucket = seaweed.new_bucket()
    rig = FaultRig(loaded, seaweed.open(bucket, timeout="2s"))
    saved, new = prompts(3, seed=9), prompts(5, seed=10)
    check_output(rig.short_wait, baseline, saved)
    rig.flush()
    rig.clear_caches()
    burst(rig, baseline, saved + new, seaweed.kill)
    check_output(rig.short_wait, baseline, prompts(2, seed=11))
    assert rig.error_count()
    shutil.rmtree(seaweed.directory / "data")
    (seaweed.directory / "data").mkdir()
    seaweed.start()
    rig.clear_caches()
    # First without the bucket, then with an empty one.
    check_output(rig.long_wait, baseline, saved)
    seaweed.client.create_bucket(Bucket=bucket)
    check_recovery(rig, baseline, saved + new)
    rig.close()


def test_disk_files_truncated_while_in_use(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path
) -> None:
    """The tier's files are truncated while it is open. It continues with new files."""
    folder = tmp_path / "disk"
    rig = FaultRig(loaded, disk.open(disk.Config(directory=str(folder), capacity=16 << 20)))
    saved = prompts(3, seed=12)
    check_output(rig.short_wait, baseline, saved)
    rig.flush()
    rig.clear_caches()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            with path.open("r+b") as file:
                file.truncate(4096)
    hits = check_output(rig.long_wait, baseline, saved)
    assert not hits.get(rig.name)
    check_recovery(rig, baseline, prompts(3, seed=13))
    rig.close()
