"""The store's data path, over real tiers: what is stored is served, to whom it belongs, once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from store_rig import (
    OTHER_SPACE,
    SLOT_BYTES,
    SPACE,
    WAIT_S,
    CountingTier,
    RemoteTier,
    content,
    ended,
    fill,
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
from kvstore.blocks.key import Key, Namespace
from kvstore.cache.write_policy import write_policy
from kvstore.errors import ConfigError, FrameInvalid, StoreClosed, TierFull
from kvstore.interface import Answer
from kvstore.shm.slab import Slab
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.tiers import disk
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import Files
from kvstore.tiers.memory import MemoryTier


def make_tier(kind: str, folder: Path) -> Tier:
    if kind == "disk":
        return disk.open(disk.Config(directory=str(folder / "disk"), capacity=8 << 20))
    return RemoteTier() if kind == "remote" else MemoryTier()


@pytest.mark.parametrize("codec", ["auto", "identity"])
@pytest.mark.parametrize("kind", ["memory", "remote", "disk"])
def test_a_run_goes_down_and_comes_back(kind: str, codec: str, tmp_path: Path) -> None:
    tier = make_tier(kind, tmp_path)
    names = hashes(9)
    with make_store(tier, codecs={tier.name: codec}) as store:
        session = store.session(SPACE)
        assert save(session, names).dropped == 0
        assert match(session, names) == ["l2"] * 9
        assert loaded_tiers(session, names) == ["l2"] * 9
        spill_to_tiers(store)
        assert match(session, names) == [tier.name] * 9
        assert loaded_tiers(session, names) == [tier.name] * 9
        assert loaded_tiers(session, names) == ["l2"] * 9
        stats = store.stats()
        assert stats["tiers"][tier.name]["reads"] == 9
        assert stats["tiers"][tier.name]["writes"] == 9
        assert stats["hits"] == {"l2": 18, tier.name: 9}
        session.close()
        store.clear("l2")
        assert free_slots(store) == store.slab.slots


def test_blocks_outlive_the_store_on_disk(tmp_path: Path) -> None:
    names = hashes(5)
    with make_store(make_tier("disk", tmp_path)) as store:
        save(store.session(SPACE), names)  # closing writes what is queued
    with make_store(make_tier("disk", tmp_path)) as store:
        assert loaded_tiers(store.session(SPACE), names) == ["disk"] * 5


def test_acknowledged_is_seen_by_any_session_and_unacknowledged_by_none() -> None:
    with make_store() as store:
        writer, reader = store.session(SPACE), store.session(SPACE)
        ticket = writer.save(hashes(3))
        fill(writer, ticket)
        assert match(reader, hashes(3)) == []
        assert load(reader, hashes(3)).slots == []
        writer.commit(ticket)
        assert match(reader, hashes(3)) == ["l2"] * 3
        assert len(load(reader, hashes(3)).slots) == 3


def test_a_run_ends_at_its_first_gap() -> None:
    names = hashes(6)
    with make_store(MemoryTier()) as store:
        session = store.session(SPACE)
        save(session, names[:2] + names[3:])
        assert match(session, names) == ["l2"] * 2
        ticket = load(session, names)
        assert len(ticket.slots) == 2
        assert store.stats()["l2"]["slots_leased"] - store.stats()["l2"]["spilling"] <= 2
        session.release(ticket)
        spill_to_tiers(store)
        assert loaded_tiers(session, names) == ["memory"] * 2
        assert match(session, names[2:]) == []
        assert session.match(names[2:]).answer is Answer.MISS


def test_of_two_writers_the_first_wins() -> None:
    with make_store() as store:
        one, two = store.session(SPACE), store.session(SPACE)
        first, second = one.save(hashes(2)), two.save(hashes(3))
        assert len(first.grants) == 2
        assert [index for index, _ in second.grants] == [2]
        fill(one, first)
        fill(two, second)
        two.commit(second)
        one.commit(first)
        assert loaded_tiers(two, hashes(3)) == ["l2"] * 3


def test_two_loads_of_a_run_read_each_block_once() -> None:
    names = hashes(8)
    tier = CountingTier()
    with make_store(tier) as store:
        one, two = store.session(SPACE), store.session(SPACE)
        save(one, names)
        spill_to_tiers(store)
        tier.gate.clear()
        first, second = one.load(names), two.load(names)
        assert not first.done
        assert not second.done
        tier.gate.set()
        for session, ticket in ((one, first), (two, second)):
            ended(session, ticket)
            assert len(ticket.slots) == 8
        assert first.slots == second.slots
        assert Counter(tier.reads) == {key_of(one, name): 1 for name in names}
        one.release(first)
        assert loaded_tiers(two, names) == ["l2"] * 8


def test_tenants_and_namespaces_never_share() -> None:
    names = hashes(4)
    with make_store(MemoryTier(), slots=64) as store:
        parties = [
            store.session(SPACE, "red"),
            store.session(SPACE, "blue"),
            store.session(OTHER_SPACE, "red"),
        ]
        for place in ("l2", "memory"):
            for party, session in enumerate(parties):
                if place == "l2":
                    assert match(session, names) == [], "answered with another's blocks"
                    assert len(save(session, names).grants) == 4
                assert loaded_tiers(session, names) == [place] * 4, party
            spill_to_tiers(store)
        stranger = store.session(OTHER_SPACE, "blue")
        assert match(stranger, names) == []
        assert loaded_tiers(stranger, names) == []


def test_selective_writes_what_is_asked_for_again() -> None:
    with make_store(MemoryTier(), write_policy=write_policy("selective")) as store:
        session = store.session(SPACE)
        save(session, hashes(4))
        for _ in range(2):
            loaded_tiers(session, hashes(2))
        spill_to_tiers(store)
        assert match(session, hashes(4)) == ["memory"] * 2


def test_write_back_writes_before_it_evicts_and_when_flushed() -> None:
    tier = MemoryTier()
    with make_store(tier, slots=16, write_policy=write_policy("write_back")) as store:
        session = store.session(SPACE)
        save(session, hashes(8))
        assert tier.stats()["blocks"] == 0
        for n in range(8):
            label = f"more{n}"
            until(partial(saved_whole, store, session, hashes(4, label)))
            assert match(session, hashes(4, label)) == ["l2"] * 4
        assert store.stats()["l2"]["evictions"] >= 20
        spill_to_tiers(store)
        assert loaded_tiers(session, hashes(8)) == ["memory"] * 8
        for n in range(8):
            assert loaded_tiers(session, hashes(4, f"more{n}")) == ["memory"] * 4


def saved_whole(store: Store, session: Session, names: list[bytes]) -> bool:
    """Save what is lacking; when refused, let writes end: else the tier is taken for stuck."""
    return save(session, names).dropped == 0 or not store.flush(WAIT_S)


def test_a_remote_tier_is_asked_once_and_behind_the_caller() -> None:
    tier = RemoteTier()
    names = hashes(6)
    for name in names:  # another node has written them
        key = Key("default", SPACE.digest, name)
        tier.write(key, *frame_of(key))
    with make_store(tier) as store:
        session = store.session(SPACE)
        ticket = session.match(names + hashes(2, "never"))
        ended(session, ticket)
        assert ticket.answer is Answer.HIT
        assert ticket.tiers == ["memory"] * 6
        assert store.stats()["tiers"]["memory"]["probes"] == 1
        assert session.match(names).done
        assert loaded_tiers(session, names) == ["memory"] * 6


def frame_of(key: Key, block: bytes | None = None) -> tuple[memoryview, memoryview]:
    block = content(key, SPACE.block_bytes) if block is None else block
    header, payload = frame.aligned_buffer(4096), frame.aligned_buffer(len(block))
    payload[: len(block)] = block
    total = frame.checksum(block)
    frame.pack_header(
        header,
        key=key,
        codec="identity",
        raw_bytes=len(block),
        stored_bytes=len(block),
        raw_sum=total,
        stored_sum=total,
    )
    return header, payload


def test_frames_go_in_and_come_out_verified() -> None:
    with make_store(MemoryTier()) as store:
        session = store.session(SPACE)
        keys = [key_of(session, name) for name in hashes(3)]
        for key in keys[:2]:
            header, payload = frame_of(key)
            assert store.frames.write(key, header, payload)
            assert not store.frames.write(key, header, payload), "taken twice"
        assert store.frames.contains(keys) == ["l2", "l2", ""]
        assert loaded_tiers(session, hashes(3)) == ["l2"] * 2
        header = frame.aligned_buffer(4096)
        payload = frame.aligned_buffer(store.frames.payload_bytes)
        for place in ("l2", "memory"):
            assert store.frames.contains(keys) == [place, place, ""]
            length = store.frames.read(keys[0], header, payload)
            parsed = frame.parse_header(header, keys[0])
            frame.verify_stored(parsed, payload[:length])
            assert store.frames.read(keys[2], header, payload) == 0
            spill_to_tiers(store)


def test_a_frame_that_is_not_right_is_not_taken() -> None:
    with make_store() as store:
        session = store.session(SPACE)
        key, other = (key_of(session, name) for name in hashes(2))
        header, payload = frame_of(key)
        with pytest.raises(FrameInvalid):
            store.frames.write(other, header, payload)
        short_header, short_payload = frame_of(key, b"short")
        with pytest.raises(FrameInvalid):
            store.frames.write(key, short_header, short_payload)
        payload[7] ^= 1
        with pytest.raises(FrameInvalid):
            store.frames.write(key, header, payload)
        assert store.frames.contains([key, other]) == ["", ""]
        assert free_slots(store) == store.slab.slots


def test_a_frame_finds_no_slot() -> None:
    with make_store(slots=4) as store:
        session = store.session(SPACE)
        assert len(session.save(hashes(4)).grants) == 4
        key = key_of(session, hashes(1, "frame")[0])
        with pytest.raises(TierFull):
            store.frames.write(key, *frame_of(key))


def test_a_frame_of_a_size_that_was_not_known_yet_does_not_stay_in_the_way() -> None:
    (name,) = hashes(1)
    key = Key("default", SPACE.digest, name)
    with make_store(MemoryTier()) as store:
        assert store.frames.write(key, *frame_of(key, b"short")), "HTTP alone is enough to store"
        assert store.flush(WAIT_S)
        session = store.session(SPACE)
        session.release(load(session, [name]))
        assert match(session, [name]) == []
        assert store.frames.contains([key]) == [""], "found, though it cannot be loaded"
        save(session, [name])
        spill_to_tiers(store)
        assert loaded_tiers(session, [name]) == ["memory"]


def test_what_leaves_l2_while_a_load_looks_for_it_is_found_below() -> None:
    class EmptiesL2(MemoryTier):
        """The first time that it is asked, L2 is emptied meanwhile."""

        store: Store | None = None

        def contains(self, keys: Sequence[Key]) -> list[bool]:
            store, self.store = self.store, None
            if store is not None:
                store.clear("l2")
            return super().contains(keys)

    names = hashes(3)
    tier = EmptiesL2()
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, names)
        spill_to_tiers(store)
        session.release(load(session, names[1:2]))
        tier.store = store
        assert loaded_tiers(session, names) == ["memory"] * 3
        assert tier.store is None
        assert store.stats()["l2"]["slots_leased"] == 0


def test_too_few_slots_drop_the_tail_and_are_counted() -> None:
    with make_store(slots=4) as store:
        session = store.session(SPACE)
        ticket = session.save(hashes(7))
        assert [index for index, _ in ticket.grants] == [0, 1, 2, 3]
        assert ticket.dropped == 3
        assert store.stats()["l2"]["busy"] == 3
        session.release(ticket)
        assert free_slots(store) == 4


def test_a_load_larger_than_the_slab_is_cut_and_starves_nobody() -> None:
    names = hashes(40)
    with make_store(MemoryTier(), slots=12) as store:
        session = store.session(SPACE)
        for start in range(0, 40, 4):
            save(session, names[start : start + 4])
            assert store.flush(WAIT_S)
        store.clear("l2")
        ticket = load(session, names)
        assert 0 < len(ticket.slots) < 12
        assert ticket.fault
        assert len(session.save(hashes(2, "new")).grants) == 2
        session.release(ticket)


def test_a_dead_session_gives_everything_back() -> None:
    tier = CountingTier()
    with make_store(tier) as store:
        dying, other = store.session(SPACE), store.session(SPACE)
        save(dying, hashes(8))
        spill_to_tiers(store)
        load(dying, hashes(2))
        dying.save(hashes(5, "unfilled"))
        tier.gate.clear()
        cut_short = dying.load(hashes(8))
        until(lambda: len(tier.reads) > 2)
        dying.drop()
        assert cut_short.done
        assert cut_short.fault
        tier.gate.set()
        assert len(loaded_tiers(other, hashes(8))) == 8
        assert match(other, hashes(5, "unfilled")) == []
        other.close()
        until(lambda: store.stats()["l2"]["flights"] == 0)
        store.clear("l2")
        assert free_slots(store) == store.slab.slots


def test_a_ticket_is_handed_back_once() -> None:
    with make_store() as store:
        session = store.session(SPACE)
        saved = save(session, hashes(2))
        loaded = load(session, hashes(2))
        session.release(loaded)
        for again in (loaded, saved):
            with pytest.raises(AssertionError):
                session.release(again)
        with pytest.raises(AssertionError):
            session.commit(saved)


def test_poll_waits_in_one_thread_while_another_asks() -> None:
    tier = CountingTier()
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        spill_to_tiers(store)
        session.poll()
        tier.gate.clear()
        moved: list[object] = []
        poller = threading.Thread(target=lambda: moved.extend(session.poll(WAIT_S)))
        poller.start()
        ticket = session.load(hashes(3))
        tier.gate.set()
        poller.join(WAIT_S)
        assert ticket in moved
        waiter = threading.Thread(target=session.poll, args=(WAIT_S,))
        session.poll()
        waiter.start()
        session.close()
        waiter.join(WAIT_S)
        assert not waiter.is_alive(), "closing did not wake who polls"


def test_a_closed_store_answers_that_it_is() -> None:
    store = make_store(MemoryTier())
    session = store.session(SPACE)
    save(session, hashes(1))
    held = load(session, hashes(1))
    store.close()
    store.close()
    for ticket in (session.match(hashes(1)), session.load(hashes(1)), session.save(hashes(1))):
        assert ticket.done
        assert "closed" in ticket.fault
    assert session.match(hashes(1)).tiers == []
    session.release(held)
    session.poll(WAIT_S)  # returns at once
    assert session.slab is None
    with pytest.raises(StoreClosed):
        store.session(SPACE)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_store(MemoryTier(), slots=4), "4 slots"),
        (lambda: make_store(MemoryTier(), MemoryTier()), "distinct"),
        (lambda: make_store(MemoryTier(name="l2")), "distinct"),
        (lambda: make_store(MemoryTier(), codecs={"memory": "zstd-plane"}), "zstd-planes"),
        (lambda: make_store(eviction="lur"), "lru"),
    ],
)
def test_a_users_mistake_is_one_line(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_block_larger_than_a_slot_is_refused_with_the_size_it_takes() -> None:
    large = Namespace(model="large", layers=8, kv_heads=2, head_dim=64)
    with make_store() as store, pytest.raises(ConfigError, match=str(large.block_bytes)):
        store.session(large)


def test_repr_tells_the_truth() -> None:
    with Store(Slab.create(16, SLOT_BYTES), [MemoryTier()]) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        assert store.flush(WAIT_S)
        load(session, hashes(2))
        assert repr(store) == ("L2 3/16 slots, 2 leased | memory 0 queued, 0 faults | 0 dropped")


def test_a_match_touches_no_disk_and_no_network(tmp_path: Path) -> None:
    """Of what L2 and a tier with an index hold: 512 blocks, over tiers that raise if touched."""

    class Untouched(Files):
        closed_to_all = False

        def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
            assert not self.closed_to_all, "the disk was read"
            return super().read_at(fd, views, offset)

    files = Untouched()
    config = disk.Config(directory=str(tmp_path), capacity=16 << 20)
    remote = FaultyTier(RemoteTier())
    names = hashes(512)
    with make_store(disk.open(config, files=files), remote, slots=1024) as store:
        session = store.session(SPACE)
        for start in range(0, 512, 64):
            save(session, names[start : start + 64])
            assert store.flush(WAIT_S)
        files.closed_to_all = True
        remote.schedule = always(Fault.ERROR)
        remote.calls.clear()
        assert match(session, names) == ["l2"] * 512
        store.clear("l2")
        assert match(session, names) == ["disk"] * 512
        assert remote.calls == []
        files.closed_to_all = False
        remote.schedule = None
        assert loaded_tiers(session, names[:3]) == ["disk"] * 3
        session.close()
