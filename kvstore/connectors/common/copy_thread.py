"""A thread that copies blocks between the pages of an engine and the slots of the store.

A slot is leased from before its copy is queued until after the copy has ended. So `CopyThread`
never drops a copy it accepted. `finished` returns each copy when it is done or failed; `withdraw`
returns copies that have not started. Only then does the owner release the operation.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvstore.forks import INHERITED, on_fork
from kvstore.interface import SlabView
from kvstore.kernels import Copier, Event

log = logging.getLogger(__name__)

T = TypeVar("T")

COPIES_QUEUED_MAX: Final = 256
"""Maximum number of queued copies in one direction. Further ones are dropped."""
SCATTERS_IN_A_ROW_MAX: Final = 16
"""Maximum number of scatters that run before a queued gather. The engine keeps the blocks of the
gather until it ends."""


class Direction(enum.Enum):
    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(eq=False, slots=True)
class Copy:
    """A copy of several blocks between pages and slots.

    pages: page ids of each block. slots: slots of `slab`, one for each block. after: device work
    that must end first. owner: an object of the caller. error: why the copy failed; "" if it did
    not. by_layer: a scatter that reports each layer: once it is queued on the device, `layers` is
    set and `launched` returns the copy. then: the thread calls it with the slots of a finished
    gather.
    """

    direction: Direction
    pages: Sequence[Sequence[int]]
    slab: SlabView
    slots: Sequence[int]
    after: Event
    owner: Any
    by_layer: bool = False
    layers: Sequence[Event] = ()
    then: Callable[[Sequence[memoryview]], None] | None = None
    error: str = ""


class CopyThread:
    """Runs copies one after another on its own thread. Scatters go first: requests wait for them,
    but not for a gather, which belongs to a save."""

    def __init__(self, copier: Copier, *, name: str = "kvstore-copies") -> None:
        self._copier = copier
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[Copy]] = {each: deque() for each in Direction}
        self._scatters_in_a_row = 0
        self._launched: list[Copy] = []
        self._running: Copy | None = None
        self._inherited = False
        self._finished: list[Copy] = []
        self._under_way = 0
        self._closing = False
        self._slab: SlabView | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        on_fork(self._let_go)
        self._thread.start()

    @property
    def under_way(self) -> int:
        """Number of accepted copies that `finished` has not returned."""
        return self._under_way

    def submit(self, copy: Copy) -> bool:
        """Queue a copy; False when the queue is full. Never waits."""
        with self._changed:
            assert not self._closing, "no copies after close"
            if self._inherited or len(self._queues[copy.direction]) >= COPIES_QUEUED_MAX:
                return False
            self._queues[copy.direction].append(copy)
            self._under_way += 1
            self._changed.notify_all()
            return True

    def withdraw(self, wanted: Callable[[Copy], bool]) -> list[Copy]:
        """Remove and return the queued gathers that match `wanted`. They touch no slot, and
        `finished` does not return them. Never waits for a copy."""
        with self._changed:
            queue = self._queues[Direction.GATHER]
            taken = [copy for copy in queue if wanted(copy)]
            for copy in taken:
                queue.remove(copy)
            self._under_way -= len(taken)
            return taken

    def launched(self) -> list[Copy]:
        """Scatters by layer that were queued on the device since the last call. `finished` returns
        each of them as well."""
        with self._changed:
            launched, self._launched = self._launched, []
            return launched

    def finished(self, timeout_s: float = 0.0) -> list[Copy]:
        """Copies that ended since the last call. Waits up to timeout_s for the first one, or until
        one is launched."""
        with self._changed:
            if not self._finished and timeout_s > 0.0:
                self._changed.wait_for(lambda: bool(self._finished or self._launched), timeout_s)
            ended, self._finished = self._finished, []
            self._under_way -= len(ended)
            return ended

    def close(self) -> list[Copy]:
        """Run the queued copies, end the thread, and return the copies that `finished` has not."""
        if self._inherited:
            return self.finished()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._copier.close()
        return self.finished()

    def _let_go(self) -> None:
        """In a forked child: fail every accepted copy, as the thread that runs it is not here."""
        running = [] if self._running is None else [self._running]
        for copy in (*running, *itertools.chain.from_iterable(self._queues.values())):
            copy.error = INHERITED
            self._finished.append(copy)
        self._changed = threading.Condition()
        self._queues = {each: deque() for each in Direction}
        self._running, self._launched, self._inherited = None, [], True
        self._under_way = len(self._finished)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(self._queues.values()) or self._closing)
                if not any(self._queues.values()):
                    return
                self._running = copy = self._next()
            try:
                self._copy(copy)
            except Exception as error:  # a failed copy is a result; the engine computes instead
                log.exception("%s of %d blocks failed", copy.direction.value, len(copy.slots))
                copy.error = f"{type(error).__name__}: {error}"
            with self._changed:
                self._running = None
                self._finished.append(copy)
                self._changed.notify_all()

    def _next(self) -> Copy:
        """Take the copy to run next off its queue."""
        gathers, scatters = self._queues[Direction.GATHER], self._queues[Direction.SCATTER]
        if not scatters or (gathers and self._scatters_in_a_row >= SCATTERS_IN_A_ROW_MAX):
            self._scatters_in_a_row = 0
            return gathers.popleft()
        self._scatters_in_a_row += 1
        return scatters.popleft()

    def _copy(self, copy: Copy) -> None:
        if copy.slab is not self._slab:
            self._copier.map_slab(copy.slab)
            self._slab = copy.slab
        copy.after.wait()
        views = [copy.slab.view(slot) for slot in copy.slots]
        if copy.direction is Direction.GATHER:
            self._copier.gather(copy.pages, views).wait()
            if copy.then is not None:
                copy.then(views)
        elif copy.by_layer:
            copy.layers = self._copier.scatter_layers(copy.pages, views)
            with self._changed:
                self._launched.append(copy)
                self._changed.notify_all()
            for layer in copy.layers:
                layer.wait()
        else:
            self._copier.scatter(copy.pages, views).wait()
