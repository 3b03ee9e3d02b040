"""A node that shares a bucket with others: a tier in a child process that executes commands.

As a program it reads commands from stdin, one JSON list a line, and answers each with a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from kvstore.errors import TierError
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.processes import PACKAGE_PARENT
from kvstore.tiers import s3
from kvstore.tiers.s3.tier import S3Tier

MAX_BYTES = 200_000


ENVIRONMENT = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}


class Node:
    """A tier in another process. Every method waits for its result."""

    def __init__(self, config: dict[str, Any]) -> None:
        argv = [sys.executable, __file__, json.dumps(config)]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        assert self.finish() == "ready"

    def start(self, operation: str, *arguments: Any) -> None:
        """Send a command without waiting for its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([operation, *arguments]) + "\n")
        self._process.stdin.flush()

    def finish(self) -> Any:
        """The result of the last command."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the node has ended"
        return json.loads(line)

    def do(self, operation: str, *arguments: Any) -> Any:
        """Send a command and wait for its result."""
        self.start(operation, *arguments)
        return self.finish()

    def close(self) -> None:
        """Stop the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Operations:
    """The commands of a node."""

    def __init__(self, tier: S3Tier) -> None:
        self._tier = tier
        self._buffer = FrameBuffer(MAX_BYTES)

    def write(self, numbers: list[int], nbytes: int) -> int:
        """Write blocks; returns the number written."""
        taken = 0
        for number in numbers:
            try:
                self._tier.write(*self._buffer.fill(key_of(number), nbytes))
                taken += 1
            except TierError:
                continue
        return taken

    def read(self, numbers: list[int]) -> list[int]:
        """Numbers of the blocks that read back unchanged."""
        found = []
        for number in numbers:
            length = self._tier.read(key_of(number), self._buffer.header, self._buffer.payload)
            if length:
                assert self._buffer.version_of(key_of(number), length) == 0
                found.append(number)
        return found

    def contains(self, numbers: list[int]) -> list[int]:
        answers = self._tier.contains([key_of(number) for number in numbers])
        return [number for number, has in zip(numbers, answers, strict=True) if has]

    def delete(self, numbers: list[int]) -> None:
        self._tier.delete([key_of(number) for number in numbers])

    def reconcile(self) -> None:
        self._tier.reconcile()

    def churn(self, numbers: list[int], nbytes: int, rounds: int) -> int:
        """Write, read and reconcile `rounds` times; returns the number of hits."""
        hits = 0
        for _ in range(rounds):
            self.write(numbers, nbytes)
            self._tier.reconcile()
            hits += len(self.read(numbers))
        return hits

    def stats(self) -> dict[str, Any]:
        return self._tier.stats()


def main() -> None:
    tier = s3.open(s3.Config(**json.loads(sys.argv[1])))
    assert isinstance(tier, S3Tier)
    operations = Operations(tier)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        print(json.dumps(getattr(operations, operation)(*arguments)), flush=True)
    tier.close()


if __name__ == "__main__":
    main()
