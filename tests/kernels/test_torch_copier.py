"""Every copier that runs on this machine equals the loops of `kernels.reference`, bit for bit."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import kernels
from kvstore.kernels import reference
from kvstore.kernels.torch_copier import DeviceCopier, HostCopier

torch.set_num_threads(1)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
SLOT_ROUND_BYTES = 64
"""Slots here are longer than a block, as real ones are."""


@dataclass
class Case:
    """A pool of random bits, a page table, and slots of random bits."""

    pool: torch.Tensor
    pages: list[list[int]]
    slots: list[bytearray]


@st.composite
def cases(draw: st.DrawFn, *, unique: bool) -> Case:
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    page_tokens, head_dim = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    pages_per_block, blocks = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    num_pages = draw(st.integers(max(1, pages_per_block * blocks), pages_per_block * blocks + 3))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (layers, 2, num_pages, page_tokens, heads, head_dim)
    pool = random_bits(rng, int(np.prod(shape)) * dtype.itemsize).view(dtype).view(shape)
    table = rng.permutation(num_pages)[: blocks * pages_per_block]
    if not unique:
        table = rng.integers(0, num_pages, blocks * pages_per_block)
    table[rng.random(len(table)) < draw(st.sampled_from((0.0, 0.3, 1.0)))] = kernels.SKIP
    block_bytes = layers * 2 * pages_per_block * page_tokens * heads * head_dim * dtype.itemsize
    slot_bytes = -(-block_bytes // SLOT_ROUND_BYTES) * SLOT_ROUND_BYTES
    slots = [bytearray(rng.bytes(slot_bytes)) for _ in range(blocks)]
    return Case(pool, table.reshape(blocks, pages_per_block).tolist(), slots)


def random_bits(rng: np.random.Generator, nbytes: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, nbytes, dtype=np.uint8))


def bits(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def views(slots: list[bytearray]) -> list[memoryview]:
    return [memoryview(slot) for slot in slots]


@pytest.mark.parametrize("copier", [HostCopier, DeviceCopier])
@settings(max_examples=100, deadline=None)
@given(case=cases(unique=False))
def test_gather_equals_the_loops(copier: type, case: Case) -> None:
    expected = [bytearray(slot) for slot in case.slots]
    before = bits(case.pool)
    reference.gather(case.pool, case.pages, views(expected))
    event = copier(case.pool).gather(case.pages, views(case.slots))
    event.wait()
    assert event.done()
    assert case.slots == expected
    assert bits(case.pool) == before


@pytest.mark.parametrize("copier", [HostCopier, DeviceCopier])
@settings(max_examples=100, deadline=None)
@given(case=cases(unique=True))
def test_scatter_equals_the_loops(copier: type, case: Case) -> None:
    expected = case.pool.clone()
    before = [bytes(slot) for slot in case.slots]
    reference.scatter(expected, case.pages, views(case.slots))
    copier(case.pool).scatter(case.pages, views(case.slots)).wait()
    assert bits(case.pool) == bits(expected)
    assert [bytes(slot) for slot in case.slots] == before


@settings(max_examples=50, deadline=None)
@given(case=cases(unique=True))
def test_what_was_gathered_scatters_back(case: Case) -> None:
    kernels.gather(case.pool, case.pages, views(case.slots)).wait()
    target = torch.zeros_like(case.pool)
    kernels.scatter(target, case.pages, views(case.slots)).wait()
    kept = [page for row in case.pages for page in row if page != kernels.SKIP]
    assert bits(target[:, :, kept]) == bits(case.pool[:, :, kept])
    others = [page for page in range(case.pool.shape[2]) if page not in kept]
    assert not np.frombuffer(bits(target[:, :, others]), np.uint8).any()


def small_pool() -> torch.Tensor:
    return torch.zeros(1, 2, 4, 2, 1, 4)


@pytest.mark.parametrize(
    ("pages", "slot_bytes"),
    [([[4]], 64), ([[-2]], 64), ([[0]], 63), ([[0], [1, 2]], 64), ([[0], [1]], 64), ([[]], 64)],
    ids=["page too high", "page too low", "slot too short", "ragged", "slots missing", "no pages"],
)
@pytest.mark.parametrize("copier", [HostCopier, DeviceCopier])
def test_a_wrong_table_asserts(copier: type, pages: list[list[int]], slot_bytes: int) -> None:
    slots = [memoryview(bytearray(slot_bytes))]
    with pytest.raises((AssertionError, ValueError)):
        copier(small_pool()).gather(pages, slots)
    with pytest.raises((AssertionError, ValueError)):
        copier(small_pool()).scatter(pages, slots)


def test_a_pool_of_another_shape_asserts() -> None:
    with pytest.raises(AssertionError, match="6 axes"):
        HostCopier(torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="K and V"):
        HostCopier(torch.zeros(1, 3, 4, 2, 1, 4))
    with pytest.raises(AssertionError, match="contiguous"):
        HostCopier(torch.zeros(1, 2, 4, 2, 1, 4).transpose(2, 3))


def test_copies_on_cpu_make_no_fresh_memory() -> None:
    """A gather of whole blocks allocates nothing of a block's size."""
    import tracemalloc

    pool = torch.zeros(4, 2, 16, 16, 4, 64)
    copier = HostCopier(pool)
    block_bytes = 4 * 2 * 2 * 16 * 4 * 64 * 4
    slots = views([bytearray(block_bytes) for _ in range(4)])
    table = [[0, 5], [3, 1], [7, 2], [9, 8]]
    for copy in (copier.gather, copier.scatter):
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
@given(case=cases(unique=True))
def test_on_a_gpu_equals_the_loops(case: Case) -> None:
    """Unmapped slots: through torch's indexing on the device."""
    expected = [bytearray(slot) for slot in case.slots]
    reference.gather(case.pool, case.pages, views(expected))
    on_device = case.pool.cuda()
    copier = kernels.copier_for(on_device)
    copier.mark().wait()
    copier.gather(case.pages, views(case.slots)).wait()
    assert case.slots == expected
    target = torch.zeros_like(case.pool)
    reference.scatter(target, case.pages, views(expected))
    back = torch.zeros_like(on_device)
    copier = kernels.copier_for(back)
    copier.mark().wait()
    copier.scatter(case.pages, views(case.slots)).wait()
    assert bits(back.cpu()) == bits(target)
    copier.close()
