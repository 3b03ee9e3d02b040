"""The system calls of the disk tier, whole or not at all.

One object, so that a test can hand the tier one that fails the way disks do.
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

PAGE = HEADER_BYTES

MAX_SHORT_TRIES = 8
"""Calls in a row that may write less than a page before the write counts as failed."""


class Files:
    """Reads and writes whole pages at page offsets; O_DIRECT where the file system allows it.

    `direct` becomes False for good, once and logged, when the file system refuses it (EINVAL, at
    open or at an I/O).
    """

    def __init__(self, *, direct: bool = True) -> None:
        self.direct = direct

    def create(self, path: str, nbytes: int) -> int:
        """A new file with all its bytes allocated, or no file; its descriptor."""
        fd = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            self._allocate(fd, nbytes)
        except BaseException:
            os.close(fd)
            self.unlink(path)
            raise
        return fd

    def open(self, path: str, *, writable: bool = True) -> int:
        """The descriptor of an existing file."""
        return self._open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
        """Fill `views` from `offset` on; bytes read, fewer only where the file ends.

        A last part of a page counts as not there.
        """
        wanted = sum(map(len, views))
        done = 0
        while done < wanted:
            got = self._call(os.preadv, fd, _rest(views, done), offset + done)
            after = _progress(done, got, wanted)
            if after == done:
                break
            done = after
        return done

    def write_at(self, fd: int, views: list[memoryview], offset: int) -> None:
        """Write all of `views` at `offset`, or raise OSError."""
        wanted = sum(map(len, views))
        done = tries = 0
        while done < wanted:
            put = self._call(os.pwritev, fd, _rest(views, done), offset + done)
            after = _progress(done, put, wanted)
            tries = tries + 1 if after == done else 0
            if tries >= MAX_SHORT_TRIES:
                raise OSError(errno.EIO, f"only {put} of {wanted - done} bytes are written")
            done = after

    def sync(self, fd: int) -> None:
        """Return when everything written to `fd` is on stable storage."""
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        """Make names in a directory durable; file systems that cannot are let be."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: str) -> None:
        """Remove a file; one that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def rename(self, path: str, to: str) -> None:
        """Give a file another name in the same directory."""
        os.rename(path, to)

    def close(self, fd: int) -> None:
        os.close(fd)

    def _allocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def _open(self, path: str, flags: int) -> int:
        if self.direct:
            try:
                return self._os_open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._give_up_direct(path)
                # Some file systems make the file before they refuse the flag.
                flags &= ~os.O_EXCL
        return self._os_open(path, flags)

    def _os_open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def _call(self, call: object, fd: int, views: list[memoryview], offset: int) -> int:
        """One preadv or pwritev, tried again without O_DIRECT when it is refused."""
        assert callable(call)
        try:
            return int(call(fd, views, offset))
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            if self.direct:
                self._give_up_direct(f"descriptor {fd}")
            return int(call(fd, views, offset))

    def _give_up_direct(self, what: str) -> None:
        self.direct = False
        log.warning("direct I/O is refused (%s): the disk tier goes on buffered", what)


class Pages(threading.local):
    """A page of scratch for each thread, aligned: headers are changed in it on their way out."""

    def __init__(self) -> None:
        self.page = aligned_buffer(PAGE)


def _progress(done: int, moved: int, wanted: int) -> int:
    """Where to go on after a call: at a page, as direct I/O asks, unless all is done."""
    after = done + moved
    return after if after >= wanted else after - after % PAGE


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `views` after their first `done` bytes."""
    if done == 0:
        return views
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest
