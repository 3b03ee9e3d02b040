"""A wrapper that limits the bytes per second of a tier.

The clock and the sleep function are parameters; all times are in seconds of a monotonic clock.
"""

from __future__ import annotations

import threading
import time

from kvstore.blocks.key import Key
from kvstore.errors import CallRejected
from kvstore.tiers.base import IO_ALIGNMENT, Tier
from kvstore.tiers.wrappers import Clock, Sleep, Wrapper

MAX_RATE_WAIT_S = 2.0
"""A transfer that would wait longer for its rate limit is rejected. This is shorter than a closing
store waits for its workers."""


class _TokenBucket:
    """A token bucket of bytes. A transfer may leave it in debt; the next one waits until the debt
    is refilled."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, clock: Clock) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst = burst_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._level = burst_bytes
        self._updated_at = clock()

    def take(self, nbytes: float) -> float:
        """Take the expected size of a transfer; returns the seconds to wait before it.

        Raises CallRejected: the wait would be longer than `MAX_RATE_WAIT_S`.
        """
        with self._lock:
            now = self._clock()
            self._level = min(
                self._burst, self._level + (now - self._updated_at) * self.bytes_per_s
            )
            self._updated_at = now
            wait_s = max(0.0, -self._level) / self.bytes_per_s
            if wait_s > MAX_RATE_WAIT_S:
                raise CallRejected(f"bandwidth limit reached, next transfer in {wait_s:.0f} s")
            self._level -= nbytes
            return wait_s

    def adjust(self, nbytes: float) -> None:
        """Take `nbytes` more than `take` did; return tokens if negative."""
        with self._lock:
            self._level = min(self._burst, self._level - nbytes)


class RateLimit(Wrapper):
    """Limits the bytes per second of reads and of writes, each direction separately. 0: no limit.

    It wraps `CallTimeout`, so that waiting for the limit does not count as a slow call.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        read_bytes_per_s: float = 0.0,
        write_bytes_per_s: float = 0.0,
        burst_bytes: float = 64 << 20,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        super().__init__(tier)
        self._burst_bytes = burst_bytes
        self._clock = clock
        self._reads = self._bucket(read_bytes_per_s)
        self._writes = self._bucket(write_bytes_per_s)
        self._sleep = sleep
        self._average_read_bytes = 0.0
        """Moving average of read sizes: the expected size of the next read."""

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        bucket = self._reads
        if bucket is None:
            return self.inner.read(key, header, payload)
        expected_bytes = self._average_read_bytes
        self._wait_for_tokens(bucket, expected_bytes)
        moved = 0
        try:
            length = self.inner.read(key, header, payload)
            moved = length + IO_ALIGNMENT if length else 0
        finally:
            bucket.adjust(moved - expected_bytes)
        if moved:
            self._average_read_bytes += (moved - self._average_read_bytes) / 4
        return length

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        bucket = self._writes
        if bucket is not None:
            self._wait_for_tokens(bucket, IO_ALIGNMENT + len(payload))
        self.inner.write(key, header, payload)

    def set_limits(self, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        """Replace both limits. A transfer that is waiting keeps its old wait."""
        if read_bytes_per_s != (self._reads.bytes_per_s if self._reads else 0):
            self._reads = self._bucket(read_bytes_per_s)
        if write_bytes_per_s != (self._writes.bytes_per_s if self._writes else 0):
            self._writes = self._bucket(write_bytes_per_s)

    def _bucket(self, bytes_per_s: float) -> _TokenBucket | None:
        return _TokenBucket(bytes_per_s, self._burst_bytes, self._clock) if bytes_per_s else None

    def _wait_for_tokens(self, bucket: _TokenBucket, nbytes: float) -> None:
        wait_s = bucket.take(nbytes)
        if wait_s:
            self._sleep(wait_s)
