"""Whose directory this is: one lock file that says "ours", "this version" and "in use".

The directories of one tier name each other in their lock files (a digest of the path each): so an
empty one that was in use before is told from a new one. It is most likely the mount point of a
disk that is not mounted, and writing there would fill the disk below it.
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
"""What the lock file is counted as in the capacity."""
_FIRST_WORDS = "kvstore disk tier, version "
_OURS = f"{_FIRST_WORDS}{SEGMENT_VERSION}"
_OTHERS = frozenset({"lost+found"})
"""Names that do not make an empty directory somebody else's."""
_PEERS = "with "
MAX_PEERS = 64
"""Directories that a lock file names; those that left the configuration are among them."""
MEDIUM_FAULTS = frozenset(
    {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE, errno.EROFS, errno.ENOENT}
)
"""Errors of a disk that is gone or broken, not of whoever wrote the configuration."""


class DirectoryGone(ConfigError):
    """The directory's disk is not there or does not work; others of the same tier may."""


class DirectoryLock:
    """Holds a directory for this process until `release`."""

    def __init__(self, directory: str, *, create: bool = True) -> None:
        """Take the directory; make it first if `create`.

        Raises ConfigError when it is not ours, is in use, or is of another version; DirectoryGone
        when its disk fails.
        """
        self.directory = directory
        self.peers: frozenset[str] = frozenset()
        """Digests of directories that were used together with this one."""
        path = os.path.join(directory, LOCK_NAME)
        try:
            if create:
                os.makedirs(directory, exist_ok=True)
            if not os.path.exists(path):
                _check_empty(directory, create)
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            kind = DirectoryGone if error.errno in MEDIUM_FAULTS else ConfigError
            raise kind(
                f"the disk tier cannot use {directory!r}: {error.strerror}; "
                "give a directory this user can write to"
            ) from None
        try:
            self._claim()
        except BaseException:
            os.close(self._fd)
            raise

    def release(self) -> None:
        """Let another process have it."""
        os.close(self._fd)

    def name_peers(self, digests: Sequence[str]) -> None:
        """Write down which directories are used together with this one. Raises ConfigError."""
        known = self.peers | set(digests)
        if known == self.peers:
            return
        # Room for those in use now, then for as many of the others as there is.
        self.peers = frozenset([*digests, *(self.peers - set(digests))][:MAX_PEERS])
        self._write()

    def _claim(self) -> None:
        try:
            said = os.pread(self._fd, LOCK_BYTES, 0).decode(errors="replace")
        except OSError as error:
            raise DirectoryGone(
                f"the disk tier cannot read {self.directory!r}: {error.strerror}; check its disk"
            ) from None
        first, _, rest = said.partition("\n")
        user = rest.partition("\n")[0].strip()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{self.directory!r} is in use by another kvstore ({user or 'unknown'}); "
                "give each its own directory"
            ) from None
        if first and first != _OURS:
            if first.startswith(_FIRST_WORDS):
                version = first.removeprefix(_FIRST_WORDS)
                raise ConfigError(
                    f"{self.directory!r} is of disk tier version {version[:20]}; this kvstore "
                    f"knows {SEGMENT_VERSION}; give another directory"
                )
            raise ConfigError(
                f"{os.path.join(self.directory, LOCK_NAME)!r} is not a lock file of kvstore; "
                "give another directory"
            )
        lines = (line for line in rest.splitlines() if line.startswith(_PEERS))
        self.peers = frozenset(line.removeprefix(_PEERS) for line in lines)
        self._write()

    def _write(self) -> None:
        lines = [_OURS, f"process {os.getpid()}", *(_PEERS + digest for digest in self.peers)]
        words = "".join(f"{line}\n" for line in lines).encode()
        assert len(words) <= LOCK_BYTES, "a lock file larger than it is counted as"
        try:
            # Written before it is cut, so that a disk without room does not cost the version.
            os.pwrite(self._fd, words, 0)
            os.ftruncate(self._fd, len(words))
        except OSError as error:
            kind = DirectoryGone if error.errno in MEDIUM_FAULTS else ConfigError
            raise kind(
                f"the disk tier cannot write to {self.directory!r}: {error.strerror}; free some "
                "space there, or give another directory"
            ) from None


def digest_of(directory: str) -> str:
    """What a directory is called in the lock files of others."""
    return f"{checksum(memoryview(os.path.realpath(directory).encode())):016x}"


def is_claimed(directory: str) -> bool:
    """Whether a lock file lies in the directory. An empty one, made by hand, claims it too."""
    return os.path.exists(os.path.join(directory, LOCK_NAME))


def segment_paths(directory: str) -> list[str]:
    """The segment files in a directory, oldest first."""
    names = (name for name in os.listdir(directory) if _is_segment_name(name))
    return [os.path.join(directory, name) for name in sorted(names)]


def _is_segment_name(name: str) -> bool:
    stem = name.removesuffix(SUFFIX)
    return stem != name and len(stem) == 12 and stem.isascii() and stem.isdigit()


def _check_empty(directory: str, create: bool) -> None:
    others = [name for name in os.listdir(directory) if name not in _OTHERS]
    if others or not create:
        raise ConfigError(
            f"{directory!r} is no directory of kvstore's disk tier"
            + (f" (it holds {others[0]!r})" if others else "")
            + ("; give an empty one" if create else "; give the tier's directory")
        )
