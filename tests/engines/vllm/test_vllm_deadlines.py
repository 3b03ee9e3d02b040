"""No request waits longer than its maximum wait. response_timeout is so long here that nothing else
can end these waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_rig import PROMPTS, FaultWorld
from vllm_rig import Engine, needs_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

SETTINGS = {
    "prefetch": {"policy": "wait_complete", "max_wait": 1000, "min_load_tokens": 0},
    "response_timeout": 600_000,
}


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> Iterator[FaultWorld]:
    made = FaultWorld(tmp_path_factory.mktemp("vllm"), engines[0], **SETTINGS)
    yield made
    made.engine.ask("stop")


@pytest.fixture(autouse=True)
def _idle_before_and_after(world: FaultWorld) -> Iterator[None]:
    world.check_idle()
    yield
    world.end_sidecars()
    world.check_idle()


@pytest.mark.parametrize("together", [False, True])
def test_requests_that_wait_for_an_answer(world: FaultWorld, together: bool) -> None:
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    sidecar.suspend()
    before = world.count("waits_timed_out")
    assert world.outputs(together=together) == world.expected
    # Afterwards, the same request is truncated again.
    assert world.count("waits_timed_out") - before >= len(PROMPTS)
    assert world.engine.state()["scheduler"]["store_connected"], (
        "it never counted as not responding"
    )
    sidecar.resume()
    world.check_idle()
    world.nothing_is_leased(sidecar)


def test_a_load_under_way(world: FaultWorld) -> None:
    sidecar = world.sidecar()
    assert world.outputs() == world.expected
    before = {name: world.count(name) for name in ("loads_timed_out", "blocks_failed")}
    world.load_under_way(sidecar)
    assert world.ending() == world.expected[:1]
    assert world.count("loads_timed_out") - before["loads_timed_out"] == 1
    assert world.count("blocks_failed") - before["blocks_failed"] == 6
    assert world.engine.state()["worker"]["store_connected"], "it never counted as not responding"
    sidecar.resume()
    world.check_idle()
    world.nothing_is_leased(sidecar)


def test_a_tier_that_hangs_below_a_sidecar_that_does_not(world: FaultWorld) -> None:
    config = '[[tiers]]\nkind = "faulty.hanging"\n'
    sidecar = world.sidecar("--l2", "64MiB", "--slot-bytes", "128KiB", config=config)
    assert world.outputs() == world.expected
    world.check_idle()
    for path in ("/v1/flush", "/v1/clear?tier=l2"):
        sidecar.post(path)
    before = world.count("waits_timed_out")
    assert world.outputs() == world.expected
    assert world.count("waits_timed_out") > before
    world.check_idle()
    sidecar.kill()  # it would wait for its reads
