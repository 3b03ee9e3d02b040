"""Changes under a running vLLM with the connector: an adapter's files, the sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_adapter, write_model
from vllm_rig import (
    Engine,
    Sidecar,
    check_same,
    full_blocks,
    needs_vllm,
    patient,
    tokens,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]


def cached(results: list[dict[str, Any]]) -> list[int]:
    return [each["cached"] for each in results]


def test_an_adapter_replaced_under_its_name(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    """Other weights in the same folder: vLLM's hashes do not change."""
    a, b = engines
    sidecar = Sidecar(tmp_path, "--l2", "64MiB", "--slot-bytes", "128KiB")
    write_model(tmp_path / "llama", "llama", 6)
    write_adapter(tmp_path / "adapter", 1)
    adapter = ["adapter", 1, str(tmp_path / "adapter")]
    arguments = {
        "kv_transfer_config": patient(sidecar.socket),
        "enable_lora": True,
        "max_lora_rank": 8,
    }
    a.start(tmp_path / "llama", **arguments)
    prompt = tokens(8, 200)
    old = a.generate([prompt], tokens=8, adapter=adapter)
    assert a.ask("settle")["requests"] == 0
    assert a.ask("reset")["reset"]
    assert cached(a.generate([prompt], tokens=8, adapter=adapter)) == [full_blocks(prompt)]
    write_adapter(tmp_path / "adapter", 2)
    assert a.ask("reset")["reset"]
    still = a.generate([prompt], tokens=8, adapter=adapter)
    assert cached(still) == [0], "it is unknown which weights this engine has"
    check_same(still, old)
    assert a.ask("settle")["requests"] == 0
    b.start(tmp_path / "llama", **arguments)
    new = b.generate([prompt], tokens=8, adapter=adapter)
    assert cached(new) == [0]
    assert new[0]["tokens"] != old[0]["tokens"]
    assert b.ask("settle")["requests"] == 0
    a.start(tmp_path / "llama", **arguments)
    again = a.generate([prompt], tokens=8, adapter=adapter)
    assert cached(again) == [full_blocks(prompt)], "blocks computed with these weights"
    check_same(again, new)
    assert a.ask("settle")["requests"] == 0
    assert sidecar.stop() == 0


def test_a_model_that_changes_its_configuration_while_it_is_loaded(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """vLLM's Transformers backend writes the dtype into it. If the worker is a separate process,
    the scheduler does not see the change."""
    a, _ = engines
    sidecar = Sidecar(tmp_path, "--l2", "64MiB", "--slot-bytes", "128KiB")
    write_model(tmp_path / "llama", "llama", 6)
    arguments = {
        "kv_transfer_config": patient(sidecar.socket),
        "model_impl": "transformers",
        "dtype": "bfloat16",
    }
    prompt = tokens(12, 200)
    for executor, expected in (("mp", 0), ("uni", full_blocks(prompt))):
        a.start(tmp_path / "llama", distributed_executor_backend=executor, **arguments)
        first = a.generate([prompt])
        assert cached(first) == [expected], "another kind of process computes the same"
        assert a.ask("reset")["reset"]
        again = a.generate([prompt])
        assert cached(again) == [full_blocks(prompt)]
        assert again[0]["tokens"] == first[0]["tokens"]
        assert a.ask("settle")["requests"] == 0
    a.ask("stop")
    assert sidecar.stop() == 0


def test_blocks_are_free_with_the_last_step_once_they_are_saved(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """A program that embeds vLLM makes no further step, and may then reset or pause it."""
    a, _ = engines
    write_model(tmp_path / "llama", "llama", 6)
    a.start(tmp_path / "llama", kv_transfer_config=patient("", embedded={"l2": "64MiB"}))
    prompt = tokens(14, 200)
    a.ask("add", prompt=prompt, tokens=20)  # no more blocks become full
    while not a.state()["worker"].get("blocks_saved"):
        assert a.ask("step", pause_s=0.05)["ended"] == []
    while not a.ask("step")["ended"]:
        pass
    assert a.ask("reset", settle=False)["reset"]
    assert cached(a.generate([prompt])) == [full_blocks(prompt)]


def test_metrics_tell_whether_there_is_a_sidecar(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    a, _ = engines
    write_model(tmp_path / "llama", "llama", 6)
    a.start(tmp_path / "llama", kv_transfer_config=patient(str(tmp_path / "kv.sock")))
    seeds = iter(range(10_000))

    def told() -> dict[str, float]:
        """vLLM's metrics after one more request."""
        a.generate([tokens(next(seeds), 100)], tokens=2)
        names = ("connects", "disconnects", "lookups_failed", "saves_failed", "saves")
        metrics = a.ask("metrics")["metrics"]
        return {name: metrics[f"vllm:kvstore_{name}"] for name in names}

    absent = told()
    assert absent["connects"] == absent["disconnects"] == 0
    assert absent["lookups_failed"] == 1
    assert absent["saves_failed"] == absent["saves"] > 0
    sidecar = Sidecar(tmp_path, "--l2", "64MiB", "--slot-bytes", "128KiB")
    wait_until(lambda: told()["connects"] == 2, "the scheduler's and the worker's")
    before = told()
    after = told()
    assert after["disconnects"] == 0
    assert after["saves"] > before["saves"]
    assert after["lookups_failed"] == before["lookups_failed"]
    sidecar.kill()
    wait_until(lambda: told()["disconnects"] == 2, "both have seen the disconnect")
    assert told()["connects"] == 2


def test_ranks_are_added_up_and_logged_by_interval() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    from kvstore.connectors.vllm.connector.metrics import CounterDeltas

    worker, other, scheduler = CounterDeltas(), CounterDeltas(), CounterDeltas()
    step = worker.since({"blocks_saved": 3, "store_connected": 1, "not_told": 7})
    assert step is not None
    for each in (
        other.since({"blocks_saved": 2, "store_connected": 1}),
        scheduler.since({"hits": 1, "store_connected": 0}),
    ):
        assert each is not None
        step = step.aggregate(each)
    assert worker.since({"blocks_saved": 3, "store_connected": 1}) is None
    lost = worker.since({"blocks_saved": 4, "store_connected": 0})
    assert lost is not None
    logged = KVConnectorLogging(KVTransferConfig(**patient("/none")))
    lines: list[str] = []
    for _ in range(2):
        logged.observe(step.to_dict())
        logged.observe(lost.to_dict())
        logged.log(lambda form, *values: lines.append(form % values))
        logged.log(lambda form, *values: lines.append(form % values))
    assert lines[0] == lines[1], "reported stats are not the sum"
    assert lines[0].removeprefix("KV Transfer metrics: ").split(", ") == [
        "blocks_saved=6", "connects=2", "hits=1", "disconnects=1",
    ]  # fmt: skip
    assert len(lines) == 2, "an interval without changes is not logged"
