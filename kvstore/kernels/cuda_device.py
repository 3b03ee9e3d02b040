"""Device operations that the CUDA copier needs: memory, streams and events.

Work on one stream runs in the order it was queued. Streams run concurrently, except as ordered by
`wait_stream`. `CudaDevice` is torch's CUDA. The tests have another device, which runs the same work
on the CPU, delayed, and in any order that these rules allow.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from kvstore.kernels.base import Event
from kvstore.kernels.launchers import Launcher, Tables, launcher_for
from kvstore.kernels.plan import CopyPlan
from kvstore.kernels.torch_copier import TorchEvent

log = logging.getLogger(__name__)


class Device(Protocol):
    """A device's streams, memory and events. Call every method inside `make_current()`.

    runtime: registers host memory with the driver; see `slabs.SlabMap`.
    make_current: returns a context that makes the device current for this thread.
    """

    runtime: Any
    make_current: Callable[[], AbstractContextManager[Any]]

    def new_stream(self) -> Any:
        """Return a new stream, ordered after all work that this thread has queued so far."""
        ...

    def memory(self, nbytes: int) -> torch.Tensor | None:
        """Allocate uint8 `[nbytes]` on the device. None: not enough memory."""
        ...

    def upload(self, stream: Any, words: np.ndarray) -> torch.Tensor:
        """Copy `words` to the device as int64 `[n]`, before later work on the stream."""
        ...

    def copy(self, stream: Any, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between the device and registered host memory."""
        ...

    def launch(
        self, stream: Any, plan: CopyPlan, dtype: str, tables: Tables, *, into_slots: bool
    ) -> None:
        """Queue the copy of one plan; see `launchers.Launcher`."""
        ...

    def wait_stream(self, stream: Any, other: Any) -> None:
        """Make later work on `stream` run after all work that `other` has queued so far."""
        ...

    def event(self, stream: Any, kept: object) -> Event:
        """Return an event after all work queued on the stream. Keeps `kept` alive until then."""
        ...

    def drain(self, stream: Any) -> None:
        """Wait for all work queued on the stream."""
        ...


class CudaDevice:
    """Streams, events and memory are torch's. A `launchers.Launcher` launches the kernels.

    launcher: None: the CUDA source if cupy is installed, else Triton.
    """

    def __init__(self, device: torch.device, launcher: Launcher | None = None) -> None:
        assert device.type == "cuda", f"the pool must be on a CUDA device (is on {device})"
        self._device = device
        self._launcher = launcher_for(device) if launcher is None else launcher
        self.runtime = self._launcher.runtime
        self.make_current = functools.partial(torch.cuda.device, device)

    def new_stream(self) -> torch.cuda.Stream:
        made = self._launcher.stream()
        # Earlier work may still use the allocator's memory.
        made.wait_stream(torch.cuda.current_stream(self._device))
        return made

    def memory(self, nbytes: int) -> torch.Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            log.warning(
                "cannot allocate %d bytes for staging on %s; copying by kernels only",
                nbytes,
                self._device,
            )
            return None

    def upload(self, stream: torch.cuda.Stream, words: np.ndarray) -> torch.Tensor:
        # Copy from pinned memory, which torch keeps until the copy has run.
        pinned = torch.empty(len(words), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = words
        with torch.cuda.stream(stream):
            return pinned.to(self._device, non_blocking=True)

    def copy(self, stream: torch.cuda.Stream, into: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)

    def launch(
        self,
        stream: torch.cuda.Stream,
        plan: CopyPlan,
        dtype: str,
        tables: Tables,
        *,
        into_slots: bool,
    ) -> None:
        self._launcher.launch(stream, plan, dtype, tables, into_slots=into_slots)

    def wait_stream(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        stream.wait_stream(other)

    def event(self, stream: torch.cuda.Stream, kept: object) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return TorchEvent(event, self._device, kept)

    def drain(self, stream: torch.cuda.Stream) -> None:
        stream.synchronize()
