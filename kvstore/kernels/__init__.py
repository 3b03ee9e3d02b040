"""Block gather and scatter: pages of a KV pool into slots, and back. `base` is the contract."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from kvstore.kernels.base import FINISHED, SKIP, Copier, Event
from kvstore.kernels.torch_copier import DeviceCopier, HostCopier

__all__ = ["FINISHED", "SKIP", "Copier", "Event", "copier_for", "gather", "scatter"]


def copier_for(pool: torch.Tensor) -> Copier:
    """The fastest copier for where this pool lies.

    CPU: numpy views. CUDA: our kernels through cupy where it is installed, else torch's indexing.
    """
    if pool.device.type == "cpu":
        return HostCopier(pool)
    if pool.device.type == "cuda" and importlib.util.find_spec("cupy") is not None:
        from kvstore.kernels.cupy_copier import CupyCopier

        return CupyCopier(pool)
    return DeviceCopier(pool)


def gather(
    pool: torch.Tensor, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
) -> Event:
    """Copy the pages `pages[i]` of `pool` into `slots[i]`; see `base.Copier.gather`."""
    return copier_for(pool).gather(pages, slots)


def scatter(
    pool: torch.Tensor, pages: Sequence[Sequence[int]], slots: Sequence[memoryview]
) -> Event:
    """Copy `slots[i]` into the pages `pages[i]` of `pool`; see `base.Copier.scatter`."""
    return copier_for(pool).scatter(pages, slots)
