"""Block gather and scatter: copies pages of a KV pool into slots, and back.

`base` has the interface of a copier. `layout.PoolLayout` describes an engine's KV pool.
`formats.BlockFormat` describes the bytes of a block in a slot. `copier_for` returns the fastest
copier between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.kernels.base import FINISHED, SKIP, Copier, Event, as_layout
from kvstore.kernels.formats import PLAIN, BlockFormat, check_layout, format_of
from kvstore.kernels.launchers import can_launch
from kvstore.kernels.layout import PoolLayout
from kvstore.kernels.torch_copier import DeviceCopier, HostCopier

__all__ = [
    "FINISHED",
    "PLAIN",
    "SKIP",
    "BlockFormat",
    "Copier",
    "Event",
    "PoolLayout",
    "check_layout",
    "copier_for",
    "format_of",
    "gather",
    "scatter",
]


def copier_for(pool: torch.Tensor | PoolLayout, form: BlockFormat = PLAIN) -> Copier:
    """Return the fastest copier for a pool on its device. A bare tensor is kvstore's engine's pool.

    CPU: numpy views. CUDA: kvstore's kernels through cupy or Triton, whichever is installed, or
    else torch's indexing.
    """
    layout = as_layout(pool)
    if layout.device.type == "cpu":
        return HostCopier(layout, form)
    if layout.device.type == "cuda" and can_launch():
        from kvstore.kernels.cuda_copier import CudaCopier

        return CudaCopier(layout, form)
    return DeviceCopier(layout, form)


def gather(
    pool: torch.Tensor | PoolLayout,
    pages: Sequence[Sequence[int]],
    slots: Sequence[memoryview],
    form: BlockFormat = PLAIN,
) -> Event:
    """Copy the pages `pages[i]` of `pool` into `slots[i]`; see `base.Copier.gather`."""
    return copier_for(pool, form).gather(pages, slots)


def scatter(
    pool: torch.Tensor | PoolLayout,
    pages: Sequence[Sequence[int]],
    slots: Sequence[memoryview],
    form: BlockFormat = PLAIN,
) -> Event:
    """Copy `slots[i]` into the pages `pages[i]` of `pool`; see `base.Copier.scatter`."""
    return copier_for(pool, form).scatter(pages, slots)
