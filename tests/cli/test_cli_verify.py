"""`kvstore verify`: exit codes and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.testing.frames import FrameBuffer, block_of, key_of
from kvstore.tiers import disk


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    buffer = FrameBuffer(20_000)
    tier = disk.open(disk.Config(directory=str(tmp_path / "disk"), capacity=4 << 20))
    for number in range(5):
        tier.write(*buffer.fill(key_of(number), 20_000))
    tier.close()
    return tmp_path / "disk"


def corrupt(directory: Path, number: int) -> None:
    (segment,) = directory.glob("*.kvseg")
    stored = bytearray(segment.read_bytes())
    stored[stored.index(block_of(key_of(number), 20_000)) + 10_000] ^= 4
    segment.write_bytes(stored)


def test_an_intact_directory_exits_0(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(directory), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["frames"], report["frames_corrupt"]) == (True, 5, 0)
    assert main(["verify", str(directory)]) == 0
    assert "5 frames in 1 segments" in capsys.readouterr().out


def test_a_corrupt_frame_exits_1_and_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corrupt(directory, 3)
    assert main(["verify", str(directory), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["frames"], report["frames_corrupt"]) == (False, 5, 1)
    assert key_of(3).hash.hex() in report["corrupt"][0]["block"]
    assert report["corrupt"][0]["offset_bytes"] % 4096 == 0
    assert main(["verify", str(directory)]) == 1
    assert "1 corrupt" in capsys.readouterr().out


def test_several_directories_are_one_report(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    tier = disk.open(disk.Config(directory=str(other), capacity=4 << 20))
    buffer = FrameBuffer(20_000)
    tier.write(*buffer.fill(key_of(7), 20_000))
    assert main(["verify", str(directory), str(other)]) == 2
    assert "in use" in capsys.readouterr().err
    tier.close()
    corrupt(other, 7)
    assert main(["verify", str(directory), str(other), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["frames"], report["segments"], report["frames_corrupt"]) == (6, 2, 1)
    assert report["corrupt"][0]["segment"].startswith(str(other))


def test_another_directory_exits_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for bad in (tmp_path, tmp_path / "nothing"):
        assert main(["verify", str(bad)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("kvstore: ")
        assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "verify changes nothing"
