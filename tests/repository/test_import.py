"""`import kvstore` is light, and so is starting the command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kvstore

HEAVY = {
    "boto3", "botocore", "cupy", "fastapi", "gguf", "httpx", "redis", "safetensors", "sglang",
    "tokenizers", "torch", "triton", "uvicorn", "vllm",
}  # fmt: skip


def roots_loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    script = f"import sys, json; {statement}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return {name.partition(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}


def test_importing_the_package_loads_no_other() -> None:
    loaded = roots_loaded_by("import kvstore") - set(sys.stdlib_module_names)
    bare = roots_loaded_by("pass")
    assert loaded - bare == {"kvstore"}


@pytest.mark.parametrize(
    "statement",
    [
        "import kvstore.blocks.hashing, kvstore.blocks.model_geometry",
        "from kvstore.cli import main; main(['version'])",
    ],
)
def test_the_light_parts_load_nothing_heavy(statement: str) -> None:
    assert not roots_loaded_by(statement) & HEAVY


def test_unknown_attributes_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        kvstore.opne  # noqa: B018
    assert {"open", "connect", "__version__"} <= set(dir(kvstore))
