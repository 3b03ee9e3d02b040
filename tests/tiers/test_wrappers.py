"""Wrappers with injected faults, on a simulated clock."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvstore.blocks.key import Key
from kvstore.errors import CallRejected, TierError, TierFull, TierUnavailable
from kvstore.testing.clock import FakeClock
from kvstore.testing.faults import Fault, FaultyTier, always, in_turn
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers.base import IO_ALIGNMENT, Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.rate_limit import MAX_RATE_WAIT_S, RateLimit
from kvstore.tiers.wrappers import (
    MAX_BACKOFF,
    CallTimeout,
    CircuitBreaker,
    Retry,
)

MIB = 1 << 20


class RemoteTier(MemoryTier):
    """A memory tier that reports no local index."""

    local_index = False


class TestWrapped(TierSuite):
    """A tier with all wrappers passes the common tier tests."""

    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        limited = RateLimit(
            MemoryTier(capacity_bytes), read_bytes_per_s=1e12, write_bytes_per_s=1e12
        )
        return CircuitBreaker(CallTimeout(Retry(FaultyTier(limited)), 60.0))


class Rig:
    """A tier with one block, injected faults, a call timeout and a circuit breaker."""

    def __init__(self, inner: Tier | None = None, *, failures: int = 3) -> None:
        self.clock = FakeClock()
        self.buffer = FrameBuffer(IO_ALIGNMENT)
        self.faulty = FaultyTier(inner or MemoryTier(MIB))
        self.faulty.write(*self.buffer.fill(key_of(1), 4000))
        self.breaker = CircuitBreaker(
            CallTimeout(self.faulty, 2.0, clock=self.clock),
            failures=failures,
            reset_s=10.0,
            clock=self.clock,
        )

    def read(self) -> int:
        return self.breaker.read(key_of(1), self.buffer.header, self.buffer.payload)

    def fail(self, times: int) -> None:
        self.faulty.schedule = always(Fault.REFUSED)
        for _ in range(times):
            with pytest.raises(TierUnavailable):
                self.read()
        self.faulty.schedule = None

    def calls(self) -> int:
        return len(self.faulty.calls)


def test_a_wrapper_has_the_capabilities_of_what_it_wraps() -> None:
    tier = RemoteTier(MIB, name="far")
    tier.workers_read = 7  # type: ignore[misc]
    outer = CircuitBreaker(CallTimeout(tier, 1.0))
    assert (outer.name, outer.workers_read, outer.local_index) == ("far", 7, False)
    assert CircuitBreaker(MemoryTier(MIB)).local_index is True


def test_failures_in_a_row_take_the_tier_down() -> None:
    rig = Rig()
    rig.fail(2)
    assert rig.read() == IO_ALIGNMENT, "a success resets the count"
    rig.fail(2)
    assert rig.breaker.is_up()
    rig.fail(1)
    assert not rig.breaker.is_up()
    calls = rig.calls()
    assert rig.breaker.contains([key_of(1), key_of(2)]) == [False, False]
    assert rig.read() == 0
    with pytest.raises(TierUnavailable, match="circuit breaker open"):
        rig.breaker.write(*rig.buffer.fill(key_of(2), 100))
    with pytest.raises(TierUnavailable):
        rig.breaker.delete([key_of(1)])
    assert rig.calls() == calls, "the tier was called while the breaker was open"
    assert rig.breaker.stats()["state"] == "down"


def test_only_unavailable_counts() -> None:
    rig = Rig(failures=1)
    rig.faulty.schedule = always(Fault.ERROR)
    with pytest.raises(TierError):
        rig.read()
    rig.faulty.schedule = always(Fault.FULL)
    with pytest.raises(TierFull):
        rig.breaker.write(*rig.buffer.fill(key_of(2), 100))
    assert rig.breaker.is_up()


def test_a_probe_decides_and_failed_ones_wait_longer() -> None:
    rig = Rig()
    rig.fail(3)
    wait_s = 10.0
    for _ in range(8):
        rig.clock.advance(wait_s - 0.01)
        assert rig.read() == 0
        rig.clock.advance(0.02)
        rig.fail(1)
        wait_s = min(2 * wait_s, 10.0 * MAX_BACKOFF)
    rig.clock.advance(wait_s)
    assert rig.breaker.contains([key_of(1)]) == [True], "a lookup in a local index is no probe"
    assert not rig.breaker.is_up()
    assert rig.read() == IO_ALIGNMENT
    assert rig.breaker.is_up()
    rig.fail(3)
    rig.clock.advance(10.0)
    assert rig.read() == IO_ALIGNMENT, "a successful probe resets the wait"


def test_contains_of_a_remote_tier_is_a_probe() -> None:
    rig = Rig(RemoteTier(MIB))
    rig.fail(3)
    assert rig.breaker.contains([key_of(1)]) == [False]
    rig.clock.advance(10.0)
    assert rig.breaker.contains([key_of(1)]) == [True]
    assert rig.breaker.is_up()


def test_a_hung_call_is_told_and_everything_else_answers_at_once() -> None:
    rig = Rig()
    rig.faulty.schedule = in_turn([Fault.HUNG])
    mine = FrameBuffer(IO_ALIGNMENT)
    got: list[int] = []

    def hang() -> None:
        got.append(rig.breaker.read(key_of(1), mine.header, mine.payload))

    thread = threading.Thread(target=hang)
    thread.start()
    assert rig.faulty.wait_hung()
    assert rig.breaker.overdue_s() == 0.0
    rig.clock.advance(1.9)
    assert rig.breaker.is_up()
    rig.clock.advance(1.1)
    assert rig.breaker.overdue_s() == pytest.approx(1.0)
    assert rig.breaker.contains([key_of(1)]) == [False]
    assert rig.read() == 0
    with pytest.raises(TierUnavailable):
        rig.breaker.write(*rig.buffer.fill(key_of(2), 100))
    rig.clock.advance(1000.0)
    assert rig.read() == 0, "no probe while a call hangs"
    rig.faulty.release()
    thread.join(30)
    assert got == [IO_ALIGNMENT], "a late result is still correct"
    assert rig.breaker.overdue_s() == 0.0
    assert rig.read() == IO_ALIGNMENT
    assert rig.breaker.is_up()
    assert rig.breaker.stats()["deadline_exceeded"] == 1


def test_only_one_probe_at_a_time() -> None:
    rig = Rig()
    rig.fail(3)
    rig.clock.advance(10.0)
    rig.faulty.schedule = in_turn([Fault.HUNG])
    mine = FrameBuffer(IO_ALIGNMENT)
    thread = threading.Thread(target=lambda: rig.breaker.read(key_of(1), mine.header, mine.payload))
    thread.start()
    assert rig.faulty.wait_hung()
    calls = rig.calls()
    assert rig.read() == 0
    assert rig.calls() == calls
    rig.faulty.release()
    thread.join(30)
    assert rig.read() == IO_ALIGNMENT


def test_calls_that_end_late_count_as_failures() -> None:
    rig = Rig()
    rig.faulty = FaultyTier(rig.faulty.inner, always(Fault.SLOW), slow_s=3.0, sleep=rig.clock.sleep)
    breaker = CircuitBreaker(
        CallTimeout(rig.faulty, 2.0, clock=rig.clock), failures=2, reset_s=10.0, clock=rig.clock
    )
    for _ in range(2):
        assert breaker.is_up()
        assert breaker.read(key_of(1), rig.buffer.header, rig.buffer.payload) == IO_ALIGNMENT
    assert not breaker.is_up()


class SlowRig(Rig):
    """The tier moves `bytes_per_s`; a call without payload takes no time."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s
        self.frame = FrameBuffer(MIB)
        memory = MemoryTier(64 * MIB)
        rig = self

        class SlowTier(MemoryTier):
            def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
                rig.clock.advance(len(payload) / rig.bytes_per_s)
                memory.write(key, header, payload)

            def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
                length = memory.read(key, header, payload)
                rig.clock.advance(length / rig.bytes_per_s)
                return length

        self.timeout = CallTimeout(FaultyTier(SlowTier(64 * MIB)), 2.0, clock=self.clock)
        self.breaker = CircuitBreaker(self.timeout, failures=3, reset_s=10.0, clock=self.clock)

    def write_block(self, number: int) -> None:
        self.breaker.write(*self.frame.fill(key_of(number), MIB))

    def read_block(self, number: int) -> int:
        return self.breaker.read(key_of(number), self.frame.header, self.frame.payload)


def test_slow_writes_are_no_failures() -> None:
    """4 s for a write, twice the timeout; and 20 s, which is too slow to wait for."""
    for bytes_per_s, exceeded in ((MIB / 4, 0), (MIB / 20, 8)):
        rig = SlowRig(bytes_per_s)
        for number in range(8):
            rig.write_block(number)
            assert rig.breaker.is_up()
        assert rig.breaker.stats()["breaker_opened"] == 0
        assert rig.breaker.stats()["deadline_exceeded"] == exceeded


def test_slow_reads_are_no_failures_and_reads_that_are_far_too_slow_are() -> None:
    rig = SlowRig(MIB / 4)
    for number in range(4):
        rig.write_block(number)
    for number in range(4):
        assert rig.read_block(number) == MIB
    assert rig.breaker.is_up()
    rig.bytes_per_s = MIB / 20
    for number in range(3):
        assert rig.read_block(number) == MIB, "a late result is still correct"
    assert not rig.breaker.is_up()


def test_a_hung_write_to_a_quick_tier_is_noticed_at_the_timeout() -> None:
    rig = SlowRig(1000 * MIB)
    for number in range(8):
        rig.write_block(number)
    faulty = rig.timeout.inner
    assert isinstance(faulty, FaultyTier)
    faulty.schedule = in_turn([Fault.HUNG])
    thread = threading.Thread(target=rig.write_block, args=(9,))
    thread.start()
    assert faulty.wait_hung()
    rig.clock.advance(1.99)
    assert rig.breaker.is_up()
    rig.clock.advance(0.1)
    assert not rig.breaker.is_up()
    with pytest.raises(CallRejected):
        rig.breaker.write(*rig.buffer.fill(key_of(3), 100))
    faulty.release()
    thread.join(30)
    assert rig.breaker.is_up(), "it was late, not dead"
    rig.write_block(10)


def test_retry_tries_again_and_no_more_than_it_may() -> None:
    clock = FakeClock()
    rig = Rig()
    retry = Retry(rig.faulty, tries=3, wait_s=0.5, sleep=clock.sleep)
    rig.faulty.schedule = in_turn([Fault.REFUSED, Fault.REFUSED, None])
    assert retry.read(key_of(1), rig.buffer.header, rig.buffer.payload) == IO_ALIGNMENT
    assert clock() == 1.0
    rig.faulty.schedule = always(Fault.REFUSED)
    before = rig.calls()
    with pytest.raises(TierUnavailable):
        retry.contains([key_of(1)])
    assert rig.calls() - before == 3
    rig.faulty.schedule = always(Fault.ERROR)
    before = rig.calls()
    with pytest.raises(TierError):
        retry.delete([key_of(1)])
    assert rig.calls() - before == 1, "a permanent error is not retried"


def test_a_rate_is_kept_in_each_direction() -> None:
    clock = FakeClock()
    buffer = FrameBuffer(MIB)
    tier = RateLimit(
        MemoryTier(64 * MIB),
        read_bytes_per_s=2 * MIB,
        write_bytes_per_s=MIB,
        burst_bytes=MIB,
        clock=clock,
        sleep=clock.sleep,
    )
    # The burst covers one transfer, and the debt of the last one is not waited for yet.
    for number in range(12):
        tier.write(*buffer.fill(key_of(number), MIB))
    assert clock() == pytest.approx(10.0, rel=0.02)
    clock.advance(100.0)
    began = clock()
    for number in range(12):
        assert tier.read(key_of(number), buffer.header, buffer.payload) == MIB
    assert clock() - began == pytest.approx(5.0, rel=0.1)


def test_a_read_pays_for_what_it_got_and_not_for_its_buffer() -> None:
    clock = FakeClock()
    small, large = FrameBuffer(IO_ALIGNMENT), FrameBuffer(16 * MIB)
    tier = RateLimit(
        MemoryTier(64 * MIB),
        read_bytes_per_s=MIB,
        burst_bytes=17 * MIB,
        clock=clock,
        sleep=clock.sleep,
    )
    for number in range(8):
        tier.write(*small.fill(key_of(number), 100))
    for number in range(16):  # half of them are misses
        tier.read(key_of(number), large.header, large.payload)
    assert clock() == 0.0, "a wait for bytes that were not read"
    for _ in range(20_000):
        assert tier.read(key_of(1), small.header, small.payload) == IO_ALIGNMENT
    assert clock() > 0.0, "read bytes do not count"


def test_a_direction_without_a_limit_does_not_wait() -> None:
    clock = FakeClock()
    buffer = FrameBuffer(MIB)
    tier = RateLimit(
        MemoryTier(64 * MIB), read_bytes_per_s=10.0, clock=clock, sleep=clock.sleep, burst_bytes=1
    )
    for number in range(20):
        tier.write(*buffer.fill(key_of(number), MIB))
    assert tier.read(key_of(0), buffer.header, buffer.payload) == MIB
    with pytest.raises(TierUnavailable):
        tier.read(key_of(1), buffer.header, buffer.payload)


def test_large_slots_and_small_frames_keep_the_whole_rate() -> None:
    """Transfers within the burst are not rejected."""
    clock = FakeClock()
    frame, slot = FrameBuffer(2 * MIB), FrameBuffer(32 * MIB)
    tier = RateLimit(
        MemoryTier(64 * MIB),
        read_bytes_per_s=10 * MIB,
        burst_bytes=MIB,
        clock=clock,
        sleep=clock.sleep,
    )
    for number in range(8):
        tier.write(*frame.fill(key_of(number), 2 * MIB))
    for number in range(64):
        assert tier.read(key_of(number % 8), slot.header, slot.payload) == 2 * MIB
    assert clock() == pytest.approx(64 * 2 / 10, rel=0.1)


def test_a_transfer_that_would_wait_too_long_is_refused() -> None:
    clock = FakeClock()
    buffer = FrameBuffer(MIB)
    tier = RateLimit(
        MemoryTier(64 * MIB),
        read_bytes_per_s=1000.0,
        write_bytes_per_s=1000.0,
        burst_bytes=5000.0,
        clock=clock,
        sleep=clock.sleep,
    )
    tier.write(*buffer.fill(key_of(0), MIB))
    with pytest.raises(TierUnavailable, match="bandwidth limit"):
        tier.write(*buffer.fill(key_of(1), MIB))
    assert clock() <= MAX_RATE_WAIT_S
    assert tier.contains([key_of(0), key_of(1)]) == [True, False]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.REFUSED, TierUnavailable),
        (Fault.ERROR, TierError),
        (Fault.FULL, TierFull),
    ],
)
def test_faults_are_what_they_say(fault: Fault, expected: type[TierError]) -> None:
    buffer = FrameBuffer(IO_ALIGNMENT)
    faulty = FaultyTier(MemoryTier(MIB), always(fault))
    with pytest.raises(expected):
        faulty.write(*buffer.fill(key_of(1), 100))
    faulty.schedule = None
    faulty.write(*buffer.fill(key_of(1), 100))
    assert faulty.contains([key_of(1)]) == [True]
    assert faulty.calls == [("write", fault), ("write", None), ("contains", None)]


@pytest.mark.parametrize("fault", [Fault.CORRUPTED, Fault.TRUNCATED])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_injected_corruption_is_detected(fault: Fault, operation: str) -> None:
    from kvstore.errors import FrameInvalid

    buffer = FrameBuffer(4 * IO_ALIGNMENT)
    faulty = FaultyTier(MemoryTier(MIB), always(fault, operation))
    frame = buffer.fill(key_of(1), 4 * IO_ALIGNMENT)
    before = bytes(frame[2])
    faulty.write(*frame)
    assert bytes(frame[2]) == before, "the caller's buffer is not corrupted"
    length = faulty.read(key_of(1), buffer.header, buffer.payload)
    assert length > 0
    with pytest.raises((FrameInvalid, AssertionError)):
        buffer.version_of(key_of(1), length)
