"""Stand-in for SGLang's kernels. On a CPU without AMX SGLang imports them and calls none."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: Any, **more: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return absent
