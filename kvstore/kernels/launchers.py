"""Launches kernels on a CUDA stream: kvstore's CUDA source through cupy, or Triton.

`torch.cuda` owns streams and memory in both cases. cupy is preferred if it is installed: its
kernels are compiled and checked for every architecture, and a launch costs less. PyTorch's CUDA
builds include Triton, so that copies without cupy need not fall back to torch's indexing.
"""

from __future__ import annotations

import functools
import importlib.util
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvstore.kernels.cuda_source import (
    CUDA_SOURCE,
    KERNELS,
    RUNS_MAX,
    kernel_name,
    launch_shape,
    launch_sizes,
)
from kvstore.kernels.plan import CopyPlan


class Tables(NamedTuple):
    """Tables that a kernel reads on the device: `CopyPlan.table` as int64 `[rows, 2]`, slot
    addresses as int64 `[blocks]`, page ids as int32 `[blocks, pages_per_block]`."""

    rows: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor


class Launcher(Protocol):
    """Queues kernels. The pool's device must be current.

    runtime: registers host memory with the driver; see `slabs.SlabMap`.
    """

    runtime: Any

    def stream(self) -> torch.cuda.Stream:
        """Return a new stream that does not wait for the default one."""
        ...

    def launch(
        self,
        stream: torch.cuda.Stream,
        plan: CopyPlan,
        dtype: str,
        tables: Tables,
        *,
        into_slots: bool,
    ) -> None:
        """Queue the copy of one plan. dtype: the pool's, by the namespace's name."""
        """Queue the copy of one plan. dtype: the pool's, by the namespace's name."""


class CupyLauncher:
    """The kernels of `cuda_source`. cupy compiles them at first use and caches them on disk."""

    def __init__(self, device: torch.device) -> None:
        import cupy

        self.runtime = cupy.cuda.runtime
        self._cupy = cupy
        self._kernels = _cupy_kernels(device.index or 0)
        self._streams: dict[int, Any] = {}

    def stream(self) -> torch.cuda.Stream:
        # Made by cupy and wrapped by torch: every release supports it in this direction.
        made = self._cupy.cuda.Stream(non_blocking=True)
        self._streams[made.ptr] = made
        shown: torch.cuda.Stream = torch.cuda.ExternalStream(made.ptr)  # type: ignore[no-untyped-call]
        return shown

    def launch(
        self,
        stream: torch.cuda.Stream,
        plan: CopyPlan,
        dtype: str,
        tables: Tables,
        *,
        into_slots: bool,
    ) -> None:
        blocks = len(tables.slots)
        name = kernel_name(plan, dtype, into_slots=into_slots)
        grid, block = launch_shape(tables.pages.numel() * plan.runs_per_page)
        counts, strides = launch_sizes(plan, blocks)
        arguments = (
            *(np.uint64(table.data_ptr()) for table in tables),
            *(np.uint32(count) for count in counts),
            *(np.uint64(stride) for stride in strides),
        )
        with self._streams[stream.cuda_stream]:
            self._kernels[name](grid, block, arguments)


class TritonLauncher:
    """The kernels of `triton_kernels`. Triton compiles them at first use."""

    def __init__(self, device: torch.device) -> None:
        from kvstore.kernels import triton_kernels

        self.runtime = Registrar(device)
        self._device = device
        self._kernels = triton_kernels

    def stream(self) -> torch.cuda.Stream:
        made: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return made

    def launch(
        self,
        stream: torch.cuda.Stream,
        plan: CopyPlan,
        dtype: str,
        tables: Tables,
        *,
        into_slots: bool,
    ) -> None:
        assert tables.pages.numel() * plan.runs_per_page < RUNS_MAX, "too many runs in a launch"
        with torch.cuda.stream(stream):
            self._kernels.launch(plan, dtype, *tables, into_slots=into_slots)


def launcher_for(device: torch.device) -> Launcher:
    """Return cupy's launcher if cupy is installed, else Triton's. See `can_launch`."""
    if importlib.util.find_spec("cupy") is not None:
        return CupyLauncher(device)
    return TritonLauncher(device)


def can_launch() -> bool:
    """Return whether a library that can launch kvstore's kernels is installed."""
    return any(importlib.util.find_spec(name) is not None for name in ("cupy", "triton"))


class Registrar:
    """Registers host memory with the driver, through torch. For `slabs.SlabMap`."""

    class CUDARuntimeError(Exception):
        """The driver rejected the call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def hostRegister(self, host: int, nbytes: int, flags: int) -> None:
        self._check(torch.cuda.cudart().cudaHostRegister(host, nbytes, flags))  # type: ignore[no-untyped-call]

    def hostUnregister(self, host: int) -> None:
        self._check(torch.cuda.cudart().cudaHostUnregister(host))  # type: ignore[no-untyped-call]

    def pointerGetAttributes(self, host: int) -> SimpleNamespace:
        # With unified addressing, on every 64-bit Linux, registered memory has one address for
        # host and device.
        return SimpleNamespace(devicePointer=host)

    def _check(self, status: Any) -> None:
        if int(status) == 0:
            return
        # The driver keeps the error as its last one, and torch raises it at the next kernel. Launch
        # a kernel here, so that it does not hit the engine.
        try:
            torch.empty(1, device=self._device).fill_(0.0)
        except RuntimeError as error:
            raise self.CUDARuntimeError(str(error).splitlines()[0]) from None
        raise self.CUDARuntimeError(f"error {int(status)}")


@functools.cache
def _cupy_kernels(device_id: int) -> dict[str, Any]:
    """Return the compiled kernels of one device."""
    import cupy

    with cupy.cuda.Device(device_id):
        module = cupy.RawModule(code=CUDA_SOURCE, options=("-std=c++17",))
        return {name: module.get_function(name) for name in KERNELS}
