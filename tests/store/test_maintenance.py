"""Pins, warming and expiry, through a real store over real tiers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_rig import (
    OTHER_SPACE,
    SLOT_BYTES,
    SPACE,
    CountingTier,
    RemoteTier,
    flush_to_tiers,
    hashes,
    key_of,
    loaded_tiers,
    make_store,
    match,
    save,
    until,
)

import kvstore
from kvstore.blocks.key import Key
from kvstore.cache.write_policy import write_policy
from kvstore.errors import ConfigError
from kvstore.store.store import Store, StoreLimits
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.tiers.memory import MemoryTier

DIGEST = SPACE.digest


def rotate(store: Store, count: int, label: str) -> None:
    """Save `count` other blocks."""
    with store.session(SPACE) as session:
        for name in hashes(count, label):
            save(session, [name])
    assert store.flush()


# --- pins ----------------------------------------------------------------------------------------


def test_a_pinned_prefix_is_not_evicted() -> None:
    names = hashes(4)
    with make_store(slots=16, limits=StoreLimits(max_pinned_fraction=0.5)) as store:
        with store.session(SPACE) as session:
            save(session, names)
        assert store.pin(DIGEST, names).pinned == 4
        assert store.pin(DIGEST, names).pinned == 4, "a second pin does not count again"
        rotate(store, 40, "other")
        store.clear("l2")
        with store.session(SPACE) as session:
            assert match(session, names) == ["l2"] * 4
        assert store.stats()["l2"]["slots_pinned"] == 4
        assert store.unpin(DIGEST, names[:2]) == 2
        rotate(store, 40, "more")
        with store.session(SPACE) as session:
            assert match(session, names) == []
            assert match(session, names[2:]) == ["l2"] * 2


@pytest.mark.parametrize("kind", [MemoryTier, RemoteTier])
def test_pinning_loads_blocks_from_the_tiers(kind: type[MemoryTier]) -> None:
    names = hashes(5)
    with make_store(kind(), slots=32, limits=StoreLimits(max_pinned_fraction=0.5)) as store:
        with store.session(SPACE) as session:
            save(session, names)
        flush_to_tiers(store)
        result = store.pin(DIGEST, names)
        assert (result.wanted, result.pinned, result.reason) == (5, 5, "")
        rotate(store, 60, "other")
        with store.session(SPACE) as session:
            assert match(session, names) == ["l2"] * 5


def test_a_prefix_is_pinned_up_to_the_first_missing_block() -> None:
    names = hashes(6)
    with make_store(slots=32) as store:
        with store.session(SPACE) as session:
            save(session, names[:3])
            save(session, names[4:])
        result = store.pin(DIGEST, names)
        assert (result.wanted, result.pinned) == (6, 3)
        assert "block 3 of the prefix not loaded: missing" in result.reason


def test_the_number_of_pinned_blocks_is_limited() -> None:
    names = hashes(10)
    with make_store(slots=16, limits=StoreLimits(max_pinned_fraction=0.25)) as store:
        with store.session(SPACE) as session:
            save(session, names)
        result = store.pin(DIGEST, names)
        assert result.pinned == 4
        assert result.reason == "at most 4 blocks may be pinned (l2.max_pinned_fraction)"
        rotate(store, 40, "other")
        with store.session(SPACE) as session:
            assert match(session, names) == ["l2"] * 4


def test_pins_leave_the_slots_that_a_store_needs() -> None:
    with make_store(MemoryTier(), slots=10, limits=StoreLimits(max_pinned_fraction=1.0)) as store:
        names = hashes(10)
        with store.session(SPACE) as session:
            for name in names:
                save(session, [name])
            assert store.flush()
        assert store.pin(DIGEST, names[5:]).pinned <= 3
        rotate(store, 20, "other")
        with store.session(SPACE) as session:
            assert loaded_tiers(session, names[:3]) == ["memory"] * 3


def test_pins_belong_to_one_tenant_and_one_namespace() -> None:
    names = hashes(3)
    with make_store(slots=16) as store:
        with store.session(SPACE, "a") as session:
            save(session, names)
        assert store.pin(DIGEST, names, "b").pinned == 0
        with pytest.raises(ConfigError, match=f"unknown namespace .*known: {DIGEST}"):
            store.pin(OTHER_SPACE.digest, names)


def test_a_pinned_block_is_written_under_write_back() -> None:
    tier = MemoryTier()
    names = hashes(3)
    with make_store(tier, slots=16, write_policy=write_policy("write_back")) as store:
        with store.session(SPACE) as session:
            save(session, names)
            keys = [key_of(session, name) for name in names]
        assert not any(tier.contains(keys))
        assert store.pin(DIGEST, names).pinned == 3
        until(lambda: all(tier.contains(keys)), "not written")


def test_a_hung_tier_does_not_delay_a_pin_beyond_its_timeout() -> None:
    tier = FaultyTier(MemoryTier())
    names = hashes(3)
    with make_store(tier, slots=16) as store:
        with store.session(SPACE) as session:
            save(session, names)
        flush_to_tiers(store)
        tier.schedule = always(Fault.HUNG, "read")
        result = store.pin(DIGEST, names, timeout_s=0.2)
        assert result.pinned == 0
        assert "not loaded" in result.reason
        tier.release()


# --- warming -------------------------------------------------------------------------------------


def fill_tier(tier: MemoryTier, names: Sequence[bytes]) -> None:
    """Write these blocks to a tier, in this order."""
    with make_store(tier, slots=64) as store, store.session(SPACE) as session:
        for name in names:
            save(session, [name])
            assert store.flush()


class ReopenedTier(CountingTier):
    """A tier that stays usable after its store has closed."""

    def close(self) -> None:
        return


def test_warming_loads_the_most_recently_used_blocks_and_evicts_nothing() -> None:
    tier = ReopenedTier()
    names = hashes(20)
    fill_tier(tier, names)
    with make_store(tier, slots=16) as store, store.session(SPACE) as session:
        save(session, hashes(2, "here"))
        assert store.flush()
        tier.reads.clear()
        assert store.warmer.warm(0.75) == 10
        assert store.stats()["l2"]["warmed"] == 10
        assert match(session, hashes(2, "here")) == ["l2"] * 2
        warm = [name for name in names if match(session, [name]) == ["l2"]]
        assert warm == names[10:]
        assert len(tier.reads) == 10, "read more blocks than there was room for"
        assert loaded_tiers(session, warm) == ["l2"] * 10  # checks their bytes
        assert store.stats()["l2"]["tier_writes_written"] == 2, "wrote a warmed block again"
        assert store.warmer.warm(0.75) == 0


def test_warmed_blocks_are_evicted_in_the_order_of_their_use() -> None:
    tier = ReopenedTier()
    names = hashes(20)
    fill_tier(tier, names)
    with make_store(tier, slots=32) as store, store.session(SPACE) as session:
        assert store.warmer.warm(0.625) == 20
        rotate(store, 16, "other")  # evicts 4 of the warmed blocks
        warm = [name for name in names if match(session, [name]) == ["l2"]]
        assert len(warm) == 16
        # Four threads load them, so at most three blocks may be out of order.
        assert set(warm) >= set(names[7:])


def test_warming_skips_corrupt_blocks() -> None:
    tier = ReopenedTier()
    names = hashes(6)
    fill_tier(tier, names)
    faulty = FaultyTier(tier, always(Fault.CORRUPTED, "read"))
    with make_store(faulty, slots=16) as store:
        assert store.warmer.warm(1.0) == 0
        assert store.stats()["l2"]["slots_free"] == 16


def test_a_store_closes_while_it_warms() -> None:
    tier = ReopenedTier()
    fill_tier(tier, hashes(12))
    tier.gate.clear()
    store = make_store(tier, slots=16)
    store.warmer.start(1.0)
    until(lambda: tier.reads, "warming never starts")
    tier.gate.set()
    store.close()
    assert not any(thread.name.startswith("warmer") for thread in threading.enumerate())


def test_a_store_on_disk_is_warm_again_after_a_restart(tmp_path: Path) -> None:
    names = hashes(6)
    options = {"l2": "1MiB", "slot_bytes": SLOT_BYTES, "disk": tmp_path, "disk_capacity": "4MiB"}
    with kvstore.open(**options) as store, store.session(SPACE) as session:
        save(session, names)
        assert store.flush()
    config = tmp_path.parent / f"{tmp_path.name}.toml"
    config.write_text("[l2]\nwarm_fraction = 0.5\n")
    with kvstore.open(**options, config=config) as store, store.session(SPACE) as session:
        until(lambda: match(session, names) == ["l2"] * 6, "not warmed at start")
        assert loaded_tiers(session, names) == ["l2"] * 6


# --- expiry --------------------------------------------------------------------------------------


def test_blocks_expire_in_l2_and_stay_in_the_tiers() -> None:
    names = hashes(4)
    store = make_store(MemoryTier(), slots=16, limits=StoreLimits(ttl_s=0.1))
    with store, store.session(SPACE) as session:
        save(session, names)
        assert store.flush()
        until(lambda: store.stats()["l2"]["slots_ready"] == 0, "blocks never expire")
        assert match(session, names) == ["memory"] * 4
        assert loaded_tiers(session, names) == ["memory"] * 4
        assert store.stats()["l2"]["expired"] >= 4


def test_leased_and_pinned_blocks_do_not_expire() -> None:
    names, other = hashes(3), hashes(2, "other")
    store = make_store(slots=16, limits=StoreLimits(ttl_s=0.05))
    with store, store.session(SPACE) as session:
        save(session, names)
        operation = session.load(names)
        save(session, other)
        in_use = len(operation.slots) + store.pin(DIGEST, other).pinned
        save(session, hashes(1, "third"))
        until(lambda: store.stats()["l2"]["slots_ready"] == in_use)
        assert match(session, names) == ["l2"] * len(operation.slots)
        session.release(operation)
        until(lambda: match(session, names) == [], "the block never expires")


@pytest.mark.parametrize("how", ["quota", "ttl"])
def test_write_back_loses_nothing_to_a_quota_or_a_ttl(how: str) -> None:
    """A dirty block is written before its tenant's quota evicts it or its time to live ends."""
    names = hashes(40)
    limits = StoreLimits(ttl_s=0.05)
    if how == "quota":
        limits = StoreLimits(quotas={"*": 8 * SLOT_BYTES})
    policy = write_policy("write_back")
    store = make_store(MemoryTier(), slots=64, write_policy=policy, limits=limits)
    with store, store.session(SPACE) as session:
        for name in names:
            # Wait for earlier writes, as with a tier that keeps up.
            until(lambda: store.stats()["tiers"]["memory"]["queued_writes"] == 0)
            until(lambda: store.stats()["tiers"]["memory"]["workers_busy_write"] == 0)
            save(session, [name])
        until(
            lambda: how == "quota" or store.stats()["l2"]["slots_ready"] == 0,
            "blocks never expire",
        )
        assert store.flush()
        assert store.stats()["l2"]["tier_writes_dropped"] == 0
        tiers = [tier for name in names for tier in match(session, [name])]
        assert len(tiers) == 40
        assert tiers.count("memory") >= 32
        assert loaded_tiers(session, names[:5]) == ["memory"] * 5


def test_many_pins_do_not_slow_down_eviction() -> None:
    """The eviction policy does not list pinned blocks, so it finds the next victim at once."""
    with make_store(slots=64, limits=StoreLimits(max_pinned_fraction=0.5)) as store:
        names = hashes(20)
        with store.session(SPACE) as session:
            save(session, names)
        assert store.pin(DIGEST, names).pinned == 20
        quotas = store.manager._table.quotas
        assert not set(quotas.eviction_order()) & {Key("default", DIGEST, name) for name in names}
        rotate(store, 100, "other")
        assert store.unpin(DIGEST, names) == 20
        assert set(quotas.eviction_order()) >= {Key("default", DIGEST, name) for name in names}
        store.manager.check()


def test_write_back_works_with_many_pins() -> None:
    tier = MemoryTier()
    policy = write_policy("write_back")
    limits = StoreLimits(max_pinned_fraction=0.5)
    with make_store(tier, slots=64, write_policy=policy, limits=limits) as store:
        names = hashes(30)
        with store.session(SPACE) as session:
            save(session, names)
            assert store.pin(DIGEST, names).pinned == 30
            for name in hashes(200, "other"):
                until(lambda: store.stats()["tiers"]["memory"]["queued_writes"] == 0)
                until(lambda: store.stats()["tiers"]["memory"]["workers_busy_write"] == 0)
                assert save(session, [name]).dropped == 0
        assert store.flush()
        assert store.stats()["l2"]["tier_writes_dropped"] == 0
        assert tier.stats()["blocks"] == 230


def test_a_flush_does_not_wait_for_later_saves() -> None:
    """A flush ends although another thread saves all the time."""
    stop = threading.Event()
    with make_store(MemoryTier(), slots=64) as store, store.session(SPACE) as session:

        def keep_saving() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                save(session, hashes(8, f"prefix {number}"))

        thread = threading.Thread(target=keep_saving)
        thread.start()
        try:
            assert all(store.flush(30.0) for _ in range(20))
        finally:
            stop.set()
            thread.join()


def test_a_quota_below_one_slot_is_rejected() -> None:
    with pytest.raises(ConfigError, match="quota of tenant 'small' is 100 B, less than one slot"):
        make_store(slots=16, limits=StoreLimits(quotas={"small": 100}))
