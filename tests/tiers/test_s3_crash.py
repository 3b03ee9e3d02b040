"""`kill -9` of a process that writes to the S3 tier, at random times."""

from __future__ import annotations

import pytest

pytest.importorskip("boto3")

from s3_crash_rig import CrashRun
from s3_rig import S3Server


def test_kill_at_any_moment(s3_server: S3Server) -> None:
    """Listed blocks are intact, acknowledged blocks are listed, and no segment is torn."""
    config = s3_server.values(s3_server.new_bucket(), linger="5ms")
    run = CrashRun(config, seed=1)
    for _ in range(20):
        run.loop()
    assert run.written
    assert run.deleted
    assert run.segments < run.blocks, "no segment has several blocks"
