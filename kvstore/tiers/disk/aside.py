"""Unreadable segment files that are set aside: renamed, so that an operator can look at them.

No block is read from them. They count towards the capacity and have limits: number, bytes and age.
On a full file system they are deleted before any segment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import Final

from kvstore.tiers.disk.files import SECTOR_BYTES, Files
from kvstore.tiers.disk.layout import SUFFIX

log = logging.getLogger(__name__)

ASIDE_SUFFIX: Final = f"{SUFFIX}.unreadable"
MAX_SET_ASIDE: Final = 8
"""Maximum number of files set aside in one directory."""


@dataclass(frozen=True)
class _File:
    """written_ms: last write, in milliseconds since 1970."""

    path: str
    nbytes: int
    written_ms: int


class SetAside:
    """The files set aside in one directory, oldest segment first. Thread-safe."""

    def __init__(self, files: Files, directory: str) -> None:
        """List the files of earlier processes. Raises OSError."""
        self._files = files
        self._lock = threading.Lock()
        self._entries: list[_File] = []
        for name in os.listdir(directory):
            stem = name.removesuffix(ASIDE_SUFFIX)
            if stem != name and len(stem) == 12 and stem.isascii() and stem.isdigit():
                self._append(os.path.join(directory, name))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all files, at least a sector each."""
        return sum(entry.nbytes for entry in self._entries)

    def last_sequence_no(self) -> int:
        """The highest sequence number of a segment set aside; 0: none."""
        return max((_sequence_no(entry) for entry in self._entries), default=0)

    def add(self, path: str) -> str:
        """Set a segment file aside; returns its new path. Raises OSError."""
        target = path.removesuffix(SUFFIX) + ASIDE_SUFFIX
        self._files.rename(path, target)
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.path != target]
            self._append(target)
        return target

    def trim(self, max_bytes: int) -> None:
        """Delete the oldest files above `MAX_SET_ASIDE` and above `max_bytes`."""
        while self._entries and (len(self._entries) > MAX_SET_ASIDE or self.nbytes > max_bytes):
            self.delete_oldest()

    def delete_written_before(self, time_ms: int) -> None:
        """Delete the files last written before a time, in milliseconds since 1970."""
        for entry in list(self._entries):
            if entry.written_ms <= time_ms:
                self._delete(entry)

    def delete_oldest(self) -> bool:
        """Delete the file with the lowest sequence number; returns False if there are no files."""
        entries = list(self._entries)
        if entries:
            self._delete(entries[0])
        return bool(entries)

    def delete_all(self) -> None:
        for entry in list(self._entries):
            self._delete(entry)

    def _delete(self, entry: _File) -> None:
        log.warning("deleting %s, an unreadable segment set aside earlier", entry.path)
        try:
            self._files.unlink(entry.path)
        except OSError as error:
            log.error("%s: cannot delete the file: %s", entry.path, error)
        with self._lock, contextlib.suppress(ValueError):
            self._entries.remove(entry)

    def _append(self, path: str) -> None:
        status = os.stat(path)
        nbytes = max(SECTOR_BYTES, status.st_size)
        self._entries.append(_File(path, nbytes, int(status.st_mtime * 1000)))
        self._entries.sort(key=_sequence_no)


def _sequence_no(entry: _File) -> int:
    return int(os.path.basename(entry.path).removesuffix(ASIDE_SUFFIX))
