"""A `cuda_device.Device` without a GPU: what was queued runs late, in an order drawn at random.

Nothing runs when it is queued. Whoever waits for an event has work run, a piece at a time, of a
lane drawn at random among those whose next piece may run, until the event's lane has got there. So
a copier that forgets to order two lanes, or hands out a buffer twice, writes wrong bytes here.
Kernels are the CUDA source, built by g++.
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
    """Registers anything, at the address it has."""

    class CUDARuntimeError(Exception):
        pass

    def hostRegister(self, host: int, nbytes: int, flags: int) -> None:
        return None

    def hostUnregister(self, host: int) -> None:
        return None

    def pointerGetAttributes(self, host: int) -> SimpleNamespace:
        return SimpleNamespace(devicePointer=host)


@dataclass(eq=False)
class Lane:
    """queued: a piece of work, or None for a wait, with how far another lane must have come first.
    ran: how many of them have run."""

    queued: list[tuple[Callable[[], object] | None, Lane | None, int]] = field(default_factory=list)
    ran: int = 0

    def ready(self) -> bool:
        if self.ran == len(self.queued):
            return False
        _, other, until = self.queued[self.ran]
        return other is None or other.ran >= until


class LateEvent:
    def __init__(self, device: LateDevice, lane: Lane, kept: object) -> None:
        self._device, self._lane, self._until = device, lane, len(lane.queued)
        self._kept = kept

    def done(self) -> bool:
        return self._lane.ran >= self._until

    def wait(self) -> None:
        self._device.run_until(self.done)

    def order(self) -> None:
        raise AssertionError("the tests compute on no lane")


class LateDevice:
    """seed: of the order of things."""

    runtime: Any = Driver()
    entered: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    def __init__(self, shim: Shim, seed: int) -> None:
        self._shim = shim
        self._random = random.Random(seed)
        self._lanes: list[Lane] = []
        self.launches = self.copies = 0

    def lane(self) -> Lane:
        self._lanes.append(Lane())
        return self._lanes[-1]

    def memory(self, nbytes: int) -> torch.Tensor | None:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def upload(self, lane: Lane, words: np.ndarray) -> torch.Tensor:
        there = torch.full((len(words),), -1, dtype=torch.int64)
        source = torch.from_numpy(words.copy())
        self._queue(lane, lambda: there.copy_(source))
        return there

    def copy(self, lane: Lane, into: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        self._queue(lane, lambda: into.copy_(source))

    def launch(
        self, lane: Lane, plan: CopyPlan, dtype: str, tables: Tables, *, into_slots: bool
    ) -> None:
        self.launches += 1

        def run() -> None:
            rows, slots, pages = (table.contiguous().numpy() for table in tables)
            self._shim.launch(plan, dtype, rows, slots, pages, into_slots=into_slots)

        self._queue(lane, run)

    def after(self, lane: Lane, other: Lane) -> None:
        lane.queued.append((None, other, len(other.queued)))

    def event(self, lane: Lane, kept: object) -> LateEvent:
        return LateEvent(self, lane, kept)

    def drain(self, lane: Lane) -> None:
        LateEvent(self, lane, None).wait()

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            lane = self._random.choice([lane for lane in self._lanes if lane.ready()])
            work, _, _ = lane.queued[lane.ran]
            if work is not None:
                work()
            lane.ran += 1

    def _queue(self, lane: Lane, work: Callable[[], object]) -> None:
        lane.queued.append((work, None, 0))
