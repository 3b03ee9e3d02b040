"""Opening after a kill: from a checkpoint and a scan, never from an outdated checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from disk_rig import MIB, SECTOR_BYTES, flip, left_by_a_kill, put, readable_keys, segment_files

from kvstore.blocks.key import Key
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.state import DiskLimits

SEGMENT = 4 * MIB
EVERY = MIB


class Counting(Files):
    """Counts the bytes read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
        got = super().read_at(fd, views, offset)
        self.read_bytes += got
        return got


def open_saving(directory: Path, files: Files | None = None) -> DiskTier:
    """A tier that writes a checkpoint at each sync after a MiB of frames."""
    limits = DiskLimits(4 * SEGMENT, SEGMENT, checkpoint_bytes=EVERY)
    return DiskTier([str(directory)], limits, files=files)


def killed(tier: DiskTier, directory: Path, copy: Path) -> Path:
    left_by_a_kill(directory, copy)
    tier.close()
    return copy


def opened(directory: Path, buffer: FrameBuffer, keys: list[Key]) -> tuple[list[Key], int]:
    """The keys after opening, and the number of bytes that opening read."""
    files = Counting()
    tier = open_saving(directory, files)
    read_bytes = files.read_bytes
    assert tier.stats()["torn"] == 0
    there = readable_keys(tier, buffer, keys)
    assert len(list(tier.keys())) == len(there)
    tier.close()
    return there, read_bytes


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def test_only_the_tail_is_read(directory: Path, tmp_path: Path, buffer: FrameBuffer) -> None:
    tier = open_saving(directory)
    keys = put(tier, buffer, range(150))
    tier.flush()
    keys += put(tier, buffer, range(150, 155))
    copy = killed(tier, directory, tmp_path / "copy")
    there, read_bytes = opened(copy, buffer, keys)
    assert there == keys
    # The scan also reads the space after the last frame.
    assert read_bytes < SEGMENT - 150 * 6 * SECTOR_BYTES + MIB


def test_without_enough_frames_there_is_none(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    tier = open_saving(directory)
    keys = put(tier, buffer, range(40))
    tier.flush()
    copy = killed(tier, directory, tmp_path / "copy")
    there, read_bytes = opened(copy, buffer, keys)
    assert there == keys
    assert read_bytes > SEGMENT - MIB


@pytest.mark.parametrize("at", ["body", "trailer"])
def test_a_damaged_checkpoint_costs_a_scan_and_no_block(
    directory: Path, tmp_path: Path, buffer: FrameBuffer, at: str
) -> None:
    tier = open_saving(directory)
    keys = put(tier, buffer, range(100))
    tier.flush()
    copy = killed(tier, directory, tmp_path / "copy")
    (segment,) = segment_files(copy)
    stored = segment.read_bytes()
    flip(segment, stored.rindex(keys[50].hash) if at == "body" else SEGMENT - SECTOR_BYTES + 20)
    there, read_bytes = opened(copy, buffer, keys)
    assert there == keys
    assert read_bytes > SEGMENT - MIB


def test_what_is_deleted_after_a_checkpoint_stays_deleted(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    tier = open_saving(directory)
    keys = put(tier, buffer, range(100))
    tier.flush()
    tier.delete(keys[10:20])
    copy = killed(tier, directory, tmp_path / "copy")
    for _ in range(2):
        there, _ = opened(copy, buffer, keys)
        assert there == keys[:10] + keys[20:]
    tier = open_saving(copy)
    more = put(tier, buffer, range(200, 260))
    tier.flush()
    again = killed(tier, copy, tmp_path / "again")
    there, read_bytes = opened(again, buffer, keys + more)
    assert there == keys[:10] + keys[20:] + more
    assert read_bytes < SEGMENT - 100 * 6 * SECTOR_BYTES, "a later checkpoint is valid again"


def test_a_frame_that_is_being_written_is_not_passed_over(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """A write that starts before a checkpoint and ends after it."""

    class Slow(Files):
        writing, go_on = threading.Event(), threading.Event()
        slow = False

        def write_at(self, fd: int, views: list[memoryview], offset: int) -> None:
            if self.slow and len(views) == 2:
                self.slow = False
                self.writing.set()
                assert self.go_on.wait(30)
            super().write_at(fd, views, offset)

    files = Slow()
    tier = open_saving(directory, files)
    keys = put(tier, buffer, range(60))
    files.slow = True
    mine = FrameBuffer(MIB)
    writer = threading.Thread(target=tier.write, args=mine.fill(key_of(1000), 20_000))
    writer.start()
    assert files.writing.wait(30)
    keys += put(tier, buffer, range(60, 120))
    tier.flush()
    files.go_on.set()
    writer.join(30)
    copy = killed(tier, directory, tmp_path / "copy")
    there, read_bytes = opened(copy, buffer, [*keys, key_of(1000)])
    assert there == [*keys, key_of(1000)]
    assert read_bytes < SEGMENT - 50 * 6 * SECTOR_BYTES, "a checkpoint exists"


def test_sealing_and_appending_go_on_over_checkpoints(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    keys: list[Key] = []
    for turn in range(8):
        tier = open_saving(directory)
        for part in range(3):
            first = turn * 60 + part * 20
            keys += put(tier, buffer, range(first, first + 20))
            tier.flush()
        assert readable_keys(tier, buffer, keys) == keys
        copy = killed(tier, directory, tmp_path / f"copy {turn}")
        assert opened(copy, buffer, keys)[0] == keys
    assert len(segment_files(directory)) == 3
