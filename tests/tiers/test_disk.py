"""The disk tier: the common tier tests, capacity and restarts."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path

import pytest
from disk_rig import (
    MIB,
    SECTOR_BYTES,
    file_bytes,
    left_by_a_kill,
    open_disk,
    put,
    readable_keys,
    segment_files,
)

from kvstore.blocks.frame import decode_header
from kvstore.blocks.key import Key
from kvstore.errors import FrameInvalid, TierUnavailable
from kvstore.testing.frames import FrameBuffer, block_of, key_of
from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import Files


class DiskSuite(TierSuite):
    persistent = True
    direct_io = True

    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return open_disk(tmp_path / "disk", capacity=capacity_bytes, direct_io=self.direct_io)

    def stored_bytes(self, tmp_path: Path) -> bytes:
        return b"".join(path.read_bytes() for path in segment_files(tmp_path / "disk"))

    def check_racing_read(self, buffer: FrameBuffer, key: Key, length: int) -> None:
        """A read during a delete may return a zero header, but no other wrong bytes."""
        try:
            assert buffer.version_of(key, length) == 0
        except FrameInvalid:
            assert not any(buffer.header[:6])


class TestDisk(DiskSuite):
    pass


class TestDiskBuffered(DiskSuite):
    direct_io = False


class TestDiskDurable(DiskSuite):
    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return open_disk(tmp_path / "disk", capacity=capacity_bytes, sync_writes=True)


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def test_capacity_is_exact_whatever_is_written(directory: Path, buffer: FrameBuffer) -> None:
    """At every time, for all files including preallocation, indexes and the lock file."""
    capacity = 4 * MIB
    rng = random.Random(1)
    tier = open_disk(directory, capacity=capacity)
    for number in range(200):
        tier.write(*buffer.fill(key_of(number), rng.randrange(1, 300_000)))
        assert file_bytes(directory) <= capacity
        assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()
    assert file_bytes(directory) <= capacity
    blocks = sum(path.stat().st_blocks * 512 for path in segment_files(directory))
    assert blocks <= capacity, "more space is allocated than the length of the files"


def test_small_frames_leave_room_for_their_footer(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory, capacity=2 * MIB, segment=256 * 1024)
    keys = []
    for number in range(400):
        key = key_of(number, tenant=f"tenant {number % 90}" * 9, namespace=f"{number % 7}" * 60)
        tier.write(*buffer.fill(key, 1))
        keys.append(key)
    tier.close()
    tier = open_disk(directory, capacity=2 * MIB, segment=256 * 1024)
    assert len(readable_keys(tier, buffer, keys)) >= 150
    assert tier.stats()["torn"] == 0
    tier.close()


def test_a_smaller_capacity_at_the_next_opening_is_kept(
    directory: Path, buffer: FrameBuffer
) -> None:
    tier = open_disk(directory, capacity=8 * MIB)
    keys = put(tier, buffer, range(300))
    tier.close()
    tier = open_disk(directory, capacity=3 * MIB)
    assert file_bytes(directory) <= 3 * MIB
    assert readable_keys(tier, buffer, keys)
    put(tier, buffer, range(300, 400))
    assert file_bytes(directory) <= 3 * MIB
    tier.close()


def test_the_segment_that_is_read_stays(directory: Path, buffer: FrameBuffer) -> None:
    """Evict the least recently used segment, not the oldest one."""
    tier = open_disk(directory, capacity=4 * MIB, segment=MIB)
    old = put(tier, buffer, range(5))
    for number in range(100, 700):
        tier.write(*buffer.fill(key_of(number), 20_000))
        assert tier.read(old[0], buffer.header, buffer.payload)
        if number % 5 == 0:
            # A segment with a pending footer cannot be evicted, which would change the order.
            tier.flush()
    assert tier.contains(old) == [True] * 5
    assert float(tier.stats()["evictions"]) > 300
    tier.close()


def test_a_reader_of_a_reclaimed_segment_reads_to_the_end(
    directory: Path, buffer: FrameBuffer
) -> None:
    class Slow(Files):
        """Blocks one read until the test releases it."""

        def __init__(self) -> None:
            super().__init__()
            self.reading, self.go_on = threading.Event(), threading.Event()

        def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
            if len(views) == 2:
                self.reading.set()
                assert self.go_on.wait(30)
            return super().read_at(fd, views, offset)

    files = Slow()
    tier = open_disk(directory, files, capacity=2 * MIB, segment=MIB // 2)
    tier.write(*buffer.fill(key_of(0), 20_000))
    mine, length = FrameBuffer(MIB), []

    def read() -> None:
        length.append(tier.read(key_of(0), mine.header, mine.payload))

    reader = threading.Thread(target=read)
    reader.start()
    assert files.reading.wait(30)
    threading.Timer(0.3, files.go_on.set).start()
    number = 1
    while tier.contains([key_of(0)]) == [True]:
        tier.write(*buffer.fill(key_of(number), 20_000))
        number += 1
    reader.join(30)
    assert float(tier.stats()["evictions"]) <= MIB // 2 // (6 * SECTOR_BYTES), (
        "one evicted segment is enough"
    )
    assert mine.version_of(key_of(0), length[0]) == 0
    put(tier, buffer, range(500, 600))
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()


@pytest.mark.parametrize("deleted", [range(0), range(2, 7)])
def test_what_a_killed_process_acknowledged_is_there(
    directory: Path, tmp_path: Path, buffer: FrameBuffer, deleted: range
) -> None:
    tier = open_disk(directory)
    keys = put(tier, buffer, range(120))
    tier.delete([keys[number] for number in deleted])
    copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    for _ in range(2):
        tier = open_disk(copy)
        assert len(readable_keys(tier, buffer, keys)) == 120 - len(deleted)
        assert tier.stats()["torn"] == 0
        tier.close()


def test_an_unfinished_frame_is_never_served(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """After a kill: the header is on disk, but only a part of the payload."""
    tier = open_disk(directory)
    keys = put(tier, buffer, range(3))
    copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    (segment,) = segment_files(copy)
    payload = segment.read_bytes().index(block_of(keys[1], 20_000))
    with segment.open("r+b") as file:
        file.seek(payload + 3 * SECTOR_BYTES)
        file.write(bytes(SECTOR_BYTES))
    tier = open_disk(copy)
    assert tier.contains(keys) == [True, False, True]
    assert tier.stats()["torn"] == 1
    assert len(readable_keys(tier, buffer, keys)) == 2
    tier.write(*buffer.fill(keys[1], 20_000))
    again = left_by_a_kill(copy, tmp_path / "again")
    tier.close()
    tier = open_disk(again)
    assert len(readable_keys(tier, buffer, keys)) == 3
    assert tier.stats()["torn"] == 0, "a torn frame is dropped once"
    tier.close()


def test_a_frame_inside_a_block_is_not_taken_for_one(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """The bytes of a block are a complete frame of another tenant. Its own header is lost."""
    forged = key_of(7, tenant="victim")
    _, header, payload = buffer.fill(forged, 20_000)
    frame = bytes(header) + bytes(payload)
    outer = FrameBuffer(MIB)
    _, outer_header, _ = outer.fill(key_of(1), len(frame))
    outer.payload[: len(frame)] = frame
    tier = open_disk(directory)
    tier.write(key_of(1), outer_header, outer.payload[: len(frame)])
    tier.delete([key_of(1)])
    copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    (segment,) = segment_files(copy)
    at = segment.read_bytes().index(frame)
    assert at % SECTOR_BYTES == 0
    assert decode_header(memoryview(frame)).key == forged
    tier = open_disk(copy)
    assert tier.contains([forged, key_of(1)]) == [False, False]
    tier.close()


def test_appending_goes_on_where_it_ended(directory: Path, buffer: FrameBuffer) -> None:
    keys = []
    for turn in range(6):
        tier = open_disk(directory)
        keys += put(tier, buffer, range(turn * 3, turn * 3 + 3))
        assert len(readable_keys(tier, buffer, keys)) == len(keys)
        tier.close()
    assert len(segment_files(directory)) == 1


def test_what_is_appended_to_an_old_segment_outlives_a_kill(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """The footer, which does not list the block, is removed first."""
    tier = open_disk(directory)
    keys = put(tier, buffer, range(3))
    tier.close()
    tier = open_disk(directory)
    keys += put(tier, buffer, range(3, 6))
    copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    tier = open_disk(copy)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_a_deletion_holds_in_a_sealed_segment(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    tier = open_disk(directory, segment=MIB)
    keys = put(tier, buffer, range(100))
    assert len(segment_files(directory)) > 2
    tier.delete(keys[0:3])
    copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    for place in (directory, copy):
        tier = open_disk(place, segment=MIB)
        assert tier.contains(keys[:4]) == [False, False, False, True]
        assert sorted(tier.keys()) == sorted(keys[3:])
        tier.close()


@pytest.mark.parametrize("header_stays", [False, True])
def test_a_deletion_holds_when_its_segment_is_appended_to_again(
    directory: Path, tmp_path: Path, buffer: FrameBuffer, header_stays: bool
) -> None:
    """header_stays: a kill came between the write of the tombstone and of the frame's header."""

    class Killed(Files):
        def write_at(self, fd: int, views: list[memoryview], offset: int) -> None:
            if not header_stays or offset != 6 * 4096 + 4096:
                super().write_at(fd, views, offset)

    tier = open_disk(directory, segment=MIB)
    keys = put(tier, buffer, range(3))
    tier.close()
    # A segment of another size is not appended to, so its footer stays and gets the tombstone.
    tier = open_disk(directory, Killed(), segment=2 * MIB)
    tier.delete(keys[1:2])
    tier.close()
    tier = open_disk(directory, segment=MIB)
    copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    for place in (directory, copy):
        for _ in range(2):
            tier = open_disk(place, segment=MIB)
            assert readable_keys(tier, buffer, keys) == [keys[0], keys[2]]
            tier.close()
    tier = open_disk(directory, segment=MIB)
    put(tier, buffer, range(1, 2))
    tier.close()
    tier = open_disk(directory, segment=MIB)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_a_file_is_used_again_and_nothing_of_it_is_seen(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """After a kill at any roll: frames of the reused file are invalid."""
    tier = open_disk(directory, capacity=4 * MIB, segment=MIB // 2)
    inodes: dict[int, set[str]] = {}
    for number in range(0, 1001, 7):
        keys = put(tier, buffer, range(number, number + 7))
        for path in segment_files(directory):
            inodes.setdefault(path.stat().st_ino, set()).add(path.name)
        if number % 77 == 0:
            copy = left_by_a_kill(directory, tmp_path / f"copy {number}")
            named = set(tier.keys())
            again = open_disk(copy, capacity=4 * MIB, segment=MIB // 2)
            assert set(again.keys()) == named
            assert again.stats()["torn"] == 0
            assert readable_keys(again, buffer, keys) == keys
            again.close()
    assert len(inodes) <= 9
    assert max(map(len, inodes.values())) > 3
    tier.close()


@pytest.mark.parametrize("failing", ["rename", "write"])
def test_a_file_that_cannot_be_used_again_costs_its_blocks_only(
    directory: Path, buffer: FrameBuffer, failing: str
) -> None:
    class Failing(Files):
        on = False

        def rename(self, path: str, to: str) -> None:
            if self.on and failing == "rename":
                raise OSError(errno.EIO, "as told")
            super().rename(path, to)

        def write_at(self, fd: int, views: list[memoryview], offset: int) -> None:
            if self.on and failing == "write" and offset == 0:
                raise OSError(errno.EIO, "as told")
            super().write_at(fd, views, offset)

    files = Failing()
    tier = open_disk(directory, files, capacity=4 * MIB, segment=MIB // 2)
    put(tier, buffer, range(300))
    blocks = int(tier.stats()["blocks"])
    files.on = True
    failed = 0
    for number in range(1000, 1060):
        try:
            put(tier, buffer, range(number, number + 1))
        except TierUnavailable:
            failed += 1
            assert file_bytes(directory) == tier.stats()["bytes_used"]
            files.on = False
    assert failed == (failing == "write"), "a new file is created instead, if possible"
    assert tier.contains([key_of(1059)]) == [True]
    assert int(tier.stats()["blocks"]) >= blocks - 50
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()
    assert file_bytes(directory) <= 4 * MIB


def test_a_file_that_lost_its_name_half_way_is_removed(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """A kill between the write of the new header and the rename."""

    class Killed(Files):
        copy: Path | None = None

        def rename(self, path: str, to: str) -> None:
            if self.copy is None:
                self.copy = left_by_a_kill(directory, tmp_path / "copy")
            super().rename(path, to)

    files = Killed()
    tier = open_disk(directory, files, capacity=4 * MIB, segment=MIB // 2)
    keys = put(tier, buffer, range(300))
    tier.close()
    assert files.copy is not None
    count = len(segment_files(files.copy))
    tier = open_disk(files.copy, capacity=4 * MIB, segment=MIB // 2)
    assert len(segment_files(files.copy)) == count - 1
    there = readable_keys(tier, buffer, keys)
    assert len(there) > 100
    assert there == keys[keys.index(there[0]) : keys.index(there[-1]) + 1]
    tier.close()
