"""The order in which the copies of a connector run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from fork_rig import IGNORE_FORK_WARNING, in_child
from manual_store import ManualSlab

from kvstore.connectors.common.copy_thread import (
    COPIES_QUEUED_MAX,
    SCATTERS_IN_A_ROW_MAX,
    Copy,
    CopyThread,
    Direction,
)
from kvstore.interface import SlabView
from kvstore.kernels import FINISHED, Event

pytestmark = pytest.mark.filterwarnings(IGNORE_FORK_WARNING)

GATHER, SCATTER = Direction.GATHER, Direction.SCATTER
LIMIT_S = 20.0


@dataclass
class SlowCopier:
    """Copies nothing; the first copy lasts until `go`. ran: first page of each, in order."""

    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    ran: list[int] = field(default_factory=list)

    def map_slab(self, slab: SlabView) -> None:
        return None

    def mark(self) -> Event:
        return FINISHED

    def gather(self, pages: Sequence[Sequence[int]], views: Sequence[memoryview]) -> Event:
        self.begun.set()
        assert self.go.wait(LIMIT_S)
        self.ran.append(pages[0][0])
        return FINISHED

    scatter = gather

    def close(self) -> None:
        return None


class Rig:
    def __init__(self) -> None:
        self.copier = SlowCopier()
        self.copies = CopyThread(self.copier)  # type: ignore[arg-type]
        self.slab = ManualSlab(4, 64)
        assert self.submit(GATHER, 0)
        assert self.copier.begun.wait(LIMIT_S), "all later copies wait for this one"

    def submit(self, direction: Direction, page: int) -> bool:
        return self.copies.submit(Copy(direction, [[page]], self.slab, (0,), FINISHED, page))

    def ran(self) -> list[int]:
        self.copier.go.set()
        self.copies.close()
        return self.copier.ran


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.copier.go.set()
    made.copies.close()


def test_a_load_runs_before_queued_saves(rig: Rig) -> None:
    for page in (1, 2, 3):
        assert rig.submit(GATHER, page)
    assert rig.submit(SCATTER, 10)
    assert rig.submit(SCATTER, 11)
    assert rig.ran() == [0, 10, 11, 1, 2, 3]


def test_saves_run_among_endless_loads(rig: Rig) -> None:
    loads = [100 + page for page in range(2 * SCATTERS_IN_A_ROW_MAX + 1)]
    for page in (1, 2):
        assert rig.submit(GATHER, page)
    for page in loads:
        assert rig.submit(SCATTER, page)
    first, second = loads[:SCATTERS_IN_A_ROW_MAX], loads[SCATTERS_IN_A_ROW_MAX:-1]
    assert rig.ran() == [0, *first, 1, *second, 2, loads[-1]]


def test_saves_that_have_not_started_are_withdrawn(rig: Rig) -> None:
    for page in (1, 2, 3, 4):
        assert rig.submit(GATHER, page)
    assert rig.submit(SCATTER, 2)
    taken = rig.copies.withdraw(lambda copy: copy.owner in (0, 2, 4))
    assert [copy.owner for copy in taken] == [2, 4], "the first one runs, and a load is not a save"
    assert rig.copies.under_way == 4
    assert rig.ran() == [0, 2, 1, 3]
    assert rig.copies.under_way == 0


def test_saves_that_fill_the_queue_do_not_block_loads(rig: Rig) -> None:
    while rig.submit(GATHER, 1):
        pass
    assert rig.copies.under_way == 1 + COPIES_QUEUED_MAX
    assert rig.submit(SCATTER, 10)
    assert rig.ran()[:2] == [0, 10]


def test_a_forked_child_waits_for_no_copy(rig: Rig) -> None:
    """The thread that copies is the parent's. In the child every copy has failed."""
    assert rig.submit(GATHER, 1)
    assert rig.submit(SCATTER, 2)

    def close() -> list[object]:
        assert not rig.submit(GATHER, 3)
        under_way = rig.copies.under_way
        ended = [*rig.copies.finished(LIMIT_S), *rig.copies.close()]
        return [under_way, sorted(copy.owner for copy in ended), all(copy.error for copy in ended)]

    with rig.copies._changed:
        assert in_child(close) == [3, [0, 1, 2], True]
    assert rig.ran() == [0, 2, 1]
