"""Kill -9 against the S3 tier: kills a writer, then checks the tier.

As a program: `python tests/tiers/s3_crash_rig.py --loops 200` (with `tests` on PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.processes import PACKAGE_PARENT
from kvstore.tiers import s3
from kvstore.tiers.base import Tier

MAX_BYTES = 150_000
THREADS = 4
ENVIRONMENT = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}
KEYS_A_THREAD = 1_000_000
"""The number of a key is thread * this + a count."""


def bytes_of(number: int) -> int:
    """Stored bytes of a block, derived from its number."""
    return 1 + random.Random(number).randrange(MAX_BYTES)


def write_forever(tier: Tier, first: int) -> None:
    """Write blocks in threads until killed, and print each acknowledged one."""

    def work(thread: int) -> None:
        buffer = FrameBuffer(MAX_BYTES)
        for count in range(first, KEYS_A_THREAD):
            number = thread * KEYS_A_THREAD + count
            tier.write(*buffer.fill(key_of(number), bytes_of(number)))
            os.write(1, b"%d\n" % number)
            if count % 7 == 3:
                tier.delete([key_of(number)])
                os.write(1, b"-%d\n" % number)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(1, THREADS + 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


class CrashRun:
    """Writes to one bucket and kills the writer, many times.

    config: of the tier, as JSON can hold it; it has no capacity, so that nothing may be missing.
    """

    def __init__(self, config: dict[str, Any], *, seed: int) -> None:
        self.config = config
        self.written: set[int] = set()
        self.deleted: set[int] = set()
        self.segments = 0
        self.blocks = 0
        self._first = 0
        self._rng = random.Random(seed)
        self._buffer = FrameBuffer(MAX_BYTES)

    def loop(self) -> None:
        """Write until the kill at a random time, then open the tier as a new node and check it."""
        argv = [sys.executable, __file__, "--writer", json.dumps(self.config), str(self._first)]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, env=ENVIRONMENT)
        assert child.stdout is not None
        said = [child.stdout.readline()]
        time.sleep(self._rng.random() * 0.4)
        child.kill()
        said += child.stdout.read().splitlines()
        assert child.wait() < 0, "the writer ended without a kill"
        child.stdout.close()
        # The kill may truncate the last line, which then acknowledges nothing.
        whole = [int(line) for line in (said[:-1] if len(said) > 1 else said)]
        self.written |= {number for number in whole if number > 0}
        self.deleted |= {-number for number in whole if number < 0}
        unsure = {number for number in map(abs, whole) if number % KEYS_A_THREAD % 7 == 3}
        unsure.add(abs(int(said[-1].strip() or b"0")))
        self._check(unsure)
        self._first = 100 + max((n % KEYS_A_THREAD for n in self.written), default=0)

    def _check(self, unsure: set[int]) -> None:
        """Compare with what was acknowledged.

        unsure: numbers of the last run; a deletion of one of them may be done and not yet said.
        """
        tier = s3.open(s3.Config(**self.config))
        try:
            stats = tier.stats()
            assert stats["corrupt_segments"] == 0, "a torn segment"
            self.segments, self.blocks = int(stats["segments"]), int(stats["blocks"])
            for key, _ in tier.usage():
                length = tier.read(key, self._buffer.header, self._buffer.payload)
                assert length, "contains lists a block that read does not find"
                assert self._buffer.version_of(key, length) == 0
            for number in self.deleted:
                assert tier.contains([key_of(number)]) == [False], "a deleted block reappeared"
            acknowledged = sorted(self.written - self.deleted)
            answers = tier.contains([key_of(number) for number in acknowledged])
            missing = {n for n, has in zip(acknowledged, answers, strict=True) if not has}
            assert missing <= unsure, f"acknowledged and lost: {sorted(missing - unsure)[:5]}"
            self.deleted |= missing
        finally:
            tier.close()


def main() -> None:
    if sys.argv[1:2] == ["--writer"]:
        write_forever(s3.open(s3.Config(**json.loads(sys.argv[2]))), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from s3_rig import running_server

    with running_server() as server:
        run = CrashRun(server.values(server.new_bucket(), linger="5ms"), seed=arguments.seed)
        for number in range(arguments.loops):
            run.loop()
            print(f"{number + 1} kills: {run.blocks} blocks in {run.segments} segments", flush=True)


if __name__ == "__main__":
    main()
