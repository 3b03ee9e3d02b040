"""Whose directory this is: one lock file that says "ours", "this version" and "in use"."""

from __future__ import annotations

import fcntl
import os

from kvstore.errors import ConfigError
from kvstore.tiers.disk.segment import SEGMENT_VERSION, SUFFIX

LOCK_NAME = "kvstore.lock"
LOCK_BYTES = 4096
"""What the lock file is counted as in the capacity."""
_FIRST_WORDS = "kvstore disk tier, version "
_OTHERS = frozenset({"lost+found"})
"""Names that do not make an empty directory somebody else's."""


class DirectoryLock:
    """Holds a directory for this process until `release`."""

    def __init__(self, directory: str, *, create: bool = True) -> None:
        """Take the directory; make it first if `create`.

        Raises ConfigError when it is not ours, is in use, or is of another version.
        """
        self.directory = directory
        path = os.path.join(directory, LOCK_NAME)
        try:
            if create:
                os.makedirs(directory, exist_ok=True)
            if not os.path.exists(path):
                _check_empty(directory, create)
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(
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

    def _claim(self) -> None:
        said = os.pread(self._fd, LOCK_BYTES, 0).decode(errors="replace")
        first, _, second = said.partition("\n")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{self.directory!r} is in use by another kvstore ({second.strip() or 'unknown'}); "
                "give each its own directory"
            ) from None
        ours = f"{_FIRST_WORDS}{SEGMENT_VERSION}"
        if first and first != ours:
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
        words = f"{ours}\nprocess {os.getpid()}\n".encode()
        try:
            # Written before it is cut, so that a disk without room does not cost the version.
            os.pwrite(self._fd, words, 0)
            os.ftruncate(self._fd, len(words))
        except OSError as error:
            raise ConfigError(
                f"the disk tier cannot write to {self.directory!r}: {error.strerror}; free some "
                "space there, or give another directory"
            ) from None


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
