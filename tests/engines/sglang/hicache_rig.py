"""SGLang's real radix tree and cache controller on CPU, by the driver beside this repository."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
DRIVER = HERE.parents[3] / "shared" / "conformance" / "sglang_cpu_e2e.py"
LAYERS, HEADS, WIDTH, TOKENS = 4, 8, 128, 16
"""The driver's model; a page of bfloat16 has 262,144 bytes."""
PAGE_BYTES = LAYERS * HEADS * WIDTH * TOKENS * 2 * 2
RESERVE_BYTES = 256 << 20
"""Memory that SGLang's host pools must leave free."""
SEQUENCES, PAGES = 2, 20
"""Number of sequences of one drive, and pages of each. SGLang prefetches at least 256 tokens."""


def absent() -> str:
    """Why the tests of this folder cannot run here; "" if they can."""
    try:
        importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "SGLang is not installed (.ci/engines sglang installs it)"
    return "" if DRIVER.exists() else f"no driver at ../shared/conformance/{DRIVER.name}"


@cache
def driver() -> ModuleType:
    """The driver as a module. Its import lets SGLang's copies to and from the device run on CPU in
    this process."""
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(HERE / "standins"))
    spec = importlib.util.spec_from_file_location("sglang_cpu_e2e", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from sglang.srt.mem_cache.pool_host import base

    # SGLang leaves 10 GiB of the machine's memory alone; the pools of these tests are small.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
    logging.getLogger("sglang").setLevel(logging.WARNING)
    return module


def extra(socket: str, *, zero_copy: bool = True, **more: Any) -> dict[str, Any]:
    """Value of --hicache-storage-backend-extra-config."""
    return {
        "backend_name": "kvstore",
        "module_path": "kvstore.connectors.sglang",
        "class_name": "KVStoreBackend",
        "interface_v1": int(zero_copy),
        "socket": socket,
        "revision": "driver",  # its model has no weights
        "max_wait": {"base": 60_000, "max": 60_000},
        **more,
    }


def drive(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: dict[str, Any],
    *,
    layout: str = "page_first",
    core: str = "rust",
) -> str:
    """One instance computes and writes. A second, empty one prefetches, loads and compares every
    byte. Returns the output of the driver."""
    arguments = ["dynamic", json.dumps(chosen), "--layout", layout, "--core", core]
    arguments += ["--pages", str(PAGES), "--seqs", str(SEQUENCES), "--page-size", str(TOKENS)]
    monkeypatch.setattr(sys, "argv", ["sglang_cpu_e2e", *arguments])
    driver().main()
    printed = capsys.readouterr().out
    tokens = SEQUENCES * PAGES * TOKENS
    assert (
        f"PASS KVStoreBackend layout={layout} page={TOKENS} core={core}: {tokens} tokens "
        "restored byte-identical" in printed
    ), printed
    return printed


def between_instances(
    monkeypatch: pytest.MonkeyPatch, happens: Any, then: dict[str, Any] | None = None
) -> None:
    """Call `happens()` after the first instance has written, before the second starts. `then`
    overrides keys of the second one's configuration."""
    make = driver().make
    made = []

    def make_after(arguments: Any, chosen: dict[str, Any], folder: str) -> Any:
        made.append(chosen)
        if len(made) == 2:
            happens()
        over = then or {} if len(made) > 1 else {}
        return make(arguments, {**chosen, **over}, folder)

    monkeypatch.setattr(driver(), "make", make_after)
