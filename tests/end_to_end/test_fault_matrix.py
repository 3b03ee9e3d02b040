"""Every fault at every tier, under a real engine: its output is what it is without kvstore, it does
not wait for what hangs, the fault is counted, and the tier comes back by itself.

The tiers are real (a directory, a Valkey server, an S3 server); faults strike between the store and
the tier, or are the server's own death.
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
    Ask,
    Baseline,
    Served,
    tiny_model,
)

from kvstore.engine.loader import LoadedModel
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.tiers import disk, redis
from kvstore.tiers.base import Tier
from kvstore.tiers.wrappers import Breaker, Deadline

LIMIT_S = 60.0
"""A hang guard, no measure."""
DEADLINE_MS = 300.0
"""Of a request."""
CALL_LIMIT_S = 1.0
"""Of a call to a tier: a healthy one under load ends sooner."""
PROMPT_TOKENS = 50
HIT = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
SLOTS = 256
KINDS = ("disk", "redis", "s3")
STRIKES = [
    (fault, verb) for fault in Fault for verb in ("read", "write") if fault is not Fault.FULL
]
STRIKES.append((Fault.FULL, "write"))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def baseline(loaded: LoadedModel) -> Baseline:
    return Baseline(loaded)


@pytest.fixture(scope="module")
def endings() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def valkey(endings: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> redis_rig.Server:
    server = redis_rig.Server(tmp_path_factory.mktemp("valkey"), redis_rig.valkey_binary())
    endings.callback(server.stop)
    return server


@pytest.fixture(scope="module")
def seaweed(endings: ExitStack) -> s3_rig.S3Server:
    return endings.enter_context(s3_rig.running_server())


@pytest.fixture
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Tier]:
    """A fresh tier of a kind; its server is started when the first test needs it."""

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


class Site:
    """An engine over a store whose one tier can be made to fail."""

    def __init__(self, loaded: LoadedModel, tier: Tier) -> None:
        self.faulty = FaultyTier(tier, slow_s=1.2 * CALL_LIMIT_S)
        self.name = tier.name
        guarded = Breaker(Deadline(self.faulty, CALL_LIMIT_S), failures=2, reset_s=0.05)
        slab = Slab.create(SLOTS, loaded.namespace(BLOCK_TOKENS).block_bytes)
        self.store = Store(slab, [guarded])
        self.hurried = Served(loaded, self.store, deadline_ms=DEADLINE_MS)
        self.patient = Served(loaded, self.store, deadline_ms=LIMIT_S * 1e3)

    def settle(self) -> None:
        """What was saved lies in the tier."""
        until(lambda: self.store.flush(5.0), "never written")

    def forget(self) -> None:
        """Only the tier holds anything."""
        self.store.clear("l2")
        for served in (self.hurried, self.patient):
            assert served.engine.reset_prefix_cache()

    def trouble(self) -> int:
        """Everything that is counted when a tier does not do what it is asked."""
        stats = self.store.stats()["tiers"][self.name]
        names = ("faults", "checksum_failures", "breaker_refused", "breaker_opened", "late")
        return sum(int(stats.get(name, 0)) for name in names)

    def close(self) -> None:
        self.faulty.release()
        for served in (self.hurried, self.patient):
            served.close()
        # A call that was late a moment ago may keep the tier down for another one.
        self.settle()
        until(lambda: not self.store.stats()["l2"]["flights"], "a flight never lands")
        self.store.clear("l2")
        stats = self.store.stats()["l2"]
        assert stats["slots_free"] == stats["slots"], stats
        self.store.close()


def prompts(count: int, seed: int) -> list[Ask]:
    rng = np.random.default_rng(seed)
    return [Ask(tuple(rng.integers(0, VOCAB, PROMPT_TOKENS).tolist())) for _ in range(count)]


def check_output(served: Served, baseline: Baseline, asks: list[Ask]) -> dict[str, int]:
    """Same tokens as without kvstore; hits by tier."""
    hits: dict[str, int] = {}
    for ask in asks:
        [output] = served.ask([ask])
        assert output.tokens == baseline.tokens(ask), ask
        for tier, tokens in output.cached.items():
            hits[tier] = hits.get(tier, 0) + tokens
    return hits


def until(true: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def comes_back(site: Site, baseline: Baseline, asks: list[Ask]) -> None:
    """Without being told, the tier takes and gives again: a second look at the prompts hits."""

    def hits_all() -> bool:
        site.forget()
        check_output(site.patient, baseline, asks)
        site.store.flush(1.0)
        site.forget()
        return check_output(site.patient, baseline, asks).get(site.name, 0) == len(asks) * HIT

    until(hits_all, "the tier never comes back")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fault", "verb"), STRIKES)
def test_a_fault_is_a_miss(
    loaded: LoadedModel,
    baseline: Baseline,
    make_tier: Callable[[str], Tier],
    kind: str,
    fault: Fault,
    verb: str,
) -> None:
    site = Site(loaded, make_tier(kind))
    known, new = prompts(2, seed=1), prompts(2, seed=2)
    check_output(site.hurried, baseline, known)
    site.settle()
    site.forget()
    before = site.trouble()

    site.faulty.schedule = always(fault, verb)
    # While it lasts (a call that hangs hangs until it is released below) every request ends.
    check_output(site.hurried, baseline, known + new)
    site.store.flush(0.2)
    site.forget()
    hits = check_output(site.hurried, baseline, known + new)
    if verb == "read" and fault is not Fault.SLOW:
        assert not hits.get(site.name), "a hit, out of a tier that gives nothing"
    if verb == "write" and fault in (Fault.TRUNCATED, Fault.CORRUPTED):
        # What was damaged on its way down is found out on its way up.
        site.settle()
        site.forget()
        check_output(site.patient, baseline, new)
    until(lambda: site.trouble() > before, "nothing was counted")

    site.faulty.schedule = None
    site.faulty.release()
    comes_back(site, baseline, known + new)
    site.close()


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.HUNG, Fault.ERROR, Fault.SLOW])
def test_a_fault_of_a_question_is_a_miss(
    loaded: LoadedModel, baseline: Baseline, make_tier: Callable[[str], Tier], fault: Fault
) -> None:
    """Only a tier that has to be asked what it holds can fail at that."""
    site = Site(loaded, make_tier("redis"))
    asks = prompts(2, seed=3)
    site.faulty.schedule = always(fault, "contains")
    before = site.trouble()
    check_output(site.hurried, baseline, asks)
    until(lambda: site.trouble() > before, "nothing was counted")
    site.faulty.schedule = None
    site.faulty.release()
    comes_back(site, baseline, asks)
    site.close()


def burst(site: Site, baseline: Baseline, asks: list[Ask], strike: Callable[[], None]) -> None:
    """Ask for all at once; in the midst of it something happens."""
    names = site.hurried.submit(asks)
    made: dict[str, list[int]] = {name: [] for name in names}
    step = 0
    while site.hurried.engine.busy:
        step += 1
        if step == 4:
            strike()
        for output in site.hurried.engine.step():
            made[output.request_id] += output.tokens
    assert step > 4
    for name, ask in zip(names, asks, strict=True):
        assert made[name] == baseline.tokens(ask)


def test_redis_killed_in_the_midst_of_writes_and_restarted_empty(
    loaded: LoadedModel, baseline: Baseline, valkey: redis_rig.Server, tmp_path: Path
) -> None:
    config = redis.Config(url=f"redis://{valkey.address}", prefix=tmp_path.name)
    site = Site(loaded, redis.open(config))
    known, new = prompts(3, seed=4), prompts(5, seed=5)
    check_output(site.hurried, baseline, known)
    site.settle()
    site.forget()
    burst(site, baseline, known + new, valkey.kill)
    check_output(site.hurried, baseline, prompts(2, seed=6))
    assert site.trouble()
    valkey.start()
    with_client = valkey.client()
    assert with_client.dbsize() == 0
    with_client.close()
    site.forget()
    # What it is remembered to hold and does not is a miss too.
    check_output(site.patient, baseline, known)
    comes_back(site, baseline, known + new)
    site.close()


def test_redis_hangs_and_wakes(
    loaded: LoadedModel, baseline: Baseline, valkey: redis_rig.Server, tmp_path: Path
) -> None:
    """SIGSTOP of the server: connections stand, nothing is answered."""
    config = redis.Config(url=f"redis://{valkey.address}", prefix=tmp_path.name)
    site = Site(loaded, redis.open(config))
    known, new = prompts(3, seed=7), prompts(3, seed=8)
    check_output(site.hurried, baseline, known)
    site.settle()
    site.forget()
    valkey.freeze()
    try:
        check_output(site.hurried, baseline, known + new)
    finally:
        valkey.thaw()
    assert site.trouble()
    comes_back(site, baseline, known + new)
    site.close()


def test_s3_killed_in_the_midst_of_writes_and_restarted_empty(
    loaded: LoadedModel, baseline: Baseline, seaweed: s3_rig.S3Server
) -> None:
    bucket = seaweed.new_bucket()
    site = Site(loaded, seaweed.open(bucket, timeout="2s"))
    known, new = prompts(3, seed=9), prompts(5, seed=10)
    check_output(site.hurried, baseline, known)
    site.settle()
    site.forget()
    burst(site, baseline, known + new, seaweed.kill)
    check_output(site.hurried, baseline, prompts(2, seed=11))
    assert site.trouble()
    shutil.rmtree(seaweed.directory / "data")
    (seaweed.directory / "data").mkdir()
    seaweed.start()
    site.forget()
    # Without its bucket, and with an empty one.
    check_output(site.patient, baseline, known)
    seaweed.client.create_bucket(Bucket=bucket)
    comes_back(site, baseline, known + new)
    site.close()


def test_a_disk_emptied_behind_its_back(
    loaded: LoadedModel, baseline: Baseline, tmp_path: Path
) -> None:
    """Its files are cut to nothing while it is in use; then it goes on with new ones."""
    folder = tmp_path / "disk"
    site = Site(loaded, disk.open(disk.Config(directory=str(folder), capacity=16 << 20)))
    known = prompts(3, seed=12)
    check_output(site.hurried, baseline, known)
    site.settle()
    site.forget()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            with path.open("r+b") as file:
                file.truncate(4096)
    hits = check_output(site.patient, baseline, known)
    assert not hits.get(site.name)
    comes_back(site, baseline, prompts(3, seed=13))
    site.close()
