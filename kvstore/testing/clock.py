"""A clock for tests that moves only when told."""

from __future__ import annotations

import threading


class FakeClock:
    """Call it for the time in seconds. `sleep` and `advance` move it. Thread-safe."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        assert seconds >= 0, "time cannot go back"
        with self._lock:
            self._now_s += seconds

    sleep = advance
