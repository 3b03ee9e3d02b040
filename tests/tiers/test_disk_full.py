"""A full disk: each test mounts a small tmpfs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.disk import Config, open

MountSmall = Callable[[int], Path]
KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[MountSmall]:
    """Mounts a file system of this size; skips the test without the permission."""
    mounted: list[Path] = []

    def make(nbytes: int) -> Path:
        folder = tmp_path / f"small-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("needs the right to mount a file system")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def serve(folder: Path, capacity: str) -> subprocess.CompletedProcess[str]:
    """Run `kvstore serve` with a disk tier in `folder`; it must fail."""
    flags = ["--socket", str(folder.parent / "s.sock"), "--port", "0", "--l2", "4MiB"]
    disk = ["--slot-bytes", "64KiB", "--disk", str(folder / "d"), "--disk-capacity", capacity]
    return subprocess.run(
        [sys.executable, "-m", "kvstore", "serve", *flags, *disk],
        capture_output=True,
        text=True,
        timeout=120,
    )


def fill(folder: Path) -> None:
    """Fill the file system completely."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(64 * KIB))
    assert os.statvfs(folder).f_bavail == 0


def test_a_full_disk_is_one_line(small: MountSmall) -> None:
    folder = small(MIB)
    (folder / "d").mkdir()
    fill(folder)
    ended = serve(folder, "4MiB")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "No space left" in ended.stderr
    assert str(folder) in ended.stderr


def test_a_disk_with_no_room_for_a_segment_is_one_line(small: MountSmall) -> None:
    folder = small(8 * MIB)
    ended = serve(folder, "1GiB")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "--disk-capacity" in ended.stderr
    assert not list((folder / "d").glob("*.seg*"))


def test_a_full_disk_costs_no_version(small: MountSmall) -> None:
    """Blocks of an earlier process are kept after a start on a full disk."""
    folder = small(4 * MIB)
    config = Config(directory=str(folder / "d"), capacity=2 * MIB)
    open(config).close()
    fill(folder)
    with pytest.raises(ConfigError, match="free some space"):
        open(config)
    (folder / "filler").unlink()
    open(config).close()
