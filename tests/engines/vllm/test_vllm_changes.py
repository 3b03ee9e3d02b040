"""What changes under a running vLLM, through the connector: an adapter's files, the sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_adapter, write_model
from vllm_rig import Engine, Sidecar, check_same, full_blocks, needs_vllm, patient, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]


def cached(results: list[dict[str, Any]]) -> list[int]:
    return [each["cached"] for each in results]


def test_an_adapter_replaced_under_its_name(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    """By other weights in the same folder: vLLM's hashes stay what they were."""
    a, b = engines
    sidecar = Sidecar(tmp_path, "--l2", "64MiB", "--slot", "128KiB")
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
    assert cached(still) == [0], "nobody can say which weights this engine has"
    check_same(still, old)
    assert a.ask("settle")["requests"] == 0
    b.start(tmp_path / "llama", **arguments)
    new = b.generate([prompt], tokens=8, adapter=adapter)
    assert cached(new) == [0]
    assert new[0]["tokens"] != old[0]["tokens"]
    assert b.ask("settle")["requests"] == 0
    a.start(tmp_path / "llama", **arguments)
    again = a.generate([prompt], tokens=8, adapter=adapter)
    assert cached(again) == [full_blocks(prompt)], "what was computed with these weights"
    check_same(again, new)
    assert a.ask("settle")["requests"] == 0
    assert sidecar.stop() == 0
