"""The CUDA copier's queues, staging and paths, on a device that runs work late and out of order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cuda_shim import Shim
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice
from pool_cases import Case, Sizes, bits, cases, clone, make_pool

from kvstore.kernels import BlockFormat, PoolLayout, reference
from kvstore.kernels.cuda_copier import CudaCopier
from kvstore.kernels.paths import Path
from kvstore.shm.slab import Slab

torch.set_num_threads(1)

SLOTS = 6
BLOCKS = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)


def filled_slab(block_bytes: int, seed: int) -> Slab:
    slab = Slab.create(SLOTS, block_bytes)
    rng = np.random.default_rng(seed)
    for slot in range(SLOTS):
        slab.view(slot)[:] = rng.bytes(slab.slot_bytes)
    return slab


def contents(slab: Slab) -> list[bytes]:
    return [bytes(slab.view(slot)) for slot in range(SLOTS)]


@settings(max_examples=150, deadline=None)
@given(
    storage=st.sampled_from(("plain", "planes")),
    staged_blocks=st.integers(0, 3),
    calls=st.lists(
        st.tuples(st.booleans(), st.sampled_from((*Path, None)), BLOCKS), min_size=1, max_size=5
    ),
    waits=st.lists(st.booleans(), min_size=5, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_calls_end_as_if_run_one_by_one(
    shim: Shim,
    storage: str,
    staged_blocks: int,
    calls: Sequence[tuple[bool, Path | None, list[int]]],
    waits: Sequence[bool],
    seed: int,
) -> None:
    """Gathers and scatters over the same pages and slots, on both paths, mostly without waiting.

    staged_blocks: blocks in half of the staging buffer. 0: none, so kernels do everything.
    """
    rng = np.random.default_rng(seed)
    sizes = Sizes(layers=2, pages=2 * SLOTS, tokens=2, heads=2, width=8)
    pool = make_pool("reference", sizes, torch.bfloat16, rng.integers(0, 256, 4096, dtype=np.uint8))
    form = BlockFormat("LKTHD", storage)
    block_bytes = form.block_bytes(pool, 2)
    slab, expected_slab = filled_slab(block_bytes, seed), filled_slab(block_bytes, seed)
    expected_pool = clone(pool)
    device = LateDevice(shim, seed)
    copier = CudaCopier(pool, form, device=device, staging_bytes=2 * staged_blocks * block_bytes)
    copier.map_slab(slab)
    for (into_slots, path, slots), wait in zip(calls, waits, strict=False):
        pages = rng.permutation(pool.num_pages)[: 2 * len(slots)].reshape(-1, 2).tolist()
        copier._path = path
        copy = copier.gather if into_slots else copier.scatter
        event = copy(pages, [slab.view(slot) for slot in slots])
        loops = reference.gather if into_slots else reference.scatter
        loops(expected_pool, pages, [expected_slab.view(slot) for slot in slots], form)
        if wait:
            event.wait()
            assert event.done()
    copier.close()
    assert bits(pool) == bits(expected_pool)
    # A slot is longer than a block. The copy engine copies whole blocks, and nothing after them.
    assert contents(slab) == contents(expected_slab)
    slab.close()
    expected_slab.close()


@settings(max_examples=100, deadline=None)
@given(
    case=cases(unique=True, storages=("plain", "planes", "int8")),
    into_slots=st.booleans(),
    path=st.sampled_from(tuple(Path)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_pool_by_either_path(
    shim: Shim, case: Case, into_slots: bool, path: Path, seed: int
) -> None:
    """Any layout, order and storage, with skipped pages: both paths equal the loops."""
    block_bytes = case.form.block_bytes(case.pool, case.pages_per_block)
    slab = Slab.create(max(1, len(case.slots)), block_bytes)
    for number, slot in enumerate(case.slots):
        slab.view(number)[: len(slot)] = slot
    views = [slab.view(number) for number in range(len(case.slots))]
    wanted = [bytearray(view) for view in views]
    expected = clone(case.pool)
    if into_slots:
        reference.gather(case.pool, case.pages, [memoryview(slot) for slot in wanted], case.form)
    else:
        reference.scatter(expected, case.pages, [memoryview(slot) for slot in wanted], case.form)
    device = LateDevice(shim, seed)
    copier = CudaCopier(
        case.pool, case.form, path=path, device=device, staging_bytes=4 * block_bytes
    )
    copier.map_slab(slab)
    copy = copier.gather if into_slots else copier.scatter
    copy(case.pages, views).wait()
    assert [bytearray(view) for view in views] == wanted
    assert bits(case.pool) == bits(expected)
    copier.close()
    slab.close()


@pytest.fixture
def pool() -> PoolLayout:
    fill = np.random.default_rng(4).integers(0, 256, 4096, dtype=np.uint8)
    return make_pool("vllm split LBHNC", Sizes(3, 12, 2, 2, 8), torch.bfloat16, fill)


def test_layers_arrive_in_order_and_each_only_with_its_own_bytes(
    shim: Shim, pool: PoolLayout
) -> None:
    slab = filled_slab(BlockFormat().block_bytes(pool, 2), 0)
    whole, before = clone(pool), clone(pool)
    pages, views = [[4, 1], [0, 3]], [slab.view(5), slab.view(2)]
    reference.scatter(whole, pages, views)
    copier = CudaCopier(pool, device=LateDevice(shim, 1))
    copier.map_slab(slab)
    events = copier.scatter_layers(pages, views)
    for layer, event in enumerate(events):
        event.wait()
        for number, sheet in enumerate(pool.sheets):
            there = whole if number // pool.parts <= layer else before
            assert torch.equal(
                sheet.contiguous().view(torch.uint8),
                there.sheets[number].contiguous().view(torch.uint8),
            )
    copier.close()
    slab.close()


def test_the_paths_are_taken(shim: Shim, pool: PoolLayout) -> None:
    """Check that the two paths differ, so that the other tests cover both."""
    block_bytes = BlockFormat().block_bytes(pool, 1)
    slab = filled_slab(block_bytes, 0)
    device = LateDevice(shim, 2)
    copier = CudaCopier(
        pool, path=Path.COPY_ENGINE, device=device, staging_bytes=4 * slab.slot_bytes
    )
    copier.map_slab(slab)
    pages = [[page] for page in range(SLOTS)]
    views = [slab.view(slot) for slot in range(SLOTS)]
    copier.scatter(pages, views).wait()
    assert device.copies == SLOTS, "slots longer than their blocks are not joined"
    assert device.launches == -(-SLOTS // (2 * slab.slot_bytes // block_bytes))
    copier.gather([[0], [-1]], views[:2]).wait()
    assert device.copies == SLOTS, "a whole block would overwrite a skipped page"
    strange = [memoryview(bytearray(block_bytes))]
    copier.gather([[1]], strange).wait()
    assert device.launches == -(-SLOTS // (2 * slab.slot_bytes // block_bytes)) + 1, "not mapped"
    expected = [memoryview(bytearray(block_bytes))]
    reference.gather(pool, [[1]], expected)
    assert strange == expected
    copier.close()
    slab.close()
