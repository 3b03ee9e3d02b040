"""How many workers write to a tier at a time, and when a failed write is tried again.

A slow tier gets fewer writers: each then gets more of its bandwidth, so that a write ends before
its deadline. A tier that does not answer gets one write at a time, at growing intervals.
"""

from __future__ import annotations

from typing import Final

SLOW_WRITE_S: Final = 2.0
"""Time of one write above which the number of writers is halved; below a quarter of it, the number
grows by one."""
RETRY_FIRST_S: Final = 0.25
"""Time from a failed write to the next try. It doubles at each failure in a row,"""
RETRY_MAX_S: Final = 5.0
"""up to this."""


class WritePace:
    """Every method is called under the workers' lock. Times are seconds of a monotonic clock.

    writers_max: maximum number of workers that write at a time.
    """

    def __init__(self, writers_max: int) -> None:
        self.writers = writers_max
        """Number of workers that may write at a time while the tier answers."""
        self.retry_at_s = 0.0
        """No write starts earlier."""
        self._writers_max = writers_max
        self._failures = 0
        self._changed_at_s = 0.0

    @property
    def failing(self) -> bool:
        """Whether the last write failed because the tier did not answer."""
        return self._failures > 0

    def may_write(self, now_s: float, writing: int) -> bool:
        """Whether one more worker may start a write; writing: number of those that write now."""
        return now_s >= self.retry_at_s and writing < (1 if self.failing else self.writers)

    def record_success(self, started_s: float, ended_s: float) -> None:
        """A write has succeeded. One that started before the last change says nothing about the
        present number of writers."""
        self._failures, self.retry_at_s = 0, 0.0
        if started_s < self._changed_at_s:
            return
        elapsed_s = ended_s - started_s
        if elapsed_s > SLOW_WRITE_S:
            self._set_writers(self.writers // 2, ended_s)
        elif elapsed_s < SLOW_WRITE_S / 4 and self.writers < self._writers_max:
            self._set_writers(self.writers + 1, ended_s)

    def record_failure(self, started_s: float, ended_s: float) -> None:
        """The tier did not answer a write, or was not called."""
        if started_s < self._changed_at_s:
            return  # one of several writes that failed together
        wait_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        self.retry_at_s = ended_s + wait_s
        self._set_writers(self.writers // 2, ended_s)

    def _set_writers(self, writers: int, now_s: float) -> None:
        self.writers = max(1, writers)
        self._changed_at_s = now_s
