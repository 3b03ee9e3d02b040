"""Digests of all bytes of files: read once by several threads, then remembered (`digest_records`).

XXH3 identifies files: it is faster than memory. Parts of a file are hashed in parallel, and their
digests are hashed. SHA256 and GIT_SHA1 are the names that the Hugging Face hub gives to files. They
take the bytes in order, so that only several files are hashed in parallel.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from kvstore.config.settings import cache_folder
from kvstore.connectors.common.digest_records import DigestRecords, FileState
from kvstore.connectors.common.engine_start import boot_clock_s

log = logging.getLogger(__name__)

XXH3: Final = "xxh3-256MiB"
SHA256: Final = "sha256"
GIT_SHA1: Final = "git-sha1"

THREADS_MAX: Final = 16
READ_BYTES: Final = 4 << 20
"""Size of the buffer of each thread."""
PART_BYTES: Final = 256 << 20
"""Size of the parts of a file that are hashed in parallel. XXH3 digests depend on it."""
RECORDED_MIN_BYTES: Final = 4 << 20
"""Files of less than this in all are always read: that takes as long as a record."""
RECORDS_FOLDER: Final = "weights"


class FileChanged(ValueError):
    """A file was changed while it was read."""


@dataclass(frozen=True)
class Digests:
    """Digests of files in their order, in hex. files_read, bytes_read: those not remembered."""

    digests: list[str]
    files_read: int = 0
    bytes_read: int = 0
    seconds: float = 0.0


def digest_files(files: Sequence[Path], algorithm: str = XXH3) -> Digests:
    """Digest all bytes of these files, or remember their digests.

    Several processes may call it at once: one reads, the others wait for its records.

    Raises:
        FileChanged: a file was changed or replaced meanwhile.
        OSError: a file cannot be read.
    """
    states = [FileState.of(file) for file in files]
    if sum(state.nbytes for state in states) < RECORDED_MIN_BYTES:
        return _read(files, algorithm, DigestRecords(None))
    folder = cache_folder()
    records = DigestRecords(folder / RECORDS_FOLDER if folder is not None else None)
    with records.lock(str(files[0].resolve().parent)):
        return _read(files, algorithm, records)


def _read(files: Sequence[Path], algorithm: str, records: DigestRecords) -> Digests:
    found = [records.find(file, FileState.of(file), algorithm) for file in files]
    absent = [file for file, digest in zip(files, found, strict=True) if digest is None]
    if not absent:
        return Digests([digest for digest in found if digest is not None])
    began_s = boot_clock_s()
    before = [records.state_before_read(file) for file in absent]
    states = [state for state, _ in before]
    read = _hash_files(absent, states, algorithm)
    for file, state in zip(absent, states, strict=True):
        if FileState.of(file) != state:
            raise FileChanged(f"{file} was changed while it was read")
    for (state, settled), digest in zip(before, read, strict=True):
        records.add(state, algorithm, digest, settled=settled, began_s=began_s)
    by_file = dict(zip(absent, read, strict=True))
    digests = [
        by_file[file] if old is None else old for file, old in zip(files, found, strict=True)
    ]
    nbytes = sum(state.nbytes for state in states)
    seconds = boot_clock_s() - began_s
    log.info("kvstore: %d weight files (%d bytes) read in %.1f s", len(absent), nbytes, seconds)
    return Digests(digests, len(absent), nbytes, seconds)


@dataclass(frozen=True)
class _Part:
    """Bytes of a file that one thread hashes. state: the file's, if nobody changes it."""

    file: Path
    state: FileState
    start: int
    nbytes: int


def _hash_files(files: Sequence[Path], states: Sequence[FileState], algorithm: str) -> list[str]:
    """Digests of all bytes of files that have these states.

    Raises:
        FileChanged: a file has another state now.
        OSError: a file cannot be read.
    """
    parts: list[list[_Part]] = []
    for file, state in zip(files, states, strict=True):
        step = PART_BYTES if algorithm == XXH3 else max(1, state.nbytes)
        starts = range(0, max(1, state.nbytes), step)
        parts.append(
            [_Part(file, state, start, min(step, state.nbytes - start)) for start in starts]
        )
    hasher = _Hasher(algorithm)
    threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="kvstore-digest") as pool:
        pending = [[pool.submit(hasher.hash_part, part) for part in of_file] for of_file in parts]
        try:
            digests = [[part.result() for part in of_file] for of_file in pending]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if algorithm != XXH3:
        return [whole.hex() for (whole,) in digests]
    return [xxhash.xxh3_128_hexdigest(b"".join(of_file)) for of_file in digests]


class _Hasher:
    """Hashes parts of files, on several threads."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._threads = threading.local()

    def hash_part(self, part: _Part) -> bytes:
        """Raises FileChanged, OSError."""
        buffer = self._buffer()
        digest = _new_digest(self._algorithm, part.state.nbytes)
        descriptor = os.open(part.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != (part.state.device, part.state.inode):
                raise FileChanged(f"{part.file} was replaced while it was read")
            done = 0
            while done < part.nbytes:
                view = buffer[: min(len(buffer), part.nbytes - done)]
                count = os.preadv(descriptor, [view], part.start + done)
                if count == 0:
                    raise FileChanged(f"{part.file} became shorter while it was read")
                digest.update(view[:count])
                done += count
        finally:
            os.close(descriptor)
        found: bytes = digest.digest()
        return found

    def _buffer(self) -> memoryview:
        """The buffer of this thread, of READ_BYTES."""
        buffer: memoryview | None = getattr(self._threads, "buffer", None)
        if buffer is None:
            buffer = self._threads.buffer = memoryview(bytearray(READ_BYTES))
        return buffer


def _new_digest(algorithm: str, nbytes: int) -> Any:
    """A digest of this algorithm, for a file of this size."""
    if algorithm == XXH3:
        return xxhash.xxh3_128()
    if algorithm == SHA256:
        return hashlib.sha256()
    assert algorithm == GIT_SHA1, f"unknown algorithm {algorithm!r}"
    # The name of a file in Git, not a measure against attacks.
    return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)
