"""What the CUDA copier asks of a device: memory, lanes to queue work on, and events behind it.

A lane is a stream of its own. Work on one lane runs in the order it was queued; lanes run beside
each other except where `after` says otherwise. `CudaDevice` is torch's CUDA. The tests have another
device: it runs the same work on the CPU, late, and in any order that these rules allow.
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
    """A device's work queues. Every method is called with `entered()` entered.

    runtime: registers host memory with the driver; see `slabs.SlabMap`.
    entered: gives what makes the device current for this thread.
    """

    runtime: Any
    entered: Callable[[], AbstractContextManager[Any]]

    def lane(self) -> Any:
        """A new lane, behind all that this thread has queued on the device so far."""
        ...

    def memory(self, nbytes: int) -> torch.Tensor | None:
        """uint8 `[nbytes]` on the device; None when there is no room."""
        ...

    def upload(self, lane: Any, words: np.ndarray) -> torch.Tensor:
        """int64 `[n]` on the device, there for what is queued on the lane afterwards."""
        ...

    def copy(self, lane: Any, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between the device and registered host memory."""
        ...

    def launch(
        self, lane: Any, plan: CopyPlan, dtype: str, tables: Tables, *, into_slots: bool
    ) -> None:
        """Queue the copy of one plan; see `launchers.Launcher`."""
        ...

    def after(self, lane: Any, other: Any) -> None:
        """What is queued on `lane` from here on runs after all that `other` has queued so far."""
        ...

    def event(self, lane: Any, kept: object) -> Event:
        """Behind all that the lane has queued so far; keeps `kept` alive until then."""
        ...

    def drain(self, lane: Any) -> None:
        """Wait for all that the lane has queued."""
        ...


class CudaDevice:
    """Streams, events and memory are torch's; the kernels' launch is a `launchers.Launcher`.

    launcher: None: the CUDA source where cupy is installed, else Triton.
    """

    def __init__(self, device: torch.device, launcher: Launcher | None = None) -> None:
        assert device.type == "cuda", f"a pool on a CUDA device, not on {device}"
        self._device = device
        self._launcher = launcher_for(device) if launcher is None else launcher
        self.runtime = self._launcher.runtime
        self.entered = functools.partial(torch.cuda.device, device)

    def lane(self) -> torch.cuda.Stream:
        made = self._launcher.stream()
        # The allocator's memory may still be in use by earlier work.
        made.wait_stream(torch.cuda.current_stream(self._device))
        return made

    def memory(self, nbytes: int) -> torch.Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            log.warning("no %d bytes on %s for staging; copies go by kernels", nbytes, self._device)
            return None

    def upload(self, lane: torch.cuda.Stream, words: np.ndarray) -> torch.Tensor:
        # From pinned memory, which torch keeps until the copy has run.
        pinned = torch.empty(len(words), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = words
        with torch.cuda.stream(lane):
            return pinned.to(self._device, non_blocking=True)

    def copy(self, lane: torch.cuda.Stream, into: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(lane):
            into.copy_(source, non_blocking=True)

    def launch(
        self,
        lane: torch.cuda.Stream,
        plan: CopyPlan,
        dtype: str,
        tables: Tables,
        *,
        into_slots: bool,
    ) -> None:
        self._launcher.launch(lane, plan, dtype, tables, into_slots=into_slots)

    def after(self, lane: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        lane.wait_stream(other)

    def event(self, lane: torch.cuda.Stream, kept: object) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(lane)
        return TorchEvent(event, self._device, kept)

    def drain(self, lane: torch.cuda.Stream) -> None:
        lane.synchronize()
