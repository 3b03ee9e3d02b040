"""The identity of a segment is in its file twice, and an unreadable segment is set aside."""

from __future__ import annotations

import os
import random
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

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
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    ForkedSidecar,
    disk,
    hashes_of,
    wait_until,
)
from sidecar_rig import put as save

from kvstore.blocks.key import Key
from kvstore.ipc.client import Client
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.aside import MAX_SET_ASIDE, SetAside
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.recover import recover
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import DiskLimits
from kvstore.tiers.disk.verify import verify

BLOCKS = 20
SEGMENT = MIB // 4
FIELDS_BYTES = 64
"""The fields of a header are in its first bytes; zeros follow."""
VERSION_BYTES = (6, 7)

KEYS = [key_of(number) for number in range(BLOCKS)]


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def open_small(directory: Path, **changed: object) -> Tier:
    return open_disk(directory, **{"segment": SEGMENT, "capacity": 4 * MIB, **changed})


def write_and_be_killed(directory: Path, nbytes: int = 4000) -> None:
    """A process writes `BLOCKS` blocks, and is killed when all are acknowledged."""
    child = os.fork()
    if child == 0:
        try:
            put(open_small(directory), FrameBuffer(MIB), range(BLOCKS), nbytes)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def as_an_older_release(directory: Path) -> None:
    """Releases before the second copy left zeros at the end of a segment in use."""
    for segment in segment_files(directory):
        with segment.open("r+b") as file:
            file.seek(-SECTOR_BYTES, os.SEEK_END)
            file.write(bytes(SECTOR_BYTES))


def recovered(directory: Path) -> list[Key]:
    """The keys that an opening finds in the directory."""
    files = Files(direct_io=False)
    result = recover(files, str(directory), DiskLimits(4 * MIB, SEGMENT), 64)
    for segment in result.segments:
        files.close(segment.fd)
    return [key for segment in result.segments for key, _, _ in segment.entries]


def damage(path: Path, *sectors: int) -> None:
    """Overwrite whole sectors with noise; -1 is the last one."""
    with path.open("r+b") as file:
        for sector in sectors:
            file.seek(sector * SECTOR_BYTES, os.SEEK_END if sector < 0 else os.SEEK_SET)
            file.write(random.Random(sector).randbytes(SECTOR_BYTES))


def aside(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.kvseg.unreadable"))


@pytest.mark.parametrize("release", ["this", "older"])
def test_no_flipped_bit_of_the_first_sector_costs_the_identity(
    directory: Path, release: str
) -> None:
    """Every bit of the fields, and one of every byte behind them."""
    write_and_be_killed(directory)
    (segment,) = segment_files(directory)
    every = [(at, bit) for at in range(FIELDS_BYTES) for bit in range(8)]
    every += [(at, at % 8) for at in range(FIELDS_BYTES, SECTOR_BYTES)]
    if release == "older":
        as_an_older_release(directory)
        # The version's only copy would be that of a later release.
        every = [(at, bit) for at, bit in every if at not in VERSION_BYTES]
    files = Files(direct_io=False)
    first = Segment.open(files, str(segment), writable=False)
    files.close(first.fd)
    for at, bit in every:
        flip(segment, at, 1 << bit)
        opened = Segment.open(files, str(segment), writable=False)
        files.close(opened.fd)
        assert opened.identity == first.identity, f"bit {bit} of byte {at}"
        flip(segment, at, 1 << bit)


@pytest.mark.parametrize("release", ["this", "older"])
def test_a_flipped_bit_of_the_first_sector_costs_no_block(directory: Path, release: str) -> None:
    """A bit of every field and of some of the bytes behind them, and what an opening finds."""
    write_and_be_killed(directory)
    if release == "older":
        as_an_older_release(directory)
    (segment,) = segment_files(directory)
    for at in [*range(FIELDS_BYTES), *range(FIELDS_BYTES, SECTOR_BYTES, 101)]:
        if release == "older" and at in VERSION_BYTES:
            continue
        flip(segment, at, 1 << at % 8)
        assert recovered(directory) == KEYS, f"bit {at % 8} of byte {at}"
        assert segment_files(directory) == [segment], f"bit {at % 8} of byte {at}"
    assert aside(directory) == []


@pytest.mark.parametrize("at", ["first", "last"])
def test_one_lost_copy_costs_no_block(
    directory: Path, buffer: FrameBuffer, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole sector of noise, and both copies are there again afterwards."""
    write_and_be_killed(directory)
    (segment,) = segment_files(directory)
    damage(segment, 0 if at == "first" else -1)
    tier = open_small(directory)
    assert ("restored" in caplog.text) == (at == "first")
    assert readable_keys(tier, buffer, KEYS) == KEYS
    keys = [*KEYS, *put(tier, buffer, range(100, 103), 4000)]
    copy = left_by_a_kill(directory, directory.with_name("copy"))
    tier.close()
    damage(segment_files(copy)[0], -1 if at == "first" else 0)
    tier = open_small(copy)
    assert readable_keys(tier, buffer, keys) == keys
    assert tier.stats()["segments_unreadable"] == 0
    tier.close()


def grown(tier: Tier, buffer: FrameBuffer) -> None:
    put(tier, buffer, range(100, 102), 4000)


def deleted(tier: Tier, buffer: FrameBuffer) -> None:
    tier.flush()
    tier.delete(KEYS[:3])


def reopened(tier: Tier, buffer: FrameBuffer) -> None:
    tier.close()


@pytest.mark.parametrize("change", [grown, deleted, reopened])
def test_the_second_copy_outlives_what_happens_to_a_segment(
    directory: Path, buffer: FrameBuffer, change: Callable[[Tier, FrameBuffer], None]
) -> None:
    tier = open_small(directory, capacity=MIB)
    put(tier, buffer, range(BLOCKS), 4000)
    change(tier, buffer)
    if change is reopened:
        tier = open_small(directory, capacity=MIB)
        put(tier, buffer, range(100, 101), 4000)
    there = sorted(tier.keys())
    copy = left_by_a_kill(directory, directory.with_name("copy"))
    tier.close()
    for segment in segment_files(copy):
        damage(segment, 0)
    tier = open_small(copy, capacity=MIB)
    assert sorted(tier.keys()) == there
    assert len(readable_keys(tier, buffer, there)) == len(there)
    tier.close()


def test_a_file_used_again_has_both_copies(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_small(directory, capacity=MIB)
    put(tier, buffer, range(400), 4000)
    there = sorted(tier.keys())
    copy = left_by_a_kill(directory, directory.with_name("copy"))
    tier.close()
    for segment in segment_files(copy):
        damage(segment, 0)
    tier = open_small(copy, capacity=MIB)
    assert sorted(tier.keys()) == there
    tier.close()


# ---------------------------------------------------------------------- set aside


def test_an_unreadable_segment_is_set_aside_and_counted(
    directory: Path, buffer: FrameBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_small(directory)
    put(tier, buffer, range(BLOCKS))
    tier.close()
    first, *_ = segment_files(directory)
    intact = first.read_bytes()
    damage(first, 0, -1)
    damaged = first.read_bytes()
    tier = open_small(directory)
    (left,) = aside(directory)
    assert left.read_bytes() == damaged
    assert str(left) in caplog.text
    assert tier.stats()["segments_unreadable"] == tier.stats()["segments_set_aside"] == 1
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    kept = readable_keys(tier, buffer, KEYS)
    assert 0 < len(kept) < BLOCKS
    put(tier, buffer, range(100, 103))
    tier.close()
    report = verify([str(directory)])
    assert (report.ok, report.segments_set_aside) == (True, 1)
    # It is found again, but not a second time. Its number is not used by another segment.
    tier = open_small(directory)
    assert (tier.stats()["segments_unreadable"], tier.stats()["segments_set_aside"]) == (0, 1)
    put(tier, buffer, range(200, 240))
    assert first not in segment_files(directory)
    tier.close()
    # An operator who has repaired it gives it its name back.
    left.write_bytes(intact)
    left.rename(first)
    tier = open_small(directory)
    assert readable_keys(tier, buffer, KEYS) == KEYS
    assert tier.stats()["segments_set_aside"] == 0
    tier.close()


def test_a_sidecar_counts_the_files_that_it_set_aside(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, disk(tmp_path / "disk"))
    with Client(sidecar.socket, NAMESPACE) as client:
        assert save(client, hashes_of("lost", 4)) == 4
        assert client.sync(LIMIT_S)
        wait_until(lambda: sidecar.stats()["tiers"]["disk"]["blocks"] == 4, "written")
    sidecar.kill()
    damage(segment_files(tmp_path / "disk")[0], 0, -1)
    sidecar.start()
    with urllib.request.urlopen(f"{sidecar.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    for name in ("segments_unreadable_total", "segments_set_aside"):
        assert f'kvstore_tier_{name}{{tier="disk"}} 1.0' in lines
    assert 'kvstore_tier_directories_down{tier="disk"} 0.0' in lines
    assert sidecar.stop() == 0


def test_the_number_of_the_newest_segment_is_not_used_again(
    directory: Path, buffer: FrameBuffer
) -> None:
    write_and_be_killed(directory)
    (segment,) = segment_files(directory)
    damage(segment, 0, -1)
    tier = open_small(directory)
    put(tier, buffer, range(100, 103))
    assert segment_files(directory)[0].name > segment.name
    tier.close()


def test_files_set_aside_have_a_limit_and_count_as_used(
    directory: Path, buffer: FrameBuffer
) -> None:
    for turn in range(MAX_SET_ASIDE + 3):
        tier = open_small(directory)
        assert file_bytes(directory) == tier.stats()["bytes_used"] <= 4 * MIB
        put(tier, buffer, range(turn * 10, turn * 10 + 30))
        assert file_bytes(directory) == tier.stats()["bytes_used"] <= 4 * MIB
        tier.close()
        for segment in segment_files(directory):
            damage(segment, 0, -1)
    tier = open_small(directory)
    assert len(aside(directory)) == tier.stats()["segments_set_aside"]
    assert 1 < len(aside(directory)) <= MAX_SET_ASIDE
    assert sum(path.stat().st_size for path in aside(directory)) <= 2 * MIB
    tier.clear()
    assert aside(directory) == []
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()


def test_bytes_set_aside_leave_at_their_age(directory: Path) -> None:
    write_and_be_killed(directory)
    (segment,) = segment_files(directory)
    damage(segment, 0, -1)
    now_s = segment.stat().st_mtime
    tier = open_disk(directory, clock=lambda: now_s, segment=SEGMENT, ttl="1h")
    assert len(aside(directory)) == tier.stats()["segments_set_aside"] == 1
    tier.close()
    now_s += 3601
    tier = open_disk(directory, clock=lambda: now_s, segment=SEGMENT, ttl="1h")
    assert aside(directory) == []
    assert tier.stats()["segments_set_aside"] == 0
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()


def test_the_oldest_file_set_aside_goes_first(directory: Path) -> None:
    directory.mkdir()
    kept = SetAside(Files(), str(directory))
    for number in (3, 1, 2):
        path = directory / f"{number:012d}.kvseg"
        path.write_bytes(bytes(SECTOR_BYTES))
        kept.add(str(path))
    assert kept.nbytes == 3 * SECTOR_BYTES
    assert kept.delete_oldest()
    assert [path.name[:12] for path in aside(directory)] == ["000000000002", "000000000003"]
    assert SetAside(Files(), str(directory)).nbytes == kept.nbytes == 2 * SECTOR_BYTES


@pytest.mark.parametrize("nbytes", [0, SEGMENT])
def test_a_file_that_no_frame_was_written_to_is_not_set_aside(
    directory: Path, buffer: FrameBuffer, nbytes: int
) -> None:
    """A kill between the creation of a file and its header."""
    write_and_be_killed(directory)
    blank = directory / "000000000002.kvseg"
    blank.write_bytes(bytes(nbytes))
    tier = open_small(directory)
    assert not blank.exists()
    assert aside(directory) == []
    assert tier.stats()["segments_unreadable"] == 0
    assert readable_keys(tier, buffer, KEYS) == KEYS
    tier.close()
