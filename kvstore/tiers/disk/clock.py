"""The clock that ages are measured with: it never goes back.

The wall clock of a machine may be set back, and blocks would then exceed the `ttl`. The age clock
follows the wall clock forwards. While the wall clock is behind it, it follows the time since boot.
A directory's lock file records both clocks. The next opening goes on where the age clock stopped,
and adds the time that the wall clock has advanced since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def uptime_s() -> float:
    """Seconds since boot, suspends included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class AgeClock:
    """wall: seconds since 1970. uptime: seconds since any point, never set. Thread-safe."""

    def __init__(
        self, wall: Callable[[], float] = time.time, uptime: Callable[[], float] = uptime_s
    ) -> None:
        self._wall = wall
        self._uptime = uptime
        self._lock = threading.Lock()
        self._ahead_ms = 0
        """How far this clock was ahead of the wall clock at the opening."""
        self._from_ms = self._wall_ms()
        self._from_uptime_s = uptime()

    def now_ms(self) -> int:
        """Milliseconds since 1970, or more if the wall clock was set back."""
        return self.read()[0]

    def read(self) -> tuple[int, int]:
        """(time of this clock, time of the wall clock), in milliseconds, for `advance`."""
        with self._lock:
            wall_ms = self._wall_ms()
            now_ms = self._from_ms + int((self._uptime() - self._from_uptime_s) * 1000)
            if wall_ms + self._ahead_ms >= now_ms:
                now_ms = wall_ms + self._ahead_ms
                self._set(now_ms)
            return now_ms, wall_ms

    def advance(self, now_ms: int, wall_ms: int) -> None:
        """Go on from a reading of an earlier process. An earlier time than now changes nothing."""
        with self._lock:
            self._ahead_ms = max(self._ahead_ms, now_ms - wall_ms)
            then_ms = now_ms + max(0, self._wall_ms() - wall_ms)
            current_ms = self._from_ms + int((self._uptime() - self._from_uptime_s) * 1000)
            if then_ms > current_ms:
                self._set(then_ms)

    def _set(self, now_ms: int) -> None:
        self._from_ms, self._from_uptime_s = now_ms, self._uptime()

    def _wall_ms(self) -> int:
        return int(self._wall() * 1000)
