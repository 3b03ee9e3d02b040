"""Limits that change while the tier is in use."""

from __future__ import annotations

import threading
import time

import pytest

from kvstore.blocks.key import Key
from kvstore.errors import TierUnavailable
from kvstore.testing.clock import FakeClock
from kvstore.testing.faults import Fault, FaultyTier, always, in_turn
from kvstore.testing.frames import FrameBuffer
from kvstore.tiers.base import IO_ALIGNMENT
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.rate_limit import RateLimit
from kvstore.tiers.tenant_quota import TenantQuotas
from kvstore.tiers.wrappers import CallTimeout, CircuitBreaker, iter_layers

MIB = 1 << 20
FRAME = IO_ALIGNMENT + 8192
WAIT_S = 60.0


def key(tenant: str, number: int) -> Key:
    return Key(tenant, "space", bytes([number]) * 32)


def put(tier: TenantQuotas, tenant: str, numbers: range) -> None:
    buffer = FrameBuffer(8192)
    for number in numbers:
        tier.write(*buffer.fill(key(tenant, number), 8192))


def held(tier: TenantQuotas, tenant: str, numbers: range) -> list[bool]:
    return tier.contains([key(tenant, number) for number in numbers])


def test_layers() -> None:
    tier = TenantQuotas(RateLimit(CircuitBreaker(CallTimeout(MemoryTier(), 1.0))), {})
    kinds = [TenantQuotas, RateLimit, CircuitBreaker, CallTimeout, MemoryTier]
    assert [type(layer) for layer in iter_layers(tier)] == kinds


def test_a_rate_is_set_changed_and_taken_away() -> None:
    clock = FakeClock()
    buffer = FrameBuffer(MIB)
    tier = RateLimit(MemoryTier(), burst_bytes=1, clock=clock, sleep=clock.sleep)

    def seconds_of_four_writes(first: int) -> float:
        began = clock()
        for number in range(first, first + 4):
            tier.write(*buffer.fill(key("a", number), MIB))
        return clock() - began

    assert seconds_of_four_writes(0) == 0.0
    tier.set_limits(0, MIB)
    assert seconds_of_four_writes(10) == pytest.approx(3.0, rel=0.05)
    debt = tier._writes
    tier.set_limits(0, MIB)
    assert tier._writes is debt, "an unchanged limit keeps its debt"
    tier.set_limits(0, 2 * MIB)
    assert seconds_of_four_writes(20) == pytest.approx(1.5, rel=0.05)
    tier.set_limits(5 * MIB, 0)
    assert seconds_of_four_writes(30) == 0.0


def test_a_quota_grows_shrinks_and_goes() -> None:
    tier = TenantQuotas(MemoryTier(), {"a": 3 * FRAME})
    put(tier, "a", range(4))
    assert sum(held(tier, "a", range(4))) == 3
    tier.set_limits({"a": 5 * FRAME})
    put(tier, "a", range(4, 6))
    assert sum(held(tier, "a", range(6))) == 5
    tier.set_limits({"a": 2 * FRAME})
    put(tier, "a", range(6, 7))
    assert held(tier, "a", range(7)) == [False] * 5 + [True] * 2
    tier.set_limits({})
    put(tier, "a", range(10, 20))
    assert all(held(tier, "a", range(10, 20)))
    assert tier.used_bytes() == {}
    tier.close()


def test_a_tenants_first_quota_counts_what_it_has_already() -> None:
    tier = TenantQuotas(MemoryTier(), {})
    put(tier, "a", range(6))
    put(tier, "b", range(6))
    tier.set_limits({"a": 4 * FRAME})
    deadline = time.monotonic() + WAIT_S
    while tier.used_bytes() != {"a": 6 * FRAME}:
        assert time.monotonic() < deadline, "the tier was not listed"
        time.sleep(0.01)
    put(tier, "a", range(6, 7))
    assert sum(held(tier, "a", range(7))) == 4
    assert all(held(tier, "b", range(6)))
    tier.close()


def test_quotas_change_under_writers() -> None:
    tier = TenantQuotas(MemoryTier(), {"a": 3 * FRAME})
    faults: list[BaseException] = []
    stop = threading.Event()

    def work(turn: int) -> None:
        try:
            while not stop.is_set():
                put(tier, "a", range(turn, 200, 4))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(300):
        tier.set_limits([{}, {"a": 2 * FRAME}, {"*": 5 * FRAME}][turn % 3])
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []
    tier.close()


def test_a_breaker_follows() -> None:
    clock = FakeClock()
    faulty = FaultyTier(MemoryTier(), schedule=always(Fault.REFUSED))
    breaker = CircuitBreaker(faulty, failures=9, reset_s=100.0, clock=clock)
    breaker.set_limits(1, 1.0)
    buffer = FrameBuffer(8192)
    with pytest.raises(TierUnavailable):
        breaker.read(key("a", 1), buffer.header, buffer.payload)
    assert not breaker.is_up()
    assert breaker.read(key("a", 1), buffer.header, buffer.payload) == 0
    clock.advance(1.5)
    faulty.schedule = in_turn([])
    breaker.read(key("a", 1), buffer.header, buffer.payload)
    assert breaker.is_up()
