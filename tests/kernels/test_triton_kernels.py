"""The Triton kernels without a GPU: on CPU by Triton's interpreter, and compiled ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# Triton reads a kernel's source from its file, so this runs as a file.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvstore.kernels import triton_kernels as kernels

def compiled(kernel, size, block, into, **more):
    constants = {"WORD": kernels.WORDS[size], "WORD_BYTES": size, "INTO_SLOTS": into,
                 "BLOCK": block, **more}
    pointers = {"rows": "*i64", "slots": "*i64", "pages": "*i32"}
    small = {"pages_per_block": "i32", "rows_count": "i32", "count0": "i32", "count1": "i32"}
    kinds = {**pointers, **small, **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds.get(name, "i64") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    for capability in (80, 90, 100):
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                              options={"enable_fp_fusion": False})
        assert len(made.asm["cubin"]) > 0
        assert ".local" not in made.asm["ptx"], "registers spilled"
        print(kernel.fn.__name__, capability, len(made.asm["cubin"]))

for into in (True, False):
    compiled(kernels.copy_plain, 8, 1024, into)
    compiled(kernels.copy_planes, 2, 1024, into)
    compiled(kernels.copy_int8, 2, 128, into, KIND=1)
"""


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_interpreted_equals_the_loops() -> None:
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = run([*options, str(HERE / "interpreted_triton.py")], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "[100%]" in done.stdout
    assert "s" not in done.stdout.split("[100%]")[0], "a test was skipped"


def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    """Compile to a cubin for each architecture, in a process without Triton's interpreter."""
    (tmp_path / "ahead.py").write_text(COMPILE)
    done = run([str(tmp_path / "ahead.py")], TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 18
