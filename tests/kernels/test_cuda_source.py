"""The CUDA source without a GPU: compiled for each architecture, and run on CPU by a shim."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels import SKIP, reference
from kvstore.kernels.cuda_source import CUDA_SOURCE, launch_shape

HERE = Path(__file__).parent
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
KERNELS = ("kvstore_gather", "kvstore_scatter")
GUARD_BYTES = 64
"""Bytes around every buffer that no kernel may touch."""
SPILLING_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(1024) spilling(float* a) {
    float x[256];
    #pragma unroll
    for (int i = 0; i < 256; i++) x[i] = a[i * 1024 + threadIdx.x];
    #pragma unroll
    for (int i = 0; i < 256; i++) a[threadIdx.x + i * 1024] = x[i] * x[(i * 37 + 11) % 256];
}
"""


def compile_with_nvrtc(source: str, architecture: str) -> str:
    """What ptxas says of each kernel; raises AssertionError with the log when it fails."""
    nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc")
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    options.append(b"--ptxas-options=-v")
    (compiled,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.decode(errors="replace")
    assert compiled == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
    _, cubin_bytes = nvrtc.nvrtcGetCUBINSize(program)
    assert cubin_bytes > 0
    nvrtc.nvrtcDestroyProgram(program)
    return text


def spilled_bytes(log: str) -> dict[str, int]:
    """Bytes of stack, spill stores and spill loads of each kernel, added up."""
    found: dict[str, int] = {}
    kernel = ""
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = match[1]
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            found[kernel] = sum(int(number) for number in match.groups())
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_register_spills(architecture: str) -> None:
    assert spilled_bytes(compile_with_nvrtc(CUDA_SOURCE, architecture)) == dict.fromkeys(KERNELS, 0)


def test_a_spill_would_be_seen() -> None:
    assert spilled_bytes(compile_with_nvrtc(SPILLING_SOURCE, "sm_90"))["spilling"] > 0


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernels as a shared library for this CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("shim")
    shim = (HERE / "cuda_shim.h").read_text()
    (folder / "kernels.cpp").write_text(
        shim + CUDA_SOURCE + (HERE / "cuda_shim_launch.h").read_text()
    )
    command = [compiler, "-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC"]
    subprocess.run(
        [*command, "-o", folder / "kernels.so", folder / "kernels.cpp"], check=True, timeout=120
    )
    function = ctypes.CDLL(str(folder / "kernels.so")).launch
    function.restype = ctypes.c_ulonglong
    function.argtypes = [ctypes.c_int, *[ctypes.c_uint] * 3, *[ctypes.c_void_p] * 3]
    function.argtypes += [ctypes.c_ulonglong] * 5
    return function


class OffsetBuffer:
    """Random bytes that begin `offset` bytes behind a 16-byte boundary, in a larger room."""

    def __init__(self, rng: np.random.Generator, nbytes: int, offset: int) -> None:
        self.room = rng.integers(0, 256, nbytes + 2 * GUARD_BYTES, dtype=np.uint8)
        start = GUARD_BYTES // 2 - self.room.ctypes.data % 16 + offset
        self.inner = slice(start, start + nbytes)

    @property
    def bytes(self) -> np.ndarray:
        return self.room[self.inner]


@settings(max_examples=150, deadline=None)
@given(
    into_slots=st.booleans(),
    rows=st.sampled_from((2, 4, 6)),
    page_bytes=st.one_of(st.integers(1, 80), st.sampled_from((128, 384, 512, 2048, 2056, 4100))),
    pages_per_block=st.integers(1, 4),
    blocks=st.integers(1, 4),
    offsets=st.one_of(st.just([0] * 5), st.lists(st.integers(0, 15), min_size=5, max_size=5)),
    shape=st.one_of(st.none(), st.tuples(st.integers(1, 5), st.integers(1, 33), st.integers(1, 9))),
    seed=st.integers(0, 2**32 - 1),
)
def test_on_cpu_equals_the_loops(
    launch: Any,
    into_slots: bool,
    rows: int,
    page_bytes: int,
    pages_per_block: int,
    blocks: int,
    offsets: list[int],
    shape: tuple[int, int, int] | None,
    seed: int,
) -> None:
    """Any page size, alignment, grid and block, holes in the table included."""
    rng = np.random.default_rng(seed)
    num_pages = blocks * pages_per_block + 2
    table = rng.permutation(num_pages)[: blocks * pages_per_block].astype(np.int32)
    table[rng.random(len(table)) < 0.2] = SKIP
    pages = table.reshape(blocks, pages_per_block)
    pool = OffsetBuffer(rng, rows * num_pages * page_bytes, offsets[0])
    block_bytes = rows * pages_per_block * page_bytes
    slots = [OffsetBuffer(rng, block_bytes, offsets[1 + index % 4]) for index in range(blocks)]
    rooms = [pool.room.copy(), *(slot.room.copy() for slot in slots)]
    inner = [rooms[0][pool.inner], *(r[s.inner] for r, s in zip(rooms[1:], slots, strict=True))]
    as_pool = torch.from_numpy(inner[0]).view(rows // 2, 2, num_pages, 1, 1, page_bytes)
    copy = reference.gather if into_slots else reference.scatter
    copy(as_pool, pages.tolist(), [memoryview(slot) for slot in inner[1:]])

    grid, block = launch_shape(blocks * pages_per_block * rows)
    grid_x, block_x, block_y = shape or (grid[0], block[0], block[1])
    addresses = np.array([slot.bytes.ctypes.data for slot in slots], dtype=np.uint64)
    sizes = (blocks, pages_per_block, rows, num_pages, page_bytes)
    where = (pool.bytes.ctypes.data, addresses.ctypes.data, pages.ctypes.data)
    misaligned = launch(int(into_slots), grid_x, block_x, block_y, *where, *sizes)
    assert misaligned == 0
    for buffer, expected in zip((pool, *slots), rooms, strict=True):
        assert (buffer.room == expected).all()


def test_launches_are_bounded_and_cover_small_work() -> None:
    assert launch_shape(1) == ((1, 1, 1), (32, 8, 1))
    assert launch_shape(10**9)[0][0] <= 128
