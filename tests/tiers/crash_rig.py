"""Kill -9 against the disk tier: kills a writer, then checks the tier.

As a program: `python tests/tiers/crash_rig.py --loops 200`. It alternates between a
tier with room for everything and one that reclaims all the time, with one and three directories.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.blocks.frame import padded_bytes
from kvstore.blocks.key import Key
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import disk
from kvstore.tiers.base import Tier

MAX_BYTES = 250_000
THREADS = 3
KEYS_A_THREAD = 1_000_000
"""The number of a key is thread * this + a count."""


def bytes_of(number: int) -> int:
    """Stored bytes of a block, derived from its number."""
    return 1 + random.Random(number).randrange(MAX_BYTES)


def open_tier(directories: Sequence[Path], capacity: int, *, direct_io: bool = True) -> Tier:
    places = tuple(map(str, directories))
    return disk.open(disk.Config(directory=places, capacity=capacity, direct_io=direct_io))


def taken_bytes(number: int) -> int:
    """Bytes of a block's frame."""
    return 4096 + padded_bytes(bytes_of(number))


def write_forever(tier: Tier, first: int, said: int) -> None:
    """Write blocks in threads until killed. Say each acknowledged one on descriptor `said`, with
    the bytes that had been acknowledged when its write began; a deleted one as a negative number.
    """
    lock, done = threading.Lock(), 0

    def work(thread: int) -> None:
        nonlocal done
        buffer = FrameBuffer(MAX_BYTES)
        for count in range(first, KEYS_A_THREAD):
            number = thread * KEYS_A_THREAD + count
            began = done
            tier.write(*buffer.fill(key_of(number), bytes_of(number)))
            with lock:
                done += taken_bytes(number)
            os.write(said, b"%d %d\n" % (number, began))
            if count % 17 == 3:
                tier.delete([key_of(number)])
                os.write(said, b"-%d 0\n" % number)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(1, THREADS + 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


class CrashRun:
    """Writes to the directories of one tier and kills the writer, many times."""

    def __init__(self, directories: Sequence[Path], *, capacity: int, seed: int) -> None:
        self.directories = list(directories)
        self.capacity = capacity
        self.journal: dict[int, int] = {}
        """Acknowledged blocks without reclaimed ones: number of bytes acknowledged when the write
        began. (Not when the write was acknowledged: a thread may be delayed before it reports that,
        and other threads may fill the whole capacity meanwhile.)"""
        self.written_bytes = 0
        self.deleted: set[int] = set()
        self.torn = 0
        self._rng = random.Random(seed)
        self._buffer = FrameBuffer(MAX_BYTES)

    def loop(self) -> None:
        """Write until the kill at a random time, then open the tier again and check it."""
        first = 1 + max((n % KEYS_A_THREAD for n in self.journal), default=0)
        direct_io = self._rng.random() < 0.5
        self._rng.shuffle(self.directories)
        reader, writer = os.pipe()
        # A fork, so that a loop does not repeat the imports. No other thread runs.
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                # A kill splits a buffered write more often than a direct one.
                tier = open_tier(self.directories, self.capacity, direct_io=direct_io)
                write_forever(tier, first, writer)
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = [pipe.readline()]
            time.sleep(self._rng.random() * 0.1)
            os.kill(child, signal.SIGKILL)
            said += pipe.read().splitlines()
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer ended without a kill"
        # The kill may truncate the last line, which then acknowledges nothing.
        whole = said[:-1] if len(said) > 1 else said
        base = self.written_bytes
        for line in whole:
            number, began = map(int, line.split())
            if number < 0:
                self.deleted.add(-number)
            else:
                self.journal[number] = base + began
                self.written_bytes += taken_bytes(number)
        names = (line.split()[0].strip(b"-") for line in said if line.strip(b"-\n "))
        self.check(unsure={int(name) for name in names if name})

    def check(self, unsure: set[int]) -> None:
        """Open, and compare with what was acknowledged.

        unsure: numbers of the last run; a deletion of one of them may be done and not yet said.
        """
        tier = open_tier(self.directories, self.capacity)
        try:
            self.torn += int(tier.stats()["torn"])
            present = set(tier.keys())
            for key in present:
                length = tier.read(key, self._buffer.header, self._buffer.payload)
                assert length, "contains lists a block that read does not find"
                assert self._buffer.version_of(key, length) == 0
            numbers = self._numbers(present)
            assert len(numbers) == len(present), "a block that no writer wrote"
            assert not numbers & self.deleted, "a deleted block reappeared"
            for number in self._must_be_there():
                # Its deletion may be done but not yet reported.
                gone = number in unsure and number % KEYS_A_THREAD % 17 == 3
                assert number in numbers or gone, f"an acknowledged block is lost: {number}"
            kept = numbers | self.deleted
            self.journal = {n: began for n, began in self.journal.items() if n in kept}
            for number in numbers - set(self.journal):
                self.journal[number] = 0
        finally:
            tier.close()

    def _must_be_there(self) -> Iterator[int]:
        """What was acknowledged and not deleted, as far back as no reclaim has come: half of the
        capacity, counted from the newest."""
        for number, began in self.journal.items():
            if self.written_bytes - began <= self.capacity // 2 and number not in self.deleted:
                yield number

    def _numbers(self, present: set[Key]) -> set[int]:
        """Numbers of these keys: the acknowledged ones, and at most one more of each thread."""
        candidates = set(self.journal) | self.deleted
        newest: dict[int, int] = {}
        for number in candidates:
            thread, count = divmod(number, KEYS_A_THREAD)
            newest[thread] = max(newest.get(thread, 0), count)
        for thread in range(1, THREADS + 1):
            start = newest.get(thread, 0)
            ahead = max(newest.values(), default=0) + 60
            candidates |= {thread * KEYS_A_THREAD + count for count in range(start, ahead)}
        return {number for number in candidates if key_of(number) in present}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        runs = {
            name: CrashRun(
                [Path(place) / name / str(number) for number in range(directories)],
                capacity=capacity,
                seed=arguments.seed,
            )
            for name, directories, capacity in (
                ("large", 1, 256 << 20),
                ("small", 1, 16 << 20),
                ("large, three directories", 3, 256 << 20),
                ("small, three directories", 3, 24 << 20),
            )
        }
        for number in range(arguments.loops):
            name = list(runs)[number % len(runs)]
            runs[name].loop()
            print(
                f"{number + 1} kills, {name}: {len(runs[name].journal)} blocks, "
                f"{runs[name].torn} torn frames dropped",
                flush=True,
            )


if __name__ == "__main__":
    main()
