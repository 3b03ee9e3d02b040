"""No copy waits for the whole device, and the parts of the CUDA copier that need no device work."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from kvstore.kernels.cuda_copier import _neighbours
from kvstore.kernels.paths import COPY_ENGINE_FROM_BYTES, Direction, path_for
from kvstore.kernels.paths import Path as CopyPath

PACKAGE = Path(__file__).parent.parent.parent / "kvstore"
HOT = sorted(
    [
        *(PACKAGE / "kernels").glob("*.py"),
        *(PACKAGE / "connectors").rglob("*.py"),
        *(PACKAGE / "engine").glob("*.py"),
    ]
)

WHOLE_DEVICE = ("deviceSynchronize", "empty_cache", "cudaDeviceSynchronize", "ctx_synchronize")


def waits_for_the_device(tree: ast.AST) -> list[str]:
    """Return the calls that wait for all streams of a device, by name."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        text = ast.unparse(node)
        if node.attr in WHOLE_DEVICE or text in ("torch.cuda.synchronize", "torch.synchronize"):
            found.append(f"line {node.lineno}: {text}")
        if node.attr == "synchronize" and ast.unparse(node.value).endswith("Device"):
            found.append(f"line {node.lineno}: {text}")
    return found


def test_nothing_waits_for_the_whole_device() -> None:
    found = {str(path): waits_for_the_device(ast.parse(path.read_text())) for path in HOT}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("torch.cuda.synchronize()", True),
        ("torch.cuda.empty_cache()", True),
        ("runtime.deviceSynchronize()", True),
        ("stream.synchronize()", False),
        ("event.synchronize()", False),
    ],
)
def test_the_search_itself(code: str, waits: bool) -> None:
    assert bool(waits_for_the_device(ast.parse(code))) is waits


def test_copies_join_only_slots_without_a_gap() -> None:
    hosts = np.array([4096, 8192, 12288, 20480, 16384, 24576], dtype=np.uint64)
    assert list(_neighbours(hosts, 4096)) == [(0, 3), (3, 1), (4, 1), (5, 1)]
    assert list(_neighbours(hosts, 2048)) == [(index, 1) for index in range(6)]
    assert list(_neighbours(hosts[:1], 4096)) == [(0, 1)]


@pytest.mark.parametrize("direction", list(Direction))
def test_the_size_chooses_the_path(direction: Direction) -> None:
    limit = COPY_ENGINE_FROM_BYTES[direction]
    assert path_for(direction, limit - 1) is CopyPath.KERNEL
    assert path_for(direction, limit) is CopyPath.COPY_ENGINE
