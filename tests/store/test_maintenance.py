"""Pins, warming and age, through a real store over real tiers."""

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
    hashes,
    key_of,
    loaded_tiers,
    make_store,
    match,
    save,
    spill_to_tiers,
    until,
)

import kvstore
from kvstore.blocks.key import Key
from kvstore.cache.write_policy import write_policy
from kvstore.errors import ConfigError
from kvstore.store.store import Budgets, Store
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.tiers.memory import MemoryTier

DIGEST = SPACE.digest


def rotate(store: Store, count: int, label: str) -> None:
    """Save so many other blocks."""
    with store.session(SPACE) as session:
        for name in hashes(count, label):
            save(session, [name])
    assert store.flush()


# --- pins ----------------------------------------------------------------------------------------


def test_a_pinned_run_outlives_what_comes_after_it() -> None:
    names = hashes(4)
    with make_store(slots=16, budgets=Budgets(pin_share=0.5)) as store:
        with store.session(SPACE) as session:
            save(session, names)
        assert store.pin(DIGEST, names).pinned == 4
        assert store.pin(DIGEST, names).pinned == 4, "a second pin is no second count"
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
def test_pinning_loads_what_lies_below(kind: type[MemoryTier]) -> None:
    names = hashes(5)
    with make_store(kind(), slots=32, budgets=Budgets(pin_share=0.5)) as store:
        with store.session(SPACE) as session:
            save(session, names)
        spill_to_tiers(store)
        done = store.pin(DIGEST, names)
        assert (done.wanted, done.pinned, done.reason) == (5, 5, "")
        rotate(store, 60, "other")
        with store.session(SPACE) as session:
            assert match(session, names) == ["l2"] * 5


def test_a_run_is_pinned_up_to_the_first_block_that_is_nowhere() -> None:
    names = hashes(6)
    with make_store(slots=32) as store:
        with store.session(SPACE) as session:
            save(session, names[:3])
            save(session, names[4:])
        done = store.pin(DIGEST, names)
        assert (done.wanted, done.pinned) == (6, 3)
        assert "block 3 of the run does not come: missing" in done.reason


def test_no_more_is_pinned_than_the_budget() -> None:
    names = hashes(10)
    with make_store(slots=16, budgets=Budgets(pin_share=0.25)) as store:
        with store.session(SPACE) as session:
            save(session, names)
        done = store.pin(DIGEST, names)
        assert done.pinned == 4
        assert done.reason == "at most 4 blocks may be pinned (l2.pin_share)"
        rotate(store, 40, "other")
        with store.session(SPACE) as session:
            assert match(session, names) == ["l2"] * 4


def test_pins_never_take_the_slots_that_a_store_needs_to_work() -> None:
    with make_store(MemoryTier(), slots=10, budgets=Budgets(pin_share=1.0)) as store:
        names = hashes(10)
        with store.session(SPACE) as session:
            for name in names:
                save(session, [name])
            assert store.flush()
        assert store.pin(DIGEST, names[5:]).pinned <= 3
        rotate(store, 20, "other")
        with store.session(SPACE) as session:
            assert loaded_tiers(session, names[:3]) == ["memory"] * 3


def test_pins_are_of_one_tenant_and_one_namespace() -> None:
    names = hashes(3)
    with make_store(slots=16) as store:
        with store.session(SPACE, "a") as session:
            save(session, names)
        assert store.pin(DIGEST, names, "b").pinned == 0
        with pytest.raises(ConfigError, match=f"no engine has told of .*known: {DIGEST}"):
            store.pin(OTHER_SPACE.digest, names)


def test_a_pinned_block_of_write_back_is_written_and_not_left_to_luck() -> None:
    tier = MemoryTier()
    names = hashes(3)
    with make_store(tier, slots=16, write_policy=write_policy("write_back")) as store:
        with store.session(SPACE) as session:
            save(session, names)
            keys = [key_of(session, name) for name in names]
        assert not any(tier.contains(keys))
        assert store.pin(DIGEST, names).pinned == 3
        until(lambda: all(tier.contains(keys)), "not written")


def test_a_tier_that_hangs_does_not_hold_a_pin_beyond_its_time() -> None:
    tier = FaultyTier(MemoryTier())
    names = hashes(3)
    with make_store(tier, slots=16) as store:
        with store.session(SPACE) as session:
            save(session, names)
        spill_to_tiers(store)
        tier.schedule = always(Fault.HUNG, "read")
        done = store.pin(DIGEST, names, timeout_s=0.2)
        assert done.pinned == 0
        assert "does not come" in done.reason
        tier.release()


# --- warming -------------------------------------------------------------------------------------


def filled(tier: MemoryTier, names: Sequence[bytes]) -> None:
    """Put these blocks into a tier, in this order."""
    with make_store(tier, slots=64) as store, store.session(SPACE) as session:
        for name in names:
            save(session, [name])
            assert store.flush()


class KeptTier(CountingTier):
    """Goes on when a store that had it has closed."""

    def close(self) -> None:
        return


def test_warming_brings_the_most_recently_used_and_evicts_nothing() -> None:
    tier = KeptTier()
    names = hashes(20)
    filled(tier, names)
    with make_store(tier, slots=16) as store, store.session(SPACE) as session:
        save(session, hashes(2, "here"))
        assert store.flush()
        tier.reads.clear()
        assert store.warmer.warm(0.75) == 10
        assert store.stats()["l2"]["warmed"] == 10
        assert match(session, hashes(2, "here")) == ["l2"] * 2
        warm = [name for name in names if match(session, [name]) == ["l2"]]
        assert warm == names[10:]
        assert len(tier.reads) == 10, "more was read than there was room for"
        assert loaded_tiers(session, warm) == ["l2"] * 10  # and their bytes are right
        assert store.stats()["l2"]["spills_written"] == 2, "written back to where it came from"
        assert store.warmer.warm(0.75) == 0


def test_what_is_warm_leaves_in_the_order_of_its_use() -> None:
    tier = KeptTier()
    names = hashes(20)
    filled(tier, names)
    with make_store(tier, slots=32) as store, store.session(SPACE) as session:
        assert store.warmer.warm(0.625) == 20
        rotate(store, 16, "other")  # 4 of the warm ones must go
        warm = [name for name in names if match(session, [name]) == ["l2"]]
        assert len(warm) == 16
        # Four threads bring them: three blocks may be held up, and no more.
        assert set(warm) >= set(names[7:])


def test_damaged_and_foreign_blocks_are_passed_over_in_warming() -> None:
    tier = KeptTier()
    names = hashes(6)
    filled(tier, names)
    faulty = FaultyTier(tier, always(Fault.CORRUPTED, "read"))
    with make_store(faulty, slots=16) as store:
        assert store.warmer.warm(1.0) == 0
        assert store.stats()["l2"]["slots_free"] == 16


def test_a_store_closes_while_it_warms() -> None:
    tier = KeptTier()
    filled(tier, hashes(12))
    tier.gate.clear()
    store = make_store(tier, slots=16)
    store.warmer.start(1.0)
    until(lambda: tier.reads, "it never begins")
    tier.gate.set()
    store.close()
    assert not any(thread.name.startswith("warmer") for thread in threading.enumerate())


def test_a_store_on_disk_is_warm_again_after_a_restart(tmp_path: Path) -> None:
    names = hashes(6)
    options = {"l2": "1MiB", "slot": SLOT_BYTES, "disk": tmp_path, "disk_capacity": "4MiB"}
    with kvstore.open(**options) as store, store.session(SPACE) as session:
        save(session, names)
        assert store.flush()
    config = tmp_path.parent / f"{tmp_path.name}.toml"
    config.write_text("[l2]\nwarm_share = 0.5\n")
    with kvstore.open(**options, config=config) as store, store.session(SPACE) as session:
        until(lambda: match(session, names) == ["l2"] * 6, "not warmed at start")
        assert loaded_tiers(session, names) == ["l2"] * 6


# --- age -----------------------------------------------------------------------------------------


def test_blocks_grow_old_in_l2_and_stay_below() -> None:
    names = hashes(4)
    store = make_store(MemoryTier(), slots=16, budgets=Budgets(ttl_s=0.1))
    with store, store.session(SPACE) as session:
        save(session, names)
        assert store.flush()
        until(lambda: store.stats()["l2"]["slots_ready"] == 0, "they never go")
        assert match(session, names) == ["memory"] * 4
        assert loaded_tiers(session, names) == ["memory"] * 4
        assert store.stats()["l2"]["expired"] >= 4


def test_what_is_in_use_or_pinned_does_not_grow_old() -> None:
    names, other = hashes(3), hashes(2, "other")
    store = make_store(slots=16, budgets=Budgets(ttl_s=0.05))
    with store, store.session(SPACE) as session:
        save(session, names)
        ticket = session.load(names)
        save(session, other)
        held = len(ticket.slots) + store.pin(DIGEST, other).pinned
        save(session, hashes(1, "third"))
        until(lambda: store.stats()["l2"]["slots_ready"] == held)
        assert match(session, names) == ["l2"] * len(ticket.slots)
        session.release(ticket)
        until(lambda: match(session, names) == [], "it never goes")


@pytest.mark.parametrize("how", ["quota", "age"])
def test_write_back_loses_nothing_to_a_quota_or_to_age(how: str) -> None:
    """What only L2 holds is written before its tenant's share, or its time, is over."""
    names = hashes(40)
    budgets = Budgets(quotas={"*": 8 * SLOT_BYTES}) if how == "quota" else Budgets(ttl_s=0.05)
    policy = write_policy("write_back")
    store = make_store(MemoryTier(), slots=64, write_policy=policy, budgets=budgets)
    with store, store.session(SPACE) as session:
        for name in names:
            # A tier that keeps up: what was saved before is down before more comes.
            until(lambda: store.stats()["tiers"]["memory"]["queued_writes"] == 0)
            until(lambda: store.stats()["tiers"]["memory"]["running_writes"] == 0)
            save(session, [name])
        until(lambda: how == "quota" or store.stats()["l2"]["slots_ready"] == 0, "they never go")
        assert store.flush()
        assert store.stats()["l2"]["spills_dropped"] == 0
        tiers = [tier for name in names for tier in match(session, [name])]
        assert len(tiers) == 40
        assert tiers.count("memory") >= 32
        assert loaded_tiers(session, names[:5]) == ["memory"] * 5


def test_a_pin_of_many_blocks_does_not_make_room_dear() -> None:
    """Pins stand in no order of eviction: what is evicted next is found at once."""
    with make_store(slots=64, budgets=Budgets(pin_share=0.5)) as store:
        names = hashes(20)
        with store.session(SPACE) as session:
            save(session, names)
        assert store.pin(DIGEST, names).pinned == 20
        order = store.brain._table.policy
        assert not set(order.victims()) & {Key("default", DIGEST, name) for name in names}
        rotate(store, 100, "other")
        assert store.unpin(DIGEST, names) == 20
        assert set(order.victims()) >= {Key("default", DIGEST, name) for name in names}
        store.brain.check()


def test_write_back_goes_on_under_pins() -> None:
    tier = MemoryTier()
    policy = write_policy("write_back")
    with make_store(tier, slots=64, write_policy=policy, budgets=Budgets(pin_share=0.5)) as store:
        names = hashes(30)
        with store.session(SPACE) as session:
            save(session, names)
            assert store.pin(DIGEST, names).pinned == 30
            for name in hashes(200, "other"):
                until(lambda: store.stats()["tiers"]["memory"]["queued_writes"] == 0)
                until(lambda: store.stats()["tiers"]["memory"]["running_writes"] == 0)
                assert save(session, [name]).dropped == 0
        assert store.flush()
        assert store.stats()["l2"]["spills_dropped"] == 0
        assert tier.stats()["blocks"] == 230


def test_a_flush_does_not_wait_for_what_is_saved_after_it() -> None:
    """Saves go on all the time; a flush ends all the same."""
    stop = threading.Event()
    with make_store(MemoryTier(), slots=64) as store, store.session(SPACE) as session:

        def keep_saving() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                save(session, hashes(8, f"run {number}"))

        thread = threading.Thread(target=keep_saving)
        thread.start()
        try:
            assert all(store.flush(30.0) for _ in range(20))
        finally:
            stop.set()
            thread.join()


def test_a_quota_that_holds_no_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="quota of 'small', 100 B of L2, holds no slot"):
        make_store(slots=16, budgets=Budgets(quotas={"small": 100}))
