"""The disk tier on corrupt files, and `kvstore verify`."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from disk_rig import (
    MIB,
    SECTOR_BYTES,
    file_bytes,
    flip,
    left_by_a_kill,
    open_disk,
    put,
    readable_keys,
    segment_files,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.testing.frames import FrameBuffer, block_of, key_of
from kvstore.tiers.disk.verify import verify


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


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
    # Half of the flips are in headers and trailers, which are small.
    places = [
        rng.randrange(segment.stat().st_size),
        rng.randrange(64),
        -rng.randrange(1, SECTOR_BYTES),
    ]
    at = rng.choice(places) % segment.stat().st_size
    keys = [key_of(number) for number in range(20)]
    buffer = FrameBuffer(MIB)
    if not while_open:
        flip(segment, at, 1 << bit)
    tier = open_disk(copy, capacity=MIB, segment=MIB // 4)
    if while_open:
        flip(segment, at, 1 << bit)
    kept = readable_keys(tier, buffer, keys, max_corrupt=1)
    assert len(kept) >= 19
    put(tier, buffer, range(100, 103), 9000)
    tier.close()


def test_a_damaged_footer_costs_a_scan_and_no_block(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    tier = open_disk(directory, segment=MIB)
    keys = put(tier, buffer, range(20))
    tier.close()
    for number in range(0, 20, 3):
        copy = left_by_a_kill(directory, tmp_path / f"copy {number}")
        (segment,) = segment_files(copy)
        flip(segment, segment.read_bytes().rindex(keys[number].hash) + number)
        tier = open_disk(copy, segment=MIB)
        assert readable_keys(tier, buffer, keys) == keys
        tier.close()


@pytest.mark.parametrize("cut", [0, 100, SECTOR_BYTES, 5 * SECTOR_BYTES + 17, 40 * SECTOR_BYTES])
def test_a_truncated_segment_keeps_what_is_left(
    directory: Path, buffer: FrameBuffer, cut: int
) -> None:
    tier = open_disk(directory, segment=MIB)
    keys = put(tier, buffer, range(20))
    tier.close()
    (segment,) = segment_files(directory)
    os.truncate(segment, cut)
    tier = open_disk(directory, segment=MIB)
    kept = readable_keys(tier, buffer, keys)
    assert len(kept) == max(0, (cut // SECTOR_BYTES - 1) // 6)
    put(tier, buffer, range(20))
    assert len(readable_keys(tier, buffer, keys)) == 20
    tier.close()


def test_a_segment_truncated_while_open_is_a_miss(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory)
    keys = put(tier, buffer, range(3))
    os.truncate(segment_files(directory)[0], 10 * SECTOR_BYTES)
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
    assert readable_keys(tier, buffer, keys) == []
    put(tier, buffer, range(10))
    assert len(readable_keys(tier, buffer, keys)) == 10
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()


def test_a_segment_deleted_while_open_is_gone_at_the_next_opening(
    directory: Path, buffer: FrameBuffer
) -> None:
    tier = open_disk(directory, segment=MIB)
    keys = put(tier, buffer, range(60))
    segment_files(directory)[0].unlink()
    assert len(readable_keys(tier, buffer, keys)) == 60
    put(tier, buffer, range(100, 500))
    tier.close()
    tier = open_disk(directory, segment=MIB)
    readable_keys(tier, buffer, keys)
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
    assert len(readable_keys(tier, buffer, keys)) == 3
    tier.close()
    for name, text in foreign.items():
        assert (directory / name).read_bytes() == text


def test_verify_counts_good_and_bad_frames(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory, segment=MIB)
    keys = put(tier, buffer, range(100))
    with pytest.raises(ConfigError, match="in use"):
        verify([str(directory)])
    tier.delete(keys[:2])
    tier.close()
    told: list[tuple[int, int]] = []
    report = verify([str(directory)], lambda done, total: told.append((done, total)))
    assert (report.frames, report.corrupt_count, report.ok) == (98, 0, True)
    assert told[-1][0] == told[-1][1] == sum(p.stat().st_size for p in segment_files(directory))
    segment = segment_files(directory)[1]
    flip(segment, segment.read_bytes().index(block_of(keys[50], 20_000)) + 777)
    report = verify([str(directory)])
    assert (report.corrupt_count, report.ok) == (1, False)
    assert report.corrupt[0].segment == str(segment)
    assert keys[50].hash.hex() in report.corrupt[0].block
    assert "checksum" in report.corrupt[0].reason
    flip(segment_files(directory)[0], 20)
    assert verify([str(directory)]).segments_corrupt == 0, "the trailer has the same fields"
    flip(segment_files(directory)[0], MIB - SECTOR_BYTES + 20)
    assert verify([str(directory)]).segments_corrupt == 0, "one bit of each is repaired"
    for at in (24, MIB - SECTOR_BYTES + 24):
        flip(segment_files(directory)[0], at)
    report = verify([str(directory)])
    assert report.segments_corrupt == 1
    assert not report.ok
