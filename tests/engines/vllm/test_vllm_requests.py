"""Kinds of requests with the connector: LoRA adapters, sounds, chunked prefill. Two engines, one
sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import AUDIO_TOKEN, write_adapter, write_hearing_model, write_model
from vllm_rig import (
    BLOCK,
    START_LIMIT_S,
    Engine,
    Sidecar,
    cached,
    check_same,
    full_blocks,
    needs_vllm,
    patient,
    tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm(), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    made = Sidecar(tmp_path_factory.mktemp("sidecar"), "--l2", "64MiB", "--slot-bytes", "128KiB")
    yield made
    assert made.stop() == 0, "leases were not released"


def both(engines: tuple[Engine, Engine], model: Path, sidecar: Sidecar, **arguments: Any) -> None:
    for engine in engines:
        engine.start(model, kv_transfer_config=patient(sidecar.socket), **arguments)


def test_a_prompt_in_several_steps(
    engines: tuple[Engine, Engine], sidecar: Sidecar, tmp_path: Path
) -> None:
    """Steps of 96 tokens with several requests: a block is saved once it is full, wherever a step
    ends. A partly loaded prompt continues after the loaded part."""
    a, b = engines
    write_model(tmp_path / "llama", "llama", 1)
    both(engines, tmp_path / "llama", sidecar, max_num_batched_tokens=96)
    prompts = [tokens(number, length) for number, length in enumerate((50, 97, 333, 511, 700))]
    longer = [prompt + tokens(50 + number, 300) for number, prompt in enumerate(prompts)]
    cold = a.generate(prompts, tokens=8, together=True)
    assert a.ask("settle")["requests"] == 0
    warm = b.generate(prompts, tokens=8, together=True)
    assert cached(warm) == [full_blocks(prompt) for prompt in prompts]
    check_same(warm, cold)
    right = a.generate(longer, tokens=8, salt="computed anew")
    assert cached(right) == [0] * len(longer)
    found = b.generate(longer, tokens=8, together=True)
    # These prompts do not have the blocks that decode filled, only the start of the first one.
    assert cached(found) == [len(prompt) // BLOCK * BLOCK for prompt in prompts]
    check_same(found, right)


def test_a_reset_of_the_connector_hides_all_that_was_saved(
    engines: tuple[Engine, Engine], sidecar: Sidecar, tmp_path: Path
) -> None:
    """vLLM resets it when weights are changed in place."""
    a, b = engines
    write_model(tmp_path / "llama", "llama", 4)
    both(engines, tmp_path / "llama", sidecar)
    prompt = tokens(5, 200)
    cold = a.generate([prompt], tokens=8)
    assert a.ask("settle")["requests"] == 0
    assert a.ask("reset", connector=True)["reset"]
    found = a.generate([prompt], tokens=8)
    assert cached(found) == [0]
    assert a.ask("settle")["requests"] == 0
    assert a.ask("reset")["reset"]
    assert cached(a.generate([prompt], tokens=8)) == [full_blocks(prompt)], (
        "its own blocks, with new hashes"
    )
    warm = b.generate([prompt], tokens=8)
    assert cached(warm) == [full_blocks(prompt)], "the other engine continues"
    check_same(warm, cold)


def test_adapters_share_nothing(
    engines: tuple[Engine, Engine], sidecar: Sidecar, tmp_path: Path
) -> None:
    a, b = engines
    write_model(tmp_path / "llama", "llama", 2)
    adapters = []
    for number in (1, 2):
        write_adapter(tmp_path / f"adapter{number}", number)
        adapters.append([f"adapter{number}", number, str(tmp_path / f"adapter{number}")])
    both(engines, tmp_path / "llama", sidecar, enable_lora=True, max_lora_rank=8, max_loras=2)
    prompt = tokens(1, 200)
    cold = [a.generate([prompt], tokens=8, adapter=adapter)[0] for adapter in (None, *adapters)]
    assert cached(cold) == [0, 0, 0]
    assert len({tuple(each["tokens"]) for each in cold}) == 3, "the adapters have no effect"
    assert a.ask("settle")["requests"] == 0
    warm = [b.generate([prompt], tokens=8, adapter=adapter)[0] for adapter in (None, *adapters)]
    assert cached(warm) == [full_blocks(prompt)] * 3
    check_same(warm, cold)


def test_sounds_are_identified_by_their_content(
    engines: tuple[Engine, Engine], sidecar: Sidecar, tmp_path: Path
) -> None:
    """A prompt with a second of sound in it, from its 40th token on."""
    a, b = engines
    write_hearing_model(tmp_path / "model", 3)
    hearing = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"audio": 1}}
    both(engines, tmp_path / "model", sidecar, **hearing)
    prompt = [max(token, 7) for token in tokens(1, 40)] + [AUDIO_TOKEN] + tokens(2, 100)
    prompt = [token if at == 40 else max(token, 7) for at, token in enumerate(prompt)]
    cold = [a.generate([prompt], tokens=8, sound=seed)[0] for seed in (1, 2)]
    assert cached(cold) == [0, BLOCK], "only the blocks before the sound are the same"
    assert cold[0]["logprobs"] != cold[1]["logprobs"], "the sound has no effect"
    assert a.ask("settle")["requests"] == 0
    warm = [b.generate([prompt], tokens=8, sound=seed)[0] for seed in (1, 2, 3)]
    assert cached(warm) == [5 * BLOCK, 5 * BLOCK, BLOCK]  # 165 tokens, 25 of them the sound
    check_same(warm[:2], cold)

    # The hash of a sound does not cover the options of the processor.
    other = {"mm_processor_kwargs": {"do_normalize": True}, **hearing}
    b.start(tmp_path / "model", kv_transfer_config=patient(sidecar.socket), **other)
    assert cached([b.generate([prompt], tokens=8, sound=1)[0]]) == [0]
    # With both caches off, vLLM identifies sounds by a counter.
    nameless = {
        "model": str(tmp_path / "model"),
        "kv_transfer_config": patient(sidecar.socket),
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
    }
    refused = b.try_ask("start", START_LIMIT_S, args={**nameless, **hearing})
    assert "identifies images and sounds by a counter" in refused["error"]


def test_inside_multi_connector_the_policy_must_be_set_outside(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """It copies each child's configuration, so a setting of the connector there has no effect."""
    write_model(tmp_path / "llama", "llama", 6)
    within = {**patient(""), "kv_connector_extra_config": {"embedded": {"l2": "64MiB"}}}
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [within]},
    }
    arguments = {"model": str(tmp_path / "llama"), "kv_transfer_config": several}
    refused = engines[0].try_ask("start", START_LIMIT_S, args=arguments)
    assert "beside kv_connector 'MultiConnector'" in refused["error"]
    several["kv_load_failure_policy"] = "recompute"
    engines[0].start(tmp_path / "llama", kv_transfer_config=several)
    prompt = tokens(7, 200)
    cold = engines[0].generate([prompt], tokens=8)
    assert engines[0].ask("reset")["reset"]
    warm = engines[0].generate([prompt], tokens=8)
    assert cached(warm) == [full_blocks(prompt)]
    check_same(warm, cold)
