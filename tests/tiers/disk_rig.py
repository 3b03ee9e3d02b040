"""Shared code of the disk tier's tests: opens and fills a tier, reads and corrupts its files."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.blocks.key import Key
from kvstore.errors import FrameInvalid
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import disk
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import Files

SECTOR_BYTES = 4096
MIB = 1 << 20


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.kvseg"))


def file_bytes(directory: Path) -> int:
    return sum(max(4096, path.stat().st_size) for path in directory.iterdir())


def open_disk(
    directory: Path,
    files: Files | None = None,
    clock: Callable[[], float] = time.time,
    **changed: Any,
) -> Tier:
    values: dict[str, Any] = {"capacity": 8 * MIB, **changed}
    return disk.open(disk.Config(directory=str(directory), **values), files=files, clock=clock)


def left_by_a_kill(directory: Path, copy: Path) -> Path:
    """Copy the files of a tier that was not closed, as a kill leaves them."""
    shutil.copytree(directory, copy)
    return copy


def put(tier: Tier, buffer: FrameBuffer, numbers: range, nbytes: int = 20_000) -> list[Key]:
    keys = [key_of(number) for number in numbers]
    for key in keys:
        tier.write(*buffer.fill(key, nbytes))
    return keys


def readable_keys(
    tier: Tier, buffer: FrameBuffer, keys: list[Key], *, max_corrupt: int = 0
) -> list[Key]:
    """The keys that `contains` lists, each read and compared; at most `max_corrupt` are corrupt."""
    right = []
    wrong = 0
    for key, has in zip(keys, tier.contains(keys), strict=True):
        length = tier.read(key, buffer.header, buffer.payload)
        if not has:
            assert length == 0
            continue
        try:
            assert length, "contains lists a block that read does not find"
            assert buffer.version_of(key, length) == 0
            right.append(key)
        except FrameInvalid:
            wrong += 1
    assert wrong <= max_corrupt
    return right


def flip(path: Path, at: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


class FaultyFiles(Files):
    """Raises `error` at the calls in `failing`; may transfer less than requested.

    only: a directory whose files fail; the others go well.
    """

    def __init__(self, only: Path | None = None) -> None:
        super().__init__()
        self.failing: dict[str, int] = {}
        self.room_bytes = 1 << 60
        self.full_errno = errno.ENOSPC
        self.short = 0
        self.only = str(only or "")

    def _fail(self, call: str, where: int | str) -> None:
        path = where if isinstance(where, str) else os.readlink(f"/proc/self/fd/{where}")
        if call in self.failing and path.startswith(self.only):
            raise OSError(self.failing[call], os.strerror(self.failing[call]))

    def create(self, path: str, nbytes: int) -> int:
        self._fail("create", path)
        return super().create(path, nbytes)

    def open(self, path: str, *, writable: bool = True) -> int:
        self._fail("open", path)
        return super().open(path, writable=writable)

    def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
        self._fail("read", fd)
        return super().read_at(fd, views, offset)

    def write_at(self, fd: int, views: list[memoryview], offset: int) -> None:
        self._fail("write", fd)
        super().write_at(fd, views, offset)

    def sync(self, fd: int) -> None:
        self._fail("sync", fd)
        super().sync(fd)

    def _allocate(self, fd: int, nbytes: int) -> None:
        if nbytes > self.room_bytes:
            raise OSError(self.full_errno, "no space")
        super()._allocate(fd, nbytes)
        self.room_bytes -= nbytes

    def unlink(self, path: str) -> None:
        if os.path.exists(path) and os.path.getsize(path):
            self.room_bytes += os.path.getsize(path)
        super().unlink(path)
