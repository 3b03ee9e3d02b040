"""The store's data path over real tiers: saved blocks are loaded, by their owner, read once."""

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
    fill,
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
from kvstore.blocks.key import Key, Namespace
from kvstore.cache.write_policy import write_policy
from kvstore.errors import ConfigError, FrameInvalid, StoreClosed, TierFull
from kvstore.interface import LookupStatus
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


@pytest.mark.parametrize("codec", ["auto", "none"])
@pytest.mark.parametrize("kind", ["memory", "remote", "disk"])
def test_a_prefix_is_written_to_a_tier_and_loaded_again(
    kind: str, codec: str, tmp_path: Path
) -> None:
    tier = make_tier(kind, tmp_path)
    names = hashes(9)
    with make_store(tier, codecs={tier.name: codec}) as store:
        session = store.session(SPACE)
        assert save(session, names).dropped == 0
        assert match(session, names) == ["l2"] * 9
        assert loaded_tiers(session, names) == ["l2"] * 9
        flush_to_tiers(store)
        assert match(session, names) == [tier.name] * 9
        assert loaded_tiers(session, names) == [tier.name] * 9
        assert loaded_tiers(session, names) == ["l2"] * 9
        stats = store.stats()
        assert stats["tiers"][tier.name]["reads"] == 9
        assert stats["tiers"][tier.name]["writes"] == 9
        assert stats["hit_blocks"] == {"l2": 18, tier.name: 9}
        session.close()
        store.clear("l2")
        assert free_slots(store) == store.slab.slots


def test_blocks_outlive_the_store_on_disk(tmp_path: Path) -> None:
    names = hashes(5)
    with make_store(make_tier("disk", tmp_path)) as store:
        save(store.session(SPACE), names)  # close writes queued blocks
    with make_store(make_tier("disk", tmp_path)) as store:
        assert loaded_tiers(store.session(SPACE), names) == ["disk"] * 5


def test_every_session_sees_a_committed_block_and_no_other() -> None:
    with make_store() as store:
        writer, reader = store.session(SPACE), store.session(SPACE)
        operation = writer.save(hashes(3))
        fill(writer, operation)
        assert match(reader, hashes(3)) == []
        assert load(reader, hashes(3)).slots == []
        writer.commit(operation)
        assert match(reader, hashes(3)) == ["l2"] * 3
        assert len(load(reader, hashes(3)).slots) == 3


def test_a_prefix_ends_at_its_first_gap() -> None:
    names = hashes(6)
    with make_store(MemoryTier()) as store:
        session = store.session(SPACE)
        save(session, names[:2] + names[3:])
        assert match(session, names) == ["l2"] * 2
        operation = load(session, names)
        assert len(operation.slots) == 2
        l2 = store.stats()["l2"]
        assert l2["slots_leased"] - l2["tier_writes_in_flight"] <= 2
        session.release(operation)
        flush_to_tiers(store)
        assert loaded_tiers(session, names) == ["memory"] * 2
        assert match(session, names[2:]) == []
        assert session.match(names[2:]).status is LookupStatus.MISS


def test_of_two_writers_the_first_wins() -> None:
    with make_store() as store:
        one, two = store.session(SPACE), store.session(SPACE)
        first, second = one.save(hashes(2)), two.save(hashes(3))
        assert len(first.slot_assignments) == 2
        assert [index for index, _ in second.slot_assignments] == [2]
        fill(one, first)
        fill(two, second)
        two.commit(second)
        one.commit(first)
        assert loaded_tiers(two, hashes(3)) == ["l2"] * 3


def test_two_loads_of_a_prefix_read_each_block_once() -> None:
    names = hashes(8)
    tier = CountingTier()
    with make_store(tier) as store:
        one, two = store.session(SPACE), store.session(SPACE)
        save(one, names)
        flush_to_tiers(store)
        tier.gate.clear()
        first, second = one.load(names), two.load(names)
        assert not first.done
        assert not second.done
        tier.gate.set()
        for session, operation in ((one, first), (two, second)):
            wait_done(session, operation)
            assert len(operation.slots) == 8
        assert first.slots == second.slots
        assert Counter(tier.reads) == {key_of(one, name): 1 for name in names}
        one.release(first)
        assert loaded_tiers(two, names) == ["l2"] * 8


def test_tenants_and_namespaces_never_share() -> None:
    names = hashes(4)
    with make_store(MemoryTier(), slots=64) as store:
        sessions = [
            store.session(SPACE, "red"),
            store.session(SPACE, "blue"),
            store.session(OTHER_SPACE, "red"),
        ]
        for place in ("l2", "memory"):
            for number, session in enumerate(sessions):
                if place == "l2":
                    assert match(session, names) == [], "blocks of another session"
                    assert len(save(session, names).slot_assignments) == 4
                assert loaded_tiers(session, names) == [place] * 4, number
            flush_to_tiers(store)
        other = store.session(OTHER_SPACE, "blue")
        assert match(other, names) == []
        assert loaded_tiers(other, names) == []


def test_selective_writes_blocks_that_are_loaded_again() -> None:
    with make_store(MemoryTier(), write_policy=write_policy("selective")) as store:
        session = store.session(SPACE)
        save(session, hashes(4))
        for _ in range(2):
            loaded_tiers(session, hashes(2))
        flush_to_tiers(store)
        assert match(session, hashes(4)) == ["memory"] * 2


def test_write_back_writes_before_it_evicts_and_when_flushed() -> None:
    tier = MemoryTier()
    with make_store(tier, slots=16, write_policy=write_policy("write_back")) as store:
        session = store.session(SPACE)
        save(session, hashes(8))
        assert tier.stats()["blocks"] == 0
        for n in range(8):
            label = f"more{n}"
            until(partial(save_all, store, session, hashes(4, label)))
            assert match(session, hashes(4, label)) == ["l2"] * 4
        assert store.stats()["l2"]["evictions"] >= 20
        flush_to_tiers(store)
        assert loaded_tiers(session, hashes(8)) == ["memory"] * 8
        for n in range(8):
            assert loaded_tiers(session, hashes(4, f"more{n}")) == ["memory"] * 4


def save_all(store: Store, session: Session, names: list[bytes]) -> bool:
    """Save missing blocks. If some find no slot, flush, so that the tier does not count as
    stalled."""
    return save(session, names).dropped == 0 or not store.flush(WAIT_S)


def test_a_remote_tier_is_queried_once_in_the_background() -> None:
    tier = RemoteTier()
    names = hashes(6)
    for name in names:  # another node has written them
        key = Key("default", SPACE.digest, name)
        tier.write(key, *frame_of(key))
    with make_store(tier) as store:
        session = store.session(SPACE)
        operation = session.match(names + hashes(2, "never"))
        wait_done(session, operation)
        assert operation.status is LookupStatus.HIT
        assert operation.tiers == ["memory"] * 6
        assert store.stats()["tiers"]["memory"]["probes"] == 1
        assert session.match(names).done
        assert loaded_tiers(session, names) == ["memory"] * 6


def frame_of(key: Key, block: bytes | None = None) -> tuple[memoryview, memoryview]:
    block = content(key, SPACE.block_bytes) if block is None else block
    header, payload = frame.aligned_buffer(4096), frame.aligned_buffer(len(block))
    payload[: len(block)] = block
    block_sum = frame.checksum(block)
    frame.pack_header(
        header,
        key=key,
        codec="identity",
        raw_bytes=len(block),
        stored_bytes=len(block),
        raw_sum=block_sum,
        stored_sum=block_sum,
    )
    return header, payload


def test_frames_are_verified_when_written_and_read() -> None:
    with make_store(MemoryTier()) as store:
        session = store.session(SPACE)
        keys = [key_of(session, name) for name in hashes(3)]
        for key in keys[:2]:
            header, payload = frame_of(key)
            assert store.frames.write(key, header, payload)
            assert not store.frames.write(key, header, payload), "saved twice"
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
            flush_to_tiers(store)


def test_an_invalid_frame_is_rejected() -> None:
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


def test_a_frame_without_a_free_slot_is_rejected() -> None:
    with make_store(slots=4) as store:
        session = store.session(SPACE)
        assert len(session.save(hashes(4)).slot_assignments) == 4
        key = key_of(session, hashes(1, "frame")[0])
        with pytest.raises(TierFull):
            store.frames.write(key, *frame_of(key))


def test_a_frame_of_the_wrong_block_size_is_replaced() -> None:
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
        flush_to_tiers(store)
        assert loaded_tiers(session, [name]) == ["memory"]


def test_a_block_evicted_during_a_load_is_read_from_a_tier() -> None:
    class EmptiesL2(MemoryTier):
        """Its first `contains` empties L2."""

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
        flush_to_tiers(store)
        session.release(load(session, names[1:2]))
        tier.store = store
        assert loaded_tiers(session, names) == ["memory"] * 3
        assert tier.store is None
        assert store.stats()["l2"]["slots_leased"] == 0


def test_too_few_slots_drop_the_tail_and_are_counted() -> None:
    with make_store(slots=4) as store:
        session = store.session(SPACE)
        operation = session.save(hashes(7))
        assert [index for index, _ in operation.slot_assignments] == [0, 1, 2, 3]
        assert operation.dropped == 3
        assert store.stats()["l2"]["no_slot"] == 3
        session.release(operation)
        assert free_slots(store) == 4


def test_a_load_larger_than_the_slab_is_truncated_and_leaves_slots_free() -> None:
    names = hashes(40)
    with make_store(MemoryTier(), slots=12) as store:
        session = store.session(SPACE)
        for start in range(0, 40, 4):
            save(session, names[start : start + 4])
            assert store.flush(WAIT_S)
        store.clear("l2")
        operation = load(session, names)
        assert 0 < len(operation.slots) < 12
        assert operation.fault
        assert len(session.save(hashes(2, "new")).slot_assignments) == 2
        session.release(operation)


def test_a_closed_session_releases_every_slot() -> None:
    tier = CountingTier()
    with make_store(tier) as store:
        dying, other = store.session(SPACE), store.session(SPACE)
        save(dying, hashes(8))
        flush_to_tiers(store)
        load(dying, hashes(2))
        dying.save(hashes(5, "unfilled"))
        tier.gate.clear()
        truncated = dying.load(hashes(8))
        until(lambda: len(tier.reads) > 2)
        dying.close()
        assert truncated.done
        assert truncated.fault
        tier.gate.set()
        assert len(loaded_tiers(other, hashes(8))) == 8
        assert match(other, hashes(5, "unfilled")) == []
        other.close()
        until(lambda: store.stats()["l2"]["loads_in_flight"] == 0)
        store.clear("l2")
        assert free_slots(store) == store.slab.slots


def test_an_operation_is_released_once() -> None:
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


def test_poll_waits_in_one_thread_while_another_loads() -> None:
    tier = CountingTier()
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        flush_to_tiers(store)
        session.poll()
        tier.gate.clear()
        changed: list[object] = []
        poller = threading.Thread(target=lambda: changed.extend(session.poll(WAIT_S)))
        poller.start()
        operation = session.load(hashes(3))
        tier.gate.set()
        poller.join(WAIT_S)
        assert operation in changed
        waiter = threading.Thread(target=session.poll, args=(WAIT_S,))
        session.poll()
        waiter.start()
        session.close()
        waiter.join(WAIT_S)
        assert not waiter.is_alive(), "close did not wake the poller"


def test_operations_of_a_closed_store_say_so() -> None:
    store = make_store(MemoryTier())
    session = store.session(SPACE)
    save(session, hashes(1))
    loaded = load(session, hashes(1))
    store.close()
    store.close()
    for operation in (session.match(hashes(1)), session.load(hashes(1)), session.save(hashes(1))):
        assert operation.done
        assert "closed" in operation.fault
    assert session.match(hashes(1)).tiers == []
    session.release(loaded)
    session.poll(WAIT_S)  # returns at once
    assert session.slab is None
    with pytest.raises(StoreClosed):
        store.session(SPACE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_store(MemoryTier(), slots=4), "4 slots"),
        (lambda: make_store(MemoryTier(), MemoryTier()), "distinct"),
        (lambda: make_store(MemoryTier(name="l2")), "distinct"),
        (
            lambda: make_store(MemoryTier(), codecs={"memory": "byteshuffle-zst"}),
            "byteshuffle-zstd",
        ),
        (lambda: make_store(eviction="lur"), "lru"),
    ],
)
def test_a_config_error_is_one_line(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_block_larger_than_a_slot_is_rejected_with_its_size() -> None:
    large = Namespace(model="large", layers=8, kv_heads=2, head_dim=64)
    with make_store() as store, pytest.raises(ConfigError, match=str(large.block_bytes)):
        store.session(large)


def test_repr_counts_slots_and_errors() -> None:
    with Store(Slab.create(16, SLOT_BYTES), [MemoryTier()]) as store:
        session = store.session(SPACE)
        save(session, hashes(3))
        assert store.flush(WAIT_S)
        load(session, hashes(2))
        assert repr(store) == ("L2 3/16 slots, 2 leased | memory 0 queued, 0 errors | 0 dropped")


def test_a_match_does_no_disk_or_network_io(tmp_path: Path) -> None:
    """512 blocks in L2 and in a tier with a local index, over tiers that raise on any access."""

    class GuardedFiles(Files):
        forbidden = False

        def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
            assert not self.forbidden, "the disk was read"
            return super().read_at(fd, views, offset)

    files = GuardedFiles()
    config = disk.Config(directory=str(tmp_path), capacity=16 << 20)
    remote = FaultyTier(RemoteTier())
    names = hashes(512)
    with make_store(disk.open(config, files=files), remote, slots=1024) as store:
        session = store.session(SPACE)
        for start in range(0, 512, 64):
            save(session, names[start : start + 64])
            assert store.flush(WAIT_S)
        files.forbidden = True
        remote.schedule = always(Fault.ERROR)
        remote.calls.clear()
        assert match(session, names) == ["l2"] * 512
        store.clear("l2")
        assert match(session, names) == ["disk"] * 512
        assert remote.calls == []
        files.forbidden = False
        remote.schedule = None
        assert loaded_tiers(session, names[:3]) == ["disk"] * 3
        session.close()
