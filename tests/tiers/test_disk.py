"""The disk tier: what every tier must do, what is damaged, what is full, whose directory it is."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks import Key
from kvstore.errors import ConfigError, FrameInvalid, TierError, TierFull, TierUnavailable
from kvstore.frame import aligned_buffer, decode_header
from kvstore.testing.frames import FrameBuffer, block_of, key_of
from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers import disk
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.index import Entries, Index, pack_place, unpack_place
from kvstore.tiers.disk.verify import verify

PAGE = 4096
MIB = 1 << 20


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.kvseg"))


def file_bytes(directory: Path) -> int:
    return sum(max(4096, path.stat().st_size) for path in directory.iterdir())


def open_disk(directory: Path, files: Files | None = None, **changed: Any) -> Tier:
    values: dict[str, Any] = {"capacity": 8 * MIB, **changed}
    return disk.open(disk.Config(directory=str(directory), **values), files=files)


def left_by_a_kill(directory: Path, copy: Path) -> Path:
    """What a killed process would have left: the files of a tier that was not closed."""
    shutil.copytree(directory, copy)
    return copy


class DiskSuite(TierSuite):
    persistent = True
    direct = True

    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return open_disk(tmp_path / "disk", capacity=capacity_bytes, direct=self.direct)

    def stored_bytes(self, tmp_path: Path) -> bytes:
        return b"".join(path.read_bytes() for path in segment_files(tmp_path / "disk"))

    def check_racing_read(self, buffer: FrameBuffer, key: Key, length: int) -> None:
        """The header of a frame that is being deleted may be read as zeros; nothing else."""
        try:
            assert buffer.version_of(key, length) == 0
        except FrameInvalid:
            assert not any(buffer.header[:6])


class TestDisk(DiskSuite):
    pass


class TestDiskBuffered(DiskSuite):
    direct = False


class TestDiskDurable(DiskSuite):
    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return open_disk(tmp_path / "disk", capacity=capacity_bytes, durable=True)


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def put(tier: Tier, buffer: FrameBuffer, numbers: range, nbytes: int = 20_000) -> list[Key]:
    keys = [key_of(number) for number in numbers]
    for key in keys:
        tier.write(*buffer.fill(key, nbytes))
    return keys


def held(tier: Tier, buffer: FrameBuffer, keys: list[Key], *, damaged: int = 0) -> list[Key]:
    """The keys that `contains` names, each read and compared; at most `damaged` are not right."""
    right = []
    wrong = 0
    for key, has in zip(keys, tier.contains(keys), strict=True):
        length = tier.read(key, buffer.header, buffer.payload)
        if not has:
            assert length == 0
            continue
        try:
            assert length, "contains names what read cannot find"
            assert buffer.version_of(key, length) == 0
            right.append(key)
        except FrameInvalid:
            wrong += 1
    assert wrong <= damaged
    return right


# ---------------------------------------------------------------- capacity and segments


def test_capacity_is_exact_whatever_is_written(directory: Path, buffer: FrameBuffer) -> None:
    """All files together, preallocation, indexes and lock file included, at every moment."""
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
    assert blocks <= capacity, "more is allocated than the files are long"


def test_small_frames_leave_room_for_their_footer(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory, capacity=2 * MIB, segment=256 * 1024)
    keys = []
    for number in range(400):
        key = key_of(number, tenant=f"tenant {number % 90}" * 9, namespace=f"{number % 7}" * 60)
        tier.write(*buffer.fill(key, 1))
        keys.append(key)
    tier.close()
    tier = open_disk(directory, capacity=2 * MIB, segment=256 * 1024)
    assert len(held(tier, buffer, keys)) >= 150
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
    assert held(tier, buffer, keys)
    put(tier, buffer, range(300, 400))
    assert file_bytes(directory) <= 3 * MIB
    tier.close()


def test_the_segment_that_is_read_stays(directory: Path, buffer: FrameBuffer) -> None:
    """Space comes from the least recently used segment, not from the oldest."""
    tier = open_disk(directory, capacity=4 * MIB, segment=MIB)
    old = put(tier, buffer, range(5))
    for number in range(100, 700):
        tier.write(*buffer.fill(key_of(number), 20_000))
        assert tier.read(old[0], buffer.header, buffer.payload)
    assert tier.contains(old) == [True] * 5
    assert float(tier.stats()["evictions"]) > 300
    tier.close()


def test_a_reader_of_a_reclaimed_segment_reads_to_the_end(
    directory: Path, buffer: FrameBuffer
) -> None:
    class Slow(Files):
        """Holds one read until it is told to go on."""

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
    assert mine.version_of(key_of(0), length[0]) == 0
    put(tier, buffer, range(500, 600))
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()


# ---------------------------------------------------------------- restart


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
        assert len(held(tier, buffer, keys)) == 120 - len(deleted)
        assert tier.stats()["torn"] == 0
        tier.close()


def test_an_unfinished_frame_is_never_served(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """Its header reached the disk, its payload did not all: what a kill can leave."""
    tier = open_disk(directory)
    keys = put(tier, buffer, range(3))
    copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    (segment,) = segment_files(copy)
    payload = segment.read_bytes().index(block_of(keys[1], 20_000))
    with segment.open("r+b") as file:
        file.seek(payload + 3 * PAGE)
        file.write(bytes(PAGE))
    tier = open_disk(copy)
    assert tier.contains(keys) == [True, False, True]
    assert tier.stats()["torn"] == 1
    assert len(held(tier, buffer, keys)) == 2
    tier.write(*buffer.fill(keys[1], 20_000))
    tier.close()
    tier = open_disk(copy)
    assert len(held(tier, buffer, keys)) == 3
    tier.close()


def test_a_frame_inside_a_block_is_not_taken_for_one(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """A block whose bytes are a whole frame of another tenant's, and whose own header is lost."""
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
    assert at % PAGE == 0
    assert decode_header(memoryview(frame)).key == forged
    tier = open_disk(copy)
    assert tier.contains([forged, key_of(1)]) == [False, False]
    tier.close()


def test_appending_goes_on_where_it_ended(directory: Path, buffer: FrameBuffer) -> None:
    keys = []
    for turn in range(6):
        tier = open_disk(directory)
        keys += put(tier, buffer, range(turn * 3, turn * 3 + 3))
        assert len(held(tier, buffer, keys)) == len(keys)
        tier.close()
    assert len(segment_files(directory)) == 1


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


# ---------------------------------------------------------------- damage


def flip(path: Path, at: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


@pytest.fixture(scope="module", params=["closed", "killed"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    """A directory with 30 blocks, closed or left by a kill."""
    place = tmp_path_factory.mktemp("filled")
    tier = open_disk(place / "disk", capacity=MIB, segment=MIB // 4)
    put(tier, FrameBuffer(MIB), range(20), 9000)
    left_by_a_kill(place / "disk", place / "killed")
    tier.close()
    return place / ("disk" if request.param == "closed" else "killed")


@given(st.integers(0, 2**32), st.integers(0, 7), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_anywhere_costs_blocks_never_wrong_ones(
    filled: Path, seed: int, bit: int, while_open: bool
) -> None:
    copy = filled.parent / "flipped"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(filled, copy)
    rng = random.Random(seed)
    segment = rng.choice(segment_files(copy))
    # Half of the flips where the few bytes lie that hold the rest together.
    places = [rng.randrange(segment.stat().st_size), rng.randrange(64), -rng.randrange(1, PAGE)]
    at = rng.choice(places) % segment.stat().st_size
    keys = [key_of(number) for number in range(20)]
    buffer = FrameBuffer(MIB)
    if not while_open:
        flip(segment, at, 1 << bit)
    tier = open_disk(copy, capacity=MIB, segment=MIB // 4)
    if while_open:
        flip(segment, at, 1 << bit)
    kept = held(tier, buffer, keys, damaged=1)
    # Only the first page of a segment that was in use when its process was killed has no double.
    assert len(kept) >= (5 if filled.name == "killed" and at < PAGE else 19)
    put(tier, buffer, range(100, 103), 9000)
    tier.close()


@pytest.mark.parametrize("cut", [0, 100, PAGE, 5 * PAGE + 17, 40 * PAGE])
def test_a_truncated_segment_keeps_what_is_left(
    directory: Path, buffer: FrameBuffer, cut: int
) -> None:
    tier = open_disk(directory, segment=MIB)
    keys = put(tier, buffer, range(20))
    tier.close()
    (segment,) = segment_files(directory)
    os.truncate(segment, cut)
    tier = open_disk(directory, segment=MIB)
    kept = held(tier, buffer, keys)
    assert len(kept) == max(0, (cut // PAGE - 1) // 6)
    put(tier, buffer, range(20))
    assert len(held(tier, buffer, keys)) == 20
    tier.close()


def test_a_segment_truncated_while_open_is_a_miss(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory)
    keys = put(tier, buffer, range(3))
    os.truncate(segment_files(directory)[0], 10 * PAGE)
    assert tier.read(keys[2], buffer.header, buffer.payload) == 0
    assert tier.contains(keys) == [True, True, False]
    tier.write(*buffer.fill(keys[2], 20_000))
    assert tier.contains(keys) == [True, True, True]
    tier.close()


def test_a_zeroed_segment_is_empty(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory)
    keys = put(tier, buffer, range(10))
    tier.close()
    (segment,) = segment_files(directory)
    segment.write_bytes(bytes(segment.stat().st_size))
    tier = open_disk(directory)
    assert held(tier, buffer, keys) == []
    put(tier, buffer, range(10))
    assert len(held(tier, buffer, keys)) == 10
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()


def test_a_segment_deleted_while_open_is_gone_at_the_next_opening(
    directory: Path, buffer: FrameBuffer
) -> None:
    tier = open_disk(directory, segment=MIB)
    keys = put(tier, buffer, range(60))
    segment_files(directory)[0].unlink()
    assert len(held(tier, buffer, keys)) == 60
    put(tier, buffer, range(100, 500))
    tier.close()
    tier = open_disk(directory, segment=MIB)
    held(tier, buffer, keys)
    tier.close()


def test_files_of_others_are_let_be(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory)
    keys = put(tier, buffer, range(3))
    foreign = {"notes.txt": b"mine", "1.kvseg": b"x" * 9000, "000000000001.kvseg.bak": b"y"}
    for name, text in foreign.items():
        (directory / name).write_bytes(text)
    tier.clear()
    put(tier, buffer, range(3))
    tier.close()
    tier = open_disk(directory)
    assert len(held(tier, buffer, keys)) == 3
    tier.close()
    for name, text in foreign.items():
        assert (directory / name).read_bytes() == text


# ---------------------------------------------------------------- whose directory


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


# ---------------------------------------------------------------- failing system calls


class FaultyFiles(Files):
    """Raises `error` at the calls named; may move less than asked."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, int] = {}
        self.room_bytes = 1 << 60
        self.short = 0

    def _fail(self, call: str) -> None:
        if call in self.failing:
            raise OSError(self.failing[call], os.strerror(self.failing[call]))

    def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
        self._fail("read")
        return super().read_at(fd, views, offset)

    def write_at(self, fd: int, views: list[memoryview], offset: int) -> None:
        self._fail("write")
        super().write_at(fd, views, offset)

    def sync(self, fd: int) -> None:
        self._fail("sync")
        super().sync(fd)

    def _allocate(self, fd: int, nbytes: int) -> None:
        if nbytes > self.room_bytes:
            raise OSError(errno.ENOSPC, "no space")
        super()._allocate(fd, nbytes)
        self.room_bytes -= nbytes

    def unlink(self, path: str) -> None:
        if os.path.exists(path) and os.path.getsize(path):
            self.room_bytes += os.path.getsize(path)
        super().unlink(path)


def test_a_full_file_system_reclaims_and_goes_on(directory: Path, buffer: FrameBuffer) -> None:
    files = FaultyFiles()
    files.room_bytes = 3 * MIB
    tier = open_disk(directory, files, capacity=8 * MIB, segment=MIB)
    keys = put(tier, buffer, range(400))
    assert tier.contains(keys[-30:]) == [True] * 30
    assert len(segment_files(directory)) == 3
    held(tier, buffer, keys)
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
    assert held(tier, buffer, keys) == keys
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
    assert held(tier, buffer, keys) == keys[1:]
    put(tier, buffer, range(2, 3))
    assert held(tier, buffer, [key_of(2)])
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
    tier = open_disk(directory, files, durable=True)
    put(tier, buffer, range(1))
    files.failing = {"sync": errno.EIO}
    with pytest.raises(TierUnavailable, match="could not sync"):
        put(tier, buffer, range(1, 2))
    files.failing = {}
    put(tier, buffer, range(2, 3))
    tier.close()


def test_flush_says_when_the_disk_could_not(directory: Path, buffer: FrameBuffer) -> None:
    files = FaultyFiles()
    tier = open_disk(directory, files)
    put(tier, buffer, range(1))
    files.failing = {"sync": errno.EIO}
    put(tier, buffer, range(1, 2))
    with pytest.raises(TierUnavailable, match="could not sync"):
        tier.flush()
    files.failing = {}
    put(tier, buffer, range(2, 3))
    tier.flush()
    tier.close()


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
        # An address that direct I/O refuses stands for a file system that does.
        odd = memoryview(bytearray(3 * PAGE))[1 : 2 * PAGE + 1]
        path = segment_files(directory)[0]
        fd = files.open(str(path))
        assert files.read_at(fd, [odd], 0) == 2 * PAGE
        files.close(fd)
    assert tier.stats()["direct"] == 0
    assert len(held(tier, buffer, keys)) == 3
    put(tier, buffer, range(3, 200))
    tier.close()
    said = [r for r in caplog.records if r.levelno >= logging.WARNING and "direct" in r.message]
    assert len(said) == 1


def test_short_io_is_taken_up_where_it_ended(directory: Path, buffer: FrameBuffer) -> None:
    class Short(Files):
        """The kernel may move any part of what is asked."""

        rng = random.Random(3)

        def _call(self, call: Any, fd: int, views: list[memoryview], offset: int) -> int:
            nbytes = sum(map(len, views))
            pages = self.rng.randrange(1, nbytes // PAGE + 1)
            part, rest = [], pages * PAGE
            for view in views:
                part.append(view[:rest])
                rest -= len(part[-1])
            return super()._call(call, fd, [view for view in part if len(view)], offset)

    tier = open_disk(directory, Short())
    keys = put(tier, buffer, range(60), 300_000)
    assert len(held(tier, buffer, keys)) > 10
    tier.close()


def test_a_buffer_that_is_not_aligned_is_our_own_mistake(
    directory: Path, buffer: FrameBuffer
) -> None:
    tier = open_disk(directory)
    if not tier.stats()["direct"]:
        pytest.skip("buffered I/O takes any address")
    key, header, payload = buffer.fill(key_of(1), 5000)
    odd = aligned_buffer(4 * PAGE)[512 : 512 + 2 * PAGE]
    with pytest.raises(AssertionError):
        tier.write(key, header, odd)
    tier.write(key, header, payload)
    with pytest.raises(AssertionError):
        tier.read(key, header, odd)
    assert tier.contains([key]) == [True]
    tier.close()


def test_close_waits_for_calls_and_later_ones_say_so(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory)
    put(tier, buffer, range(1))
    tier.close()
    with pytest.raises(TierError, match="closed"):
        tier.flush()


# ---------------------------------------------------------------- index


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "ü"]),
            st.sampled_from(["n", "m"]),
            st.binary(min_size=1, max_size=64),
        ),
        max_size=30,
        unique=True,
    ),
    st.integers(0, 4095),
)
def test_packed_entries_come_back(rows: list[tuple[str, str, bytes]], slot: int) -> None:
    entries = Entries()
    for number, row in enumerate(rows):
        entries.add(Key(*row), 1 + number * 9, 9)
    back = Entries.unpack(entries.pack())
    assert list(back) == list(entries)
    assert [unpack_place(place) for place in back.places(slot)] == [
        (slot, page, pages) for _, page, pages in entries
    ]


@given(st.binary(max_size=300))
def test_noise_is_no_index(noise: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError):
        Entries.unpack(noise)


def test_the_index_forgets_only_what_still_lies_there() -> None:
    index = Index()
    index.put(key_of(1), pack_place(0, 1, 2))
    index.put(key_of(1), pack_place(1, 5, 2))
    assert not index.remove(key_of(1), pack_place(0, 1, 2))
    assert len(index) == 1
    assert index.remove(key_of(1), pack_place(1, 5, 2))
    assert len(index) == 0
    assert key_of(1) not in index


# ---------------------------------------------------------------- verify


def test_verify_counts_good_and_bad_frames(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory, segment=MIB)
    keys = put(tier, buffer, range(100))
    with pytest.raises(ConfigError, match="in use"):
        verify(str(directory))
    tier.delete(keys[:2])
    tier.close()
    told: list[tuple[int, int]] = []
    report = verify(str(directory), lambda done, total: told.append((done, total)))
    assert (report.frames, report.bad_count, report.ok) == (98, 0, True)
    assert told[-1][0] == told[-1][1] == sum(p.stat().st_size for p in segment_files(directory))
    segment = segment_files(directory)[1]
    flip(segment, segment.read_bytes().index(block_of(keys[50], 20_000)) + 777)
    report = verify(str(directory))
    assert (report.bad_count, report.ok) == (1, False)
    assert report.bad[0].segment == segment.name
    assert keys[50].hash.hex() in report.bad[0].block
    assert "checksum" in report.bad[0].reason
    flip(segment_files(directory)[0], 20)
    assert verify(str(directory)).segments_bad == 0, "the last page says it too"
    flip(segment_files(directory)[0], MIB - 100)
    report = verify(str(directory))
    assert report.segments_bad == 1
    assert not report.ok
