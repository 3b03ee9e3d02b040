"""The lock file of a directory: it records that the directory is a tier's, its version, and use.

The lock file of each directory also lists the other directories of the tier, as digests of their
paths. An empty directory in that list was in use before, so it is not new: most likely it is the
mount point of a disk that is not mounted. Writing to it would fill the disk below.

The lines of a lock file are the version, the process, the other directories ("with DIGEST"), the
clocks ("time AGE WALL", in milliseconds, see `clock`) and the checksum of all bytes before it ("sum
XXH3_64"). Earlier releases write only the first three, and ignore the others. A lock file that is
lost or corrupt is rebuilt if the directory has a valid segment. The directory itself is locked too,
so the file may be lost while another process uses the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Sequence

from kvstore.blocks.frame import checksum
from kvstore.errors import ConfigError
from kvstore.forks import on_fork
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.layout import (
    SEGMENT_VERSION,
    SUFFIX,
    SegmentInvalid,
    read_identity,
    sequence_no_of,
)

log = logging.getLogger(__name__)

LOCK_NAME = "kvstore.lock"
LOCK_BYTES = 4096
"""Size of the lock file in the accounting of the capacity."""
_FIRST_LINE_PREFIX = "kvstore disk tier, version "
_FIRST_LINE = f"{_FIRST_LINE_PREFIX}{SEGMENT_VERSION}"
_IGNORED_NAMES = frozenset({"lost+found"})
"""Names that an unused directory may contain."""
_PEER_PREFIX = "with "
_PEER_LINE = re.compile(rf"{_PEER_PREFIX}([0-9a-f]{{16}})")
_TIME_LINE = re.compile(r"time (\d{1,15}) (\d{1,15})")
_SUM_LINE = re.compile(rb"(.*\n)sum ([0-9a-f]{16})\n", re.DOTALL)
MAX_PEERS = 64
"""Maximum number of peers in a lock file, including directories no longer configured."""
DISK_ERRNOS = frozenset(
    {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE, errno.EROFS, errno.ENOENT}
)
"""Errors of a missing or broken disk, as opposed to errors in the configuration."""


class DirectoryUnavailable(ConfigError):
    """The disk of this directory is missing or broken. Other directories of the tier may work."""


class DirectoryLock:
    """Exclusive use of a directory by this process, until `release`."""

    def __init__(self, directory: str, *, create: bool = True) -> None:
        """Lock the directory. create: create it if it does not exist.

        Raises ConfigError: the directory contains other files, is in use, or has another version.
        Raises DirectoryUnavailable: its disk fails.
        """
        self.directory = directory
        self.peers: frozenset[str] = frozenset()
        """Digests of the other directories of the tier, now or in the past."""
        self.time: tuple[int, int] | None = None
        """The last recorded reading of the age clock; None: none was recorded."""
        path = os.path.join(directory, LOCK_NAME)
        with contextlib.ExitStack() as undo:
            try:
                if create:
                    os.makedirs(directory, exist_ok=True)
                self._directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                undo.callback(os.close, self._directory_fd)
                self._lock_directory(path)
                rebuild = False
                if not os.path.exists(path):
                    rebuild = _check_unused(directory, create)
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create or rebuild else 0)
                self._fd = os.open(path, flags, 0o600)
            except OSError as error:
                kind = DirectoryUnavailable if error.errno in DISK_ERRNOS else ConfigError
                raise kind(
                    f"the disk tier cannot use {directory!r}: {error.strerror}; "
                    "use a directory that this user can write to"
                ) from None
            undo.callback(os.close, self._fd)
            self._lock(path)
            undo.pop_all()
        # A forked child must not keep the directory locked when this process has ended.
        on_fork(self.release)

    def release(self) -> None:
        """Unlock the directory. In a forked child: close the child's descriptors only."""
        fds, self._fd, self._directory_fd = (self._fd, self._directory_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def is_in_place(self, files: Files) -> bool:
        """Whether the directory at the path is still the one that was locked."""
        return files.is_same(self._directory_fd, self.directory)

    def record_peers(self, digests: Sequence[str]) -> None:
        """Record the other directories of the tier in the lock file. Raises ConfigError."""
        known = self.peers | set(digests)
        if known == self.peers:
            return
        # The configured directories come first; the others fill the remaining entries.
        self.peers = frozenset([*digests, *(self.peers - set(digests))][:MAX_PEERS])
        self._write()

    def record_time(self, reading: tuple[int, int]) -> None:
        """Record a reading of the age clock in the lock file. Raises ConfigError."""
        self.time = reading
        self._write()

    def _lock_directory(self, path: str) -> None:
        """Lock the directory itself. Some file systems cannot, and then only the file is locked."""
        try:
            fcntl.flock(self._directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            content = b""
            with contextlib.suppress(OSError), open(path, "rb") as file:
                content = file.read(LOCK_BYTES)
            raise self._in_use(content) from None
        except OSError as error:
            log.info("%s: the directory cannot be locked: %s", self.directory, error)

    def _lock(self, path: str) -> None:
        try:
            content = os.pread(self._fd, LOCK_BYTES, 0)
        except OSError as error:
            raise DirectoryUnavailable(
                f"the disk tier cannot read {self.directory!r}: {error.strerror}; check the disk"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._in_use(content) from None
        first, *lines = content.decode(errors="replace").split("\n")
        summed = _SUM_LINE.match(content)
        intact = summed is not None and int(summed[2], 16) == checksum(summed[1])
        if first and first != _FIRST_LINE:
            if intact or not has_valid_segment(self.directory):
                raise self._wrong_version(path, first)
            log.warning("%s was corrupt; rebuilt, because there are valid segments", path)
        matches = [match for line in lines if (match := _PEER_LINE.fullmatch(line))]
        self.peers = frozenset([match[1] for match in matches][:MAX_PEERS])
        times = [match for line in lines if (match := _TIME_LINE.fullmatch(line))]
        if intact and times:
            self.time = int(times[0][1]), int(times[0][2])
        self._write()

    def _in_use(self, content: bytes) -> ConfigError:
        """content: of the lock file."""
        user = content.decode(errors="replace").partition("\n")[2].partition("\n")[0].strip()
        return ConfigError(
            f"{self.directory!r} is in use by another kvstore ({user or 'unknown'}); "
            "use a separate directory for each"
        )

    def _wrong_version(self, path: str, first_line: str) -> ConfigError:
        if first_line.startswith(_FIRST_LINE_PREFIX):
            version = first_line.removeprefix(_FIRST_LINE_PREFIX)
            return ConfigError(
                f"{self.directory!r} has disk tier version {version[:20]}; this kvstore "
                f"supports {SEGMENT_VERSION}; use another directory"
            )
        return ConfigError(f"{path!r} is not a lock file of kvstore; use another directory")

    def _write(self) -> None:
        lines = [_FIRST_LINE, f"process {os.getpid()}"]
        lines += (_PEER_PREFIX + digest for digest in self.peers)
        if self.time is not None:
            lines.append("time {} {}".format(*self.time))
        content = lock_file_content(lines)
        assert len(content) <= LOCK_BYTES, "lock file larger than LOCK_BYTES"
        try:
            # Write before truncating: on a full disk the version line then stays intact.
            os.pwrite(self._fd, content, 0)
            os.ftruncate(self._fd, len(content))
        except OSError as error:
            kind = DirectoryUnavailable if error.errno in DISK_ERRNOS else ConfigError
            raise kind(
                f"the disk tier cannot write to {self.directory!r}: {error.strerror}; free some "
                "space there, or use another directory"
            ) from None


def lock_file_content(lines: Sequence[str]) -> bytes:
    """The bytes of a lock file: the lines, and a line with their checksum."""
    content = "".join(f"{line}\n" for line in lines).encode()
    return content + f"sum {checksum(content):016x}\n".encode()


def path_digest(directory: str) -> str:
    """The digest of a directory's path, as lock files record it."""
    return f"{checksum(memoryview(os.path.realpath(directory).encode())):016x}"


def has_lock_file(directory: str) -> bool:
    """Whether the directory contains a lock file. An empty one, created by hand, counts too."""
    return os.path.exists(os.path.join(directory, LOCK_NAME))


def segment_paths(directory: str) -> list[str]:
    """Paths of the segment files in a directory, oldest first."""
    names = (name for name in os.listdir(directory) if _is_segment_name(name))
    return [os.path.join(directory, name) for name in sorted(names)]


def _is_segment_name(name: str) -> bool:
    stem = name.removesuffix(SUFFIX)
    return stem != name and len(stem) == 12 and stem.isascii() and stem.isdigit()


def has_valid_segment(directory: str) -> bool:
    """Whether the directory contains a segment file whose identity can be read. Raises OSError."""
    files = Files(direct_io=False)
    for path in segment_paths(directory):
        with contextlib.suppress(SegmentInvalid, OSError):
            fd = files.open(path, writable=False)
            try:
                read_identity(files, fd, sequence_no_of(path))
                return True
            finally:
                files.close(fd)
    return False


def _check_unused(directory: str, create: bool) -> bool:
    """Check a directory without a lock file; returns whether it has lost the lock file.

    Raises ConfigError: it contains other files. Raises OSError.
    """
    others = [name for name in os.listdir(directory) if name not in _IGNORED_NAMES]
    if create and not others:
        return False
    if has_valid_segment(directory):
        log.warning("%s has no lock file; rebuilt, because there are valid segments", directory)
        return True
    raise ConfigError(
        f"{directory!r} is not a directory of kvstore's disk tier"
        + (f" (it contains {others[0]!r})" if others else "")
        + ("; use an empty directory" if create else "; give the tier's directory")
    )
