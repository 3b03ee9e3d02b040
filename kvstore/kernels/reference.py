"""Defines gather and scatter with loops: the reference for all copiers.

It works on host memory only, and slowly: one vector at a time, by the definition of the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvstore.kernels.base import SKIP, as_layout
from kvstore.kernels.formats import PLAIN, SCALE_BYTES, BlockFormat
from kvstore.kernels.layout import PoolLayout
from kvstore.kernels.quantise import NAN_BITS


def gather(
    pool: torch.Tensor | PoolLayout,
    pages: Sequence[Sequence[int]],
    slots: Sequence[memoryview],
    form: BlockFormat = PLAIN,
) -> None:
    """Copy the pages `pages[i]` of `pool` into `slots[i]`, vector by vector."""
    layout = as_layout(pool)
    for block_pages, slot in zip(pages, slots, strict=True):
        block = np.frombuffer(slot, dtype=np.uint8)
        for number, vector in _vectors(layout, block_pages, form.order):
            if form.storage == "int8":
                put = _quantised(vector)
            else:
                put = vector.view(torch.uint8).numpy()
            for at, byte in zip(_places(layout, len(block_pages), form, number), put, strict=True):
                block[at] = byte


def scatter(
    pool: torch.Tensor | PoolLayout,
    pages: Sequence[Sequence[int]],
    slots: Sequence[memoryview],
    form: BlockFormat = PLAIN,
) -> None:
    """Copy `slots[i]` into the pages `pages[i]` of `pool`, vector by vector."""
    layout = as_layout(pool)
    for block_pages, slot in zip(pages, slots, strict=True):
        block = np.frombuffer(slot, dtype=np.uint8)
        for number, vector in _vectors(layout, block_pages, form.order):
            found = block[_places(layout, len(block_pages), form, number)]
            if form.storage == "int8":
                vector.copy_(_restored(found, vector.dtype))
            else:
                vector.view(torch.uint8).copy_(torch.from_numpy(found))


def _vectors(
    layout: PoolLayout, pages: Sequence[int], order: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield every vector to copy, with its number in the block's order."""
    tokens = len(pages) * layout.page_tokens
    counts = {"L": layout.layers, "K": layout.parts, "T": tokens, "H": layout.heads}
    axes = order.replace("C", "K") if "C" in order else order.replace("D", "")
    for sheet in range(len(layout.sheets)):
        for token in range(tokens):
            page = pages[token // layout.page_tokens]
            for head in range(layout.heads):
                at = {"L": sheet // layout.parts, "K": sheet % layout.parts, "T": token, "H": head}
                number = 0
                for axis in axes:
                    number = number * counts[axis] + at[axis]
                if page != SKIP:
                    yield number, layout.sheets[sheet][page, token % layout.page_tokens, head]


def _places(layout: PoolLayout, pages_per_block: int, form: BlockFormat, number: int) -> np.ndarray:
    """Return the positions in the slot of the bytes of vector `number`.

    They are in the order of the bytes in the pool (little endian), or for int8 of its values and
    then its scale.
    """
    if form.storage == "int8":
        length = layout.width + SCALE_BYTES
        return number * length + np.arange(length)
    if form.storage == "plain":
        return number * layout.vector_bytes + np.arange(layout.vector_bytes)
    size = layout.element_bytes
    elements = form.block_bytes(layout, pages_per_block) // size
    element = number * layout.width + np.arange(layout.width)
    planes = np.arange(size - 1, -1, -1)  # The last byte of an element is the first plane.
    return np.asarray(planes[None, :] * elements + element[:, None]).reshape(-1)


def _quantised(vector: torch.Tensor) -> np.ndarray:
    """Return one vector as int8 values and a float32 scale; see `quantise`."""
    x = vector.to(torch.float32).numpy()
    top = np.float32(0)
    q = np.zeros(len(x), dtype=np.int8)
    for value in x:
        if not np.isfinite(value):
            return np.concatenate([q.view(np.uint8), np.array([np.nan], np.float32).view(np.uint8)])
        top = max(top, np.abs(value))
    scale = np.float32(0)
    if top >= np.float32(2.0**-100):
        scale = top / np.float32(127)
        factor = np.float32(127) / top
        for index, value in enumerate(x):
            q[index] = int(min(max(np.rint(value * factor), -127), 127))
    return np.concatenate([q.view(np.uint8), np.array([scale], np.float32).view(np.uint8)])


def _restored(found: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return the vector of int8 values and a float32 scale."""
    q, scale = found[:-SCALE_BYTES].view(np.int8), found[-SCALE_BYTES:].view(np.float32)[0]
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.array([np.float32(value) * scale for value in q], dtype=np.float32)
    restored = torch.from_numpy(x).to(dtype)
    integers, nan_bits = NAN_BITS[dtype]
    for index in np.flatnonzero(np.isnan(x)):
        restored.view(integers)[index] = nan_bits
    return restored
