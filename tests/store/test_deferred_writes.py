"""Blocks that a tier did not take at once are written later, while L2 has them."""

from __future__ import annotations

import logging
import threading

import pytest
from store_rig import (
    SPACE,
    WAIT_S,
    flush_to_tiers,
    hashes,
    key_of,
    loaded_tiers,
    make_store,
    match,
    save,
    until,
)

from kvstore.cache.tier_writes import WRITE_TRIES_MAX
from kvstore.cache.write_policy import WRITE_POLICIES, write_policy
from kvstore.store import write_pace
from kvstore.store.store import Store, StoreLimits
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.rate_limit import RateLimit
from kvstore.tiers.wrappers import CallTimeout, CircuitBreaker


@pytest.fixture(autouse=True)
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other quickly, as the clock of a test is the machine's."""
    monkeypatch.setattr(write_pace, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(write_pace, "RETRY_MAX_S", 0.05)


def breaker(tier: FaultyTier) -> CircuitBreaker:
    return CircuitBreaker(CallTimeout(tier, WAIT_S), failures=3, reset_s=0.05)


def l2(store: Store) -> dict[str, int]:
    found: dict[str, int] = store.stats()["l2"]
    return found


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_blocks_saved_during_an_outage_are_written_after_it(policy: str) -> None:
    """The circuit breaker opens, and closes again by a write: nothing else asks the tier."""
    tier = FaultyTier(MemoryTier(), always(Fault.REFUSED, "write"))
    with make_store(breaker(tier), slots=64, write_policy=write_policy(policy)) as store:
        session = store.session(SPACE)
        names = hashes(24)
        for at in range(0, 24, 8):
            assert save(session, names[at : at + 8]).dropped == 0
        for _ in range(3):  # `selective` writes at the second hit
            loaded_tiers(session, names)
        assert not store.flush(0.2)
        assert l2(store)["tier_writes_deferred"] == 24
        assert store.stats()["tiers"]["memory"]["breaker_opened"] >= 1
        tier.schedule = None
        until(lambda: l2(store)["tier_writes_written"] == 24)
        assert l2(store)["tier_writes_retried"] >= 1
        assert (l2(store)["tier_writes_dropped"], l2(store)["tier_writes_failed"]) == (0, 0)
        flush_to_tiers(store)
        assert loaded_tiers(session, names) == ["memory"] * 24


def test_a_flush_waits_and_says_what_it_left(caplog: pytest.LogCaptureFixture) -> None:
    tier = FaultyTier(MemoryTier(name="far"), always(Fault.REFUSED, "write"))
    near = MemoryTier(name="near")
    with make_store(near, breaker(tier), slots=64) as store:
        session = store.session(SPACE)
        save(session, hashes(5))
        with caplog.at_level(logging.WARNING):
            assert not store.flush(0.1)
        assert "flush: blocks not written yet: 5 to far" in caplog.text
        assert near.contains([key_of(session, name) for name in hashes(5)]) == [True] * 5
        failed = sum(call == ("write", Fault.REFUSED) for call in tier.calls)

        def recover() -> None:
            until(lambda: len(tier.calls) > failed + 1)
            tier.schedule = None

        healing = threading.Thread(target=recover)
        healing.start()
        assert store.flush(WAIT_S), "it did not wait for the tier"
        healing.join()
        store.clear("l2")
        near.clear()
        assert loaded_tiers(session, hashes(5)) == ["far"] * 5


def test_blocks_that_do_not_fit_into_the_queue_are_written_in_order() -> None:
    tier = FaultyTier(MemoryTier(), always(Fault.HUNG, "write"))
    tier.workers_read = tier.workers_write = 1
    with make_store(tier, slots=64, limits=StoreLimits(queue_blocks=2)) as store:
        session = store.session(SPACE)
        names = hashes(40)
        for at in range(0, 40, 8):
            assert save(session, names[at : at + 8]).dropped == 0
        assert tier.wait_hung(2)
        assert l2(store)["tier_writes_deferred"] == 36
        tier.release()
        until(lambda: l2(store)["tier_writes_written"] == 40)
        assert l2(store)["tier_writes_dropped"] == 0
        flush_to_tiers(store)
        assert loaded_tiers(session, names) == ["memory"] * 40


def test_a_block_that_always_fails_stops_no_other_and_is_given_up() -> None:
    tier = FaultyTier(MemoryTier())
    with make_store(breaker(tier), slots=64) as store:
        session = store.session(SPACE)
        names = hashes(12)
        bad = key_of(session, names[2])
        tier.schedule = lambda call, keys: (
            Fault.REFUSED if call == "write" and keys[0] == bad else None
        )
        save(session, names)
        until(lambda: l2(store)["tier_writes_failed"] == 1)
        assert l2(store)["tier_writes_written"] == 11
        assert tier.calls.count(("write", Fault.REFUSED)) == WRITE_TRIES_MAX
        until(lambda: store.flush(WAIT_S))  # once the circuit breaker is closed
        assert match(session, names) == ["l2"] * 12


def test_a_block_that_can_never_be_written_is_not_tried_again() -> None:
    tier = FaultyTier(MemoryTier(), always(Fault.ERROR, "write"))
    with make_store(breaker(tier), slots=64) as store:
        save(store.session(SPACE), hashes(6))
        assert store.flush(WAIT_S)
        assert tier.calls.count(("write", Fault.ERROR)) == 6
        assert l2(store)["tier_writes_failed"] == 6


def test_a_bandwidth_limit_is_no_failure() -> None:
    """Its rejections are not tries."""
    tier = RateLimit(MemoryTier(), write_bytes_per_s=200_000, burst_bytes=1)
    with make_store(tier, slots=64) as store:
        session = store.session(SPACE)
        save(session, hashes(20))
        assert store.flush(WAIT_S)
        assert l2(store)["tier_writes_written"] == 20
        assert (l2(store)["tier_writes_retried"], l2(store)["tier_writes_failed"]) == (0, 0)


def test_blocks_that_leave_l2_unwritten_are_counted() -> None:
    tier = FaultyTier(MemoryTier(), always(Fault.REFUSED, "write"))
    with make_store(breaker(tier), slots=16) as store:
        session = store.session(SPACE)
        for number in range(10):
            until(lambda number=number: save(session, hashes(8, str(number))).dropped == 0)  # type: ignore[misc]
        until(lambda: l2(store)["tier_writes_in_flight"] == 0)
        counted = l2(store)["tier_writes_dropped"] + l2(store)["tier_writes_deferred"]
        assert counted + l2(store)["tier_writes_failed"] == 80
