"""The directory of a disk tier is deleted or replaced while in use; its lock file is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from disk_rig import MIB, file_bytes, flip, open_disk, put, readable_keys, segment_files
from sidecar_rig import (
    NAMESPACE,
    ForkedSidecar,
    disk,
    hashes_of,
    match,
    run_command,
    wait_until,
)
from sidecar_rig import put as save

from kvstore.blocks.key import Key
from kvstore.errors import ConfigError, TierUnavailable
from kvstore.ipc.client import Client
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import disk as disk_tier
from kvstore.tiers.disk.verify import verify

LOCK = "kvstore.lock"


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


# ---------------------------------------------------------------------- deleted while in use


def delete_directory(directory: Path) -> None:
    shutil.rmtree(directory)


def move_directory(directory: Path) -> None:
    directory.rename(directory.with_name("away"))


def replace_directory(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def replace_by_another_tier(directory: Path) -> None:
    shutil.rmtree(directory)
    tier = open_disk(directory)
    put(tier, FrameBuffer(MIB), range(500, 505))
    tier.close()


def delete_segments(directory: Path) -> None:
    for segment in segment_files(directory):
        segment.unlink()


def restore_a_backup(directory: Path) -> None:
    """Another file with the same name and bytes."""
    (segment,) = segment_files(directory)
    stored = segment.read_bytes()
    segment.unlink()
    segment.write_bytes(stored)


CHANGES = [
    delete_directory,
    move_directory,
    replace_directory,
    replace_by_another_tier,
    delete_segments,
    restore_a_backup,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dirty", [True, False])
def test_a_tier_whose_directory_is_gone_is_down(
    directory: Path, buffer: FrameBuffer, change: object, dirty: bool, caplog: object
) -> None:
    tier = open_disk(directory)
    keys = put(tier, buffer, range(20))
    tier.flush()
    assert callable(change)
    change(directory)
    before = {path.name: path.read_bytes() for path in files_in(directory)}
    is_ours = change in (delete_segments, restore_a_backup)
    if dirty:
        keys += put(tier, buffer, range(20, 25))
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="deleted or replaced"):
            tier.flush()
    # Not one of its blocks is promised, and no further block is acknowledged.
    assert tier.contains(keys) == [False] * len(keys)
    with pytest.raises(TierUnavailable, match="deleted or replaced"):
        tier.read(keys[0], buffer.header, buffer.payload)
    for number in range(30, 33):
        with pytest.raises(TierUnavailable, match="deleted or replaced"):
            put(tier, buffer, range(number, number + 1))
    assert tier.stats()["directories_down"] == 1
    assert int(tier.stats()["errors"]) >= 4
    tier.close()
    after = {path.name: path.read_bytes() for path in files_in(directory)}
    if is_ours:
        after.pop(LOCK), before.pop(LOCK)
    assert after == before, "files of another tier were changed"


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def test_a_directory_that_is_back_is_used_again(directory: Path, buffer: FrameBuffer) -> None:
    tier = open_disk(directory)
    keys = put(tier, buffer, range(20))
    move_directory(directory)
    with pytest.raises(TierUnavailable, match="deleted or replaced"):
        tier.flush()
    directory.with_name("away").rename(directory)
    keys += put(tier, buffer, range(20, 25))
    tier.flush()
    assert readable_keys(tier, buffer, keys) == keys
    assert tier.stats()["directories_down"] == 0
    tier.close()
    tier = open_disk(directory)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_a_synced_write_into_a_deleted_directory_is_not_acknowledged(
    directory: Path, buffer: FrameBuffer
) -> None:
    tier = open_disk(directory, sync_writes=True)
    put(tier, buffer, range(3))
    delete_directory(directory)
    with pytest.raises(TierUnavailable, match="deleted or replaced"):
        put(tier, buffer, range(3, 4))
    tier.close()


def test_no_segment_is_created_in_a_directory_that_replaced_it(
    directory: Path, buffer: FrameBuffer
) -> None:
    """The new segment would be in a directory that another process may have locked."""
    tier = open_disk(directory, segment=MIB // 4)
    keys = put(tier, buffer, range(5))
    replace_directory(directory)
    with pytest.raises(TierUnavailable, match="deleted or replaced"):
        put(tier, buffer, range(100, 200))
    assert files_in(directory) == []
    assert tier.contains(keys) == [False] * 5
    tier.close()
    assert files_in(directory) == []


def test_the_other_directories_go_on(tmp_path: Path, buffer: FrameBuffer) -> None:
    places = [tmp_path / name for name in "abc"]
    config = disk_tier.Config(directory=tuple(map(str, places)), capacity=12 * MIB)
    tier = disk_tier.open(config)
    keys = put(tier, buffer, range(30))
    tier.flush()
    delete_directory(places[1])
    put(tier, buffer, range(30, 33))
    with pytest.raises(TierUnavailable, match="deleted or replaced"):
        tier.flush()
    lost = [key for key, has in zip(keys, tier.contains(keys), strict=True) if not has]
    assert len(lost) == 10
    assert [key for key in keys if tier.read(key, buffer.header, buffer.payload) == 0] == lost
    put(tier, buffer, range(60))
    keys = [key_of(number) for number in range(60)]
    assert readable_keys(tier, buffer, keys) == keys
    assert tier.stats()["directories_down"] == 1
    tier.close()
    assert not places[1].exists()
    tier = disk_tier.open(config)
    assert readable_keys(tier, buffer, keys) == keys, "the others have every block"
    tier.close()


def test_a_relative_directory_outlives_a_change_of_the_working_directory(
    tmp_path: Path, buffer: FrameBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tier = open_disk(Path("disk"), segment=MIB // 4)
    monkeypatch.chdir("/")
    keys = put(tier, buffer, range(30))
    tier.flush()
    tier.close()
    tier = open_disk(tmp_path / "disk", segment=MIB // 4)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_a_sidecar_says_that_its_directory_is_gone(tmp_path: Path) -> None:
    """Its flush says no, its tier is down, and the blocks in memory are still served."""
    sidecar = ForkedSidecar(tmp_path, disk(tmp_path / "disk"), stderr=tmp_path / "log")
    with Client(sidecar.socket, NAMESPACE) as client:
        first, second = hashes_of("first", 4), hashes_of("second", 4)
        assert save(client, first) == 4
        assert flush_of(sidecar)
        shutil.rmtree(tmp_path / "disk")
        assert save(client, second) == 4
        assert not flush_of(sidecar)
        assert sidecar.stats()["tiers"]["disk"]["directories_down"] == 1

        def is_down() -> bool:
            save(client, hashes_of(os.urandom(4).hex(), 4))
            return sidecar.stats()["tiers"]["disk"]["state"] != "up"

        wait_until(is_down, "the breaker opens")
        assert match(client, [*first, *second])
    assert sidecar.stop() == 0
    log = (tmp_path / "log").read_text()
    assert log.count("deleted or replaced while in use") >= 1
    assert "Traceback" not in log


def flush_of(sidecar: ForkedSidecar) -> bool:
    from kvstore.cli.common.sidecar_http import request_json

    return bool(request_json(sidecar.url, "/v1/flush", {})["flushed"])


# ---------------------------------------------------------------------- the lock file


def filled(directory: Path, buffer: FrameBuffer) -> list[Key]:
    tier = open_disk(directory, segment=MIB // 4)
    keys = put(tier, buffer, range(20))
    tier.close()
    return keys


def check_reopened(directory: Path, buffer: FrameBuffer, keys: list[Key]) -> None:
    tier = open_disk(directory, segment=MIB // 4)
    assert readable_keys(tier, buffer, keys) == keys
    assert file_bytes(directory) == tier.stats()["bytes_used"]
    tier.close()


def test_a_lost_lock_file_is_rebuilt(
    directory: Path, buffer: FrameBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    keys = filled(directory, buffer)
    (directory / LOCK).unlink()
    check_reopened(directory, buffer, keys)
    assert (directory / LOCK).read_text().startswith("kvstore disk tier, version 1\n")
    assert "rebuilt" in caplog.text


@pytest.mark.parametrize("release", ["this", "older"])
def test_no_flipped_bit_of_the_lock_file_keeps_a_tier_from_opening(
    directory: Path, buffer: FrameBuffer, release: str
) -> None:
    keys = filled(directory, buffer)
    lock = directory / LOCK
    content = lock.read_bytes()
    if release == "older":
        content = f"kvstore disk tier, version 1\nprocess {os.getpid()}\n".encode()
    for at in range(len(content)):
        lock.write_bytes(content)
        flip(lock, at, 1 << at % 8)
        verify([str(directory)])
        assert lock.read_text().startswith("kvstore disk tier, version 1\n")
    check_reopened(directory, buffer, keys)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"\xff" * 100, b"something else\n"])
def test_a_corrupt_lock_file_is_rebuilt(
    directory: Path, buffer: FrameBuffer, content: bytes
) -> None:
    keys = filled(directory, buffer)
    (directory / LOCK).write_bytes(content)
    check_reopened(directory, buffer, keys)


def test_a_later_version_is_refused_whatever_segments_there_are(
    directory: Path, buffer: FrameBuffer
) -> None:
    """A lock file that states its sum, and segments of a version that this release cannot read."""
    from kvstore.tiers.disk.lockfile import lock_file_content

    filled(directory, buffer)
    (directory / LOCK).write_bytes(lock_file_content(["kvstore disk tier, version 9", "process 1"]))
    with pytest.raises(ConfigError, match="version 9"):
        open_disk(directory)
    (directory / LOCK).unlink()
    for segment in segment_files(directory):
        flip(segment, 6, 8)
        flip(segment, MIB // 4 - 4096 + 6, 8)
    with pytest.raises(ConfigError, match="not a directory of kvstore's disk tier"):
        open_disk(directory)


def test_without_a_valid_segment_the_directory_is_not_taken(directory: Path) -> None:
    directory.mkdir()
    (directory / "000000000001.kvseg").write_bytes(b"not a segment" * 1000)
    with pytest.raises(ConfigError, match=r"it contains '000000000001\.kvseg'"):
        open_disk(directory)
    (directory / LOCK).write_text("something else\n")
    with pytest.raises(ConfigError, match="not a lock file"):
        open_disk(directory)
    assert (directory / LOCK).read_text() == "something else\n"


HOLDER = """
import sys
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import disk

buffer = FrameBuffer(1 << 20)
tier = disk.open(disk.Config(directory=sys.argv[1], capacity="8MiB", segment="256KiB"))
for number in range(20):
    tier.write(*buffer.fill(key_of(number), 20_000))
print("ready", flush=True)
sys.stdin.readline()
tier.close()
"""


@pytest.mark.parametrize("lost", ["deleted", "replaced", "corrupt"])
def test_a_directory_in_use_is_refused_without_its_lock_file(
    directory: Path, buffer: FrameBuffer, lost: str
) -> None:
    """The other process lives, and has the directory itself locked."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "ready\n"
        if lost == "corrupt":
            (directory / LOCK).write_bytes(b"\xff" * 50)
        else:
            (directory / LOCK).unlink()
        if lost == "replaced":
            (directory / LOCK).touch()
        before = files_in(directory)
        for call in (lambda: open_disk(directory), lambda: verify([str(directory)])):
            with pytest.raises(ConfigError, match="in use by another kvstore"):
                call()
        assert files_in(directory) == before
        holder.stdin.write("\n")
        holder.stdin.close()
        assert holder.wait(60) == 0
    check_reopened(directory, buffer, [key_of(number) for number in range(20)])


def test_a_sidecar_starts_without_its_lock_file(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, disk(tmp_path / "disk"))
    names = hashes_of("kept", 4)
    with Client(sidecar.socket, NAMESPACE) as client:
        assert save(client, names) == 4
        assert flush_of(sidecar)
    (tmp_path / "disk" / LOCK).unlink()
    flags = ("--disk", str(tmp_path / "disk"), "--disk-capacity", "16MiB", "--port", "0")
    code, _, err = run_command(tmp_path, "serve", "--socket", str(tmp_path / "b.sock"), *flags)
    assert code == 2
    assert "in use by another kvstore" in err
    assert err.count("\n") == 1
    sidecar.kill()
    sidecar.start()
    with Client(sidecar.socket, NAMESPACE) as client:
        assert match(client, names)
    assert sidecar.stop() == 0


def test_peers_of_a_lost_lock_file(tmp_path: Path, buffer: FrameBuffer) -> None:
    """A directory without a lock file is not taken for an empty mount point."""
    places = [tmp_path / name for name in "ab"]
    config = disk_tier.Config(directory=tuple(map(str, places)), capacity=8 * MIB)
    tier = disk_tier.open(config)
    keys = put(tier, buffer, range(20))
    tier.close()
    (places[1] / LOCK).unlink()
    tier = disk_tier.open(config)
    assert tier.stats()["directories_down"] == 0
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()
