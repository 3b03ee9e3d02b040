"""Tiers that fail below the store: every error is a counted miss and blocks no other operation."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from store_rig import (
    OTHER_SPACE,
    SPACE,
    WAIT_S,
    CountingTier,
    RemoteTier,
    check,
    content,
    flush_to_tiers,
    free_slots,
    hashes,
    key_of,
    load,
    loaded_tiers,
    make_store,
    match,
    save,
    until,
    wait_done,
)

from kvstore.blocks import frame
from kvstore.blocks.key import Key
from kvstore.cache.write_policy import write_policy
from kvstore.errors import TierFull, TierUnavailable
from kvstore.store.session import Session
from kvstore.store.store import CLOSE_TIMEOUT_S, Store, StoreLimits
from kvstore.testing.faults import Fault, FaultyTier, always, in_turn
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.wrappers import CallTimeout, CircuitBreaker, takes_calls


def put(
    tier: MemoryTier, at: Key, header_key: Key, block: bytes, *, codec: str = "identity"
) -> None:
    """Write a well-formed frame directly to a tier, without the store."""
    header, payload = frame.aligned_buffer(4096), frame.aligned_buffer(len(block))
    payload[: len(block)] = block
    block_sum = frame.checksum(block)
    frame.pack_header(
        header,
        key=header_key,
        codec=codec,
        raw_bytes=len(block),
        stored_bytes=len(block),
        raw_sum=block_sum,
        stored_sum=block_sum,
    )
    tier.write(at, header, payload)


@pytest.mark.parametrize("codec", ["auto", "none"])
@pytest.mark.parametrize("fault", [Fault.CORRUPTED, Fault.TRUNCATED])
@pytest.mark.parametrize("call", ["read", "write"])
def test_a_corrupt_block_is_a_counted_miss_and_deleted(fault: Fault, call: str, codec: str) -> None:
    inner = MemoryTier()
    tier = FaultyTier(inner, always(fault, call) if call == "write" else None)
    with make_store(tier, codecs={"memory": codec}) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        flush_to_tiers(store)
        bad = key_of(session, hashes(3)[1])
        tier.schedule = lambda made, keys: fault if (made, keys) == (call, [bad]) else None
        assert len(loaded_tiers(session, hashes(3))) < 3
        until(lambda: store.stats()["l2"]["loads_in_flight"] == 0)
        stats = store.stats()["tiers"]["memory"]
        assert stats["checksum_failures"] >= 1
        assert stats["blocks"] == 3 - stats["checksum_failures"], "not deleted"
        tier.schedule = None
        assert len(loaded_tiers(session, hashes(3))) < 3
        # Each read finds the next corrupt block. Once deleted, a block is saved again.
        for _ in range(3):
            save(session, hashes(3))
            flush_to_tiers(store)
            tiers = loaded_tiers(session, hashes(3))
        assert tiers == ["memory"] * 3


def test_corruption_in_one_read_only_is_a_counted_miss_and_not_deleted() -> None:
    tier = FaultyTier(MemoryTier())
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        flush_to_tiers(store)
        tier.schedule = in_turn([None, Fault.CORRUPTED])
        assert len(loaded_tiers(session, hashes(3))) < 3
        until(lambda: store.stats()["l2"]["loads_in_flight"] == 0)
        stats = store.stats()["tiers"]["memory"]
        assert (stats["checksum_failures"], stats["blocks"]) == (1, 3)
        assert len(loaded_tiers(session, hashes(3))) == 3


class WatchedTier(MemoryTier):
    """Calls each function in `then` once, after a read and before the reader gets its result."""

    def __init__(self) -> None:
        super().__init__()
        self.then: list[Callable[[], None]] = []

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        length = super().read(key, header, payload)
        if self.then:
            self.then.pop(0)()
        return length


def read_as_http(store: Store, key: Key) -> int:
    return store.frames.read(
        key, frame.aligned_buffer(4096), frame.aligned_buffer(store.frames.payload_bytes)
    )


@pytest.mark.parametrize("reader", ["session", "http"])
def test_a_slow_reader_of_a_corrupt_block_does_not_delete_its_good_successor(reader: str) -> None:
    tier = WatchedTier()
    with make_store(tier) as store:
        session = store.session(SPACE)
        (name,) = hashes(1)
        key = key_of(session, name)
        good = content(key, SPACE.block_bytes)
        put(tier, key, key._replace(tenant="other"), good)

        def delete_and_write_again() -> None:
            assert read_as_http(store, key) == 0
            assert tier.contains([key]) == [False]
            put(tier, key, key, good)

        tier.then = [delete_and_write_again]
        if reader == "session":
            operation = load(session, [name])
            session.release(operation)
        else:
            assert read_as_http(store, key) == 0
        assert tier.then == []
        assert tier.contains([key]) == [True]
        assert loaded_tiers(session, [name]) == ["memory"]


def test_one_reader_at_a_time_deletes_a_corrupt_block() -> None:
    """Otherwise one reader could delete a block that was written after the other's delete."""
    tier = WatchedTier()
    with make_store(tier) as store:
        key = key_of(store.session(SPACE), hashes(1)[0])
        block = content(key, SPACE.block_bytes)
        put(tier, key, key._replace(tenant="other"), block)
        found: list[bool] = []

        def read_in_parallel() -> None:
            assert read_as_http(store, key) == 0
            found.extend(tier.contains([key]))

        # After the second read of the deleting reader.
        tier.then = [lambda: None, read_in_parallel]
        assert read_as_http(store, key) == 0
        assert found == [True]
        assert tier.contains([key]) == [False]


@pytest.mark.parametrize("where", ["tenant", "namespace", "hash", "size", "codec"])
def test_a_frame_with_a_wrong_header_is_a_miss_and_deleted(where: str) -> None:
    tier = MemoryTier()
    with make_store(tier) as store:
        session = store.session(SPACE)
        (name,) = hashes(1)
        key = key_of(session, name)
        header_key = {
            "tenant": key._replace(tenant="other"),
            "namespace": key._replace(namespace=OTHER_SPACE.digest),
            "hash": key._replace(hash=hashes(2)[1]),
        }.get(where, key)
        block = content(header_key, SPACE.block_bytes)
        codec = "zstd-planes/2" if where == "codec" else "identity"
        put(tier, key, header_key, block[:99] if where == "size" else block, codec=codec)
        assert match(session, [name]) == ["memory"]
        operation = load(session, [name])
        assert operation.slots == []
        assert operation.fault
        session.release(operation)
        assert store.stats()["tiers"]["memory"]["checksum_failures"] == 1
        assert tier.contains([key]) == [False]
        assert match(session, [name]) == []
        assert free_slots(store) == store.slab.slots


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ERROR])
def test_an_unreachable_tier_is_a_miss_and_loses_nothing(fault: Fault) -> None:
    tier = FaultyTier(MemoryTier())
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        flush_to_tiers(store)
        tier.schedule = always(fault, "read")
        assert loaded_tiers(session, hashes(3)) == []
        assert store.stats()["tiers"]["memory"]["errors"] >= 1
        tier.schedule = always(fault)
        assert match(session, hashes(3)) == []
        assert save(session, hashes(2, "meanwhile")).dropped == 0
        assert loaded_tiers(session, hashes(2, "meanwhile")) == ["l2"] * 2
        # Otherwise the next load may join one of these.
        until(lambda: store.stats()["l2"]["loads_in_flight"] == 0)
        tier.schedule = None
        assert loaded_tiers(session, hashes(3)) == ["memory"] * 3


def test_a_failed_flush_returns_false_and_flushes_the_other_tiers() -> None:
    class FlushFails(MemoryTier):
        def flush(self) -> None:
            raise TierUnavailable("the disk could not sync")

    class CountsFlushes(MemoryTier):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1

    last = CountsFlushes(name="last")
    with make_store(FlushFails(), last) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        assert store.flush(timeout_s=100.0) is False
        assert last.flushes == 1
        assert store.stats()["tiers"]["memory"]["errors"] == 1
        assert loaded_tiers(session, hashes(3)) == ["l2"] * 3


def test_a_full_tier_rejects_writes_and_l2_works() -> None:
    tier = FaultyTier(MemoryTier(), always(Fault.FULL, "write"))
    with make_store(tier, slots=8) as store:
        session = store.session(SPACE)
        for n in range(6):
            assert save(session, hashes(4, str(n))).dropped == 0
            assert loaded_tiers(session, hashes(4, str(n))) == ["l2"] * 4
            assert store.flush(WAIT_S)
        assert store.stats()["l2"]["tier_writes_failed"] == 24
        store.clear("l2")
        assert match(session, hashes(4, "5")) == []


@pytest.mark.parametrize("fault", [Fault.CORRUPTED, Fault.ERROR])
def test_a_load_falls_back_to_a_slower_tier(fault: Fault) -> None:
    fast = FaultyTier(MemoryTier(name="fast"))
    slow = CountingTier(name="slow")
    with make_store(fast, slow) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        flush_to_tiers(store)
        fast.schedule = always(fault, "read")
        assert match(session, hashes(3)) == ["fast"] * 3
        assert loaded_tiers(session, hashes(3)) == ["slow"] * 3
        assert len(slow.reads) == 3


def test_a_remote_location_is_removed_after_a_miss() -> None:
    tier = RemoteTier()
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        flush_to_tiers(store)
        assert match(session, hashes(3)) == ["memory"] * 3
        tier.clear()
        assert match(session, hashes(3)) == ["memory"] * 3, (
            "the location is known until a read misses"
        )
        assert loaded_tiers(session, hashes(3)) == []
        until(lambda: store.stats()["l2"]["loads_in_flight"] == 0)
        assert store.stats()["tiers"]["memory"]["misses"] >= 1
        assert match(session, hashes(3)) == []


def hang(call: str, queue_blocks: int = 4) -> tuple[FaultyTier, Store, Session]:
    """A store whose tier contains 8 blocks and hangs at every `call` from now on."""
    tier = FaultyTier(MemoryTier())
    below = guarded(tier) if call == "write" else tier
    store = make_store(below, slots=16, limits=StoreLimits(queue_blocks=queue_blocks))
    session = store.session(SPACE)
    save(session, hashes(8)[:4])
    assert store.flush(WAIT_S)
    save(session, hashes(8)[4:])
    flush_to_tiers(store)
    tier.schedule = always(Fault.HUNG, call)
    return tier, store, session


def test_a_tier_that_hangs_at_reads_blocks_no_other_load() -> None:
    tier, store, session = hang("read")
    other = store.session(SPACE)
    stuck = session.load(hashes(8))
    assert tier.wait_hung(3)
    assert not stuck.done
    save(other, hashes(4, "other"))
    assert loaded_tiers(other, hashes(4, "other")) == ["l2"] * 4
    session.release(stuck)
    stats = store.stats()["l2"]
    assert stats["loads_in_flight"] == 3, "only the loads that workers have started"
    assert stats["slots_filling"] == 3
    tier.release()
    until(lambda: store.stats()["l2"]["loads_in_flight"] == 0)
    assert len(loaded_tiers(session, hashes(8))) == 8
    store.close()


def test_a_block_that_arrived_early_is_released_too() -> None:
    tier = FaultyTier(MemoryTier())
    with make_store(tier) as store:
        session = store.session(SPACE)
        first, second = hashes(2)
        save(session, [first, second])
        flush_to_tiers(store)
        tier.schedule = lambda call, keys: (
            Fault.HUNG if call == "read" and keys[0].hash == first else None
        )
        operation = session.load([first, second])
        until(lambda: store.stats()["tiers"]["memory"]["reads"] == 1)
        until(lambda: store.stats()["l2"]["loads_in_flight"] == 1)
        assert operation.slots == [], "not a prefix"
        assert store.stats()["l2"]["slots_leased"] == 1
        session.release(operation)
        assert store.stats()["l2"]["slots_leased"] == 0
        tier.release()


def test_the_number_of_in_flight_loads_is_limited() -> None:
    tier = CountingTier()
    store = make_store(tier, slots=16)
    session = store.session(SPACE)
    for n in range(5):
        save(session, hashes(4, str(n)))
        assert store.flush(WAIT_S)
    store.clear("l2")
    tier.gate.clear()
    operations = [session.load(hashes(4, str(n))) for n in range(5)]
    rejected = [operation for operation in operations if operation.done]
    assert len(rejected) == 2, "12 of 16 slots may be in flight"
    assert all("too many" in operation.fault for operation in rejected)
    tier.gate.set()
    for operation in operations:
        wait_done(session, operation)
        session.release(operation)
    store.close()


def test_cancelled_loads_do_not_pile_up_in_a_hung_tier() -> None:
    tier, store, session = hang("read")
    first = session.load(hashes(3))
    assert tier.wait_hung(3)
    for _ in range(300):
        session.release(session.load(hashes(8)))
    session.release(first)
    session.release(session.load(hashes(8)))
    stats = store.stats()
    assert stats["tiers"]["memory"]["queued_reads"] <= 8, "cancelled loads pile up"
    assert stats["l2"]["loads_in_flight"] == 3
    tier.release()
    until(lambda: store.stats()["l2"]["loads_in_flight"] == 0)
    store.close()


def guarded(tier: Tier) -> CircuitBreaker:
    """A tier with a circuit breaker, as a configured one has; hung calls are noticed soon."""
    return CircuitBreaker(CallTimeout(tier, 0.01), reset_s=0.01)


@pytest.mark.parametrize("queue_blocks", [4, 64])
def test_a_tier_that_hangs_at_writes_leaves_l2_usable(queue_blocks: int) -> None:
    tier, store, session = hang("write", queue_blocks)
    save(session, hashes(4, "first"))
    until(lambda: not takes_calls(store.limit_applier.tiers[0]))
    for n in range(10):
        label = str(n)
        assert save(session, hashes(4, label)).dropped == 0, "the queue leases too many slots"
        assert loaded_tiers(session, hashes(4, label)) == ["l2"] * 4
        stats = store.stats()["tiers"]["memory"]
        assert stats["queued_writes"] <= queue_blocks
    l2 = store.stats()["l2"]
    assert l2["tier_writes_dropped"] >= 40 - 16
    assert not store.flush(0.05)
    tier.release()
    assert store.flush(WAIT_S)
    after = store.stats()["l2"]
    assert after["tier_writes_dropped"] == l2["tier_writes_dropped"]
    assert after["tier_writes_deferred"] == 0
    store.clear("l2")
    assert loaded_tiers(session, hashes(4, "9")) == ["memory"] * 4, "not written after the hang"
    store.close()


def test_write_back_works_over_a_failing_tier() -> None:
    tier = FaultyTier(MemoryTier(), always(Fault.REFUSED, "write"))
    with make_store(tier, slots=8, write_policy=write_policy("write_back")) as store:
        session = store.session(SPACE)
        for n in range(6):
            names = hashes(3, str(n))
            until(lambda names=names: save(session, names).dropped == 0)  # type: ignore[misc]
            assert match(session, names) == ["l2"] * 3
        l2 = store.stats()["l2"]
        assert l2["tier_writes_retried"] >= 1
        assert l2["tier_writes_dropped"] + l2["tier_writes_deferred"] >= 10, "not counted"


def test_write_back_works_over_a_hung_tier() -> None:
    tier = FaultyTier(MemoryTier(), always(Fault.HUNG, "write"))
    store = make_store(guarded(tier), slots=8, write_policy=write_policy("write_back"))
    session = store.session(SPACE)
    for n in range(20):
        save(session, hashes(4, str(n)))
    until(lambda: not takes_calls(store.limit_applier.tiers[0]))
    for n in range(20, 30):
        assert save(session, hashes(4, str(n))).dropped == 0, "dirty blocks fill every slot"
        assert match(session, hashes(4, str(n))) == ["l2"] * 4
    assert store.stats()["l2"]["tier_writes_dropped"] >= 40
    tier.release()
    store.close()


def test_a_redirected_load_is_cancelled_with_its_last_waiter() -> None:
    fast = FaultyTier(MemoryTier(name="fast"))
    slow = CountingTier(name="slow")
    with make_store(fast, slow) as store:
        session = store.session(SPACE)
        save(session, hashes(8))
        flush_to_tiers(store)
        fast.schedule = always(Fault.ERROR, "read")
        slow.gate.clear()
        operation = session.load(hashes(8))
        until(lambda: store.stats()["tiers"]["slow"]["queued_reads"] == 8 - len(slow.reads))
        until(lambda: len(slow.reads) == 3)
        session.release(operation)
        in_flight = store.stats()["l2"]["loads_in_flight"]
        assert in_flight == 3, "only the loads that workers have started"
        slow.gate.set()


def test_a_closing_store_does_not_reuse_slots_that_an_engine_may_read() -> None:
    tier = FaultyTier(MemoryTier())
    store = make_store(tier)
    session = store.session(SPACE)
    tier.schedule = always(Fault.HUNG, "write")
    save(session, hashes(2))
    operation = load(session, hashes(2))
    assert tier.wait_hung(2)
    closing = threading.Thread(target=store.close)
    closing.start()
    until(lambda: session.closed)
    late = Key("default", SPACE.digest, hashes(1, "late")[0])
    frames = MemoryTier()
    block = content(late, SPACE.block_bytes)
    put(frames, late, late, block)
    header, payload = frame.aligned_buffer(4096), frame.aligned_buffer(4096)
    length = frames.read(late, header, payload)
    with pytest.raises(TierFull):
        store.frames.write(late, header, payload[:length])
    check(session, operation)
    tier.release()
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_closing_does_not_wait_for_a_hung_tier() -> None:
    tier, store, session = hang("read")
    stuck = session.load(hashes(8))
    assert tier.wait_hung(3)
    assert CLOSE_TIMEOUT_S <= 5
    store.close()
    assert stuck.done
    stats = store.stats()["l2"]
    assert stats["slots_filling"] == 3, "a slot is free although a worker writes to it"
    assert stats["slots_free"] < stats["slots"]
    tier.release()


def test_a_block_that_occurs_twice_in_one_load() -> None:
    names = hashes(4)
    tier = FaultyTier(MemoryTier())
    with make_store(tier) as store:
        session, other = store.session(SPACE), store.session(SPACE)
        twice = [names[0], names[1], names[1], names[2], names[0]]
        save(session, twice)
        assert loaded_tiers(session, twice) == ["l2"] * 5
        flush_to_tiers(store)
        assert loaded_tiers(session, twice) == ["memory"] * 5
        flush_to_tiers(store)
        tier.schedule = always(Fault.SLOW, "read")
        first, second = session.load(twice), other.load(twice)
        tier.schedule = always(Fault.REFUSED, "read")
        for one, operation in ((session, first), (other, second)):
            wait_done(one, operation)
            one.release(operation)
        until(lambda: store.stats()["l2"]["loads_in_flight"] == 0)
        assert store.stats()["l2"]["slots_leased"] == 0


def test_loads_go_ahead_of_writes_without_starving_them() -> None:
    """Both threads of a tier are blocked while ten writes and ten reads wait. Then they run."""
    order: list[str] = []
    gate, busy = threading.Event(), threading.Semaphore(0)

    class Gated(MemoryTier):
        workers_read = 1
        workers_write = 1

        def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
            self.pass_gate("read")
            return super().read(key, header, payload)

        def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
            self.pass_gate("write")
            super().write(key, header, payload)

        def pass_gate(self, call: str) -> None:
            busy.release()
            assert gate.wait(WAIT_S)
            order.append(call)

    gate.set()
    below = hashes(10, "below")
    with make_store(Gated(), slots=64) as store, store.session(SPACE) as session:
        save(session, below)
        flush_to_tiers(store)
        while busy.acquire(blocking=False):
            pass
        gate.clear()
        order.clear()
        save(session, hashes(12, "new"))
        for _ in range(2):
            assert busy.acquire(timeout=WAIT_S)  # each thread is in a write
        operation = session.load(below)
        gate.set()
        wait_done(session, operation)
        assert len(operation.slots) == 10
        assert store.flush(WAIT_S)
        session.release(operation)
    waited = order[2:]
    last = len(waited) - waited[::-1].index("read")
    assert waited[:last].count("write") <= 4, f"writes went ahead: {waited}"
    assert order.count("write") == 12
