"""A tier with injected faults."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvstore.blocks.frame import HEADER_BYTES, aligned_buffer
from kvstore.blocks.key import Key
from kvstore.errors import TierError, TierFull, TierUnavailable
from kvstore.tiers.base import Tier
from kvstore.tiers.wrappers import Wrapper

MAX_HANG_S = 120.0
"""Maximum time of a hung call without `release`, so that a failing test still ends."""


class Fault(enum.Enum):
    """Kind of fault."""

    REFUSED = "refused"
    """Raises TierUnavailable at once."""
    HUNG = "hung"
    """Blocks until `release`."""
    SLOW = "slow"
    """Continues after `slow_s`."""
    ERROR = "error"
    """Raises TierError: permanent."""
    TRUNCATED = "truncated"
    """The second half of the payload is missing (reads: shorter; writes: zeros are stored)."""
    CORRUPTED = "corrupted"
    """One bit of the payload is flipped, in its first byte, which is never padding."""
    FULL = "full"
    """Writes raise TierFull. Other operations succeed."""


Schedule = Callable[[str, Sequence[Key]], "Fault | None"]


def always(fault: Fault, *operations: str) -> Schedule:
    """Return a schedule with this fault at every call of `operations` (default: all)."""
    return lambda operation, keys: fault if not operations or operation in operations else None


def in_turn(faults: Sequence[Fault | None]) -> Schedule:
    """Return a schedule with one fault per call, in this order, then none."""
    rest: Iterator[Fault | None] = iter(faults)
    lock = threading.Lock()

    def schedule(operation: str, keys: Sequence[Key]) -> Fault | None:
        with lock:
            return next(rest, None)

    return schedule


class FaultyTier(Wrapper):
    """A real tier with injected faults.

    schedule: called at every contains, read, write and delete. It can be replaced at any time.
    None: no faults. slow_s: duration of SLOW. sleep: waits for it.
    """

    def __init__(
        self,
        tier: Tier,
        schedule: Schedule | None = None,
        *,
        slow_s: float = 0.05,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(tier)
        self.schedule = schedule
        self.calls: list[tuple[str, Fault | None]] = []
        """Every call with its fault, for assertions."""
        self._slow_s = slow_s
        self._sleep = sleep
        self._released = threading.Event()
        self._hung = 0
        self._lock = threading.Condition()

    def release(self) -> None:
        """Let all hung calls continue, now and in future."""
        self._released.set()

    def wait_hung(self, calls: int = 1, timeout_s: float = 10.0) -> bool:
        """Wait until this many calls hang. Returns whether they do."""
        with self._lock:
            return self._lock.wait_for(lambda: self._hung >= calls, timeout_s)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self._inject("contains", keys)
        return self.inner.contains(keys)

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        fault = self._inject("read", [key])
        length = self.inner.read(key, header, payload)
        if length and fault in (Fault.TRUNCATED, Fault.CORRUPTED):
            return _corrupt(payload, length, fault)
        return length

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        fault = self._inject("write", [key])
        if fault in (Fault.TRUNCATED, Fault.CORRUPTED):
            # The caller's buffer does not change: the corruption happens in transit.
            corrupt = aligned_buffer(len(payload))
            corrupt[:] = payload
            _corrupt(corrupt, len(corrupt), fault)
            payload = corrupt
        self.inner.write(key, header, payload)

    def delete(self, keys: Sequence[Key]) -> None:
        self._inject("delete", keys)
        self.inner.delete(keys)

    def _inject(self, operation: str, keys: Sequence[Key]) -> Fault | None:
        schedule = self.schedule
        fault = schedule(operation, keys) if schedule is not None else None
        with self._lock:
            self.calls.append((operation, fault))
        if fault is Fault.REFUSED:
            raise TierUnavailable(f"{self.name}: {operation} is unavailable (injected fault)")
        if fault is Fault.ERROR:
            raise TierError(f"{self.name}: {operation} failed (injected fault)")
        if fault is Fault.FULL and operation == "write":
            raise TierFull(f"{self.name} is full (injected fault)")
        if fault is Fault.SLOW:
            self._sleep(self._slow_s)
        if fault is Fault.HUNG:
            self._hang()
        return fault

    def _hang(self) -> None:
        with self._lock:
            self._hung += 1
            self._lock.notify_all()
        self._released.wait(MAX_HANG_S)
        with self._lock:
            self._hung -= 1


def _corrupt(payload: memoryview, length: int, fault: Fault) -> int:
    """Corrupt the first `length` bytes of a payload. Returns the length to report."""
    if fault is Fault.CORRUPTED:
        payload[0] ^= 0x10
        return length
    kept = length // 2 // HEADER_BYTES * HEADER_BYTES
    payload[kept:length] = bytes(length - kept)
    return kept or length
