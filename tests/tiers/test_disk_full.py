"""A full disk: each test mounts a small tmpfs."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_rig import file_bytes, open_disk, put, readable_keys, segment_files

from kvstore.errors import ConfigError, TierFull
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers.disk import Config, open
from kvstore.tiers.disk.files import Files

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
    with contextlib.suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
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


class Crowded(Files):
    """Other programs take every byte that the tier frees, at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.taking = False

    def unlink(self, path: str) -> None:
        super().unlink(path)
        if self.taking:
            fill(self.folder)

    def close(self, fd: int) -> None:
        super().close(fd)
        if self.taking:
            fill(self.folder)

    def _allocate(self, fd: int, nbytes: int) -> None:
        """tmpfs keeps the pages that a failed allocation got until the file is deleted."""
        try:
            super()._allocate(fd, nbytes)
        except OSError:
            os.ftruncate(fd, 0)
            raise


def test_a_crowded_disk_keeps_every_segment(small: MountSmall) -> None:
    """A new segment gets the file of an old one, so its space is never free for others."""
    folder = small(8 * MIB)
    buffer = FrameBuffer(MIB)
    files = Crowded(folder)
    tier = open_disk(folder / "d", files, capacity=32 * MIB, segment=MIB // 2)
    put(tier, buffer, range(120))
    tier.flush()
    count = len(segment_files(folder / "d"))
    fill(folder)
    files.taking = True
    for number in range(1000, 1400, 20):
        keys = put(tier, buffer, range(number, number + 20))
        assert readable_keys(tier, buffer, keys) == keys
        assert len(segment_files(folder / "d")) == count
    assert int(tier.stats()["blocks"]) >= 20 * (count - 1)
    assert tier.stats()["errors"] == 0
    assert file_bytes(folder / "d") == tier.stats()["bytes_used"]
    tier.close()


@pytest.mark.parametrize("other_size", [True, False])
def test_a_crowded_disk_costs_half_of_the_segments_at_most(
    small: MountSmall, other_size: bool
) -> None:
    """Files that cannot be used again: with a TTL, or of another size. Then the tier is full."""
    folder = small(8 * MIB)
    buffer = FrameBuffer(MIB)
    files = Crowded(folder)
    options = {"ttl": "0" if other_size else "10h", "capacity": 32 * MIB}
    tier = open_disk(folder / "d", files, segment=MIB // 2, **options)
    keys = put(tier, buffer, range(200))
    if other_size:
        tier.close()
        tier = open_disk(folder / "d", files, segment=MIB // 4, **options)
    tier.flush()
    count = len(segment_files(folder / "d"))
    fill(folder)
    files.taking = True
    full = 0
    for number in range(1000, 1200):
        try:
            put(tier, buffer, range(number, number + 1))
        except TierFull:
            full += 1
    assert full > 50
    assert count > len(segment_files(folder / "d")) >= count // 2
    kept = readable_keys(tier, buffer, keys)
    assert len(kept) >= len(keys) // 2 - 25
    assert file_bytes(folder / "d") == tier.stats()["bytes_used"]
    # With room again it goes on.
    files.taking = False
    (folder / "filler").unlink()
    more = put(tier, buffer, range(2000, 2020))
    assert readable_keys(tier, buffer, more) == more
    tier.close()


def test_a_file_that_cannot_be_used_again_on_a_full_disk(small: MountSmall) -> None:
    """A file system that copies on write has no room to overwrite a file either."""

    class CopyOnWrite(Crowded):
        full = False

        def write_at(self, fd: int, views: list[memoryview], offset: int) -> None:
            if self.full and offset == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write_at(fd, views, offset)

    folder = small(8 * MIB)
    buffer = FrameBuffer(MIB)
    files = CopyOnWrite(folder)
    tier = open_disk(folder / "d", files, capacity=32 * MIB, segment=MIB // 2)
    put(tier, buffer, range(200))
    tier.flush()
    count = len(segment_files(folder / "d"))
    fill(folder)
    files.taking = True
    files.full = True
    for number in range(1000, 1100):
        with contextlib.suppress(TierFull):
            put(tier, buffer, range(number, number + 1))
    assert len(segment_files(folder / "d")) >= count // 2
    with pytest.raises(TierFull):
        put(tier, buffer, range(2000, 2001))
    assert readable_keys(tier, buffer, [key_of(number) for number in range(200)])
    tier.close()


def test_a_full_disk_with_nothing_but_files_set_aside_is_opened(small: MountSmall) -> None:
    folder = small(4 * MIB)
    tier = open_disk(folder / "d", capacity=2 * MIB, segment=MIB // 2)
    put(tier, FrameBuffer(MIB), range(10))
    tier.close()
    (damaged,) = segment_files(folder / "d")
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    fill(folder)
    tier = open_disk(folder / "d", capacity=2 * MIB, segment=MIB // 2)
    assert tier.stats()["segments_set_aside"] == 1
    keys = put(tier, FrameBuffer(MIB), range(10))
    assert readable_keys(tier, FrameBuffer(MIB), keys) == keys
    assert tier.stats()["segments_set_aside"] == 0
    tier.close()


def test_files_set_aside_leave_a_full_disk_before_any_block(small: MountSmall) -> None:
    folder = small(8 * MIB)
    buffer = FrameBuffer(MIB)
    tier = open_disk(folder / "d", capacity=32 * MIB, segment=MIB // 2)
    put(tier, buffer, range(100))
    tier.close()
    damaged = segment_files(folder / "d")[0]
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    tier = open_disk(folder / "d", capacity=32 * MIB, segment=MIB // 2)
    before = list(tier.keys())
    assert tier.stats()["segments_set_aside"] == 1
    fill(folder)
    put(tier, buffer, range(1000, 1020))
    assert tier.stats()["segments_set_aside"] == 0
    assert all(tier.contains(before))
    assert file_bytes(folder / "d") == tier.stats()["bytes_used"]
    tier.close()
