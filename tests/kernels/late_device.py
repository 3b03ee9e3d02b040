"""A `cuda_device.Device` without a GPU: queued work runs late, in a random order.

Nothing runs when it is queued. A wait for an event runs queued work, one item at a time, of a
random stream whose next item may run, until the event's stream has reached the event. So a copier
that does not order two streams, or that uses a buffer twice, writes wrong bytes here. Kernels are
the CUDA source, compiled by g++.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cuda_shim import Shim

from kvstore.kernels.launchers import Tables
from kvstore.kernels.plan import CopyPlan


class Driver:
    """Registers all memory, at its own address."""

    class CUDARuntimeError(Exception):
        pass

    def hostRegister(self, host: int, nbytes: int, flags: int) -> None:
        return None

    def hostUnregister(self, host: int) -> None:
        return None

    def pointerGetAttributes(self, host: int) -> SimpleNamespace:
        return SimpleNamespace(devicePointer=host)


@dataclass(eq=False)
class Stream:
    """queued: items of work. None: a wait until another stream has run this many items. ran: number
    of items that have run."""

    queued: list[tuple[Callable[[], object] | None, Stream | None, int]] = field(
        default_factory=list
    )
    ran: int = 0

    def ready(self) -> bool:
        if self.ran == len(self.queued):
            return False
        _, other, until = self.queued[self.ran]
        return other is None or other.ran >= until


class LateEvent:
    def __init__(self, device: LateDevice, stream: Stream, kept: object) -> None:
        self._device, self._stream, self._until = device, stream, len(stream.queued)
        self._kept = kept

    def done(self) -> bool:
        return self._stream.ran >= self._until

    def wait(self) -> None:
        self._device.run_until(self.done)

    def order(self) -> None:
        raise AssertionError("the tests compute on no stream")


class LateDevice:
    """seed: of the order of work."""

    runtime: Any = Driver()
    make_current: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    def __init__(self, shim: Shim, seed: int) -> None:
        self._shim = shim
        self._random = random.Random(seed)
        self._streams: list[Stream] = []
        self.launches = self.copies = 0

    def new_stream(self) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    def memory(self, nbytes: int) -> torch.Tensor | None:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def upload(self, stream: Stream, words: np.ndarray) -> torch.Tensor:
        there = torch.full((len(words),), -1, dtype=torch.int64)
        source = torch.from_numpy(words.copy())
        self._queue(stream, lambda: there.copy_(source))
        return there

    def copy(self, stream: Stream, into: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        self._queue(stream, lambda: into.copy_(source))

    def launch(
        self, stream: Stream, plan: CopyPlan, dtype: str, tables: Tables, *, into_slots: bool
    ) -> None:
        self.launches += 1

        def run() -> None:
            rows, slots, pages = (table.contiguous().numpy() for table in tables)
            self._shim.launch(plan, dtype, rows, slots, pages, into_slots=into_slots)

        self._queue(stream, run)

    def wait_stream(self, stream: Stream, other: Stream) -> None:
        stream.queued.append((None, other, len(other.queued)))

    def event(self, stream: Stream, kept: object) -> LateEvent:
        return LateEvent(self, stream, kept)

    def drain(self, stream: Stream) -> None:
        LateEvent(self, stream, None).wait()

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            stream = self._random.choice([stream for stream in self._streams if stream.ready()])
            work, _, _ = stream.queued[stream.ran]
            if work is not None:
                work()
            stream.ran += 1

    def _queue(self, stream: Stream, work: Callable[[], object]) -> None:
        stream.queued.append((work, None, 0))
