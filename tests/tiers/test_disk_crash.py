"""`kill -9` of a process that writes to the disk tier, at random times."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_rig import CrashRun


@pytest.mark.parametrize(
    ("directories", "capacity", "loops"),
    [(1, 1 << 30, 7), (1, 8 << 20, 5), (3, 24 << 20, 8)],
)
def test_kill_at_any_moment(tmp_path: Path, directories: int, capacity: int, loops: int) -> None:
    """Listed blocks are intact, and acknowledged blocks are listed."""
    places = [tmp_path / str(number) for number in range(directories)]
    run = CrashRun(places, capacity=capacity, seed=capacity)
    for _ in range(loops):
        run.loop()
    assert run.journal
