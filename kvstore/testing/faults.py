"""A tier that fails on purpose, in the ways tiers do."""

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
"""A hung call that nobody released goes on after this, so that a failing test still ends."""


class Fault(enum.Enum):
    """What goes wrong with a call."""

    REFUSED = "refused"
    """TierUnavailable at once."""
    HUNG = "hung"
    """Does not go on until `release`."""
    SLOW = "slow"
    """Goes on after `slow_s`."""
    ERROR = "error"
    """TierError: permanent."""
    TRUNCATED = "truncated"
    """The second half of the payload is missing (reads: shorter; writes: zeros are stored)."""
    CORRUPTED = "corrupted"
    """One bit of the payload is flipped: of its first byte, which is never padding."""
    FULL = "full"
    """Writes raise TierFull; other verbs are not touched."""


Schedule = Callable[[str, Sequence[Key]], "Fault | None"]


def always(fault: Fault, *verbs: str) -> Schedule:
    """This fault at every call of `verbs` (default: of all)."""
    return lambda verb, keys: fault if not verbs or verb in verbs else None


def in_turn(faults: Sequence[Fault | None]) -> Schedule:
    """One fault for each call, in this order; none after the last."""
    rest: Iterator[Fault | None] = iter(faults)
    lock = threading.Lock()

    def schedule(verb: str, keys: Sequence[Key]) -> Fault | None:
        with lock:
            return next(rest, None)

    return schedule


class FaultyTier(Wrapper):
    """A real tier behind faults.

    schedule: asked at every contains, read, write and delete; may be replaced at any time
    (`tier.schedule = None`: all is well).
    slow_s: how long SLOW takes. sleep: how it is spent.
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
        """Every call and what went wrong with it; for assertions."""
        self._slow_s = slow_s
        self._sleep = sleep
        self._released = threading.Event()
        self._hung = 0
        self._lock = threading.Condition()

    def release(self) -> None:
        """Let every hung call, and every one to come, go on."""
        self._released.set()

    def wait_hung(self, calls: int = 1, timeout_s: float = 10.0) -> bool:
        """Wait until this many calls hang; whether they do."""
        with self._lock:
            return self._lock.wait_for(lambda: self._hung >= calls, timeout_s)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self._strike("contains", keys)
        return self.inner.contains(keys)

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        fault = self._strike("read", [key])
        length = self.inner.read(key, header, payload)
        if length and fault in (Fault.TRUNCATED, Fault.CORRUPTED):
            return _damage(payload, length, fault)
        return length

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        fault = self._strike("write", [key])
        if fault in (Fault.TRUNCATED, Fault.CORRUPTED):
            # The caller's buffer stays as it is: the damage happens on the way.
            damaged = aligned_buffer(len(payload))
            damaged[:] = payload
            _damage(damaged, len(damaged), fault)
            payload = damaged
        self.inner.write(key, header, payload)

    def delete(self, keys: Sequence[Key]) -> None:
        self._strike("delete", keys)
        self.inner.delete(keys)

    def _strike(self, verb: str, keys: Sequence[Key]) -> Fault | None:
        schedule = self.schedule
        fault = schedule(verb, keys) if schedule is not None else None
        with self._lock:
            self.calls.append((verb, fault))
        if fault is Fault.REFUSED:
            raise TierUnavailable(f"{self.name} refuses {verb}, on purpose")
        if fault is Fault.ERROR:
            raise TierError(f"{self.name} fails {verb}, on purpose")
        if fault is Fault.FULL and verb == "write":
            raise TierFull(f"{self.name} is full, on purpose")
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


def _damage(payload: memoryview, length: int, fault: Fault) -> int:
    """Spoil the first `length` bytes of a payload; how many are still claimed."""
    if fault is Fault.CORRUPTED:
        payload[0] ^= 0x10
        return length
    kept = length // 2 // HEADER_BYTES * HEADER_BYTES
    payload[kept:length] = bytes(length - kept)
    return kept or length
