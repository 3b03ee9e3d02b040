"""The CUDA source as a library for this CPU, with g++ and a shim of CUDA's index variables."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.kernels.cuda_source import CUDA_SOURCE, kernel_name, launch_shape, launch_sizes
from kvstore.kernels.plan import CopyPlan

HERE = Path(__file__).parent
COMPILE = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC")
TRAPS = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-pthread")


def build(folder: Path) -> Shim:
    """Compile the kernels. Skips the test without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    texts = [(HERE / part).read_text() for part in ("cuda_shim.h", "cuda_shim_launch.h")]
    (folder / "kernels.cpp").write_text(texts[0] + CUDA_SOURCE + texts[1])
    files = ("-o", folder / "kernels.so", folder / "kernels.cpp")
    subprocess.run([compiler, *COMPILE, *TRAPS, *files], check=True, timeout=120)
    return Shim(folder / "kernels.so")


class Shim:
    """The compiled kernels."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.launch.restype = ctypes.c_ulonglong
        self.library.launch.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int, *[ctypes.c_uint] * 3),
            *[ctypes.c_void_p] * 5,
        ]

    def run(
        self,
        plan: CopyPlan,
        dtype: str,
        table: np.ndarray,
        slots: Sequence[np.ndarray],
        *,
        into_slots: bool,
        shape: tuple[int, int, int] | None = None,
    ) -> None:
        """Run one launch into or out of these slots; see `launch`."""
        addresses = np.array([slot.ctypes.data for slot in slots], dtype=np.uint64)
        pages = np.ascontiguousarray(table, dtype=np.int32)
        self.launch(plan, dtype, plan.table(), addresses, pages, into_slots=into_slots, shape=shape)

    def launch(
        self,
        plan: CopyPlan,
        dtype: str,
        rows: np.ndarray,
        slots: np.ndarray,
        pages: np.ndarray,
        *,
        into_slots: bool,
        shape: tuple[int, int, int] | None = None,
    ) -> None:
        """Run one launch over tables as in `launchers.Tables`.

        shape: grid x, block x and block y. None: the one used on a device.
        """
        name = kernel_name(plan, dtype, into_slots=into_slots)
        grid, block = launch_shape(pages.size * plan.runs_per_page)
        counts, strides = launch_sizes(plan, len(slots))
        arrays = (
            *(rows, slots, pages),
            np.array(counts, dtype=np.uint32),
            np.array(strides, dtype=np.uint64),
        )
        misaligned = self.library.launch(
            ctypes.cast(getattr(self.library, name), ctypes.c_void_p),
            int(plan.storage == "int8"),
            *(shape or (grid[0], block[0], block[1])),
            *(array.ctypes.data for array in arrays),
        )
        assert misaligned == 0
