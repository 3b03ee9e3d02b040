"""A directory that a later release used: its segments stay as they are, and it finds all again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from disk_rig import (
    MIB,
    SECTOR_BYTES,
    file_bytes,
    flip,
    left_by_a_kill,
    put,
    readable_keys,
    segment_files,
)

from kvstore.blocks.frame import checksum
from kvstore.cli import main
from kvstore.errors import ConfigError, FrameInvalid, TierFull
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.state import DiskLimits

SEGMENT = MIB // 4
HEADER = 0
TRAILER = SEGMENT - SECTOR_BYTES


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def opened(directory: Path, capacity: int = 2 * MIB, checkpoint: int = MIB) -> Tier:
    limits = DiskLimits(capacity, SEGMENT, checkpoint_bytes=checkpoint)
    return DiskTier([str(directory)], limits)


def set_version(path: Path, version: int, *places: int) -> None:
    """Set the format version in these sectors. It is not part of their checksum."""
    with path.open("r+b") as file:
        for at in places:
            file.seek(at + 6)
            file.write(version.to_bytes(2, "little"))


def as_later_frames(tier: Tier, buffer: FrameBuffer, numbers: range, nbytes: int = 20_000) -> None:
    for number in numbers:
        key, header, payload = buffer.fill(key_of(number), nbytes)
        header[6] = 2
        tier.write(key, header, payload)


@pytest.fixture
def segments(directory: Path, buffer: FrameBuffer) -> list[Path]:
    """Four full segments of nine blocks of 20,000 bytes."""
    tier = opened(directory)
    put(tier, buffer, range(36))
    tier.close()
    found = segment_files(directory)
    assert len(found) == 4
    return found


KEYS = [key_of(number) for number in range(36)]


@pytest.mark.parametrize("which", [[0], [3], [1, 2], [0, 1, 2, 3]])
def test_segments_of_a_later_version_stay_as_they_are(
    directory: Path, buffer: FrameBuffer, segments: list[Path], which: list[int]
) -> None:
    later = [segments[number] for number in which]
    for path in later:
        set_version(path, 2, HEADER, TRAILER)
    before = {path: path.read_bytes() for path in later}
    for turn in range(2):
        tier = opened(directory)
        assert len(readable_keys(tier, buffer, KEYS)) == 36 - 9 * len(which)
        assert tier.stats()["segments_unsupported"] == len(which)
        put(tier, buffer, range(100 * turn + 100, 100 * turn + 120))
        assert tier.stats()["bytes_used"] == file_bytes(directory) <= 2 * MIB
        tier.close()
        assert {path: path.read_bytes() for path in later} == before
    for path in later:
        set_version(path, 1, HEADER, TRAILER)
    tier = opened(directory, capacity=4 * MIB)
    assert readable_keys(tier, buffer, KEYS) == KEYS
    assert tier.stats()["segments_unsupported"] == 0
    tier.close()


def test_they_take_room_of_the_capacity_until_the_tier_is_cleared(
    directory: Path, buffer: FrameBuffer, segments: list[Path]
) -> None:
    for path in segments:
        set_version(path, 2, HEADER, TRAILER)
    tier = opened(directory, capacity=MIB + SECTOR_BYTES)
    with pytest.raises(TierFull):
        tier.write(*buffer.fill(key_of(1), 20_000))
    assert segment_files(directory) == segments
    tier.clear()
    assert segment_files(directory) == []
    put(tier, buffer, range(10))
    assert tier.stats()["bytes_used"] == file_bytes(directory)
    assert tier.stats()["segments_unsupported"] == 0
    tier.close()


@pytest.mark.parametrize("place", [HEADER, TRAILER])
@pytest.mark.parametrize("bit", range(16))
def test_a_flipped_bit_of_a_version_costs_no_block(
    directory: Path, buffer: FrameBuffer, segments: list[Path], place: int, bit: int
) -> None:
    """Header and trailer tell each other's."""
    flip(segments[1], place + 6 + bit // 8, 1 << bit % 8)
    for _ in range(2):
        tier = opened(directory)
        assert readable_keys(tier, buffer, KEYS) == KEYS
        tier.close()


@pytest.mark.parametrize("kind", ["index", "checkpoint"])
def test_an_index_of_a_later_version_is_not_replaced(
    directory: Path, tmp_path: Path, buffer: FrameBuffer, kind: str
) -> None:
    """Its frames are found by a scan. Deletions are recorded in their headers."""
    tier = opened(directory, checkpoint=4096)
    put(tier, buffer, range(8))
    tier.flush()
    copy = directory
    if kind == "checkpoint":
        copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    (segment,) = segment_files(copy)
    set_version(segment, 2, TRAILER)
    before = segment.read_bytes()
    for turn in range(2):
        tier = opened(copy)
        assert readable_keys(tier, buffer, KEYS[:8]) == KEYS[:8]
        assert tier.stats()["segments_unsupported"] == 1
        put(tier, buffer, range(20 + turn, 21 + turn))
        tier.close()
        assert segment.read_bytes() == before
    tier = opened(copy)
    tier.delete(KEYS[:1])
    tier.close()
    after = segment.read_bytes()
    assert after[:SECTOR_BYTES] + after[2 * SECTOR_BYTES :] == (
        before[:SECTOR_BYTES] + before[2 * SECTOR_BYTES :]
    )
    tier = opened(copy)
    assert readable_keys(tier, buffer, KEYS[:8]) == KEYS[1:8]
    tier.close()


def killed_with_later_frames(directory: Path, copy: Path, buffer: FrameBuffer) -> Path:
    """A segment without an index: five of our frames, then three of a later version."""
    tier = opened(directory)
    put(tier, buffer, range(5))
    as_later_frames(tier, buffer, range(5, 8))
    left_by_a_kill(directory, copy)
    tier.close()
    (segment,) = segment_files(copy)
    return segment


def test_frames_of_a_later_version_without_an_index_are_not_overwritten(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    segment = killed_with_later_frames(directory, tmp_path / "copy", buffer)
    before = segment.read_bytes()
    for turn in range(2):
        tier = opened(tmp_path / "copy")
        assert readable_keys(tier, buffer, KEYS[:8]) == KEYS[:5]
        put(tier, buffer, range(20 + turn, 21 + turn))
        assert tier.stats()["segments_unsupported"] == 1
        assert tier.stats()["torn"] == 0
        tier.close()
        assert segment.read_bytes() == before


def test_their_eviction_is_counted(directory: Path, tmp_path: Path, buffer: FrameBuffer) -> None:
    killed_with_later_frames(directory, tmp_path / "copy", buffer)
    tier = opened(tmp_path / "copy", capacity=2 * SEGMENT + SECTOR_BYTES)
    put(tier, buffer, range(20, 35))
    assert tier.stats()["evictions"] == 8
    assert tier.stats()["segments_unsupported"] == 0
    tier.close()


def test_old_frames_of_a_later_version_in_a_reused_file_are_not_taken_for_the_segments(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """A reclaimed segment's file becomes another one. What is left in it has another secret."""
    tier = opened(directory, capacity=SEGMENT + SECTOR_BYTES)
    as_later_frames(tier, buffer, range(9))
    keys = put(tier, buffer, range(10, 13))
    copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    (segment,) = segment_files(copy)
    assert segment.read_bytes().count(b"KVFRAM\2\0") >= 5
    tier = opened(copy, capacity=SEGMENT + SECTOR_BYTES)
    assert tier.stats()["segments_unsupported"] == 0
    assert readable_keys(tier, buffer, keys) == keys
    keys += put(tier, buffer, range(13, 16))
    assert readable_keys(tier, buffer, keys) == keys, "appended to the same segment"
    tier.close()


def test_a_frame_in_a_clients_block_is_not_taken_for_one(
    directory: Path, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """A block full of headers of a later version, stepped over by a scan."""
    tier = opened(directory)
    key, header, payload = buffer.fill(key_of(1), 40_000)
    forged = b"KVFRAM\2\0" + checksum(bytes(4080)).to_bytes(8, "little") + bytes(4080)
    payload[: 9 * SECTOR_BYTES] = forged * 9
    tier.write(key, header, payload)
    tier.delete([key])
    copy = left_by_a_kill(directory, tmp_path / "copy")
    tier.close()
    tier = opened(copy)
    assert tier.stats()["segments_unsupported"] == 0
    tier.close()


def test_a_directory_of_a_later_version_is_refused(directory: Path, segments: list[Path]) -> None:
    lock = directory / "kvstore.lock"
    lock.write_text(lock.read_text().replace("version 1", "version 2"))
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(ConfigError, match="version 2; this kvstore supports 1"):
        opened(directory)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


# ------------------------------------------------------------------ kvstore verify


def verified(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["verify", str(directory), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_verify_reports_other_releases_apart(
    directory: Path,
    buffer: FrameBuffer,
    segments: list[Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    tier = opened(directory)
    as_later_frames(tier, buffer, range(100, 103))
    tier.close()
    code, report = verified(directory, capsys)
    assert (code, report["ok"]) == (3, True)
    assert (report["frames"], report["frames_unsupported"], report["frames_corrupt"]) == (39, 3, 0)
    assert report["unsupported"] == {"frame version 2 (this kvstore reads 1)": 3}
    assert main(["verify", str(directory)]) == 3
    printed = capsys.readouterr().out
    assert "3 frames of another release: not checked: frame version 2" in printed
    assert "0 corrupt" in printed
    set_version(segments[0], 2, HEADER, TRAILER)
    set_version(segments[1], 2, TRAILER)
    code, report = verified(directory, capsys)
    assert (code, report["segments_unsupported"], report["segments_corrupt"]) == (3, 2, 0)
    assert report["frames"] == 30
    # A corrupt frame counts more.
    flip(segments[2], 3 * SECTOR_BYTES)
    code, report = verified(directory, capsys)
    assert (code, report["frames_corrupt"], report["frames_unsupported"]) == (1, 1, 3)


def test_verify_of_a_segment_left_by_a_kill(
    directory: Path, tmp_path: Path, buffer: FrameBuffer, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_with_later_frames(directory, tmp_path / "copy", buffer)
    code, report = verified(tmp_path / "copy", capsys)
    assert (code, report["frames"], report["frames_unsupported"]) == (3, 8, 3)
    assert report["segments_unsupported"] == 1


def test_a_later_frame_is_never_a_block(directory: Path, buffer: FrameBuffer) -> None:
    tier = opened(directory)
    as_later_frames(tier, buffer, range(1))
    length = tier.read(key_of(0), buffer.header, buffer.payload)
    with pytest.raises(FrameInvalid, match="version 2"):
        buffer.version_of(key_of(0), length)
    tier.close()
