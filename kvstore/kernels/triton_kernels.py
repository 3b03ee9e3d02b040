"""Gather and scatter in Triton, for CUDA without cupy: PyTorch's CUDA builds include Triton.

One program copies a part of one run of a `plan.CopyPlan`, or for int8 one vector. Addresses are
integers, as in `cuda_source`, with the same tables for rows, slots and pages. It has not been
measured which of the two is faster. The CUDA kernels are preferred if cupy is installed.

The import of this module imports Triton. Triton then decides whether its kernels are compiled, or
run on the CPU by its interpreter.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore.kernels.plan import CopyPlan

BLOCK = 1024
"""Words that a program copies."""

FLOAT_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}

ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a float32 below 2**22 to the nearest integer, and
ties to the even one."""


@triton.jit
def _places(
    rows, slots, pages, run, pages_per_block, rows_count, count0, count1, page_stride,
    slot_page_stride, pool0, slot0, pool1, slot1
):  # fmt: skip
    """Return the start of a run in the pool and in the slot, the slot's base, and 1 to copy it."""
    per_page = rows_count * count0 * count1
    place = run // per_page
    rest = run - place * per_page
    j = (rest % count1).to(tl.int64)
    rest = rest // count1
    i = (rest % count0).to(tl.int64)
    row = rest // count0
    block = place // pages_per_block
    index = (place - block * pages_per_block).to(tl.int64)
    page = tl.load(pages + place)
    in_pool = tl.load(rows + 2 * row) + page.to(tl.int64) * page_stride + i * pool0 + j * pool1
    offset = tl.load(rows + 2 * row + 1) + index * slot_page_stride + i * slot0 + j * slot1
    return in_pool, offset, tl.load(slots + block), tl.where(page >= 0, 1, 0)


@triton.jit
def copy_plain(
    rows, slots, pages, pages_per_block, rows_count, count0, count1, page_stride, slot_page_stride,
    pool0, slot0, pool1, slot1, run_bytes, plane_bytes,
    WORD: tl.constexpr, WORD_BYTES: tl.constexpr, INTO_SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    in_pool, offset, slot, wanted = _places(
        rows, slots, pages, tl.program_id(0), pages_per_block, rows_count, count0, count1,
        page_stride, slot_page_stride, pool0, slot0, pool1, slot1
    )  # fmt: skip
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < run_bytes // WORD_BYTES * wanted
    there = in_pool.to(tl.pointer_type(WORD)) + at
    here = (slot + offset).to(tl.pointer_type(WORD)) + at
    if INTO_SLOTS:
        tl.store(here, tl.load(there, mask=mask), mask=mask)
    else:
        tl.store(there, tl.load(here, mask=mask), mask=mask)


@triton.jit
def copy_planes(
    rows, slots, pages, pages_per_block, rows_count, count0, count1, page_stride, slot_page_stride,
    pool0, slot0, pool1, slot1, run_bytes, plane_bytes,
    WORD: tl.constexpr, WORD_BYTES: tl.constexpr, INTO_SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """WORD: unsigned integer type of an element. Plane 0 has the most significant bytes."""
    in_pool, offset, slot, wanted = _places(
        rows, slots, pages, tl.program_id(0), pages_per_block, rows_count, count0, count1,
        page_stride, slot_page_stride, pool0, slot0, pool1, slot1
    )  # fmt: skip
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < run_bytes // WORD_BYTES * wanted
    there = in_pool.to(tl.pointer_type(WORD)) + at
    here = (slot + offset // WORD_BYTES).to(tl.pointer_type(tl.uint8)) + at
    if INTO_SLOTS:
        word = tl.load(there, mask=mask, other=0)
        for plane in tl.static_range(WORD_BYTES):
            byte = (word >> (8 * (WORD_BYTES - 1 - plane))) & 0xFF
            tl.store(here + plane * plane_bytes, byte.to(tl.uint8), mask=mask)
    else:
        word = tl.zeros([BLOCK], dtype=WORD)
        for plane in tl.static_range(WORD_BYTES):
            byte = tl.load(here + plane * plane_bytes, mask=mask, other=0)
            word = (word << 8) | byte.to(WORD)
        tl.store(there, word, mask=mask)


@triton.jit
def _as_float32(bits, KIND: tl.constexpr):
    if KIND == 0:
        return bits.to(tl.float32, bitcast=True)
    elif KIND == 1:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _from_float32(x, KIND: tl.constexpr):
    """Return the bits of x, rounded to nearest even, with one NaN for all."""
    bits = x.to(tl.uint32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if KIND == 0:
        return tl.where(nan, 0x7FC00000, bits)
    elif KIND == 1:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(nan, 0x7FC0, rounded).to(tl.uint16)
    else:
        half = x.to(tl.float16).to(tl.uint16, bitcast=True)
        return tl.where(nan, 0x7E00, half).to(tl.uint16)


@triton.jit
def copy_int8(
    rows, slots, pages, pages_per_block, rows_count, count0, count1, page_stride, slot_page_stride,
    pool0, slot0, pool1, slot1, run_bytes, plane_bytes,
    WORD: tl.constexpr, WORD_BYTES: tl.constexpr, INTO_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr
):  # fmt: skip
    """Copy one vector of at most BLOCK values. `quantise` has the formulas."""
    in_pool, offset, slot, wanted = _places(
        rows, slots, pages, tl.program_id(0), pages_per_block, rows_count, count0, count1,
        page_stride, slot_page_stride, pool0, slot0, pool1, slot1
    )  # fmt: skip
    width = run_bytes // WORD_BYTES
    at = tl.arange(0, BLOCK)
    mask = at < width * wanted
    there = in_pool.to(tl.pointer_type(WORD)) + at
    here = (slot + offset).to(tl.pointer_type(tl.uint8)) + at
    behind = (slot + offset).to(tl.pointer_type(tl.uint8)) + width
    four = tl.arange(0, 4)
    if INTO_SLOTS:
        x = _as_float32(tl.load(there, mask=mask, other=0), KIND)
        top_bits = tl.max((x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32), axis=0)
        finite = top_bits < 0x7F800000
        kept = finite & (top_bits >= 0x0D800000)
        top = tl.where(kept, top_bits, 0x3F800000).to(tl.float32, bitcast=True)
        factor = tl.div_rn(127.0, top)
        scale = tl.where(kept, tl.div_rn(top, 127.0), 0.0).to(tl.uint32, bitcast=True)
        scale = tl.where(finite, scale, 0x7FC00000)
        q = (tl.where(kept, x, 0.0) * factor + ROUNDER) - ROUNDER
        q = tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int32)
        tl.store(here, (q & 0xFF).to(tl.uint8), mask=mask)
        tl.store(behind + four, ((scale >> (8 * four)) & 0xFF).to(tl.uint8), mask=four < 4 * wanted)
    else:
        bytes_ = tl.load(behind + four, mask=four < 4 * wanted, other=0).to(tl.uint32)
        scale = tl.sum(bytes_ << (8 * four), axis=0).to(tl.uint32).to(tl.float32, bitcast=True)
        q = tl.load(here, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        tl.store(there, _from_float32(q * scale, KIND).to(WORD), mask=mask)


WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


def word_bytes(plan: CopyPlan) -> int:
    """Return the size of the widest word to which all runs of a plain plan are aligned.

    Slots are aligned to 4,096 bytes.
    """
    sizes = [plan.run_bytes, plan.page_stride, plan.slot_page_stride]
    sizes += [step for axis in plan.axes for step in (axis.pool, axis.slot)]
    sizes += [place for row in plan.rows for place in row[:2]]
    return math.gcd(8, *sizes)


def launch(
    plan: CopyPlan,
    dtype: str,
    rows: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    *,
    into_slots: bool,
) -> None:
    """Queue one copy on torch's current stream.

    rows: int64 `[rows, 2]`, `CopyPlan.table`. slots: int64 `[blocks]`, addresses. pages: int32
    `[blocks, pages_per_block]`. All are on the device.
    """
    outer, inner = plan.axes
    runs = pages.numel() * plan.runs_per_page
    sizes = (
        plan.pages_per_block, len(plan.rows), outer.steps, inner.steps, plan.page_stride,
        plan.slot_page_stride, outer.pool, outer.slot, inner.pool, inner.slot, plan.run_bytes,
        plan.plane_bytes,
    )  # fmt: skip
    size = word_bytes(plan) if plan.storage == "plain" else plan.element_bytes
    constants: dict[str, Any] = {"INTO_SLOTS": into_slots, "WORD": WORDS[size], "WORD_BYTES": size}
    words = -(-plan.run_bytes // size)
    if plan.storage == "int8":
        block = triton.next_power_of_2(words)
        # Fused, q * factor + ROUNDER would round once. The definition rounds twice.
        copy_int8[(runs, 1)](
            rows, slots, pages, *sizes, **constants, BLOCK=block, KIND=FLOAT_KINDS[dtype],
            enable_fp_fusion=False,
        )  # fmt: skip
        return
    block = min(BLOCK, triton.next_power_of_2(words))
    kernel = copy_planes if plan.storage == "planes" else copy_plain
    kernel[(runs, -(-words // block))](rows, slots, pages, *sizes, **constants, BLOCK=block)
