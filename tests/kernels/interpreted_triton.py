"""The Triton kernels on CPU, by Triton's interpreter. `test_triton_kernels` runs this file in a
separate process, because Triton chooses the interpreter at import."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import Case, Sizes, bits, cases, clone, make_pool, some_floats

from kvstore.kernels import BlockFormat, reference
from kvstore.kernels.base import Plans
from kvstore.kernels.formats import dtype_name

torch.set_num_threads(1)

ALIGNED_BYTES = 4096


@pytest.fixture(scope="module")
def kernels() -> Any:
    import triton

    assert triton.knobs.runtime.interpret, "run this file with TRITON_INTERPRET=1"
    from kvstore.kernels import triton_kernels

    return triton_kernels


def check(kernels: Any, case: Case, *, into_slots: bool) -> None:
    if not case.pages:
        return
    room = np.zeros(sum(len(slot) + 2 * ALIGNED_BYTES for slot in case.slots), dtype=np.uint8)
    slots = []
    start = -room.ctypes.data % ALIGNED_BYTES
    for slot in case.slots:
        slots.append(room[start : start + len(slot)])
        slots[-1][:] = np.frombuffer(slot, np.uint8)
        start += -(-len(slot) // ALIGNED_BYTES) * ALIGNED_BYTES
    plan = Plans(case.pool, case.form).of(case.pages_per_block)
    expected, before = clone(case.pool), bits(case.pool)
    wanted = [bytearray(slot) for slot in case.slots]
    views = [memoryview(slot) for slot in wanted]
    if into_slots:
        reference.gather(case.pool, case.pages, views, case.form)
    else:
        reference.scatter(expected, case.pages, views, case.form)
    kernels.launch(
        plan,
        dtype_name(case.pool.dtype),
        torch.from_numpy(plan.table().view(np.int64)),
        torch.tensor([slot.ctypes.data for slot in slots], dtype=torch.int64),
        torch.tensor(case.pages, dtype=torch.int32),
        into_slots=into_slots,
    )
    assert [slot.tobytes() for slot in slots] == [bytes(slot) for slot in wanted]
    assert bits(case.pool) == (before if into_slots else bits(expected))


@settings(max_examples=40, deadline=None)
@given(
    case=cases(unique=True, storages=("plain", "planes", "int8")),
    into_slots=st.booleans(),
)
def test_interpreted_equals_the_loops(kernels: Any, case: Case, into_slots: bool) -> None:
    check(kernels, case, into_slots=into_slots)


@pytest.mark.parametrize("storage", ["plain", "planes", "int8"])
@pytest.mark.parametrize("into_slots", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_runs_of_several_programs(
    kernels: Any, storage: str, into_slots: bool, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(11)
    fill = some_floats(rng, dtype)
    sizes = Sizes(1, 2, 1, 2, 128) if storage == "int8" else Sizes(1, 2, 16, 4, 128)
    pool = make_pool("reference", sizes, dtype, fill)
    form = BlockFormat("LKTHD", storage)
    slots = [bytearray(rng.bytes(form.block_bytes(pool, 1)))]
    if storage == "int8":
        views = [memoryview(slot) for slot in slots]
        reference.gather(pool, [[1]], views, form)
    check(kernels, Case(pool, form, [[0]], slots), into_slots=into_slots)
