"""Expiry and eviction of the disk tier, and the order of `usage`."""

from __future__ import annotations

import os
import random
import shutil
import struct
import threading
import time
from pathlib import Path

import pytest
from disk_rig import (
    MIB,
    file_bytes,
    flip,
    left_by_a_kill,
    open_disk,
    put,
    readable_keys,
    segment_files,
)

from kvstore.blocks.frame import checksum
from kvstore.cache.eviction import EVICTION_POLICIES
from kvstore.errors import ConfigError
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import disk
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import Files

TTL_S = 800.0


class Clock:
    """A clock that the test sets, in seconds since 1970; and the time since boot, which passes
    whatever the clock says."""

    def __init__(self) -> None:
        self.now_s = 1.8e9
        self.up_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def uptime(self) -> float:
        return self.up_s

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        self.up_s += seconds


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_aging(directory: Path, clock: Clock, files: Files | None = None) -> Tier:
    config = disk.Config(directory=str(directory), ttl=f"{TTL_S}s", segment=MIB, capacity=32 * MIB)
    return disk.open(config, files=files, clock=clock, uptime=clock.uptime)


# ---------------------------------------------------------------------- time to live


def test_a_block_lives_as_long_as_it_may_and_no_longer(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    """A block never exceeds the TTL and expires at most 1/8 early, whatever call comes first."""
    tier = open_aging(directory, clock)
    born_s: dict[int, float] = {}
    rng = random.Random(3)
    for number in range(150):
        put(tier, buffer, range(number, number + 1), 5000)
        born_s[number] = clock.now_s
        clock.now_s += rng.choice([1.0, 10.0, TTL_S / 8, TTL_S / 3])
        for other, when_s in born_s.items():
            age_s = clock.now_s - when_s
            key = key_of(other)
            if other % 2:
                there = tier.contains([key])[0]
            else:
                there = tier.read(key, buffer.header, buffer.payload) > 0
            assert not (there and age_s >= TTL_S), "read after the TTL"
            assert there or age_s >= TTL_S * 7 / 8 - 0.01, f"gone after {age_s} s"
    assert int(tier.stats()["expired"]) == tier.stats()["evictions"] > 100
    tier.close()


def test_expired_files_leave_the_disk_by_themselves(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    class Telling(Files):
        gone = threading.Event()

        def unlink(self, path: str) -> None:
            super().unlink(path)
            self.gone.set()

    files = Telling()
    tier = open_aging(directory, clock, files)
    keys = put(tier, buffer, range(3))
    clock.now_s += TTL_S
    assert tier.contains(keys) == [False] * 3
    assert files.gone.wait(30)
    assert list(tier.keys()) == []
    tier.close()
    assert segment_files(directory) == []
    files.gone.clear()
    tier = open_disk(directory, files, ttl="300ms", segment=MIB)
    put(tier, buffer, range(3))
    assert files.gone.wait(30), "the file is deleted without any call"
    tier.close()
    assert segment_files(directory) == []


def test_with_a_time_to_live_no_file_is_used_again(directory: Path, buffer: FrameBuffer) -> None:
    """A reused file would contain expired bytes."""
    renamed = []

    class Telling(Files):
        def rename(self, path: str, to: str) -> None:
            renamed.append(path)
            super().rename(path, to)

    for ttl in ("0", "1h"):
        tier = open_disk(directory / ttl, Telling(), capacity=4 * MIB, ttl=ttl)
        put(tier, buffer, range(300))
        tier.close()
        assert bool(renamed) == (ttl == "0")
        renamed.clear()


def test_a_read_under_way_ends_well_when_its_block_expires(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    class Late(Files):
        def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
            if len(views) == 2:
                clock.now_s += TTL_S
                assert tier.contains(keys) == [False]
            return super().read_at(fd, views, offset)

    tier = open_aging(directory, clock, Late())
    keys = put(tier, buffer, range(1))
    length = tier.read(keys[0], buffer.header, buffer.payload)
    assert buffer.version_of(keys[0], length) == 0
    assert tier.read(keys[0], buffer.header, buffer.payload) == 0
    put(tier, buffer, range(1))
    assert tier.contains(keys) == [True]
    tier.close()
    assert file_bytes(directory) == MIB + 4096


def test_age_counts_while_the_tier_is_closed(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    tier = open_aging(directory, clock)
    old = put(tier, buffer, range(3))
    clock.now_s += TTL_S / 2
    new = put(tier, buffer, range(10, 13))
    tier.close()
    clock.now_s += TTL_S / 2
    tier = open_aging(directory, clock)
    assert tier.contains(old + new) == [False] * 3 + [True] * 3
    tier.close()
    assert len(segment_files(directory)) == 1
    clock.now_s += TTL_S / 16
    tier = open_aging(directory, clock)
    put(tier, buffer, range(20, 21))
    clock.now_s += TTL_S / 2
    assert tier.contains([*new, key_of(20)]) == [False] * 3 + [True], (
        "appended to a segment past its append window"
    )
    tier.close()


def test_a_clock_that_was_ahead_keeps_nothing_longer(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    clock.now_s += 1e6
    tier = open_aging(directory, clock)
    keys = put(tier, buffer, range(3))
    tier.close()
    clock.now_s -= 1e6
    tier = open_aging(directory, clock)
    assert tier.contains(keys) == [True] * 3
    clock.wait(TTL_S)
    assert tier.contains(keys) == [False] * 3
    tier.close()


def kill(tier: Tier, directory: Path, clock: Clock) -> None:
    """Leave the files as a kill does now."""
    copy = left_by_a_kill(directory, directory.with_name("killed"))
    tier.close()
    shutil.rmtree(directory)
    copy.rename(directory)


@pytest.mark.parametrize("back_s", [1.0, TTL_S / 2, 1e6, 1.7e9])
@pytest.mark.parametrize("between", ["nothing", "close", "kill"])
def test_a_clock_set_back_keeps_nothing_longer(
    directory: Path, buffer: FrameBuffer, clock: Clock, between: str, back_s: float
) -> None:
    tier = open_aging(directory, clock)
    keys = put(tier, buffer, range(3))
    clock.wait(TTL_S / 2)
    new = put(tier, buffer, range(10, 13))
    clock.wait(TTL_S / 4)
    if between == "kill":
        tier.flush()
        wait_for_record(directory, clock)
        kill(tier, directory, clock)
    elif between == "close":
        tier.close()
    clock.now_s -= back_s
    if between != "nothing":
        tier = open_aging(directory, clock)
    assert readable_keys(tier, buffer, keys + new) == keys + new
    newest = put(tier, buffer, range(20, 23))
    clock.wait(TTL_S / 4)
    assert tier.contains(keys + new + newest) == [False] * 3 + [True] * 6
    clock.wait(TTL_S / 2)
    assert tier.contains(new + newest) == [False] * 3 + [True] * 3
    clock.wait(TTL_S / 4)
    assert tier.contains(newest) == [False] * 3
    assert int(tier.stats()["expired"]) == 9
    tier.close()
    assert segment_files(directory) == []


def wait_for_record(directory: Path, clock: Clock) -> None:
    recorded = f"time {int(clock.now_s * 1000)} "
    deadline_s = time.monotonic() + 30
    while recorded not in (directory / "kvstore.lock").read_text():
        assert time.monotonic() < deadline_s, "the time is not recorded"
        time.sleep(0.05)


def test_an_idle_tier_records_the_time(directory: Path) -> None:
    tier = open_disk(directory, ttl="8s")
    first = (directory / "kvstore.lock").read_text()
    deadline_s = time.monotonic() + 30
    while (directory / "kvstore.lock").read_text() == first:
        assert time.monotonic() < deadline_s, "the time is not recorded"
        time.sleep(0.05)
    tier.close()


def test_what_had_expired_does_not_come_back(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    """Closed with files that had expired, and opened with a clock set back."""
    tier = open_aging(directory, clock)
    keys = put(tier, buffer, range(3))
    copy = left_by_a_kill(directory, directory.with_name("copy"))
    clock.wait(TTL_S + 1)
    new = put(tier, buffer, range(10, 13))
    tier.close()
    for segment in segment_files(copy):
        segment.rename(directory / segment.name)
    clock.now_s -= TTL_S
    tier = open_aging(directory, clock)
    assert tier.contains(keys + new) == [False] * 3 + [True] * 3
    tier.close()


def test_time_counts_while_a_tier_is_closed_with_a_clock_set_back(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    tier = open_aging(directory, clock)
    keys = put(tier, buffer, range(3))
    clock.now_s -= 1e6
    tier.flush()
    assert tier.contains(keys) == [True] * 3
    tier.close()
    clock.wait(TTL_S)
    tier = open_aging(directory, clock)
    assert tier.contains(keys) == [False] * 3
    tier.close()


def test_without_a_recorded_time_the_newest_segment_counts(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    """An older release wrote the files, or the lock file was lost."""
    tier = open_aging(directory, clock)
    keys = put(tier, buffer, range(3))
    clock.wait(TTL_S / 2)
    new = put(tier, buffer, range(10, 13))
    tier.close()
    (directory / "kvstore.lock").write_text("kvstore disk tier, version 1\nprocess 1\n")
    clock.now_s -= TTL_S
    tier = open_aging(directory, clock)
    assert tier.contains(keys + new) == [True] * 6
    clock.wait(TTL_S / 2)
    assert tier.contains(keys + new) == [False] * 3 + [True] * 3
    tier.close()


def test_a_clock_set_forward_and_back_costs_no_more_than_it_must(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    """A machine whose clock is wrong until the network sets it: ages go on where they were."""
    tier = open_aging(directory, clock)
    keys = put(tier, buffer, range(3))
    tier.close()
    right_s = clock.now_s
    clock.now_s, clock.up_s = 0.0, 5.0
    tier = open_aging(directory, clock)
    clock.wait(10)
    clock.now_s = right_s + 60
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()
    clock.wait(TTL_S - 61)
    tier = open_aging(directory, clock)
    assert readable_keys(tier, buffer, keys) == keys
    clock.wait(1)
    assert tier.contains(keys) == [False] * 3
    tier.close()


def test_files_that_say_no_age_count_from_their_last_write(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    tier = open_disk(directory, clock=clock, segment=MIB)
    keys = put(tier, buffer, range(3))
    tier.close()
    (segment,) = segment_files(directory)
    with segment.open("r+b") as file:
        page = bytearray(file.read(4096))
        struct.pack_into("<Q", page, 48, 0)
        struct.pack_into("<Q", page, 8, checksum(page[16:]))
        file.seek(0)
        file.write(page)
    os.utime(segment, (clock.now_s, clock.now_s))
    clock.now_s += TTL_S - 1
    tier = open_aging(directory, clock)
    assert readable_keys(tier, buffer, keys) == keys
    clock.now_s += 1
    assert tier.contains(keys) == [False] * 3
    tier.close()


def test_the_age_is_kept_when_the_first_page_is_damaged(
    directory: Path, buffer: FrameBuffer, clock: Clock
) -> None:
    tier = open_aging(directory, clock)
    keys = put(tier, buffer, range(3))
    tier.close()
    flip(segment_files(directory)[0], 50)
    clock.now_s += TTL_S - 1
    tier = open_aging(directory, clock)
    assert readable_keys(tier, buffer, keys) == keys
    clock.now_s += 1
    assert tier.contains(keys) == [False] * 3
    tier.close()


# ---------------------------------------------------------------------- eviction policies


def test_an_unknown_policy_is_rejected(directory: Path) -> None:
    with pytest.raises(ConfigError, match="'lru'"):
        open_disk(directory, eviction="lur")
    assert not directory.exists()


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_every_order_keeps_the_capacity_and_serves_what_is_right(
    directory: Path, buffer: FrameBuffer, name: str
) -> None:
    rng = random.Random(5)
    tier = open_disk(directory, capacity=4 * MIB, eviction=name)
    for _ in range(300):
        number = min(rng.randrange(300), rng.randrange(300))
        key = key_of(number)
        length = tier.read(key, buffer.header, buffer.payload)
        if length:
            assert buffer.version_of(key, length) == 0
        else:
            put(tier, buffer, range(number, number + 1))
            assert tier.contains([key]) == [True]
        assert file_bytes(directory) <= 4 * MIB
    assert float(tier.stats()["evictions"]) > 15
    tier.close()


def test_the_order_of_eviction_is_the_one_asked_for(directory: Path, buffer: FrameBuffer) -> None:
    """LRU, and S3-FIFO, which ignores the order of uses. Each block is read once."""
    kept = {}
    for name in ("lru", "s3fifo"):
        tier = open_disk(directory / name, capacity=4 * MIB, segment=MIB // 2, eviction=name)
        keys = put(tier, buffer, range(130))
        assert all(tier.contains(keys))
        tier.read(keys[0], buffer.header, buffer.payload)
        put(tier, buffer, range(1000, 1060))
        kept[name] = tier.contains([keys[0], keys[60]])
        tier.close()
    assert kept["lru"] == [True, False]
    assert kept["s3fifo"] != kept["lru"]


# ---------------------------------------------------------------------- usage


def test_usage_tells_what_was_used_last_first(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory, segment=MIB // 2)
    keys = put(tier, buffer, range(100))
    (first, taken), *_ = tier.usage()
    assert taken == 4096 + 20_480
    assert keys.index(first) > 75
    tier.read(keys[30], buffer.header, buffer.payload)
    listed = [key for key, _ in tier.usage()]
    together = listed[: listed.index(keys[30]) + 1]
    assert together == keys[keys.index(together[0]) : 31], (
        "the blocks of one segment in write order"
    )
    assert keys.index(listed[len(together) + 5]) < 45
    assert sorted(listed) == sorted(keys)
    tier.delete(keys[:10])
    assert sorted(key for key, _ in tier.usage()) == sorted(keys[10:])
    assert sum(nbytes for _, nbytes in tier.usage()) == 90 * taken
    copy = left_by_a_kill(directory, directory.with_name("copy"))
    tier.close()
    for place in (directory, copy):
        tier = open_disk(place, segment=MIB // 2)
        assert sorted(key for key, _ in tier.usage()) == sorted(keys[10:])
        tier.close()


def test_listing_goes_on_while_segments_leave(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory, capacity=4 * MIB, segment=MIB // 2)
    put(tier, buffer, range(100))
    listing = tier.usage()
    seen = [next(listing)[0] for _ in range(5)]
    put(tier, buffer, range(1000, 1150))
    seen += [key for key, _ in listing]
    assert len(set(seen)) == len(seen)
    tier.close()
