"""The CUDA source without a GPU: compiled for each architecture, and run on CPU by a shim."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from cuda_shim import Shim
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import Case, Sizes, bits, cases, clone, crafted, make_pool

from kvstore.kernels import BlockFormat, PoolLayout, reference
from kvstore.kernels.base import Plans
from kvstore.kernels.cuda_source import CUDA_SOURCE, KERNELS, LANES, launch_shape
from kvstore.kernels.formats import dtype_name

torch.set_num_threads(1)

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
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
    """Return the report of ptxas on each kernel. Raises AssertionError with the log on failure."""
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
    """Return the sum of stack, spill store and spill load bytes of each kernel."""
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


def test_a_register_spill_would_be_detected() -> None:
    assert spilled_bytes(compile_with_nvrtc(SPILLING_SOURCE, "sm_90"))["spilling"] > 0


def check(
    shim: Shim, case: Case, *, into_slots: bool, layer: int | None = None, **shape: Any
) -> None:
    """Compare one launch with the loops. Slots are longer than blocks and pools have gaps, so all
    writes have bytes around them that no kernel may change."""
    if not case.pages:
        return
    slots = [np.frombuffer(slot, dtype=np.uint8) for slot in case.slots]
    plan = Plans(case.pool, case.form).of(case.pages_per_block, layer)
    expected, before = clone(case.pool), bits(case.pool)
    if into_slots:
        wanted = [bytearray(slot) for slot in case.slots]
        reference.gather(case.pool, case.pages, [memoryview(slot) for slot in wanted], case.form)
    else:
        wanted = [bytearray(slot) for slot in case.slots]
        reference.scatter(expected, case.pages, case.views(), case.form)
    table = np.array(case.pages, dtype=np.int32)
    shim.run(plan, dtype_name(case.pool.dtype), table, slots, into_slots=into_slots, **shape)
    assert case.slots == wanted
    assert bits(case.pool) == (before if into_slots else bits(expected))


SHAPES = st.one_of(st.none(), st.tuples(st.integers(1, 5), st.integers(1, 33), st.integers(1, 9)))


@settings(max_examples=200, deadline=None)
@given(
    case=cases(unique=True, storages=("plain", "planes")), into_slots=st.booleans(), shape=SHAPES
)
def test_on_cpu_equals_the_loops(
    shim: Shim, case: Case, into_slots: bool, shape: tuple[int, int, int] | None
) -> None:
    """Any layout, order, grid and block, with skipped pages."""
    check(shim, case, into_slots=into_slots, shape=shape)


@settings(max_examples=40, deadline=None)
@given(case=cases(unique=True, storages=("int8",)), into_slots=st.booleans())
def test_int8_on_cpu_equals_the_loops(shim: Shim, case: Case, into_slots: bool) -> None:
    """Grid and block as on a device: the lanes of a warp find the largest value together."""
    check(shim, case, into_slots=into_slots)


@pytest.mark.parametrize("storage", ["plain", "planes", "int8"])
@pytest.mark.parametrize("into_slots", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_wide_vectors_take_the_vector_paths(
    shim: Shim, storage: str, into_slots: bool, dtype: torch.dtype
) -> None:
    """Sizes of real models: runs of many 16-byte vectors, and vectors of 128 values."""
    rng = np.random.default_rng(7)
    values = torch.from_numpy(rng.standard_normal(1 << 14).astype(np.float32)).to(dtype)
    pool = make_pool("reference", Sizes(2, 3, 4, 2, 128), dtype, values.view(torch.uint8).numpy())
    form = BlockFormat("LKTHD", storage)
    slots = [bytearray(rng.bytes(form.block_bytes(pool, 2) + 64))]
    if storage == "int8" and not into_slots:
        other = make_pool(
            "reference", Sizes(2, 3, 4, 2, 128), dtype, values.view(torch.uint8).numpy()
        )
        reference.gather(other, [[0, 1]], [memoryview(slot) for slot in slots], form)
    check(shim, Case(pool, form, [[2, 0]], slots), into_slots=into_slots)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_int8_rounds_back_to_nearest_even(shim: Shim, dtype: torch.dtype) -> None:
    tensor, slot = crafted(dtype)
    pool = PoolLayout.reference(tensor)
    check(shim, Case(pool, BlockFormat("LKTHD", "int8"), [[0]], [slot]), into_slots=False)


@pytest.mark.parametrize("top", [2.0**-100, 2.0**-100 * (1 - 2.0**-20), 2.0**-102, 1e30])
def test_int8_of_the_smallest_vectors(shim: Shim, top: float) -> None:
    tensor = torch.full((1, 2, 1, 1, 1, 8), top)
    tensor[..., 3:] = -top / 3
    pool, form = PoolLayout.reference(tensor), BlockFormat("LKTHD", "int8")
    slot = bytearray(form.block_bytes(pool, 1))
    check(shim, Case(pool, form, [[0]], [slot]), into_slots=True)


@settings(max_examples=150, deadline=None)
@given(
    into_slots=st.booleans(),
    planes=st.booleans(),
    run_bytes=st.one_of(st.integers(1, 80), st.sampled_from((128, 384, 512, 2048, 2056, 4100))),
    offsets=st.lists(st.integers(0, 15), min_size=2, max_size=2),
    element=st.sampled_from((1, 2, 4)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_alignment_is_correct(
    shim: Shim,
    into_slots: bool,
    planes: bool,
    run_bytes: int,
    offsets: list[int],
    element: int,
    seed: int,
) -> None:
    """Pools and slots that start anywhere, elements aligned to their size."""
    rng = np.random.default_rng(seed)
    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[element]
    width = -(-run_bytes // element)
    room = torch.from_numpy(rng.integers(0, 256, 6 * width * element + 64, dtype=np.uint8))
    start = (-room.data_ptr()) % 16 + offsets[0] // element * element
    inner = room[start : start + 6 * width * element].view(dtype).view(1, 2, 3, 1, 1, width)
    pool = PoolLayout.reference(inner)
    form = BlockFormat("LKTHD", "planes" if planes else "plain")
    block_bytes = form.block_bytes(pool, 2)
    slot_room = rng.integers(0, 256, block_bytes + 64, dtype=np.uint8)
    slot_start = (-slot_room.ctypes.data) % 16 + offsets[1]
    slot = slot_room[slot_start : slot_start + block_bytes]
    expected_slot, expected_room = slot_room.copy(), room.clone()
    their_slot = memoryview(expected_slot)[slot_start : slot_start + block_bytes]
    their_pool = PoolLayout.reference(
        expected_room[start : start + 6 * width * element].view(dtype).view(inner.shape)
    )
    copy = reference.gather if into_slots else reference.scatter
    copy(their_pool, [[2, 0]], [their_slot], form)
    plan = Plans(pool, form).of(2)
    shim.run(plan, dtype_name(dtype), np.array([[2, 0]]), [slot], into_slots=into_slots)
    assert (slot_room == expected_slot).all()
    assert torch.equal(room, expected_room)


def test_one_layer_changes_that_layer_only(shim: Shim) -> None:
    rng = np.random.default_rng(3)
    fill = rng.integers(0, 256, 4096, dtype=np.uint8)
    pool = make_pool("vllm split BLNHC", Sizes(3, 4, 2, 2, 8), torch.bfloat16, fill)
    form = BlockFormat("LKTHD")
    slot = rng.integers(0, 256, form.block_bytes(pool, 1), dtype=np.uint8)
    whole = clone(pool)
    reference.scatter(whole, [[2]], [memoryview(slot)], form)
    before = [sheet.clone() for sheet in pool.sheets]
    plans = Plans(pool, form)
    shim.run(plans.of(1, 1), dtype_name(pool.dtype), np.array([[2]]), [slot], into_slots=False)
    for number, sheet in enumerate(pool.sheets):
        wanted = whole.sheets[number] if number // 2 == 1 else before[number]
        assert torch.equal(
            sheet.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
        )


def test_launches_are_bounded_and_cover_small_work() -> None:
    assert launch_shape(1) == ((1, 1, 1), (LANES, 8, 1))
    assert launch_shape(10**9)[0][0] <= 128
    with pytest.raises(AssertionError, match="runs in one launch"):
        launch_shape(2**31)
