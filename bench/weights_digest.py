"""Measures what the identity of a model's weights adds to an engine's start: read, and remembered.

    python bench/weights_digest.py --size 5GB --directory /var/tmp

Makes shards of random bytes in a scratch folder, and times their fingerprint, and the comparison
with the hub's digests: with the page cache empty, with the files in it (as after an engine has
loaded them), and remembered. `read` is the same read without hashing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.config.units import parse_bytes
from kvstore.connectors.common import file_digests
from kvstore.connectors.common.digest_records import SETTLED_S
from kvstore.connectors.common.file_digests import SHA256, XXH3, Digests, digest_files

SHARD_BYTES = 2_500_000_000
PIECE_BYTES = 64 << 20
LARGE_BYTES = 140e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="5GB", help="size of all shards")
    parser.add_argument("--directory", default=None, help="parent of the scratch folder")
    parser.add_argument("--rounds", type=int, default=3, help="repeats; the best one counts")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="weights-digest-", dir=options.directory))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        files = make(folder, parse_bytes(options.size))
        nbytes = sum(file.stat().st_size for file in files)
        threads = min(file_digests.THREADS_MAX, len(os.sched_getaffinity(0)))
        print(f"{len(files)} shards, {nbytes / 1e9:.2f} GB, {threads} threads")
        print(
            "| what | page cache | seconds | GB/s | 140 GB, s |\n| --- | --- | ---: | ---: | ---: |"
        )
        cases: Sequence[tuple[str, Callable[[], Any]]] = (
            ("read", lambda: read(files)),
            ("fingerprint (XXH3)", lambda: digest(files, XXH3, folder)),
            ("hub's digests (SHA-256)", lambda: digest(files, SHA256, folder)),
        )
        for name, run in cases:
            for state, prepare in (("empty", lambda: drop(files)), ("full", lambda: read(files))):
                seconds = best(run, prepare, options.rounds)
                rate = nbytes / seconds
                print(
                    f"| {name} | {state} | {seconds:.2f} | {rate / 1e9:.2f} | "
                    f"{LARGE_BYTES / rate:.0f} |"
                )
        digest_files(files)
        seconds = best(lambda: remembered(files), lambda: drop(files), options.rounds)
        print(f"remembered: {seconds * 1e3:.2f} ms")
    finally:
        shutil.rmtree(folder)


def make(folder: Path, nbytes: int) -> list[Path]:
    """Shards on the disk, old enough to be remembered."""
    files = []
    while nbytes > 0:
        files.append(folder / f"model-{len(files):05}.safetensors")
        with files[-1].open("wb") as opened:
            for at in range(0, min(nbytes, SHARD_BYTES), PIECE_BYTES):
                opened.write(os.urandom(min(PIECE_BYTES, min(nbytes, SHARD_BYTES) - at)))
            opened.flush()
            os.fsync(opened.fileno())
        nbytes -= SHARD_BYTES
    time.sleep(SETTLED_S + 0.1)
    return files


def best(run: Callable[[], Any], prepare: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        prepare()
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return min(times)


def digest(files: Sequence[Path], algorithm: str, folder: Path) -> Digests:
    """Without records of an earlier round."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    found = digest_files(files, algorithm)
    assert found.files_read == len(files)
    return found


def remembered(files: Sequence[Path]) -> Digests:
    found = digest_files(files)
    assert found.files_read == 0, "this file system is not one that is remembered"
    return found


def read(files: Sequence[Path]) -> None:
    """Read all bytes, by the same number of threads, without hashing them."""

    class Nothing:
        def update(self, view: Any) -> None:
            pass

        def digest(self) -> bytes:
            return b""

    new_digest = file_digests._new_digest
    file_digests._new_digest = lambda algorithm, nbytes: Nothing()
    try:
        states = [file_digests.FileState.of(file) for file in files]
        file_digests._hash_files(files, states, XXH3)
    finally:
        file_digests._new_digest = new_digest


def drop(files: Sequence[Path]) -> None:
    """Drop the files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
