"""Wrappers around a tier that bound the effect of its failures. They have the tier's methods.

    CircuitBreaker(CallTimeout(tier, 2.0), failures=3, reset_s=5.0)

A thread that is blocked in a call cannot be interrupted, and its buffers must not be reused while
the call may still write to them. `CallTimeout` therefore does not cancel a call: it reports that a
call is overdue. The circuit breaker then rejects new calls until the overdue call has ended and a
probe has succeeded. The connector bounds how long a request waits for a block (`max_wait`).

Clocks and sleep functions are parameters; all times are in seconds of a monotonic clock.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvstore.blocks.key import Key
from kvstore.errors import TierUnavailable
from kvstore.tiers.base import IO_ALIGNMENT, ErrorClass, Tier

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Sleep = Callable[[float], None]
T = TypeVar("T")

MAX_BACKOFF = 16
"""The reset time doubles at each failed probe, up to this multiple of `reset_s`."""
MAX_RATE_WAIT_S = 2.0
"""A transfer that would wait longer for its rate limit is rejected. This is shorter than a closing
store waits for its workers."""

_CAPABILITIES = (
    "workers_read",
    "workers_write",
    "local_index",
    "sole_writer",
    "max_payload_bytes",
)


class Wrapper(Tier):
    """Forwards every call to the inner tier. Subclasses override some methods."""

    def __init__(self, tier: Tier) -> None:
        self.inner = tier
        self.name = tier.name
        for name in _CAPABILITIES:
            self.__dict__[name] = getattr(tier, name)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return self.inner.contains(keys)

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        return self.inner.read(key, header, payload)

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        self.inner.write(key, header, payload)

    def delete(self, keys: Sequence[Key]) -> None:
        self.inner.delete(keys)

    def close(self) -> None:
        self.inner.close()

    def usage(self) -> Iterator[tuple[Key, int]]:
        return self.inner.usage()

    def clear(self) -> None:
        self.inner.clear()

    def flush(self) -> None:
        self.inner.flush()

    def stats(self) -> dict[str, int | float | str]:
        return self.inner.stats()

    def classify_error(self, error: BaseException) -> ErrorClass:
        return self.inner.classify_error(error)


def iter_layers(tier: Tier) -> Iterator[Tier]:
    """The wrappers of a tier from the outermost inwards, then the tier itself."""
    yield tier
    while isinstance(tier, Wrapper):
        tier = tier.inner
        yield tier


class CallTimeout(Wrapper):
    """Records the running calls and when each started.

    timeout_s: seconds after which a call is overdue.
    """

    def __init__(self, tier: Tier, timeout_s: float, *, clock: Clock = time.monotonic) -> None:
        super().__init__(tier)
        self.timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._started_at: dict[int, float] = {}
        self._next_call = 0
        self._exceeded = 0

    def overdue_s(self) -> float:
        """Seconds by which the longest running call exceeds the timeout; 0.0: no call does."""
        with self._lock:
            if not self._started_at:
                return 0.0
            return max(0.0, self._clock() - min(self._started_at.values()) - self.timeout_s)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._track_call():
            return self.inner.contains(keys)

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        with self._track_call():
            return self.inner.read(key, header, payload)

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        with self._track_call():
            self.inner.write(key, header, payload)

    def delete(self, keys: Sequence[Key]) -> None:
        with self._track_call():
            self.inner.delete(keys)

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            exceeded = self._exceeded
        return {**self.inner.stats(), "deadline_exceeded": exceeded}

    @contextlib.contextmanager
    def _track_call(self) -> Iterator[None]:
        with self._lock:
            self._next_call += 1
            call = self._next_call
            self._started_at[call] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._exceeded += self._clock() - self._started_at.pop(call) > self.timeout_s


class _State(enum.Enum):
    UP = "up"
    DOWN = "down"
    PROBING = "probing"


class CircuitBreaker(Wrapper):
    """Stops calls to a failing tier. Meanwhile reads and lookups are misses, without a wait.

    The breaker opens after `failures` consecutive calls raised TierUnavailable or exceeded the
    timeout. It opens immediately when a running call of the inner `CallTimeout` is overdue. After
    `reset_s` seconds the next read or write goes through as a probe, also the next `contains` of a
    tier without a local index. A successful probe closes the breaker. A failed probe doubles the
    wait, up to `MAX_BACKOFF` times `reset_s`.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        failures: int = 3,
        reset_s: float = 5.0,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(tier)
        self._failures = failures
        self._reset_s = reset_s
        self._clock = clock
        self._call_timeout = tier if isinstance(tier, CallTimeout) else None
        self._lock = threading.Lock()
        self._state = _State.UP
        self._consecutive_failures = 0
        self._backoff = 1
        self._retry_at = 0.0
        self._open_count = 0
        self._rejected_count = 0

    def overdue_s(self) -> float:
        """Seconds by which the longest running call exceeds the timeout; 0.0: no call does."""
        return self._call_timeout.overdue_s() if self._call_timeout else 0.0

    def set_limits(self, failures: int, reset_s: float) -> None:
        """Replace both limits. An open breaker keeps the time of its next probe."""
        with self._lock:
            self._failures, self._reset_s = failures, reset_s

    def is_up(self) -> bool:
        """Whether the breaker is closed."""
        with self._lock:
            self._check_overdue()
            return self._state is _State.UP

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        if self.local_index:
            # The answer comes from memory and proves nothing about the device: not a probe.
            with self._lock:
                if not self._allows_call():
                    return [False] * len(keys)
            return self.inner.contains(keys)
        return self._call(lambda: self.inner.contains(keys), lambda: [False] * len(keys))

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        return self._call(lambda: self.inner.read(key, header, payload), lambda: 0)

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        self._call(lambda: self.inner.write(key, header, payload), self._reject)

    def delete(self, keys: Sequence[Key]) -> None:
        self._call(lambda: self.inner.delete(keys), self._reject)

    def clear(self) -> None:
        self._call(self.inner.clear, self._reject)

    def flush(self) -> None:
        self._call(self.inner.flush, self._reject)

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            self._check_overdue()
            own: dict[str, int | float | str] = {
                "state": self._state.value,
                "breaker_opened": self._open_count,
                "breaker_rejected": self._rejected_count,
            }
        return {**self.inner.stats(), **own}

    def _reject(self) -> None:
        raise TierUnavailable(f"tier {self.name}: circuit breaker open")

    def _call(self, call: Callable[[], T], reject: Callable[[], T]) -> T:
        """Make the call if the breaker allows it, and record the result; else `reject`."""
        with self._lock:
            if not self._allows_call():
                self._rejected_count += 1
                allowed = probe = False
            else:
                allowed, probe = True, self._state is _State.DOWN
                if probe:
                    self._state = _State.PROBING
        if not allowed:
            return reject()
        began = self._clock()
        try:
            result = call()
        except TierUnavailable as error:
            self._record_result(probe, cause=str(error))
            raise
        except BaseException:
            # The tier answered: only this call failed.
            self._record_result(probe)
            raise
        exceeded = (
            self._call_timeout is not None and self._clock() - began > self._call_timeout.timeout_s
        )
        self._record_result(probe, cause="a call exceeded its timeout" if exceeded else "")
        return result

    def _allows_call(self) -> bool:
        """Whether a call may go through now, as usual or as a probe. The caller owns the lock."""
        self._check_overdue()
        if self._state is _State.DOWN:
            return self._clock() >= self._retry_at and not self.overdue_s()
        return self._state is _State.UP

    def _check_overdue(self) -> None:
        """Open the breaker if a running call is overdue. The caller owns the lock."""
        if self._state is _State.UP and self.overdue_s():
            self._open_circuit(f"a call did not end within {self._timeout_s():g} s")

    def _record_result(self, probe: bool, cause: str = "") -> None:
        with self._lock:
            if probe:
                self._state = _State.DOWN
                if cause:
                    self._backoff = min(self._backoff * 2, MAX_BACKOFF)
                    self._open_circuit(cause)
                    return
                log.warning("tier %s: circuit breaker closed, the tier is up", self.name)
                self._state, self._backoff, self._consecutive_failures = _State.UP, 1, 0
            elif not cause:
                self._consecutive_failures = 0
            elif self._state is _State.UP:
                self._consecutive_failures += 1
                if self._consecutive_failures >= self._failures:
                    self._open_circuit(cause)

    def _open_circuit(self, cause: str) -> None:
        """Reject calls until the next probe. The caller owns the lock."""
        wait_s = self._reset_s * self._backoff
        if self._state is _State.UP:
            self._open_count += 1
        self._state, self._consecutive_failures = _State.DOWN, 0
        self._retry_at = self._clock() + wait_s
        log.warning("tier %s: circuit breaker open, next try in %g s: %s", self.name, wait_s, cause)

    def _timeout_s(self) -> float:
        return self._call_timeout.timeout_s if self._call_timeout else 0.0


class Retry(Wrapper):
    """Repeats a call that raised TierUnavailable, up to `tries` calls in total."""

    def __init__(
        self, tier: Tier, *, tries: int = 2, wait_s: float = 0.05, sleep: Sleep = time.sleep
    ) -> None:
        super().__init__(tier)
        assert tries >= 1, f"{tries} tries"
        self._tries = tries
        self._wait_s = wait_s
        self._sleep = sleep

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return self._call_with_retry(lambda: self.inner.contains(keys))

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        return self._call_with_retry(lambda: self.inner.read(key, header, payload))

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        self._call_with_retry(lambda: self.inner.write(key, header, payload))

    def delete(self, keys: Sequence[Key]) -> None:
        self._call_with_retry(lambda: self.inner.delete(keys))

    def _call_with_retry(self, call: Callable[[], T]) -> T:
        for _ in range(self._tries - 1):
            try:
                return call()
            except TierUnavailable:
                self._sleep(self._wait_s)
        return call()


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

        Raises TierUnavailable: the wait would be longer than `MAX_RATE_WAIT_S`.
        """
        with self._lock:
            now = self._clock()
            self._level = min(
                self._burst, self._level + (now - self._updated_at) * self.bytes_per_s
            )
            self._updated_at = now
            wait_s = max(0.0, -self._level) / self.bytes_per_s
            if wait_s > MAX_RATE_WAIT_S:
                raise TierUnavailable(f"bandwidth limit reached, next transfer in {wait_s:.0f} s")
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
