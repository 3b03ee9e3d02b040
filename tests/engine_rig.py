"""`kvstore engine` in a process of its own, with a random model: for tests of its clients."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from types import TracebackType

LIMIT_S = 60.0
"""A hang guard, no measure."""


class EngineProcess:
    """A served random model that reads bytes; url ends in /v1."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "kvstore", "engine", "--model", "random", "--port", "0"]
        defaults = ["--model-name", "tiny", "--threads", "1", "--num-pages", "1024"]
        self._process = subprocess.Popen(
            [*command, *defaults, *options], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("kvstore engine: "), f"no engine: {line!r}"
        self.url = line.split()[-1]

    def reset(self) -> None:
        """Empty its own cache."""
        url = self.url.removesuffix("/v1") + "/reset_prefix_cache"
        request = urllib.request.Request(url, b"", method="POST")
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            assert answer.status == 200

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(LIMIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
