"""A disk tier with several directories: spread, capacity, and isolated failures."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from disk_rig import MIB, FaultyFiles, file_bytes, open_disk, put, readable_keys, segment_files

from kvstore.blocks.key import Key
from kvstore.config.settings import TierSettings
from kvstore.errors import ConfigError, FrameInvalid, TierUnavailable
from kvstore.store.assembly import open_tier
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers import disk
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.state import DiskLimits, DiskState
from kvstore.tiers.disk.verify import verify
from kvstore.tiers.disk.volumes import DOWN_S, MAX_CONSECUTIVE_FAILURES, MAX_DIRECTORIES, Volumes


def open_volumes(directories: Sequence[Path], files: Files | None = None, **changed: Any) -> Tier:
    values: dict[str, Any] = {"capacity": 4 * MIB * len(directories), **changed}
    places = tuple(map(str, directories))
    return disk.open(disk.Config(directory=places, **values), files=files)


def blocks_in(directory: Path) -> int:
    return verify([str(directory)]).frames


class TestStripedDisk(TierSuite):
    persistent = True
    small_capacity_bytes = 9 << 20

    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return open_volumes([tmp_path / name for name in "abc"], capacity=capacity_bytes)

    def stored_bytes(self, tmp_path: Path) -> bytes:
        paths = [path for name in "abc" for path in segment_files(tmp_path / name)]
        return b"".join(path.read_bytes() for path in paths)

    def check_racing_read(self, buffer: FrameBuffer, key: Key, length: int) -> None:
        """A read during a delete may return a zero header, but no other wrong bytes."""
        try:
            assert buffer.version_of(key, length) == 0
        except FrameInvalid:
            assert not any(buffer.header[:6])


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("a", "b", "c")]


# ---------------------------------------------------------------------- spread and capacity


def test_blocks_are_spread_evenly(places: list[Path], buffer: FrameBuffer) -> None:
    tier = open_volumes(places)
    keys = put(tier, buffer, range(90))
    assert readable_keys(tier, buffer, keys) == keys
    assert (tier.workers_read, tier.workers_write) == (12, 6)
    tier.close()
    assert [blocks_in(place) for place in places] == [30, 30, 30]
    tier = open_volumes(places[:1], sync_writes=True)
    assert tier.workers_write == 8, "writes share an fdatasync"
    tier.close()


def test_capacity_is_exact_over_all_and_in_each(places: list[Path], buffer: FrameBuffer) -> None:
    capacity = 7 * MIB + 12345
    tier = open_volumes(places, capacity=capacity)
    for number in range(600):
        put(tier, buffer, range(number, number + 1), 1 + 7919 * number % 60_000)
        each = [file_bytes(place) for place in places]
        assert max(each) <= capacity // 3
        assert sum(each) == tier.stats()["bytes_used"]
        assert sum(each) <= capacity
    assert float(tier.stats()["evictions"]) > 200
    assert tier.stats()["bytes_capacity"] == capacity // 3 * 3
    tier.close()
    assert sum(map(file_bytes, places)) <= capacity


def test_sizes_and_lists_that_cannot_be_are_refused(tmp_path: Path) -> None:
    one = tmp_path / "one"
    (tmp_path / "link").symlink_to(one)
    for bad, message in (
        ([one, tmp_path / "link"], "are the same"),
        ([one, one], "are the same"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_volumes(bad, capacity=64 * MIB)
    for bad in ([], [tmp_path / str(number) for number in range(MAX_DIRECTORIES + 1)]):
        table = {"kind": "disk", "directory": bad, "capacity": "1GiB"}
        with pytest.raises(ConfigError, match=r"tiers\.0\.directory"):
            open_tier(TierSettings.model_validate(table), "tiers.0")
    with pytest.raises(ConfigError, match="each needs at least 1 MiB"):
        open_volumes([one, tmp_path / "two"], capacity=2 * MIB - 1)
    assert not one.exists()
    for directories in (1, 3, 16):
        names = tuple(map(str, range(directories)))
        config = disk.Config(directory=names, capacity=2 << 40)
        assert (2 << 40) / disk.segment_bytes_for(config) <= disk.MAX_SEGMENTS + directories


# ---------------------------------------------------------------------- other directories


def test_directories_may_be_reordered_added_and_left_out(
    places: list[Path], buffer: FrameBuffer
) -> None:
    tier = open_volumes(places[:2])
    keys = put(tier, buffer, range(20))
    tier.close()
    tier = open_volumes([places[1], places[0]])
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()
    tier = open_volumes([places[2], places[1], places[0]])
    assert readable_keys(tier, buffer, keys) == keys
    keys += put(tier, buffer, range(20, 35))
    tier.close()
    assert blocks_in(places[2]) == 5
    tier = open_volumes(places[1:])
    kept = readable_keys(tier, buffer, keys)
    assert len(kept) == 20
    keys += put(tier, buffer, range(35, 40))
    tier.close()
    tier = open_disk(places[0], capacity=4 * MIB)
    assert len(readable_keys(tier, buffer, keys)) == 15
    tier.close()
    tier = open_volumes(places)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_an_emptied_directory_is_not_written_to(
    places: list[Path], buffer: FrameBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    """An unmounted disk: its blocks return with the disk."""
    tier = open_volumes(places)
    keys = put(tier, buffer, range(30))
    tier.close()
    away = places[1].with_name("away")
    places[1].rename(away)
    for exists in (False, True):
        if exists:
            places[1].mkdir()
        with caplog.at_level(logging.ERROR):
            tier = open_volumes(places)
        assert "mount its disk" in caplog.text
        assert len(readable_keys(tier, buffer, keys)) == 20
        assert tier.stats()["directories_down"] == 1
        assert tier.stats()["directories"] == 3
        put(tier, buffer, range(100, 110))
        tier.close()
        assert not places[1].exists() or not list(places[1].iterdir())
    places[1].rmdir()
    away.rename(places[1])
    tier = open_volumes(places)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()
    shutil.rmtree(places[1])
    places[1].mkdir()
    (places[1] / "kvstore.lock").touch()
    tier = open_volumes(places)
    assert tier.stats()["directories_down"] == 0, "the operator created a lock file to start empty"
    tier.close()


def test_a_block_with_two_copies_stays_deleted(places: list[Path], buffer: FrameBuffer) -> None:
    """The block was written again while its directory was missing, then deleted."""
    tier = open_volumes(places[:2])
    keys = put(tier, buffer, range(10))
    tier.close()
    away = places[0].with_name("away")
    places[0].rename(away)
    tier = open_volumes(places[:2])
    missing = [key for key, has in zip(keys, tier.contains(keys), strict=True) if not has]
    assert len(missing) == 5
    put(tier, buffer, range(10))
    tier.close()
    away.rename(places[0])
    tier = open_volumes(places[:2])
    assert len(list(tier.keys())) == 10
    tier.delete(missing)
    tier.close()
    for _ in range(2):
        tier = open_volumes(places[:2])
        assert tier.contains(missing) == [False] * 5
        assert len(readable_keys(tier, buffer, keys)) == 5
        tier.close()


def test_what_was_written_anew_elsewhere_and_deleted_does_not_come_back(
    places: list[Path], buffer: FrameBuffer
) -> None:
    """A disk fails and is disabled. Its blocks are written to the others, then deleted."""
    files = FaultyFiles(only=places[1])
    tier = open_volumes(places, files)
    keys = put(tier, buffer, range(30))
    files.failing = {"read": errno.EIO}
    for key in keys:
        tier.read(key, buffer.header, buffer.payload)
    files.failing = {}
    lost = [key for key, has in zip(keys, tier.contains(keys), strict=True) if not has]
    assert lost, "no block was on the failing disk"
    for key in lost:
        tier.write(*buffer.fill(key, 20_000))
    tier.delete(keys[::2])
    tier.close()
    tier = open_volumes(places)
    assert readable_keys(tier, buffer, keys) == keys[1::2]
    tier.delete(keys)
    tier.close()
    tier = open_volumes(places)
    assert readable_keys(tier, buffer, keys) == []
    tier.close()


def test_each_directory_is_locked(places: list[Path]) -> None:
    tier = open_volumes(places[:2])
    with pytest.raises(ConfigError, match="in use"):
        open_disk(places[1])
    with pytest.raises(ConfigError, match="in use"):
        open_volumes([places[2], places[1]])
    open_disk(places[2]).close()
    tier.close()
    for place in places:
        open_disk(place).close()


def test_a_wrong_directory_among_right_ones_is_refused(places: list[Path]) -> None:
    places[1].mkdir()
    (places[1] / "thesis.tex").write_text("do not touch")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        open_volumes(places)
    (places[1] / "thesis.tex").unlink()
    (places[1] / "kvstore.lock").write_text("kvstore disk tier, version 9\n")
    with pytest.raises(ConfigError, match="version 9"):
        open_volumes(places)
    open_volumes([places[0], places[2]]).close()


# ---------------------------------------------------------------------- a failing directory


def test_a_disk_that_fails_takes_only_its_own_blocks_away(
    places: list[Path], buffer: FrameBuffer
) -> None:
    files = FaultyFiles(places[1])
    tier = open_volumes(places, files)
    keys = put(tier, buffer, range(30))
    files.failing = {"read": errno.EIO, "write": errno.EIO, "sync": errno.EIO, "create": errno.EIO}
    for _ in range(2):
        # No call raises, because the circuit breaker would disable the other disks too.
        assert len([key for key in keys if tier.read(key, buffer.header, buffer.payload)]) == 20
    assert tier.stats()["directories_down"] == 1
    assert len(readable_keys(tier, buffer, keys)) == 20, "what is left alone is not named either"
    put(tier, buffer, range(30))
    assert readable_keys(tier, buffer, keys) == keys, "written again, to disks that work"
    more = put(tier, buffer, range(100, 130))
    assert readable_keys(tier, buffer, more) == more
    with pytest.raises(TierUnavailable, match="sync failed"):
        tier.flush()
    tier.close()
    files.failing = {}
    assert [blocks_in(place) for place in places] == [30, 10, 30]


def test_a_disk_that_cannot_be_opened_takes_only_its_own_blocks_away(
    places: list[Path], buffer: FrameBuffer
) -> None:
    tier = open_volumes(places)
    keys = put(tier, buffer, range(30))
    tier.close()
    files = FaultyFiles(places[0])
    files.failing = {"open": errno.EIO}
    tier = open_volumes(places, files)
    assert len(readable_keys(tier, buffer, keys)) == 20
    assert tier.stats()["directories_down"] == 1
    put(tier, buffer, range(30))
    tier.close()
    files.failing = {}
    tier = open_volumes(places, files)
    assert readable_keys(tier, buffer, keys) == keys
    assert tier.stats()["blocks"] == 30
    tier.close()
    for place in places[1:]:
        shutil.rmtree(place)
    files.failing = {"open": errno.EIO}
    with pytest.raises(ConfigError, match="contained blocks"):
        open_volumes(places, files)
    files.failing = {}
    open_disk(places[0]).close()


def test_a_disk_that_fails_is_tried_again_later(places: list[Path]) -> None:
    now_s = [100.0]
    state = DiskState()
    directories = [str(place) for place in places]
    limits = DiskLimits(4 * MIB, MIB)
    volumes = Volumes(directories, Files(), state, limits, name="disk", clock=lambda: now_s[0])
    bad, good = volumes.volumes[1], volumes.volumes[0]
    error = OSError(errno.EIO, "broken")
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        assert volumes.is_up(bad)
        volumes.record_failure(bad, error)
    assert not volumes.is_up(bad)
    assert volumes.is_up(good)
    assert all(volumes.write_candidates()[-1] is bad for _ in range(5))
    now_s[0] += DOWN_S
    assert volumes.is_up(bad)
    volumes.record_failure(bad, error)
    now_s[0] += DOWN_S
    assert not volumes.is_up(bad), "a failed retry doubles the time"
    now_s[0] += DOWN_S
    assert volumes.is_up(bad)
    volumes.record_success(bad)
    assert volumes.are_all_up()
    volumes.record_failure(bad, error)
    assert volumes.is_up(bad), "a success resets the failures"
    for _ in range(100):
        now_s[0] += 1e6
        volumes.record_failure(bad, error)
    now_s[0] += 100
    assert volumes.is_up(bad), "the time is bounded"
    assert volumes.stop()
    volumes.close()


def test_one_directory_alone_tells_its_faults(places: list[Path], buffer: FrameBuffer) -> None:
    """The breaker above decides then."""
    files = FaultyFiles()
    tier = open_volumes(places[:1], files)
    keys = put(tier, buffer, range(1))
    files.failing = {"read": errno.EIO}
    for _ in range(3 * MAX_CONSECUTIVE_FAILURES):
        with pytest.raises(TierUnavailable):
            tier.read(keys[0], buffer.header, buffer.payload)
        assert tier.contains(keys) == [True]
    tier.close()


def test_when_every_disk_fails_it_is_said(places: list[Path], buffer: FrameBuffer) -> None:
    files = FaultyFiles()
    tier = open_volumes(places, files)
    put(tier, buffer, range(3))
    files.failing = {"write": errno.EIO}
    for _ in range(8):
        with pytest.raises(TierUnavailable):
            put(tier, buffer, range(100, 101))
    assert tier.contains([key_of(100)]) == [False]
    files.failing = {}
    put(tier, buffer, range(100, 101))
    assert readable_keys(tier, buffer, [key_of(100)])
    tier.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB; skips where mounting is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_takes_less_and_the_others_the_rest(
    small: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """A real file system without room: it reclaims what it has, and goes on."""
    tier = open_volumes([small / "d", tmp_path / "b"], capacity=16 * MIB, segment=MIB // 2)
    for number in range(0, 900, 30):
        keys = put(tier, buffer, range(number, number + 30))
        assert readable_keys(tier, buffer, keys) == keys
    assert 1 <= len(segment_files(small / "d")) <= 3
    assert file_bytes(tmp_path / "b") > 7 * MIB
    assert tier.stats()["errors"] == 0
    tier.close()
    tier = open_volumes([small / "d", tmp_path / "b"], capacity=16 * MIB, segment=MIB // 2)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_a_disk_that_went_read_only_takes_only_its_own_blocks_away(
    small: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """What Linux does to a file system with errors."""
    places = [small / "d", tmp_path / "b"]
    tier = open_volumes(places, segment=MIB // 2)
    keys = put(tier, buffer, range(20))
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    tier = open_volumes(places, segment=MIB // 2)
    assert len(readable_keys(tier, buffer, keys)) == 10
    more = put(tier, buffer, range(100, 110))
    assert readable_keys(tier, buffer, more) == more
    tier.close()
    with pytest.raises(ConfigError, match="Read-only"):
        open_disk(places[0])
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    tier = open_volumes(places, segment=MIB // 2)
    assert readable_keys(tier, buffer, keys + more) == keys + more
    tier.close()
