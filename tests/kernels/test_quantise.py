"""The lossy int8 storage: its definition at the edges, its error, and that all copiers agree."""

from __future__ import annotations

import pytest
import torch
from pool_cases import crafted

from kvstore.kernels import BlockFormat, PoolLayout, gather, reference, scatter
from kvstore.kernels.quantise import dequantise, error_of, quantise
from kvstore.kernels.torch_copier import DeviceCopier, HostCopier

torch.set_num_threads(1)

INT8 = BlockFormat("LKTHD", "int8")


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    return dequantise(*quantise(x), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_within_half_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(64, 128).to(dtype)
    back = there_and_back(x)
    step = x.float().abs().amax(dim=-1, keepdim=True) / 127
    rounding = x.float().abs() * torch.finfo(dtype).eps
    assert ((back.float() - x.float()).abs() <= step * 0.5001 + rounding).all()
    error = error_of(x, back)
    assert error.relative_rms < 0.008
    assert error.max_abs <= float(step.max())
    assert error.values == x.numel()
    assert "relative RMS" in str(error)


def test_edges() -> None:
    tiny = 2.0**-100
    rows = torch.tensor([[0.0, 0.0], [1.0, -127.0], [tiny, 0.0], [tiny / 2, 0.0], [3e38, -3e38]])
    back = there_and_back(rows)
    assert back[0].tolist() == [0.0, 0.0]
    assert back[1].tolist() == [1.0, -127.0]
    assert back[2, 0] == pytest.approx(tiny)
    assert back[3].tolist() == [0.0, 0.0]
    assert back[4].tolist() == pytest.approx([3e38, -3e38])
    for odd in (float("inf"), float("-inf"), float("nan")):
        assert there_and_back(torch.tensor([[1.0, odd]])).isnan().all(), "never silently wrong"


def test_error_of_nothing_and_of_equal_values() -> None:
    assert error_of(torch.zeros(3), torch.zeros(3)).relative_rms == 0.0
    assert error_of(torch.full((2,), float("nan")), torch.zeros(2)).values == 0
    assert error_of(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])).relative_rms == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copier", [HostCopier, DeviceCopier])
def test_rounding_back_is_to_nearest_even(copier: type, dtype: torch.dtype) -> None:
    pool, slot = crafted(dtype)
    wanted = pool.clone()
    reference.scatter(wanted, [[0]], [memoryview(slot)], INT8)
    copier(pool, INT8).scatter([[0]], [memoryview(slot)])
    assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))


def test_a_slot_takes_half_and_the_error_is_small() -> None:
    pool = torch.randn(2, 2, 4, 8, 2, 128, dtype=torch.bfloat16)
    layout = PoolLayout.reference(pool)
    slot = bytearray(INT8.block_bytes(layout, 2))
    assert len(slot) / BlockFormat().block_bytes(layout, 2) == 132 / 256
    gather(pool, [[2, 1]], [memoryview(slot)], INT8)
    back = torch.zeros_like(pool)
    scatter(back, [[2, 1]], [memoryview(slot)], INT8)
    error = error_of(pool[:, :, [2, 1]], back[:, :, [2, 1]])
    assert 0 < error.relative_rms < 0.01
    assert not back[:, :, [0, 3]].any()


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("copier", [HostCopier, DeviceCopier])
def test_a_single_vector_with_an_unaligned_scale(copier: type, width: int) -> None:
    latent = torch.randn(1, 1, 1, width)
    pool = PoolLayout((latent,), 1)
    form = BlockFormat("LTHC", "int8")
    slot = bytearray(form.block_bytes(pool, 1))
    copier(pool, form).gather([[0]], [memoryview(slot)])
    wanted = PoolLayout((torch.zeros_like(latent),), 1)
    reference.scatter(wanted, [[0]], [memoryview(slot)], form)
    copier(pool, form).scatter([[0]], [memoryview(slot)])
    assert torch.equal(latent, wanted.sheets[0])
