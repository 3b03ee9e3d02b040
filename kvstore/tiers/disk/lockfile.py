"""The lock file of a directory: it records that the directory is a tier's, its version, and use.

The lock file of each directory also lists the other directories of the tier, as digests of their
paths. An empty directory in that list was in use before, so it is not new: most likely it is the
mount point of a disk that is not mounted. Writing to it would fill the disk below.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

from kvstore.blocks.frame import checksum
from kvstore.errors import ConfigError
from kvstore.tiers.disk.layout import SEGMENT_VERSION, SUFFIX

LOCK_NAME = "kvstore.lock"
LOCK_BYTES = 4096
"""Size of the lock file in the accounting of the capacity."""
_FIRST_LINE_PREFIX = "kvstore disk tier, version "
_FIRST_LINE = f"{_FIRST_LINE_PREFIX}{SEGMENT_VERSION}"
_IGNORED_NAMES = frozenset({"lost+found"})
"""Names that an unused directory may contain."""
_PEER_PREFIX = "with "
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
        path = os.path.join(directory, LOCK_NAME)
        try:
            if create:
                os.makedirs(directory, exist_ok=True)
            if not os.path.exists(path):
                _check_empty(directory, create)
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            kind = DirectoryUnavailable if error.errno in DISK_ERRNOS else ConfigError
            raise kind(
                f"the disk tier cannot use {directory!r}: {error.strerror}; "
                "use a directory that this user can write to"
            ) from None
        try:
            self._lock()
        except BaseException:
            os.close(self._fd)
            raise

    def release(self) -> None:
        """Unlock the directory."""
        os.close(self._fd)

    def record_peers(self, digests: Sequence[str]) -> None:
        """Record the other directories of the tier in the lock file. Raises ConfigError."""
        known = self.peers | set(digests)
        if known == self.peers:
            return
        # The configured directories come first; the others fill the remaining entries.
        self.peers = frozenset([*digests, *(self.peers - set(digests))][:MAX_PEERS])
        self._write()

    def _lock(self) -> None:
        try:
            content = os.pread(self._fd, LOCK_BYTES, 0).decode(errors="replace")
        except OSError as error:
            raise DirectoryUnavailable(
                f"the disk tier cannot read {self.directory!r}: {error.strerror}; check the disk"
            ) from None
        first, _, rest = content.partition("\n")
        user = rest.partition("\n")[0].strip()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{self.directory!r} is in use by another kvstore ({user or 'unknown'}); "
                "use a separate directory for each"
            ) from None
        if first and first != _FIRST_LINE:
            if first.startswith(_FIRST_LINE_PREFIX):
                version = first.removeprefix(_FIRST_LINE_PREFIX)
                raise ConfigError(
                    f"{self.directory!r} has disk tier version {version[:20]}; this kvstore "
                    f"supports {SEGMENT_VERSION}; use another directory"
                )
            raise ConfigError(
                f"{os.path.join(self.directory, LOCK_NAME)!r} is not a lock file of kvstore; "
                "use another directory"
            )
        lines = (line for line in rest.splitlines() if line.startswith(_PEER_PREFIX))
        self.peers = frozenset(line.removeprefix(_PEER_PREFIX) for line in lines)
        self._write()

    def _write(self) -> None:
        lines = [
            _FIRST_LINE,
            f"process {os.getpid()}",
            *(_PEER_PREFIX + digest for digest in self.peers),
        ]
        content = "".join(f"{line}\n" for line in lines).encode()
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


def sequence_no_of(path: str) -> int:
    """The sequence number in the name of a segment file."""
    return int(os.path.basename(path).removesuffix(SUFFIX))


def _is_segment_name(name: str) -> bool:
    stem = name.removesuffix(SUFFIX)
    return stem != name and len(stem) == 12 and stem.isascii() and stem.isdigit()


def _check_empty(directory: str, create: bool) -> None:
    others = [name for name in os.listdir(directory) if name not in _IGNORED_NAMES]
    if others or not create:
        raise ConfigError(
            f"{directory!r} is not a directory of kvstore's disk tier"
            + (f" (it contains {others[0]!r})" if others else "")
            + ("; use an empty directory" if create else "; give the tier's directory")
        )
