"""The system calls of the disk tier. A transfer either completes or raises.

They are methods of one object, so that a test can replace it with one that fails like a disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading

from kvstore.blocks.frame import HEADER_BYTES, aligned_buffer

log = logging.getLogger(__name__)

SECTOR_BYTES = HEADER_BYTES
"""Alignment of offsets and lengths in a segment file. A frame's header takes one sector."""

MAX_SHORT_WRITES = 8
"""Consecutive calls that wrote less than a sector, after which the write fails."""


class Files:
    """Reads and writes whole sectors at sector offsets, with O_DIRECT if the file system allows it.

    If the file system rejects O_DIRECT (EINVAL, at open or at an I/O), `direct_io` becomes False
    permanently. A warning is logged once.
    """

    def __init__(self, *, direct_io: bool = True) -> None:
        self.direct_io = direct_io

    def create(self, path: str, nbytes: int) -> int:
        """Create a file with all its bytes allocated; returns its descriptor. Raises OSError, and
        then leaves no file."""
        fd = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            self._allocate(fd, nbytes)
        except BaseException:
            os.close(fd)
            self.unlink(path)
            raise
        return fd

    def open(self, path: str, *, writable: bool = True) -> int:
        """Open an existing file; returns its descriptor."""
        return self._open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
        """Fill `views` from `offset`; returns the bytes read, fewer only at the end of the file.

        A partial last sector does not count.
        """
        wanted = sum(map(len, views))
        done = 0
        while done < wanted:
            got = self._call(os.preadv, fd, _remaining(views, done), offset + done)
            after = _aligned_progress(done, got, wanted)
            if after == done:
                break
            done = after
        return done

    def write_at(self, fd: int, views: list[memoryview], offset: int) -> None:
        """Write all of `views` at `offset`. Raises OSError."""
        wanted = sum(map(len, views))
        done = tries = 0
        while done < wanted:
            put = self._call(os.pwritev, fd, _remaining(views, done), offset + done)
            after = _aligned_progress(done, put, wanted)
            tries = tries + 1 if after == done else 0
            if tries >= MAX_SHORT_WRITES:
                raise OSError(errno.EIO, f"short write: {put} of {wanted - done} bytes")
            done = after

    def sync(self, fd: int) -> None:
        """Wait until all data written to `fd` is on stable storage."""
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable. Errors of the fsync are ignored, because some
        file systems do not support it."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: str) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def is_same(self, fd: int, path: str) -> bool:
        """Whether `path` is the file of this descriptor, and neither missing nor another file."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(path))
        except OSError:
            return False

    def rename(self, path: str, to: str) -> None:
        """Rename a file within its directory."""
        os.rename(path, to)

    def close(self, fd: int) -> None:
        os.close(fd)

    def _allocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def _open(self, path: str, flags: int) -> int:
        if self.direct_io:
            try:
                return self._os_open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._disable_direct_io(path)
                # Some file systems create the file before they reject the flag.
                flags &= ~os.O_EXCL
        return self._os_open(path, flags)

    def _os_open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def _call(self, call: object, fd: int, views: list[memoryview], offset: int) -> int:
        """One preadv or pwritev, repeated without O_DIRECT if the file system rejects that."""
        assert callable(call)
        try:
            return int(call(fd, views, offset))
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            if self.direct_io:
                self._disable_direct_io(f"descriptor {fd}")
            return int(call(fd, views, offset))

    def _disable_direct_io(self, what: str) -> None:
        self.direct_io = False
        log.warning("disk tier: no direct I/O, using the page cache: %s rejects O_DIRECT", what)


class SectorBuffer(threading.local):
    """An aligned buffer of one sector for each thread, in which headers are modified."""

    def __init__(self) -> None:
        self.sector = aligned_buffer(SECTOR_BYTES)


def _aligned_progress(done: int, moved: int, wanted: int) -> int:
    """Bytes done after a call, rounded down to a sector (for direct I/O) unless all are done."""
    after = done + moved
    return after if after >= wanted else after - after % SECTOR_BYTES


def _remaining(views: list[memoryview], done: int) -> list[memoryview]:
    """`views` without their first `done` bytes."""
    if done == 0:
        return views
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest
