"""Tiers that fail under the store: every fault is a miss, counted, and in nobody's way."""

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
    ended,
    free_slots,
    hashes,
    key_of,
    load,
    loaded_tiers,
    make_store,
    match,
    save,
    spill_to_tiers,
    until,
)

from kvstore.blocks import frame
from kvstore.blocks.key import Key
from kvstore.cache.write_policy import write_policy
from kvstore.errors import TierFull, TierUnavailable
from kvstore.store.session import Session
from kvstore.store.store import CLOSE_WAIT_S, Budgets, Store
from kvstore.testing.faults import Fault, FaultyTier, always, in_turn
from kvstore.tiers.memory import MemoryTier


def put(tier: MemoryTier, at: Key, says: Key, block: bytes, *, codec: str = "identity") -> None:
    """Lay a well-formed frame into a tier, behind the store's back."""
    header, payload = frame.aligned_buffer(4096), frame.aligned_buffer(len(block))
    payload[: len(block)] = block
    total = frame.checksum(block)
    frame.pack_header(
        header,
        key=says,
        codec=codec,
        raw_bytes=len(block),
        stored_bytes=len(block),
        raw_sum=total,
        stored_sum=total,
    )
    tier.write(at, header, payload)


@pytest.mark.parametrize("codec", ["auto", "identity"])
@pytest.mark.parametrize("fault", [Fault.CORRUPTED, Fault.TRUNCATED])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_damage_is_a_miss_counted_and_deleted(fault: Fault, verb: str, codec: str) -> None:
    inner = MemoryTier()
    tier = FaultyTier(inner, always(fault, verb) if verb == "write" else None)
    with make_store(tier, codecs={"memory": codec}) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        spill_to_tiers(store)
        bad = key_of(session, hashes(3)[1])
        tier.schedule = lambda call, keys: fault if (call, keys) == (verb, [bad]) else None
        assert len(loaded_tiers(session, hashes(3))) < 3
        until(lambda: store.stats()["l2"]["flights"] == 0)
        stats = store.stats()["tiers"]["memory"]
        assert stats["checksum_failures"] >= 1
        assert stats["blocks"] == 3 - stats["checksum_failures"], "not deleted"
        tier.schedule = None
        assert len(loaded_tiers(session, hashes(3))) < 3
        # Damage is found when it is read, block by block; once found, the block is stored anew.
        for _ in range(3):
            save(session, hashes(3))
            spill_to_tiers(store)
            tiers = loaded_tiers(session, hashes(3))
        assert tiers == ["memory"] * 3


def test_damage_on_the_way_is_a_miss_counted_and_not_deleted() -> None:
    tier = FaultyTier(MemoryTier())
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        spill_to_tiers(store)
        tier.schedule = in_turn([None, Fault.CORRUPTED])
        assert len(loaded_tiers(session, hashes(3))) < 3
        until(lambda: store.stats()["l2"]["flights"] == 0)
        stats = store.stats()["tiers"]["memory"]
        assert (stats["checksum_failures"], stats["blocks"]) == (1, 3)
        assert len(loaded_tiers(session, hashes(3))) == 3


class WatchedTier(MemoryTier):
    """Calls each of `then` once, after a read and before its reader sees what it read."""

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
def test_a_slow_reader_of_damage_does_not_delete_what_was_written_since(reader: str) -> None:
    tier = WatchedTier()
    with make_store(tier) as store:
        session = store.session(SPACE)
        (name,) = hashes(1)
        key = key_of(session, name)
        good = content(key, SPACE.block_bytes)
        put(tier, key, key._replace(tenant="other"), good)

        def deleted_and_written_anew() -> None:
            assert read_as_http(store, key) == 0
            assert tier.contains([key]) == [False]
            put(tier, key, key, good)

        tier.then = [deleted_and_written_anew]
        if reader == "session":
            ticket = load(session, [name])
            session.release(ticket)
        else:
            assert read_as_http(store, key) == 0
        assert tier.then == []
        assert tier.contains([key]) == [True]
        assert loaded_tiers(session, [name]) == ["memory"]


def test_damage_is_deleted_by_one_reader_at_a_time() -> None:
    """Else one could delete what was written after the other's delete."""
    tier = WatchedTier()
    with make_store(tier) as store:
        key = key_of(store.session(SPACE), hashes(1)[0])
        block = content(key, SPACE.block_bytes)
        put(tier, key, key._replace(tenant="other"), block)
        held: list[bool] = []

        def read_by_another() -> None:
            assert read_as_http(store, key) == 0
            held.extend(tier.contains([key]))

        # After the deleter's second read.
        tier.then = [lambda: None, read_by_another]
        assert read_as_http(store, key) == 0
        assert held == [True]
        assert tier.contains([key]) == [False]


@pytest.mark.parametrize("where", ["tenant", "namespace", "hash", "size", "codec"])
def test_a_frame_of_something_else_is_a_miss_and_deleted(where: str) -> None:
    tier = MemoryTier()
    with make_store(tier) as store:
        session = store.session(SPACE)
        (name,) = hashes(1)
        right = key_of(session, name)
        says = {
            "tenant": right._replace(tenant="other"),
            "namespace": right._replace(namespace=OTHER_SPACE.digest),
            "hash": right._replace(hash=hashes(2)[1]),
        }.get(where, right)
        block = content(says, SPACE.block_bytes)
        codec = "zstd-planes/2" if where == "codec" else "identity"
        put(tier, right, says, block[:99] if where == "size" else block, codec=codec)
        assert match(session, [name]) == ["memory"]
        ticket = load(session, [name])
        assert ticket.slots == []
        assert ticket.fault
        session.release(ticket)
        assert store.stats()["tiers"]["memory"]["checksum_failures"] == 1
        assert tier.contains([right]) == [False]
        assert match(session, [name]) == []
        assert free_slots(store) == store.slab.slots


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ERROR])
def test_a_tier_that_is_away_is_a_miss_and_loses_nothing(fault: Fault) -> None:
    tier = FaultyTier(MemoryTier())
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        spill_to_tiers(store)
        tier.schedule = always(fault, "read")
        assert loaded_tiers(session, hashes(3)) == []
        assert store.stats()["tiers"]["memory"]["faults"] >= 1
        tier.schedule = always(fault)
        assert match(session, hashes(3)) == []
        assert save(session, hashes(2, "meanwhile")).dropped == 0
        assert loaded_tiers(session, hashes(2, "meanwhile")) == ["l2"] * 2
        until(lambda: store.stats()["l2"]["flights"] == 0)  # or the next load may join one of them
        tier.schedule = None
        assert loaded_tiers(session, hashes(3)) == ["memory"] * 3


def test_a_flush_that_fails_says_so_and_flushes_the_others() -> None:
    class Unsynced(MemoryTier):
        def flush(self) -> None:
            raise TierUnavailable("the disk could not sync")

    class Flushed(MemoryTier):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1

    last = Flushed(name="last")
    with make_store(Unsynced(), last) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        assert store.flush(timeout_s=100.0) is False
        assert last.flushes == 1
        assert store.stats()["tiers"]["memory"]["faults"] == 1
        assert loaded_tiers(session, hashes(3)) == ["l2"] * 3


def test_a_full_tier_takes_no_more_and_harms_nobody() -> None:
    tier = FaultyTier(MemoryTier(), always(Fault.FULL, "write"))
    with make_store(tier, slots=8) as store:
        session = store.session(SPACE)
        for n in range(6):
            assert save(session, hashes(4, str(n))).dropped == 0
            assert loaded_tiers(session, hashes(4, str(n))) == ["l2"] * 4
            assert store.flush(WAIT_S)
        assert store.stats()["l2"]["spills_failed"] == 24
        store.clear("l2")
        assert match(session, hashes(4, "5")) == []


@pytest.mark.parametrize("fault", [Fault.CORRUPTED, Fault.ERROR])
def test_a_slower_tier_stands_in_for_a_faulty_one(fault: Fault) -> None:
    fast = FaultyTier(MemoryTier(name="fast"))
    slow = CountingTier(name="slow")
    with make_store(fast, slow) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        spill_to_tiers(store)
        fast.schedule = always(fault, "read")
        assert match(session, hashes(3)) == ["fast"] * 3
        assert loaded_tiers(session, hashes(3)) == ["slow"] * 3
        assert len(slow.reads) == 3


def test_what_a_remote_tier_has_lost_is_forgotten() -> None:
    tier = RemoteTier()
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        spill_to_tiers(store)
        assert match(session, hashes(3)) == ["memory"] * 3
        tier.clear()
        assert match(session, hashes(3)) == ["memory"] * 3, "remembered, until found out"
        assert loaded_tiers(session, hashes(3)) == []
        until(lambda: store.stats()["l2"]["flights"] == 0)
        assert store.stats()["tiers"]["memory"]["misses"] >= 1
        assert match(session, hashes(3)) == []


def hang(verb: str, queue_blocks: int = 4) -> tuple[FaultyTier, Session]:
    """A store whose tier holds 8 blocks, and hangs at every `verb` from now on."""
    tier = FaultyTier(MemoryTier())
    session = make_store(tier, slots=16, budgets=Budgets(queue_blocks=queue_blocks)).session(SPACE)
    save(session, hashes(8)[:4])
    assert session._store.flush(WAIT_S)
    save(session, hashes(8)[4:])
    spill_to_tiers(session._store)
    tier.schedule = always(Fault.HUNG, verb)
    return tier, session


def test_a_tier_that_hangs_at_reads_hangs_nobody_else() -> None:
    tier, session = hang("read")
    store = session._store
    other = store.session(SPACE)
    stuck = session.load(hashes(8))
    assert tier.wait_hung(3)
    assert not stuck.done
    save(other, hashes(4, "other"))
    assert loaded_tiers(other, hashes(4, "other")) == ["l2"] * 4
    session.release(stuck)
    stats = store.stats()["l2"]
    assert stats["flights"] == 3, "only what workers hold is still in the air"
    assert stats["slots_filling"] == 3
    tier.release()
    until(lambda: store.stats()["l2"]["flights"] == 0)
    assert len(loaded_tiers(session, hashes(8))) == 8
    store.close()


def test_a_block_that_came_before_its_turn_goes_back_too() -> None:
    tier = FaultyTier(MemoryTier())
    with make_store(tier) as store:
        session = store.session(SPACE)
        first, second = hashes(2)
        save(session, [first, second])
        spill_to_tiers(store)
        tier.schedule = lambda verb, keys: (
            Fault.HUNG if verb == "read" and keys[0].hash == first else None
        )
        ticket = session.load([first, second])
        until(lambda: store.stats()["tiers"]["memory"]["reads"] == 1)
        until(lambda: store.stats()["l2"]["flights"] == 1)
        assert ticket.slots == [], "not a leading run"
        assert store.stats()["l2"]["slots_leased"] == 1
        session.release(ticket)
        assert store.stats()["l2"]["slots_leased"] == 0
        tier.release()


def test_loads_in_progress_have_a_bound() -> None:
    tier = CountingTier()
    store = make_store(tier, slots=16)
    session = store.session(SPACE)
    for n in range(5):
        save(session, hashes(4, str(n)))
        assert store.flush(WAIT_S)
    store.clear("l2")
    tier.gate.clear()
    tickets = [session.load(hashes(4, str(n))) for n in range(5)]
    assert sum(ticket.done for ticket in tickets) == 2, "12 of 16 slots may be on their way"
    assert all("too many" in ticket.fault for ticket in tickets if ticket.done)
    tier.gate.set()
    for ticket in tickets:
        ended(session, ticket)
        session.release(ticket)
    store.close()


def test_a_hung_tier_gathers_nothing() -> None:
    tier, session = hang("read")
    store = session._store
    first = session.load(hashes(3))
    assert tier.wait_hung(3)
    for _ in range(300):
        session.release(session.load(hashes(8)))
    session.release(first)
    session.release(session.load(hashes(8)))
    stats = store.stats()
    assert stats["tiers"]["memory"]["queued_reads"] <= 8, "cancelled flights pile up"
    assert stats["l2"]["flights"] == 3
    tier.release()
    until(lambda: store.stats()["l2"]["flights"] == 0)
    store.close()


@pytest.mark.parametrize("queue_blocks", [4, 64])
def test_a_tier_that_hangs_at_writes_leaves_l2_to_those_who_use_it(queue_blocks: int) -> None:
    tier, session = hang("write", queue_blocks)
    store = session._store
    for n in range(10):
        label = str(n)
        assert save(session, hashes(4, label)).dropped == 0, "slots are held by a queue"
        assert loaded_tiers(session, hashes(4, label)) == ["l2"] * 4
        stats = store.stats()["tiers"]["memory"]
        assert stats["queued_writes"] <= queue_blocks
    assert store.stats()["l2"]["spills_dropped"] >= 40 - 16
    assert not store.flush(0.05)
    tier.release()
    assert store.flush(WAIT_S)
    store.close()


def test_write_back_over_a_tier_that_fails_goes_on() -> None:
    tier = FaultyTier(MemoryTier(), always(Fault.REFUSED, "write"))
    with make_store(tier, slots=8, write_policy=write_policy("write_back")) as store:
        session = store.session(SPACE)
        for n in range(6):
            names = hashes(3, str(n))
            until(lambda names=names: save(session, names).dropped == 0)  # type: ignore[misc]
            assert match(session, names) == ["l2"] * 3
        assert store.stats()["l2"]["spills_failed"] >= 10


def test_write_back_over_a_tier_that_hangs_goes_on() -> None:
    tier = FaultyTier(MemoryTier(), always(Fault.HUNG, "write"))
    store = make_store(tier, slots=8, write_policy=write_policy("write_back"))
    session = store.session(SPACE)
    for n in range(20):
        save(session, hashes(4, str(n)))
    for n in range(20, 30):
        assert save(session, hashes(4, str(n))).dropped == 0, "unwritten blocks hold every slot"
        assert match(session, hashes(4, str(n))) == ["l2"] * 4
    assert store.stats()["l2"]["spills_dropped"] >= 40
    tier.release()
    store.close()


def test_a_redirected_load_leaves_with_who_waited_for_it() -> None:
    fast = FaultyTier(MemoryTier(name="fast"))
    slow = CountingTier(name="slow")
    with make_store(fast, slow) as store:
        session = store.session(SPACE)
        save(session, hashes(8))
        spill_to_tiers(store)
        fast.schedule = always(Fault.ERROR, "read")
        slow.gate.clear()
        ticket = session.load(hashes(8))
        until(lambda: store.stats()["tiers"]["slow"]["queued_reads"] == 8 - len(slow.reads))
        until(lambda: len(slow.reads) == 3)
        session.release(ticket)
        assert store.stats()["l2"]["flights"] == 3, "only what workers hold is still in the air"
        slow.gate.set()


def test_a_closing_store_fills_no_slot_that_an_engine_may_still_read() -> None:
    tier = FaultyTier(MemoryTier())
    store = make_store(tier)
    session = store.session(SPACE)
    tier.schedule = always(Fault.HUNG, "write")
    save(session, hashes(2))
    ticket = load(session, hashes(2))
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
    check(session, ticket)
    tier.release()
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_closing_does_not_wait_for_a_tier_that_hangs() -> None:
    tier, session = hang("read")
    store = session._store
    stuck = session.load(hashes(8))
    assert tier.wait_hung(3)
    assert CLOSE_WAIT_S <= 5
    store.close()
    assert stuck.done
    stats = store.stats()["l2"]
    assert stats["slots_filling"] == 3, "a slot is called free while a worker writes to it"
    assert stats["slots_free"] < stats["slots"]
    tier.release()


def test_a_block_asked_for_twice_in_one_run() -> None:
    names = hashes(4)
    tier = FaultyTier(MemoryTier())
    with make_store(tier) as store:
        session, other = store.session(SPACE), store.session(SPACE)
        twice = [names[0], names[1], names[1], names[2], names[0]]
        save(session, twice)
        assert loaded_tiers(session, twice) == ["l2"] * 5
        spill_to_tiers(store)
        assert loaded_tiers(session, twice) == ["memory"] * 5
        spill_to_tiers(store)
        tier.schedule = always(Fault.SLOW, "read")
        first, second = session.load(twice), other.load(twice)
        tier.schedule = always(Fault.REFUSED, "read")
        for one, ticket in ((session, first), (other, second)):
            ended(one, ticket)
            one.release(ticket)
        until(lambda: store.stats()["l2"]["flights"] == 0)
        assert store.stats()["l2"]["slots_leased"] == 0


def test_loads_go_ahead_of_saves_and_saves_move_on() -> None:
    """Both threads of a tier are held up, ten writes and ten reads wait; then they go on."""
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

        def pass_gate(self, verb: str) -> None:
            busy.release()
            assert gate.wait(WAIT_S)
            order.append(verb)

    gate.set()
    below = hashes(10, "below")
    with make_store(Gated(), slots=64) as store, store.session(SPACE) as session:
        save(session, below)
        spill_to_tiers(store)
        while busy.acquire(blocking=False):
            pass
        gate.clear()
        order.clear()
        save(session, hashes(12, "new"))
        for _ in range(2):
            assert busy.acquire(timeout=WAIT_S)  # each thread is in a write
        ticket = session.load(below)
        gate.set()
        ended(session, ticket)
        assert len(ticket.slots) == 10
        assert store.flush(WAIT_S)
        session.release(ticket)
    waited = order[2:]
    last = len(waited) - waited[::-1].index("read")
    assert waited[:last].count("write") <= 4, f"saves went ahead: {waited}"
    assert order.count("write") == 12
