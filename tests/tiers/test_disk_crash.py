"""`kill -9` of a process that writes to the disk tier, at random moments."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_rig import CrashRun


@pytest.mark.parametrize(("capacity", "loops"), [(2 << 30, 12), (8 << 20, 8)])
def test_kill_at_any_moment(tmp_path: Path, capacity: int, loops: int) -> None:
    """What `contains` names is whole and right, what was acknowledged is there, none is torn."""
    run = CrashRun(tmp_path / "disk", capacity=capacity, seed=capacity)
    for _ in range(loops):
        run.loop()
    assert run.written
