"""All copiers that run on this machine equal the loops of `kernels.reference`, bit for bit."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from pool_cases import Case, bits, cases, clone

from kvstore import kernels
from kvstore.kernels import PoolLayout, reference
from kvstore.kernels.torch_copier import DeviceCopier, HostCopier

torch.set_num_threads(1)

STORAGES = ("plain", "plain", "planes", "int8")
COPIERS = (HostCopier, DeviceCopier)


def views(slots: list[bytearray]) -> list[memoryview]:
    return [memoryview(slot) for slot in slots]


@pytest.mark.parametrize("copier", COPIERS)
@settings(max_examples=150, deadline=None)
@given(case=cases(unique=False, storages=STORAGES))
def test_gather_equals_the_loops(copier: type, case: Case) -> None:
    expected = [bytearray(slot) for slot in case.slots]
    before = bits(case.pool)
    reference.gather(case.pool, case.pages, views(expected), case.form)
    event = copier(case.pool, case.form).gather(case.pages, case.views())
    event.wait()
    assert event.done()
    assert case.slots == expected
    assert bits(case.pool) == before


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("copier", COPIERS)
@settings(max_examples=100, deadline=None)
@given(case=cases(unique=True, storages=STORAGES))
def test_scatter_equals_the_loops(copier: type, by_layer: bool, case: Case) -> None:
    expected = clone(case.pool)
    before = [bytes(slot) for slot in case.slots]
    reference.scatter(expected, case.pages, case.views(), case.form)
    made = copier(case.pool, case.form)
    if by_layer:
        events = made.scatter_layers(case.pages, case.views())
        assert len(events) == case.pool.layers
        events[-1].wait()
        assert all(event.done() for event in events)
    else:
        made.scatter(case.pages, case.views()).wait()
    assert bits(case.pool) == bits(expected)
    assert [bytes(slot) for slot in case.slots] == before


@settings(max_examples=80, deadline=None)
@given(case=cases(unique=True, storages=("plain", "planes")))
def test_gathered_blocks_scatter_back(case: Case) -> None:
    kernels.gather(case.pool, case.pages, case.views(), case.form).wait()
    target = clone(case.pool)
    for number in range(len(target.sheets)):
        target.bytes_of(number).zero_()
    kernels.scatter(target, case.pages, case.views(), case.form).wait()
    kept = [page for row in case.pages for page in row if page != kernels.SKIP]
    others = [page for page in range(case.pool.num_pages) if page not in kept]
    for back, sheet in zip(target.sheets, case.pool.sheets, strict=True):
        as_bytes = back.contiguous().view(torch.uint8), sheet.contiguous().view(torch.uint8)
        assert torch.equal(as_bytes[0][kept], as_bytes[1][kept])
        assert not as_bytes[0][others].any()


def small_pool() -> torch.Tensor:
    return torch.zeros(1, 2, 4, 2, 1, 4)


@pytest.mark.parametrize(
    ("pages", "slot_bytes"),
    [([[4]], 64), ([[-2]], 64), ([[0]], 63), ([[0], [1, 2]], 64), ([[0], [1]], 64), ([[]], 64)],
    ids=["page too high", "page too low", "slot too short", "ragged", "slots missing", "no pages"],
)
@pytest.mark.parametrize("copier", COPIERS)
def test_an_invalid_table_asserts(copier: type, pages: list[list[int]], slot_bytes: int) -> None:
    slots = [memoryview(bytearray(slot_bytes))]
    for copy in (copier(small_pool()).gather, copier(small_pool()).scatter):
        with pytest.raises((AssertionError, ValueError)):
            copy(pages, slots)


def test_a_pool_of_another_shape_asserts() -> None:
    with pytest.raises(AssertionError, match="6 axes"):
        HostCopier(torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="K and V"):
        HostCopier(torch.zeros(1, 3, 4, 2, 1, 4))
    with pytest.raises(AssertionError, match="contiguous"):
        HostCopier(torch.zeros(1, 2, 4, 2, 1, 4).transpose(2, 3))


def test_copies_on_cpu_allocate_no_block_memory() -> None:
    """A gather of whole blocks allocates nothing near a block's size."""
    import tracemalloc

    pool = torch.zeros(4, 2, 16, 16, 4, 64)
    copier = HostCopier(pool)
    block_bytes = 4 * 2 * 2 * 16 * 4 * 64 * 4
    slots = views([bytearray(block_bytes) for _ in range(4)])
    table = [[0, 5], [3, 1], [7, 2], [9, 8]]
    for copy in (copier.gather, copier.scatter, copier.scatter_layers):
        copy(table, slots)
        gc.collect()
        tracemalloc.start()
        copy(table, slots)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < block_bytes // 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(max_examples=50, deadline=None)
@given(case=cases(unique=True, storages=STORAGES))
def test_on_a_gpu_equals_the_loops(case: Case) -> None:
    """Unmapped slots are copied by torch's indexing on the device."""
    expected = [bytearray(slot) for slot in case.slots]
    reference.gather(case.pool, case.pages, views(expected), case.form)
    moved = clone(case.pool)
    on_device = PoolLayout(tuple(sheet.cuda() for sheet in moved.sheets), moved.parts)
    copier = kernels.copier_for(on_device, case.form)
    copier.mark().wait()
    copier.gather(case.pages, case.views()).wait()
    assert case.slots == expected
    reference.scatter(case.pool, case.pages, views(expected), case.form)
    copier.scatter(case.pages, case.views()).wait()
    for there, here in zip(on_device.sheets, case.pool.sheets, strict=True):
        assert torch.equal(there.cpu().view(torch.uint8), here.contiguous().view(torch.uint8))
    copier.close()
