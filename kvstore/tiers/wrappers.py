"""Wrappers around a tier that bound the effect of its failures. They have the tier's methods.

    CircuitBreaker(CallTimeout(tier, 2.0), failures=3, reset_s=5.0)

A thread that is blocked in a call cannot be interrupted, and its buffers must not be reused while
the call may still write to them. `CallTimeout` therefore does not cancel a call: it reports that a
call is overdue. The circuit breaker then rejects new calls until the overdue call has ended and a
probe has succeeded. The connector bounds how long a request waits for a block (`max_wait`).

Late is not dead: a transfer may take time for its bytes, by the tier's measured speed, and a write
that ends late has shown that the tier works.

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
from kvstore.errors import CallRejected, TierUnavailable
from kvstore.tiers.base import ErrorClass, Tier

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Sleep = Callable[[float], None]
T = TypeVar("T")

MAX_BACKOFF = 16
"""The reset time doubles at each failed probe, up to this multiple of `reset_s`."""
MIN_BYTES_PER_S = 256 << 10
"""Speed of a transfer below which a tier counts as failing, whatever was measured before: a block
of 2 MiB may take 8 s longer than the timeout."""
SLACK = 4.0
"""A transfer may take this many times as long as its bytes took before."""
KEEP = 0.8
"""Weight of the earlier transfers when one more is measured."""

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


def takes_calls(tier: Tier) -> bool:
    """Whether all circuit breakers around a tier are closed."""
    breakers = (layer for layer in iter_layers(tier) if isinstance(layer, CircuitBreaker))
    return all(breaker.is_up() for breaker in breakers)


class CallTimeout(Wrapper):
    """Records the running calls and when each is overdue.

    timeout_s: seconds after which a call is overdue. A transfer gets more time for its bytes: a
    multiple of the time that as many bytes took before, at most the time at MIN_BYTES_PER_S. A
    write gets all of it before the first one has been measured.
    """

    def __init__(self, tier: Tier, timeout_s: float, *, clock: Clock = time.monotonic) -> None:
        super().__init__(tier)
        self.timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._overdue_at: dict[int, float] = {}
        self._next_call = 0
        self._exceeded = 0
        self._measured = {"read": (0.0, 0.0), "write": (0.0, 0.0)}
        """(seconds, bytes) of recent transfers; older ones count less."""

    def overdue_s(self) -> float:
        """Seconds by which a running call is overdue, the longest; 0.0: no call is."""
        with self._lock:
            if not self._overdue_at:
                return 0.0
            return max(0.0, self._clock() - min(self._overdue_at.values()))

    def is_late(self, nbytes: int, elapsed_s: float) -> bool:
        """Whether a call that moved these bytes took too long even for a slow tier."""
        return elapsed_s > self.timeout_s + nbytes / MIN_BYTES_PER_S

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._track_call(self.timeout_s):
            return self.inner.contains(keys)

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        return self._transfer("read", len(payload), lambda: self.inner.read(key, header, payload))

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        nbytes = len(payload)

        def write() -> int:
            self.inner.write(key, header, payload)
            return nbytes

        self._transfer("write", nbytes, write)

    def delete(self, keys: Sequence[Key]) -> None:
        with self._track_call(self.timeout_s):
            self.inner.delete(keys)

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            exceeded = self._exceeded
        return {**self.inner.stats(), "deadline_exceeded": exceeded}

    def _transfer(self, direction: str, max_bytes: int, move: Callable[[], int]) -> int:
        """Run a transfer, and measure it. move: returns the number of bytes moved."""
        with self._lock:
            seconds, nbytes = self._measured[direction]
        more_s = max_bytes / MIN_BYTES_PER_S
        if nbytes:
            more_s = min(more_s, SLACK * max_bytes * seconds / nbytes)
        elif direction == "read":
            more_s = 0.0
        began = self._clock()
        with self._track_call(self.timeout_s + more_s):
            moved = move()
        elapsed_s = self._clock() - began
        if moved:
            with self._lock:
                seconds, nbytes = self._measured[direction]
                self._measured[direction] = seconds * KEEP + elapsed_s, nbytes * KEEP + moved
        return moved

    @contextlib.contextmanager
    def _track_call(self, allowed_s: float) -> Iterator[None]:
        with self._lock:
            self._next_call += 1
            call = self._next_call
            self._overdue_at[call] = self._clock() + allowed_s
        try:
            yield
        finally:
            with self._lock:
                self._exceeded += self._clock() > self._overdue_at.pop(call)


class _State(enum.Enum):
    UP = "up"
    DOWN = "down"
    PROBING = "probing"


def _never_late(result: None) -> None:
    """For `CircuitBreaker._call`: such a call may take long, and its success proves the tier."""


class CircuitBreaker(Wrapper):
    """Stops calls to a failing tier. Meanwhile reads and lookups are misses, without a wait.

    The breaker opens after `failures` consecutive calls raised TierUnavailable or exceeded the
    timeout. It opens immediately when a running call of the inner `CallTimeout` is overdue. After
    `reset_s` seconds the next read or write goes through as a probe, also the next `contains` of a
    tier without a local index. A successful probe closes the breaker. A failed probe doubles the
    wait, up to `MAX_BACKOFF` times `reset_s`. A write that is overdue and then succeeds closes the
    breaker at once, and never counts as a failure.
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
        self._opened_by_overdue = False
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
        return self._call(lambda: self.inner.read(key, header, payload), lambda: 0, moved=int)

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        self._call(lambda: self.inner.write(key, header, payload), self._reject, moved=_never_late)

    def delete(self, keys: Sequence[Key]) -> None:
        self._call(lambda: self.inner.delete(keys), self._reject)

    def clear(self) -> None:
        self._call(self.inner.clear, self._reject, moved=_never_late)

    def flush(self) -> None:
        self._call(self.inner.flush, self._reject, moved=_never_late)

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
        raise CallRejected(f"tier {self.name}: circuit breaker open")

    def _call(
        self,
        call: Callable[[], T],
        reject: Callable[[], T],
        moved: Callable[[T], int | None] = lambda _: 0,
    ) -> T:
        """Make the call if the breaker allows it, and record the result; else `reject`.

        moved: bytes of the result; None: a call that succeeds late is not a failure.
        """
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
        nbytes, elapsed_s = moved(result), self._clock() - began
        late = (
            nbytes is not None
            and self._call_timeout is not None
            and self._call_timeout.is_late(nbytes, elapsed_s)
        )
        self._record_result(probe, cause="a call exceeded its timeout" if late else "")
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
            self._open_circuit("a call did not end within its timeout")
            self._opened_by_overdue = True

    def _record_result(self, probe: bool, cause: str = "") -> None:
        with self._lock:
            if probe:
                self._state = _State.DOWN
                if cause:
                    self._backoff = min(self._backoff * 2, MAX_BACKOFF)
                    self._open_circuit(cause)
                    return
                self._close_circuit()
            elif not cause:
                self._consecutive_failures = 0
                late = self._state is _State.DOWN and self._opened_by_overdue
                if late and not self.overdue_s():
                    self._close_circuit()
            elif self._state is _State.UP:
                self._consecutive_failures += 1
                if self._consecutive_failures >= self._failures:
                    self._open_circuit(cause)

    def _close_circuit(self) -> None:
        """Allow calls again. The caller owns the lock."""
        log.warning("tier %s: circuit breaker closed, the tier is up", self.name)
        self._state, self._backoff, self._consecutive_failures = _State.UP, 1, 0

    def _open_circuit(self, cause: str) -> None:
        """Reject calls until the next probe. The caller owns the lock."""
        wait_s = self._reset_s * self._backoff
        if self._state is _State.UP:
            self._open_count += 1
        self._state, self._consecutive_failures = _State.DOWN, 0
        self._opened_by_overdue = False
        self._retry_at = self._clock() + wait_s
        log.warning("tier %s: circuit breaker open, next try in %g s: %s", self.name, wait_s, cause)


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
