"""Wrappers that keep a tier's faults short: the same verbs, one worry each.

    Breaker(Deadline(tier, 2.0), failures=3, reset_s=5.0)

A thread that is blocked in a call cannot be interrupted, and its buffers must not be reused while
it may still write into them. So a deadline does not cut a call off: it *tells* that one is
overdue, and the breaker answers everything new at once until it has ended and a probe went well.
Waiting for a block is bounded where it is waited for (the connector's deadline).

Clocks and sleeps are passed in: seconds, monotonic.
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
from kvstore.tiers.base import PAGE_BYTES, Judgement, Tier

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Sleep = Callable[[float], None]
T = TypeVar("T")

MAX_GROWTH = 16
"""The time a tier is left alone doubles at each failed probe, up to this many times the first."""
MAX_RATE_WAIT_S = 2.0
"""A transfer that would have to wait longer for its rate is refused: shorter than a store waits for
its workers when it closes."""

_CAPABILITIES = (
    "workers_read",
    "workers_write",
    "local_index",
    "sole_writer",
    "max_payload_bytes",
)


class Wrapper(Tier):
    """Passes every verb on; subclasses change some."""

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

    def judge(self, error: BaseException) -> Judgement:
        return self.inner.judge(error)


def layers_of(tier: Tier) -> Iterator[Tier]:
    """A tier's wrappers from the outermost, and the tier itself."""
    yield tier
    while isinstance(tier, Wrapper):
        tier = tier.inner
        yield tier


class Deadline(Wrapper):
    """Knows which calls are running, and since when."""

    def __init__(self, tier: Tier, limit_s: float, *, clock: Clock = time.monotonic) -> None:
        super().__init__(tier)
        self.limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[int, float] = {}
        self._calls = 0
        self._late = 0

    def overdue(self) -> float:
        """Seconds by which the longest running call is past its limit; 0.0 when none is."""
        with self._lock:
            if not self._since:
                return 0.0
            return max(0.0, self._clock() - min(self._since.values()) - self.limit_s)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._timed():
            return self.inner.contains(keys)

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        with self._timed():
            return self.inner.read(key, header, payload)

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        with self._timed():
            self.inner.write(key, header, payload)

    def delete(self, keys: Sequence[Key]) -> None:
        with self._timed():
            self.inner.delete(keys)

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            late = self._late
        return {**self.inner.stats(), "late": late}

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
            call = self._calls
            self._since[call] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._late += self._clock() - self._since.pop(call) > self.limit_s


class _State(enum.Enum):
    UP = "up"
    DOWN = "down"
    PROBING = "probing"


class Breaker(Wrapper):
    """Leaves a failing tier alone: what it is asked meanwhile is a miss, at once.

    Down after `failures` calls in a row raised TierUnavailable or ended late, and at once while a
    call of the `Deadline` inside is overdue. After `reset_s` (doubled with each failed probe, at
    most `MAX_GROWTH` times) the next read or write, or `contains` of a tier without a local index,
    is let through as a probe; it decides.
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
        self._deadline = tier if isinstance(tier, Deadline) else None
        self._lock = threading.Lock()
        self._state = _State.UP
        self._in_a_row = 0
        self._growth = 1
        self._retry_at = 0.0
        self._opened = 0
        self._refused = 0

    def overdue(self) -> float:
        """Seconds by which the longest running call is past its limit; 0.0 when none is."""
        return self._deadline.overdue() if self._deadline else 0.0

    def limit_to(self, failures: int, reset_s: float) -> None:
        """From here on, these; a tier that is left alone now comes back when it was to."""
        with self._lock:
            self._failures, self._reset_s = failures, reset_s

    def up(self) -> bool:
        """Whether calls go through as usual."""
        with self._lock:
            self._look()
            return self._state is _State.UP

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        if self.local_index:
            # Answers without touching the device, so it proves nothing: no probe.
            with self._lock:
                if not self._due():
                    return [False] * len(keys)
            return self.inner.contains(keys)
        return self._guarded(lambda: self.inner.contains(keys), lambda: [False] * len(keys))

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        return self._guarded(lambda: self.inner.read(key, header, payload), lambda: 0)

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        self._guarded(lambda: self.inner.write(key, header, payload), self._refuse)

    def delete(self, keys: Sequence[Key]) -> None:
        self._guarded(lambda: self.inner.delete(keys), self._refuse)

    def clear(self) -> None:
        self._guarded(self.inner.clear, self._refuse)

    def flush(self) -> None:
        self._guarded(self.inner.flush, self._refuse)

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            self._look()
            own: dict[str, int | float | str] = {
                "state": self._state.value,
                "breaker_opened": self._opened,
                "breaker_refused": self._refused,
            }
        return {**self.inner.stats(), **own}

    def _refuse(self) -> None:
        raise TierUnavailable(f"tier {self.name} is down")

    def _guarded(self, call: Callable[[], T], refused: Callable[[], T]) -> T:
        """Make the call if it may be made, and learn from how it ends."""
        with self._lock:
            if not self._due():
                self._refused += 1
                allowed = probe = False
            else:
                allowed, probe = True, self._state is _State.DOWN
                if probe:
                    self._state = _State.PROBING
        if not allowed:
            return refused()
        began = self._clock()
        try:
            result = call()
        except TierUnavailable as error:
            self._ended(probe, fault=str(error))
            raise
        except BaseException:
            # The tier answered, if only to refuse this call.
            self._ended(probe)
            raise
        late = self._deadline is not None and self._clock() - began > self._deadline.limit_s
        self._ended(probe, fault="a call ended past its deadline" if late else "")
        return result

    def _due(self) -> bool:
        """Whether a call may go through now, as usual or as a probe; the lock is held."""
        self._look()
        if self._state is _State.DOWN:
            return self._clock() >= self._retry_at and not self.overdue()
        return self._state is _State.UP

    def _look(self) -> None:
        """Go down when a running call is overdue; the lock is held."""
        if self._state is _State.UP and self.overdue():
            self._down(f"a call has not ended within {self._deadline_s():g} s")

    def _ended(self, probe: bool, fault: str = "") -> None:
        with self._lock:
            if probe:
                self._state = _State.DOWN
                if fault:
                    self._growth = min(self._growth * 2, MAX_GROWTH)
                    self._down(fault)
                    return
                log.warning("tier %s is up again", self.name)
                self._state, self._growth, self._in_a_row = _State.UP, 1, 0
            elif not fault:
                self._in_a_row = 0
            elif self._state is _State.UP:
                self._in_a_row += 1
                if self._in_a_row >= self._failures:
                    self._down(fault)

    def _down(self, fault: str) -> None:
        """Leave the tier alone from now on; the lock is held."""
        wait_s = self._reset_s * self._growth
        if self._state is _State.UP:
            self._opened += 1
        self._state, self._in_a_row = _State.DOWN, 0
        self._retry_at = self._clock() + wait_s
        log.warning("tier %s is down, for %g s at least: %s", self.name, wait_s, fault)

    def _deadline_s(self) -> float:
        return self._deadline.limit_s if self._deadline else 0.0


class Retry(Wrapper):
    """Tries again when the tier is unavailable, at most `tries` times in all."""

    def __init__(
        self, tier: Tier, *, tries: int = 2, wait_s: float = 0.05, sleep: Sleep = time.sleep
    ) -> None:
        super().__init__(tier)
        assert tries >= 1, f"{tries} tries"
        self._tries = tries
        self._wait_s = wait_s
        self._sleep = sleep

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return self._tried(lambda: self.inner.contains(keys))

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        return self._tried(lambda: self.inner.read(key, header, payload))

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        self._tried(lambda: self.inner.write(key, header, payload))

    def delete(self, keys: Sequence[Key]) -> None:
        self._tried(lambda: self.inner.delete(keys))

    def _tried(self, call: Callable[[], T]) -> T:
        for _ in range(self._tries - 1):
            try:
                return call()
            except TierUnavailable:
                self._sleep(self._wait_s)
        return call()


class _Bucket:
    """Tokens that come back at a rate. What is moved is taken when it is known, and may leave a
    debt; nobody begins before the debt is waited off."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, clock: Clock) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst = burst_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._level = burst_bytes
        self._at = clock()

    def begin(self, nbytes: float) -> float:
        """Take what will probably be moved; seconds to wait before it is. Raises TierUnavailable
        when they are too many."""
        with self._lock:
            now = self._clock()
            self._level = min(self._burst, self._level + (now - self._at) * self.bytes_per_s)
            self._at = now
            wait_s = max(0.0, -self._level) / self.bytes_per_s
            if wait_s > MAX_RATE_WAIT_S:
                raise TierUnavailable(f"its rate is used up for {wait_s:.0f} s")
            self._level -= nbytes
            return wait_s

    def correct(self, nbytes: float) -> None:
        """So many bytes more (or fewer, below 0) than was said were moved."""
        with self._lock:
            self._level = min(self._burst, self._level - nbytes)


class RateLimit(Wrapper):
    """Holds reads and writes, each direction by itself, to a number of bytes a second; 0: to none.

    It stands outside of a `Deadline`: waiting for a rate is no fault of the tier's.
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
        self._usual_bytes = 0.0
        """What a read was long lately: how long the next will be is known when it has ended."""

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        bucket = self._reads
        if bucket is None:
            return self.inner.read(key, header, payload)
        usual_bytes = self._usual_bytes
        self._wait(bucket, usual_bytes)
        moved = 0
        try:
            length = self.inner.read(key, header, payload)
            moved = length + PAGE_BYTES if length else 0
        finally:
            bucket.correct(moved - usual_bytes)
        if moved:
            self._usual_bytes += (moved - self._usual_bytes) / 4
        return length

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        bucket = self._writes
        if bucket is not None:
            self._wait(bucket, PAGE_BYTES + len(payload))
        self.inner.write(key, header, payload)

    def limit_to(self, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        """From here on, these rates; what waits for an old one waits for it still."""
        if read_bytes_per_s != (self._reads.bytes_per_s if self._reads else 0):
            self._reads = self._bucket(read_bytes_per_s)
        if write_bytes_per_s != (self._writes.bytes_per_s if self._writes else 0):
            self._writes = self._bucket(write_bytes_per_s)

    def _bucket(self, bytes_per_s: float) -> _Bucket | None:
        return _Bucket(bytes_per_s, self._burst_bytes, self._clock) if bytes_per_s else None

    def _wait(self, bucket: _Bucket, nbytes: float) -> None:
        wait_s = bucket.begin(nbytes)
        if wait_s:
            self._sleep(wait_s)
