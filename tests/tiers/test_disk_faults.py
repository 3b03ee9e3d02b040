"""The disk tier with failing system calls, a full disk, and directories in use."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from disk_rig import (
    MIB,
    SECTOR_BYTES,
    FaultyFiles,
    file_bytes,
    open_disk,
    put,
    readable_keys,
    segment_files,
)

from kvstore.blocks.frame import aligned_buffer
from kvstore.errors import ConfigError, TierError, TierFull, TierUnavailable
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import disk
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.state import DiskLimits
from kvstore.tiers.disk.verify import verify


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def test_a_directory_in_use_is_refused(directory: Path) -> None:
    tier = open_disk(directory)
    with pytest.raises(ConfigError, match=f"in use by another kvstore .process {os.getpid()}"):
        open_disk(directory)
    tier.close()
    open_disk(directory).close()


def _open_and_say(directory: str, said: Any) -> None:
    try:
        open_disk(Path(directory)).close()
        said.put("opened")
    except ConfigError as error:
        said.put(str(error))


def test_a_directory_in_use_by_another_process_is_refused(directory: Path) -> None:
    tier = open_disk(directory)
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    other = context.Process(target=_open_and_say, args=(str(directory), said))
    other.start()
    assert "in use" in said.get(timeout=60)
    other.join()
    tier.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kvstore disk tier, version 9\nprocess 1\n", "version 9"),
        ("something else\n", "not a lock file"),
    ],
)
def test_an_unknown_version_is_refused(directory: Path, content: str, message: str) -> None:
    directory.mkdir()
    (directory / "kvstore.lock").write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_disk(directory)
    assert (directory / "kvstore.lock").read_text() == content


def test_a_directory_that_is_not_ours_is_refused(directory: Path, tmp_path: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").write_text("do not touch")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        open_disk(directory)
    assert [path.name for path in directory.iterdir()] == ["thesis.tex"]
    file = tmp_path / "file"
    file.write_text("")
    for bad in (file, Path("/proc/nowhere"), file / "below"):
        with pytest.raises(ConfigError, match="cannot use"):
            open_disk(bad)


def test_sizes_that_cannot_be_are_refused(directory: Path) -> None:
    for segment in (1000, 7 * MIB):
        with pytest.raises(ConfigError, match="segment = "):
            open_disk(directory, segment=segment)
    assert not directory.exists()
    config = disk.Config(directory="x", capacity=2 << 40)
    assert (2 << 40) / disk.segment_bytes_for(config) <= disk.MAX_SEGMENTS + 1
    assert disk.segment_bytes_for(disk.Config(directory="x", capacity="50GiB")) == 256 * MIB


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_reclaims_and_goes_on(
    directory: Path, buffer: FrameBuffer, full: int
) -> None:
    files = FaultyFiles()
    files.full_errno = full
    files.room_bytes = 3 * MIB
    tier = open_disk(directory, files, capacity=8 * MIB, segment=MIB)
    keys = put(tier, buffer, range(400))
    assert tier.contains(keys[-30:]) == [True] * 30
    assert len(segment_files(directory)) == 3
    readable_keys(tier, buffer, keys)
    tier.close()


def test_no_room_at_all_is_tier_full(directory: Path, buffer: FrameBuffer) -> None:
    files = FaultyFiles()
    files.room_bytes = 0
    tier = open_disk(directory, files)
    for _ in range(2):
        with pytest.raises(TierFull):
            put(tier, buffer, range(1))
    assert segment_files(directory) == []
    files.room_bytes = 1 << 60
    keys = put(tier, buffer, range(1))
    assert readable_keys(tier, buffer, keys) == keys
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()


def test_failing_io_is_unavailable_and_nothing_is_lost(
    directory: Path, buffer: FrameBuffer
) -> None:
    files = FaultyFiles()
    tier = open_disk(directory, files)
    keys = put(tier, buffer, range(2))
    files.failing = {"read": errno.EIO, "write": errno.EIO}
    with pytest.raises(TierUnavailable):
        tier.read(keys[0], buffer.header, buffer.payload)
    with pytest.raises(TierUnavailable):
        put(tier, buffer, range(2, 3))
    assert tier.contains([key_of(2)]) == [False]
    tier.delete(keys[:1])
    files.failing = {}
    assert tier.contains(keys) == [False, True]
    assert readable_keys(tier, buffer, keys) == keys[1:]
    put(tier, buffer, range(2, 3))
    assert readable_keys(tier, buffer, [key_of(2)])
    tier.close()


def test_a_write_is_seen_only_after_it_has_ended(directory: Path, buffer: FrameBuffer) -> None:
    files = FaultyFiles()
    tier = open_disk(directory, files)
    seen = []

    def during_write(fd: int, views: list[memoryview], offset: int) -> None:
        mine = FrameBuffer(MIB)
        seen.append(tier.contains([key_of(5)]))
        seen.append(tier.read(key_of(5), mine.header, mine.payload))
        Files.write_at(files, fd, views, offset)

    put(tier, buffer, range(1))
    files.write_at = during_write  # type: ignore[method-assign]
    put(tier, buffer, range(5, 6))
    assert seen == [[False], 0]
    assert tier.contains([key_of(5)]) == [True]
    del files.write_at
    tier.close()


def test_durable_writes_wait_for_the_disk(directory: Path, buffer: FrameBuffer) -> None:
    files = FaultyFiles()
    tier = open_disk(directory, files, sync_writes=True)
    put(tier, buffer, range(1))
    files.failing = {"sync": errno.EIO}
    with pytest.raises(TierUnavailable, match="sync failed"):
        put(tier, buffer, range(1, 2))
    assert tier.contains([key_of(1)]) == [False], (
        "a second write would be acknowledged without a sync"
    )
    files.failing = {}
    keys = put(tier, buffer, range(3))
    assert len(segment_files(directory)) == 2, "no more frames in the segment whose sync failed"
    tier.close()
    tier = open_disk(directory)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_a_durable_write_waits_for_the_name_of_its_file(
    directory: Path, buffer: FrameBuffer
) -> None:
    """A file is lost in a power loss if its name is not on stable storage."""
    synced: set[str] = set()

    class Telling(Files):
        def sync_directory(self, path: str) -> None:
            super().sync_directory(path)
            synced.update(file.name for file in segment_files(directory))

    tier = open_disk(directory, Telling(), sync_writes=True, capacity=4 * MIB)
    for number in range(250):
        put(tier, buffer, range(number, number + 1))
        assert {file.name for file in segment_files(directory)} <= synced
    assert len(synced) > 9
    tier.close()


def test_a_disk_that_never_syncs_does_not_cost_what_it_holds(
    directory: Path, buffer: FrameBuffer
) -> None:
    files = FaultyFiles()
    tier = open_disk(directory, files, sync_writes=True, segment=MIB)
    put(tier, buffer, range(400))
    before = int(tier.stats()["blocks"])
    files.failing = {"sync": errno.EIO}
    for number in range(1000, 1020):
        with pytest.raises(TierUnavailable):
            put(tier, buffer, range(number, number + 1))
    assert int(tier.stats()["blocks"]) > before - 2 * MIB // 20_000
    files.failing = {}
    keys = put(tier, buffer, range(1000, 1020))
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_flush_says_when_the_disk_could_not(directory: Path, buffer: FrameBuffer) -> None:
    files = FaultyFiles()
    tier = open_disk(directory, files)
    put(tier, buffer, range(1))
    files.failing = {"sync": errno.EIO}
    put(tier, buffer, range(1, 2))
    with pytest.raises(TierUnavailable, match="sync failed"):
        tier.flush()
    files.failing = {}
    keys = put(tier, buffer, range(3))
    # The kernel has dropped the pages that it could not write. A later sync does not report them.
    with pytest.raises(TierUnavailable, match="sync failed"):
        tier.flush()
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()
    assert verify([str(directory)]).segments_unsealed == 1
    tier = open_disk(directory)
    assert readable_keys(tier, buffer, keys) == keys
    tier.flush()
    tier.close()


def test_flush_is_right_again_when_the_segment_that_failed_is_gone(
    directory: Path, buffer: FrameBuffer
) -> None:
    files = FaultyFiles()
    tier = open_disk(directory, files)
    files.failing = {"sync": errno.EIO}
    put(tier, buffer, range(1))
    with pytest.raises(TierUnavailable, match="sync failed"):
        tier.flush()
    files.failing = {}
    tier.clear()
    put(tier, buffer, range(1))
    tier.flush()
    tier.close()


def test_a_failed_sync_at_sealing_is_told_by_flush(directory: Path, buffer: FrameBuffer) -> None:
    """The kernel reports a failed sync to the first caller only."""

    class Telling(FaultyFiles):
        failed = threading.Event()

        def sync(self, fd: int) -> None:
            try:
                super().sync(fd)
            except OSError:
                self.failed.set()
                raise

    files = Telling()
    tier = open_disk(directory, files, segment=MIB)
    put(tier, buffer, range(1))
    tier.flush()
    files.failing = {"sync": errno.EIO}
    while len(segment_files(directory)) < 2:
        put(tier, buffer, range(int(tier.stats()["blocks"]), int(tier.stats()["blocks"]) + 1))
    assert files.failed.wait(30)
    files.failing = {}
    with pytest.raises(TierUnavailable, match="sync failed"):
        tier.flush()
    tier.close()


@pytest.mark.parametrize("clear", [True, False])
def test_a_segment_that_cannot_be_made_leaves_the_others_to_be_reclaimed(
    directory: Path, buffer: FrameBuffer, clear: bool
) -> None:
    class Full(Files):
        failing = 0

        def create(self, path: str, nbytes: int) -> int:
            if self.failing:
                self.failing -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().create(path, nbytes)

        def rename(self, path: str, to: str) -> None:
            if self.failing:
                raise OSError(errno.EMFILE, "no file is used again, so one has to be made")
            super().rename(path, to)

    files = Full()
    tier = open_disk(directory, files, capacity=4 * MIB, segment=MIB)
    number = 0
    for _ in range(6):
        number += 1
        put(tier, buffer, range(number, number + 1), 200_000)
        files.failing = 1
        while files.failing:
            number += 1
            try:
                put(tier, buffer, range(number, number + 1), 200_000)
            except TierUnavailable:
                break
        assert not files.failing, "no segment was rolled"
        if clear:
            tier.clear()
            # A pending footer keeps its segment open.
            tier.flush()
            assert file_bytes(directory) == tier.stats()["bytes_used"]
    keys = put(tier, buffer, range(1000, 1030), 200_000)
    assert readable_keys(tier, buffer, keys[-8:]) == keys[-8:]
    tier.close()
    assert verify([str(directory)]).segments_unsealed == 0


def test_a_hung_write_keeps_the_directory_from_others(directory: Path, buffer: FrameBuffer) -> None:
    """The write may still complete, in files that another process has recovered meanwhile."""

    class Hung(Files):
        hanging, go_on = threading.Event(), threading.Event()

        def write_at(self, fd: int, views: list[memoryview], offset: int) -> None:
            if len(views) > 1:
                self.hanging.set()
                assert self.go_on.wait(60)
            super().write_at(fd, views, offset)

    files = Hung()
    limits = DiskLimits(8 * MIB, MIB)
    tier = disk.DiskTier([str(directory)], limits, files=files, close_wait_s=0.05)
    writer = threading.Thread(target=tier.write, args=buffer.fill(key_of(1), 20_000))
    writer.start()
    assert files.hanging.wait(30)
    tier.close()
    with pytest.raises(ConfigError, match="in use"):
        open_disk(directory)
    files.go_on.set()
    writer.join(30)
    assert not writer.is_alive()


@pytest.mark.parametrize("refused_at", ["open", "io"])
def test_without_direct_io_the_tier_goes_on_buffered(
    directory: Path, buffer: FrameBuffer, refused_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Files):
        def _os_open(self, path: str, flags: int) -> int:
            fd = super()._os_open(path, flags)
            if refused_at == "open" and flags & os.O_DIRECT:
                os.close(fd)
                raise OSError(errno.EINVAL, "no direct I/O here")
            return fd

    files = Refusing()
    tier = open_disk(directory, files)
    keys = put(tier, buffer, range(3))
    if refused_at == "io":
        # An unaligned address has the same effect as a file system without direct I/O.
        odd = memoryview(bytearray(3 * SECTOR_BYTES))[1 : 2 * SECTOR_BYTES + 1]
        path = segment_files(directory)[0]
        fd = files.open(str(path))
        assert files.read_at(fd, [odd], 0) == 2 * SECTOR_BYTES
        files.close(fd)
    assert tier.stats()["direct_io"] == 0
    assert len(readable_keys(tier, buffer, keys)) == 3
    put(tier, buffer, range(3, 200))
    tier.close()
    said = [r for r in caplog.records if r.levelno >= logging.WARNING and "direct" in r.message]
    assert len(said) == 1


def test_short_io_is_taken_up_where_it_ended(directory: Path, buffer: FrameBuffer) -> None:
    class Short(Files):
        """The kernel may transfer any part of the request."""

        rng = random.Random(3)

        def _call(self, call: Any, fd: int, views: list[memoryview], offset: int) -> int:
            nbytes = sum(map(len, views))
            pages = self.rng.randrange(1, nbytes // SECTOR_BYTES + 1)
            part, rest = [], pages * SECTOR_BYTES
            for view in views:
                part.append(view[:rest])
                rest -= len(part[-1])
            return super()._call(call, fd, [view for view in part if len(view)], offset)

    tier = open_disk(directory, Short())
    keys = put(tier, buffer, range(60), 300_000)
    assert len(readable_keys(tier, buffer, keys)) > 10
    tier.close()


def test_an_unaligned_buffer_is_an_assertion_error(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory)
    if not tier.stats()["direct_io"]:
        pytest.skip("buffered I/O takes any address")
    key, header, payload = buffer.fill(key_of(1), 5000)
    odd = aligned_buffer(4 * SECTOR_BYTES)[512 : 512 + 2 * SECTOR_BYTES]
    with pytest.raises(AssertionError):
        tier.write(key, header, odd)
    tier.write(key, header, payload)
    with pytest.raises(AssertionError):
        tier.read(key, header, odd)
    assert tier.contains([key]) == [True]
    tier.close()


def test_close_waits_for_a_write_that_makes_a_segment(directory: Path, buffer: FrameBuffer) -> None:
    """Otherwise it would write to a descriptor number that was reused."""

    class Slow(Files):
        making, go_on = threading.Event(), threading.Event()

        def create(self, path: str, nbytes: int) -> int:
            self.making.set()
            assert self.go_on.wait(30)
            return super().create(path, nbytes)

    files = Slow()
    tier = open_disk(directory, files)
    frame = buffer.fill(key_of(1), 20_000)
    writer = threading.Thread(target=tier.write, args=frame)
    closer = threading.Thread(target=tier.close)
    writer.start()
    assert files.making.wait(30)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    files.go_on.set()
    closer.join(30)
    writer.join(30)
    with pytest.raises(TierError, match="closed"):
        tier.flush()
    tier = open_disk(directory)
    assert readable_keys(tier, FrameBuffer(MIB), [key_of(1)]) == [key_of(1)]
    tier.close()
