"""docs/vllm_arguments.md against the installed vLLM: it has a verdict for every argument, and the
code does what it says of them."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model
from vllm_rig import ROOT, needs_vllm

from kvstore.connectors.vllm.common import kv_settings as settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm()]

PAGE = ROOT / "docs" / "vllm_arguments.md"
VERDICTS = ("in the name", "rejected", "no effect")
ARGUMENT = "EngineArgs"
MODULES = {
    ARGUMENT: "engine.arg_utils",
    "CompilationConfig": "config.compilation",
    "PassConfig": "config.compilation",
    "EngramConfig": "config.engram",
    "DiffusionConfig": "config.diffusion",
    "EPLBConfig": "config.parallel",
    "MambaConfig": "config.mamba",
    "OffloadConfig": "config.offload",
}
"""Modules of classes that are not in `vllm.config`."""
STRICT = "SpeculativeConfig"
"""A class whose fields have the names of arguments but mean something else."""
PARTS = {
    "model_config": "ModelConfig",
    "multimodal_config": "MultiModalConfig",
    "load_config": "LoadConfig",
    "cache_config": "CacheConfig",
    "attention_config": "AttentionConfig",
    "kernel_config": "KernelConfig",
    "parallel_config": "ParallelConfig",
    "lora_config": "LoRAConfig",
    "compilation_config": "CompilationConfig",
    "mamba_config": "MambaConfig",
}
ALL_DEFAULTS = {
    **settings.DEFAULTS,
    **settings.DEFAULTS_OF_QUANTISED_KV,
    **settings.DEFAULTS_OF_STATES,
    **settings.DEFAULTS_OF_THE_TIER,
}


def rows() -> Iterator[tuple[str, str, str]]:
    """(class, name, verdict) of each name on the page."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) not in (3, 4) or not cells[0].startswith("`"):
            continue
        owner = cells[0].strip("`") if len(cells) == 4 else ARGUMENT
        verdict = cells[-2]
        assert verdict in VERDICTS, line
        for name in re.findall(r"`(\w+)`", cells[-3]):
            yield owner, name, verdict


@cache
def page() -> dict[str, dict[str, str]]:
    """Verdicts by class and name."""
    found: dict[str, dict[str, str]] = {}
    for owner, name, verdict in rows():
        names = found.setdefault(owner, {})
        assert name not in names, f"{owner}.{name} is listed twice"
        names[name] = verdict
    return found


def fields_of(owner: str) -> set[str]:
    module = importlib.import_module(f"vllm.{MODULES.get(owner, 'config')}")
    return {field.name for field in dataclasses.fields(getattr(module, owner))}


def test_every_argument_of_vllm_has_a_verdict() -> None:
    assert set(page()[ARGUMENT]) == fields_of(ARGUMENT)


@pytest.mark.parametrize(
    "owner", [*dict.fromkeys(PARTS.values()), *sorted(set(page()) - {ARGUMENT})]
)
def test_every_field_of_a_configuration_has_a_verdict(owner: str) -> None:
    inherited = set() if owner == STRICT else set(page()[ARGUMENT])
    listed = set(page().get(owner, ()))
    assert fields_of(owner) - inherited == listed - inherited


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments") / "llama"
    write_model(folder, "llama", 1)
    return folder


@pytest.fixture(scope="module")
def vllm_config(model: Path) -> Any:
    """Of an engine with default arguments, and LoRA."""
    return made(model, enable_lora=True)


def made(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, **arguments
    ).create_engine_config()


def test_default_arguments_are_not_in_the_name(model: Path, vllm_config: Any) -> None:
    assert settings.kv_settings(vllm_config, "") == {}
    assert settings.kv_settings(made(model, enforce_eager=True), "") == {}
    cache_config = type("KVCacheConfig", (), {"kv_cache_groups": []})
    assert settings.tier_settings(vllm_config, cache_config, "") == {}


@pytest.mark.parametrize("path", ALL_DEFAULTS)
def test_a_named_setting_is_called_named_and_exists(path: str, vllm_config: Any) -> None:
    *parts, name = path.split(".")
    owner = PARTS.get(parts[-1], "") if parts else "VllmConfig"
    if path == "ec_transfer_config.ec_connector":
        owner, name = "VllmConfig", parts[0]  # an object that is None by default
    else:
        assert name in fields_of(owner), f"vLLM has no {path} any more"
    verdict = page().get(owner, {}).get(name) or page()[ARGUMENT].get(name)
    assert verdict == "in the name"
    if not parts or "multimodal_config" in parts or owner == "VllmConfig":
        return
    changed = copy.copy(vllm_config)
    part = copy.copy(getattr(vllm_config, parts[0]))
    object.__setattr__(changed, parts[0], part)
    other = ["-op"] if name == "custom_ops" else "a.custom.value"
    object.__setattr__(part, name, other)
    found = settings._differing(changed, ALL_DEFAULTS)
    assert path in found
    assert settings.settings_digest(found) != settings.settings_digest({})


NAMED: dict[str, Any] = {
    "model_impl": "transformers",
    "code_revision": "main",
    "quantization_config": {"linear": "fp8_per_tensor"},
    "load_format": "pt",
    "ignore_patterns": ["*.bin"],
    "model_loader_extra_config": {"concurrency": 2},
    "kv_cache_dtype_skip_layers": ["0"],
    "moe_backend": "triton",
    "linear_backend": "torch",
    "all2all_backend": "deepep_low_latency",
    "worker_extension_cls": "a.module.Extension",
    "additional_config": {"key": 1},
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "attention_config": {"indexer_kv_dtype": "bf16"},
}
"""Other values than the default one of some arguments."""


@pytest.mark.parametrize("argument", NAMED)
def test_a_named_argument_reaches_the_name(argument: str, model: Path) -> None:
    assert page()[ARGUMENT][argument] == "in the name"
    more = {"quantization": "online"} if argument == "quantization_config" else {}
    found = settings.kv_settings(made(model, **{argument: NAMED[argument]}, **more), "")
    assert len(found) == 1
    again = settings.kv_settings(made(model, **{argument: NAMED[argument]}, **more), "")
    assert settings.settings_digest(again) == settings.settings_digest(found)


def test_kernels_of_attention_are_named_for_quantised_kv_only(model: Path) -> None:
    kernel = {"attention_config": {"backend": "CPU_ATTN"}}
    assert settings.kv_settings(made(model, **kernel), "") == {}
    assert len(settings.kv_settings(made(model, kv_cache_dtype="fp8", **kernel), "")) == 1
    assert settings.kv_settings(made(model, kv_cache_dtype="fp8"), "") == {}
