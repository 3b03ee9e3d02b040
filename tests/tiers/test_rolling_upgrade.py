"""A rolling upgrade and back: nodes of this and of a later release on one disk, Redis and S3.

The later release writes frames, segments and tombstones that this one does not know. They are
misses here: nothing is deleted or overwritten, all is counted apart, and the later release finds
every block again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from newer_release import KINDS, Node

BLOCKS = 10
"""Blocks saved with each change of the format."""


@pytest.fixture
def redis_table(tmp_path: Path) -> Iterator[dict[str, Any]]:
    from redis_rig import Server, valkey_binary

    server = Server(tmp_path / "server", valkey_binary())
    yield {"kind": "redis", "url": f"redis://{server.address}", "timeout": "20s"}
    server.stop()


@pytest.fixture
def s3_table(s3_server: Any) -> dict[str, Any]:
    return {"kind": "s3", **s3_server.values(s3_server.new_bucket())}


@pytest.fixture
def disk_table(tmp_path: Path) -> dict[str, Any]:
    return {"kind": "disk", "directory": str(tmp_path / "disk"), "capacity": "8MiB"}


def save_all(node: Node) -> None:
    """Save BLOCKS blocks with each change, and some that this release understands."""
    for kind in KINDS:
        assert node.save(kind, BLOCKS, kind)
    assert node.save("optional", BLOCKS, "optional")
    assert node.save("same", BLOCKS)


def load_all(node: Node) -> dict[str, int]:
    """Number of blocks that the node finds, by change."""
    return {kind: node.load(kind, BLOCKS) for kind in (*KINDS, "optional", "same")}


FOUND_BY_NEWER = dict.fromkeys((*KINDS, "optional", "same"), BLOCKS)
FOUND_BY_THIS = {**FOUND_BY_NEWER, **dict.fromkeys(KINDS, 0)}


def use_as_this_release(node: Node) -> None:
    """Everything that a node does with a tier that has blocks of a later release."""
    assert load_all(node) == FOUND_BY_THIS
    stats = node.stats()
    assert stats["unsupported_frames"] == len(KINDS) * BLOCKS
    assert stats["checksum_failures"] == stats["errors"] == 0
    assert load_all(node) == FOUND_BY_THIS
    assert node.stats()["unsupported_frames"] == len(KINDS) * BLOCKS, "read again"
    # The blocks that were misses are computed and saved. The tier does not take them.
    for kind in KINDS:
        assert node.do("prefix", kind, BLOCKS) == [0, 0]
        assert not node.save(kind, BLOCKS), "said to be written, and cannot be read"
    assert node.stats()["tier_writes_failed"] == len(KINDS) * BLOCKS
    node.do("warm")
    assert load_all(node) == FOUND_BY_THIS
    assert node.save("back", BLOCKS)


def test_one_redis(redis_table: dict[str, Any]) -> None:
    with contextlib.ExitStack() as nodes:
        this, newer = Node(redis_table), Node(redis_table, newer=True)
        nodes.callback(this.close)
        nodes.callback(newer.close)
        assert this.save("before", BLOCKS)
        save_all(newer)
        use_as_this_release(this)
        assert load_all(newer) == FOUND_BY_NEWER
        assert newer.load("before", BLOCKS) == newer.load("back", BLOCKS) == BLOCKS
        assert this.load("before", BLOCKS) == BLOCKS


def test_one_bucket(s3_table: dict[str, Any]) -> None:
    with contextlib.ExitStack() as nodes:
        this, newer = Node(s3_table), Node(s3_table, newer=True)
        nodes.callback(this.close)
        nodes.callback(newer.close)
        assert this.save("before", BLOCKS)
        newer.do("reconcile")
        save_all(newer)
        this.do("reconcile")
        use_as_this_release(this)
        for node in (this, newer):
            node.do("reconcile")
        assert load_all(newer) == FOUND_BY_NEWER
        assert newer.load("before", BLOCKS) == newer.load("back", BLOCKS) == BLOCKS
        assert this.load("before", BLOCKS) == BLOCKS


@pytest.mark.parametrize("end", ["close", "kill"])
def test_one_directory(disk_table: dict[str, Any], end: str) -> None:
    """Forward, back and forward again. Killed, a release leaves a segment without its index."""
    this = Node(disk_table)
    assert this.save("before", BLOCKS)
    getattr(this, end)()
    newer = Node(disk_table, newer=True)
    assert newer.load("before", BLOCKS) == BLOCKS
    save_all(newer)
    getattr(newer, end)()
    this = Node(disk_table)
    assert this.load("before", BLOCKS) == BLOCKS
    if end == "close":
        use_as_this_release(this)
    else:  # the blocks that the index does not have can be written again
        assert load_all(this) == FOUND_BY_THIS
        assert this.save("back", BLOCKS)
    getattr(this, end)()
    newer = Node(disk_table, newer=True)
    assert load_all(newer) == FOUND_BY_NEWER
    assert newer.load("before", BLOCKS) == newer.load("back", BLOCKS) == BLOCKS
    newer.close()


@pytest.mark.parametrize("end", ["close", "kill"])
def test_segments_of_a_later_version(disk_table: dict[str, Any], end: str) -> None:
    newer = Node(disk_table, newer=True)
    assert newer.save("later", BLOCKS, "segments")
    getattr(newer, end)()
    this = Node(disk_table)
    assert this.load("later", BLOCKS) == 0
    assert this.stats()["segments_unsupported"] == 1
    assert this.save("back", BLOCKS)
    getattr(this, end)()
    newer = Node(disk_table, newer=True)
    assert newer.load("later", BLOCKS) == newer.load("back", BLOCKS) == BLOCKS
    newer.close()
