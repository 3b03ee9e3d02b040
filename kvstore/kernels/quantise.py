"""int8 with one scale per vector: half the bytes of bf16, lossy.

A vector (one token's K or V of one head) is stored as `width` int8 values, followed by a float32
scale: value = q * scale, scale = max|x| / 127. It is lossy, so it is never a default: a namespace
requests it (`formats.BlockFormat(storage="int8")`) and states it in `quantisation`.

The arithmetic is defined to the bit, so that all copiers give the same bytes: float32, each
operation rounded to nearest even, no fused multiply-add.

    top = max|x|                            as the greatest bit pattern without its sign
    any value infinite or NaN:              scale = NaN, q = 0: the vector becomes NaN
    top < 2**-100:                          scale = 0, q = 0
    else:                                   scale = top / 127;  q = round(x * (127 / top)),
                                            clamped to -127..127
    reverse:                                float32(q) * scale, rounded to the pool's dtype;
                                            every NaN as the one of `NAN_BITS`

For vectors of 128 normally distributed values, the relative error (root mean square) is about
0.6 %. One outlier of ten times the rest makes it about 2 %. The user must measure the effect on a
model's answers. `error_meter` reports the error of stored KV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Q_MAX = 127.0
SMALLEST_TOP = 2.0**-100
NAN_BITS = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}
_INFINITE_BITS = 0x7F800000
_NAN = float("nan")


@dataclass(frozen=True)
class QuantisationError:
    """Difference between values before and after.

    max_abs: largest difference. relative_rms: root of the sum of squared differences divided by the
    sum of squared values. 0: all values are 0. values: number of compared (finite) values.
    """

    max_abs: float
    relative_rms: float
    values: int

    def __str__(self) -> str:
        return f"max abs {self.max_abs:.3g}, relative RMS {self.relative_rms:.3%}"


def quantise(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise floats `[..., width]` to int8 `[..., width]` and float32 scales `[..., 1]`."""
    x = vectors.to(torch.float32)
    top_bits = (x.view(torch.int32) & 0x7FFFFFFF).amax(dim=-1, keepdim=True)
    finite = top_bits < _INFINITE_BITS
    top = top_bits.view(torch.float32)
    kept = finite & (top >= SMALLEST_TOP)
    one = torch.ones_like(top)
    q_max = torch.full_like(top, Q_MAX)
    safe = torch.where(kept, top, one)
    scale = torch.where(kept, safe / q_max, torch.zeros_like(top))
    scale = torch.where(finite, scale, torch.full_like(top, _NAN))
    x = torch.where(kept, x, torch.zeros_like(x))
    q = torch.round(x * (q_max / safe)).clamp_(-Q_MAX, Q_MAX)
    return q.to(torch.int8), scale


def dequantise(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert int8 `[..., width]` and float32 `[..., 1]` to `[..., width]` of `dtype`."""
    x = q.to(torch.float32) * scale
    integers, nan_bits = NAN_BITS[dtype]
    restored: torch.Tensor = x.to(dtype).view(integers).masked_fill_(x.isnan(), nan_bits)
    return restored.view(dtype)


def error_of(before: torch.Tensor, after: torch.Tensor) -> QuantisationError:
    """Compare floats before and after, of any shape, in float64."""
    was, now = before.to(torch.float64).flatten(), after.to(torch.float64).flatten()
    finite = torch.isfinite(was) & torch.isfinite(now)
    was, now = was[finite], now[finite]
    if not len(was):
        return QuantisationError(0.0, 0.0, 0)
    difference = (now - was).abs()
    power = float((was * was).sum())
    rms = (float((difference * difference).sum()) / power) ** 0.5 if power else 0.0
    return QuantisationError(float(difference.max()), rms, len(was))
