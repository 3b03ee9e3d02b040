"""Weights changed under their name, as merges, fine-tunes and re-quantised files do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import change_weights, write_model
from vllm_rig import (
    CACHE,
    PATIENT_TIER,
    Engine,
    Sidecar,
    cached,
    check_same,
    full_blocks,
    needs_vllm,
    our_tier,
    patient,
    tier,
    tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]

CHANGED_BYTES = 3072


@pytest.mark.parametrize("integration", ["connector", "tier"])
def test_three_kibibytes_of_a_projection_changed_in_place(
    engines: tuple[Engine, Engine], tmp_path: Path, integration: str
) -> None:
    """Size and time stay. A fresh process over the same store computes all, like a cold engine."""
    a, b = engines
    sidecar = Sidecar(tmp_path, "--l2", "64MiB", "--slot-bytes", "256KiB")
    model = tmp_path / "llama"
    write_model(model, "llama", 6)
    transfer = {
        "connector": lambda: patient(sidecar.socket),
        "tier": lambda: tier(32 << 20, our_tier(sidecar.socket, **PATIENT_TIER)),
    }[integration]
    prompts = [tokens(seed, 200) for seed in (21, 22, 23)]
    a.start(model, kv_transfer_config=transfer())
    old = a.generate(prompts)
    assert a.ask("settle")["requests"] == 0
    a.ask("stop")
    records = list((Path(CACHE.name) / "kvstore" / "weights").glob("*.json"))
    assert records, "the next start reads nothing, except what has changed"
    b.start(model, kv_transfer_config=transfer())
    assert cached(b.generate(prompts)) == [full_blocks(prompt) for prompt in prompts]
    b.ask("stop")
    change_weights(model, "model.layers.1.self_attn.k_proj.weight", CHANGED_BYTES)
    a.start(model)
    cold = a.generate(prompts)
    assert [each["tokens"] for each in cold] != [each["tokens"] for each in old]
    b.start(model, kv_transfer_config=transfer())
    found = b.generate(prompts)
    assert cached(found) == [0, 0, 0]
    check_same(found, cold)
    assert b.ask("settle")["requests"] == 0
    b.ask("stop")
    assert sidecar.stop() == 0
