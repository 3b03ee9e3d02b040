"""Remembers the digests of files, so that the next process need not read gigabytes again.

A record names a file by device, inode, size, modification time and change time. The change time is
the one that no process can set: any write, also one that restores size and modification time, moves
it. A record that is absent, corrupt, foreign or unsure means that the file is read again.

A record is sure where the kernel of this machine moves the change time at every write (`SURE`).
Elsewhere it counts for the processes of one engine's start only: ranks do not read the same files
again, and the next start does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from kvstore.connectors.common.engine_start import boot_clock_id, engine_start_s

log = logging.getLogger(__name__)

SURE: Final = {0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs"}
"""Types of file system (statfs) on which every write moves a file's change time.

Not network file systems: their servers' clocks are others. Not overlay, FUSE, squashfs, erofs: the
times come from below, or from the image. Not tmpfs: a write through an old mapping moves no time.
"""
SETTLED_S: Final = 2.0
"""Minimum age of a file's change time when it is read for a record. The change time is as coarse as
one second (ext4 with small inodes): a later write within it would not be seen."""
FORMAT: Final = 1
RECORD_BYTES_MAX: Final = 4096
RECORDS_MAX: Final = 4096
"""Maximum number of records. The oldest are deleted."""
LOCKS: Final = 16
LOCK_WAIT_MAX_S: Final = 600.0
"""Maximum time for which a process waits until another has read the same files. After it, the
process reads them itself."""
LOCK_POLL_S: Final = 0.05


@dataclass(frozen=True)
class FileState:
    """Attributes that differ after any change of a file's bytes, and between files."""

    file_system: int
    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path) -> FileState:
        """Raises OSError: there is no such file."""
        status = file.stat()
        return cls(
            os.statvfs(file).f_fsid,
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


def _settled_state(file: Path) -> tuple[FileState, bool]:
    settled = True
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # After it, also a write through a mapping that exists already moves the change time.
        os.fsync(descriptor)
    except OSError:
        settled = False
    finally:
        os.close(descriptor)
    state = FileState.of(file)
    return state, settled and state.changed_ns / 1e9 < time.time() - SETTLED_S


class DigestRecords:
    """Records in one folder, which several processes use at once. folder: None keeps none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._clock_id = boot_clock_id()
        self._engine_start_s = engine_start_s()

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Let one process at a time read the files of this name; it records their digests for the
        others. Without effect where that is not possible."""
        descriptor = self._open_lock(name)
        if descriptor is None:
            yield
            return
        try:
            _wait_for_lock(descriptor, name)
            yield
        finally:
            # Explicitly: a process forked meanwhile has the descriptor too.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def find(self, file: Path, state: FileState, algorithm: str) -> str | None:
        """The recorded digest of a file in this state. None: it must be read."""
        record = self._read(self._path(state, algorithm)) if self._folder is not None else None
        if record is None or record.get("state") != asdict(state):
            return None
        sure = record.get("settled") is True and _file_system_type(file) in SURE
        if not (sure or self._is_of_this_start(record)):
            return None
        digest = record.get("digest")
        return digest if isinstance(digest, str) else None

    def state_before_read(self, file: Path) -> tuple[FileState, bool]:
        """The state of a file that is about to be read, and whether it is settled: any later write
        will change the state.

        Raises OSError: there is no such file.
        """
        return (FileState.of(file), False) if self._folder is None else _settled_state(file)

    def add(
        self, state: FileState, algorithm: str, digest: str, *, settled: bool, began_s: float
    ) -> None:
        """Record the digest of a file. settled: by `state_before_read`. began_s: start of the
        read, by `boot_clock_s`."""
        if self._folder is None:
            return
        record = {
            "format": FORMAT,
            "state": asdict(state),
            "settled": settled,
            "digest": digest,
            "clock": self._clock_id,
            "began_s": began_s,
        }
        try:
            self._write(self._path(state, algorithm), json.dumps(record))
            self._prune()
        except OSError as error:
            log.warning("kvstore: weights are read again at the next start: %s", error)
            self._folder = None

    def _is_of_this_start(self, record: dict[str, Any]) -> bool:
        """True if the read began after this engine's process did. Then it is as good as a read by
        this process, which is also later than its start."""
        start_s, began_s = self._engine_start_s, record.get("began_s")
        same_clock = bool(self._clock_id) and record.get("clock") == self._clock_id
        return (
            same_clock and start_s is not None and isinstance(began_s, float) and began_s > start_s
        )

    def _path(self, state: FileState, algorithm: str) -> Path:
        assert self._folder is not None, "no folder, no paths"
        name = f"{algorithm}:{state.file_system}:{state.device}:{state.inode}"
        return self._folder / f"{xxhash.xxh3_64_hexdigest(name.encode())}.json"

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            with open(path, "rb", opener=_open_no_link) as opened:
                status = os.fstat(opened.fileno())
                content = opened.read(RECORD_BYTES_MAX)
        except OSError:
            return None
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return None  # another user's, or writable by others
        text, _, checksum = content.partition(b"\n")
        if checksum.decode(errors="replace") != xxhash.xxh3_64_hexdigest(text):
            return None
        record = json.loads(text)
        known = isinstance(record, dict) and record.get("format") == FORMAT
        return record if known else None

    def _write(self, path: Path, text: str) -> None:
        """Replace a record at once: a reader sees the old one or the new one."""
        assert self._folder is not None, "no folder, no records"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self._folder)  # readable by this user only
        try:
            with open(descriptor, "w") as opened:
                opened.write(f"{text}\n{xxhash.xxh3_64_hexdigest(text.encode())}")
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _prune(self) -> None:
        """Delete the oldest records above the limit, and what killed processes left."""
        assert self._folder is not None, "no folder, no records"
        files = [each for each in self._folder.iterdir() if not each.name.startswith("lock-")]
        if len(files) <= RECORDS_MAX:
            return
        with contextlib.suppress(FileNotFoundError):  # another process prunes too
            for file in sorted(files, key=lambda each: each.stat().st_mtime)[: len(files) // 4]:
                file.unlink()

    def _open_lock(self, name: str) -> int | None:
        if self._folder is None:
            return None
        number = xxhash.xxh3_64_intdigest(name.encode()) % LOCKS
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._folder / f"lock-{number}"
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.warning("kvstore: weights are read again at every start: %s", error)
            self._folder = None
            return None


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _wait_for_lock(descriptor: int, name: str) -> None:
    end_s = time.monotonic() + LOCK_WAIT_MAX_S
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not said:
                log.info("kvstore: another process reads the weights in %s", name)
                said = True
        except OSError:
            return  # this file system has no locks
        if time.monotonic() > end_s:
            return
        time.sleep(LOCK_POLL_S)


_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _file_system_type(file: Path) -> int:
    """The type of the file's file system. 0: unknown."""
    status = (ctypes.c_long * 64)()  # struct statfs begins with the type, and is shorter
    if _LIBC.statfs(os.fsencode(file), status) != 0:
        return 0
    return int(status[0]) & 0xFFFFFFFF
