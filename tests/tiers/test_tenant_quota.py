"""Tenant quotas of L2 and of tiers: a tenant over its quota loses its own blocks."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks.key import Key
from kvstore.cache.eviction import LRU
from kvstore.cache.manager import L2Manager
from kvstore.cache.write_policy import write_policy
from kvstore.errors import TierFull, TierUnavailable
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.testing.frames import FrameBuffer
from kvstore.tiers import disk
from kvstore.tiers.base import IO_ALIGNMENT
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.tenant_quota import TenantQuotas
from kvstore.tiers.wrappers import CircuitBreaker

FRAME = IO_ALIGNMENT + 8192
WAIT_S = 60.0


def key(tenant: str, number: int) -> Key:
    return Key(tenant, "space", bytes([number]) * 32)


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(8192)


def keys_of(tenant: str, numbers: Sequence[int]) -> list[Key]:
    return [key(tenant, number) for number in numbers]


# --- lower tiers ---------------------------------------------------------------------------------


def test_a_tenant_over_its_quota_loses_its_own_oldest(buffer: FrameBuffer) -> None:
    tier = TenantQuotas(MemoryTier(), {"small": 3 * FRAME})
    for number in range(4):
        tier.write(*buffer.fill(key("large", number), 8192))
    for number in range(3):
        tier.write(*buffer.fill(key("small", number), 8192))
    assert tier.read(key("small", 0), buffer.header, buffer.payload)
    tier.write(*buffer.fill(key("small", 3), 8192))
    assert tier.contains(keys_of("small", range(4))) == [True, False, True, True]
    assert all(tier.contains(keys_of("large", range(4))))
    assert tier.used_bytes() == {"small": 3 * FRAME}
    assert tier.stats()["quota_evictions"] == 1


def test_a_quota_for_everybody_is_one_for_each(buffer: FrameBuffer) -> None:
    tier = TenantQuotas(MemoryTier(), {"*": 2 * FRAME, "more": 3 * FRAME})
    for tenant in ("a", "b", "more"):
        for number in range(5):
            tier.write(*buffer.fill(key(tenant, number), 8192))
    assert tier.used_bytes() == {"a": 2 * FRAME, "b": 2 * FRAME, "more": 3 * FRAME}


def test_a_block_larger_than_the_quota_is_refused_and_nothing_is_lost(buffer: FrameBuffer) -> None:
    tier = TenantQuotas(MemoryTier(), {"small": FRAME})
    tier.write(*buffer.fill(key("small", 0), 8192))
    large = FrameBuffer(16384)
    with pytest.raises(TierFull, match=r"quota of tenant 'small' in memory \(12 KiB\)"):
        tier.write(*large.fill(key("small", 1), 16384))
    assert tier.contains(keys_of("small", [0, 1])) == [True, False]


def test_a_quota_outlives_a_restart_of_the_tier(tmp_path: Path, buffer: FrameBuffer) -> None:
    config = disk.Config(directory=str(tmp_path), capacity=16 << 20)
    for start in (0, 3):
        tier = TenantQuotas(disk.open(config), {"small": 4 * FRAME})
        for number in range(start, start + 3):
            tier.write(*buffer.fill(key("small", number), 8192))
        assert tier.used_bytes()["small"] == min(start + 3, 4) * FRAME
        assert sum(tier.contains(keys_of("small", range(6)))) == min(start + 3, 4)
        tier.close()


def test_what_the_tier_evicted_itself_makes_room_first(buffer: FrameBuffer) -> None:
    inner = MemoryTier(capacity_bytes=4 * FRAME)
    tier = TenantQuotas(inner, {"a": 3 * FRAME})
    for number in range(3):
        tier.write(*buffer.fill(key("a", number), 8192))
    for number in range(4):
        tier.write(*buffer.fill(key("b", number), 8192))  # evicts all blocks of tenant a
    for number in range(3, 6):
        tier.write(*buffer.fill(key("a", number), 8192))
    assert all(tier.contains(keys_of("a", range(3, 6))))
    assert tier.used_bytes() == {"a": 3 * FRAME}


def test_a_tier_that_says_no_for_a_while_loses_nothing(buffer: FrameBuffer) -> None:
    """An open circuit breaker or a disabled disk reports every block as absent."""

    class Shy(MemoryTier):
        silent = False

        def contains(self, keys: Sequence[Key]) -> list[bool]:
            return [False] * len(keys) if self.silent else super().contains(keys)

        def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
            return 0 if self.silent else super().read(key, header, payload)

    inner = Shy()
    tier = TenantQuotas(inner, {"a": 10 * FRAME})
    for number in range(10):
        tier.write(*buffer.fill(key("a", number), 8192))
    inner.silent = True
    for number in range(10):
        assert tier.read(key("a", number), buffer.header, buffer.payload) == 0
    assert tier.used_bytes() == {"a": 10 * FRAME}
    tier.write(*buffer.fill(key("a", 10), 8192))
    inner.silent = False
    assert tier.contains(keys_of("a", range(11))) == [False] + [True] * 10


def test_what_is_written_while_a_list_is_made_is_counted(buffer: FrameBuffer) -> None:
    listing, go_on = threading.Event(), threading.Event()

    class Slow(MemoryTier):
        local_index = False

        def usage(self) -> Iterator[tuple[Key, int]]:
            rows = list(super().usage())
            listing.set()
            assert go_on.wait(WAIT_S)
            yield from rows

    tier = TenantQuotas(Slow(), {"a": 4 * FRAME})
    assert listing.wait(WAIT_S)
    for number in range(3):
        tier.write(*buffer.fill(key("a", number), 8192))
    tier.delete([key("a", 1)])
    go_on.set()
    for number in range(3, 9):
        tier.write(*buffer.fill(key("a", number), 8192))
    deadline = time.monotonic() + WAIT_S
    while tier._changes_since_list is not None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert tier.used_bytes() == {"a": 4 * FRAME}
    go_on.set()
    assert len(list(tier.inner.usage())) == 4


def test_a_write_that_hangs_keeps_no_other_tenant_and_no_other_writer(buffer: FrameBuffer) -> None:
    faulty = FaultyTier(MemoryTier())
    tier = TenantQuotas(faulty, {"*": 4 * FRAME})
    stuck = key("a", 0)
    faulty.schedule = lambda operation, keys: Fault.HUNG if stuck in keys else None
    mine = FrameBuffer(8192)
    thread = threading.Thread(target=tier.write, args=mine.fill(stuck, 8192), daemon=True)
    thread.start()
    assert faulty.wait_hung()
    for number in range(1, 9):
        tier.write(*buffer.fill(key("a", number), 8192))
        tier.write(*buffer.fill(key("b", number), 8192))
    assert tier.used_bytes() == {"a": 3 * FRAME, "b": 4 * FRAME}
    faulty.release()
    thread.join(WAIT_S)
    assert tier.used_bytes() == {"a": 4 * FRAME, "b": 4 * FRAME}


def test_a_tier_that_is_down_forgets_no_account(buffer: FrameBuffer) -> None:
    """An open circuit breaker reports every block as absent. This does not change the usage."""
    faulty = FaultyTier(MemoryTier())
    tier = TenantQuotas(CircuitBreaker(faulty, failures=1, reset_s=0.0), {"a": 2 * FRAME})
    for number in range(2):
        tier.write(*buffer.fill(key("a", number), 8192))
    faulty.schedule = always(Fault.REFUSED)
    for number in range(2, 5):
        with pytest.raises(TierUnavailable):
            tier.write(*buffer.fill(key("a", number), 8192))
    assert tier.used_bytes() == {"a": 2 * FRAME}
    faulty.schedule = None
    tier.write(*buffer.fill(key("a", 6), 8192))
    assert tier.used_bytes() == {"a": 2 * FRAME}
    assert sum(faulty.inner.contains(keys_of("a", range(7)))) == 2


def test_a_tier_that_must_be_asked_is_listed_behind_the_scenes(buffer: FrameBuffer) -> None:
    class Remote(MemoryTier):
        local_index = False

    inner = Remote()
    for number in range(3):
        inner.write(*buffer.fill(key("a", number), 8192))
    tier = TenantQuotas(inner, {"a": 3 * FRAME})
    deadline = time.monotonic() + WAIT_S
    while tier.used_bytes() != {"a": 3 * FRAME}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tier.write(*buffer.fill(key("a", 3), 8192))
    assert sum(tier.contains(keys_of("a", range(4)))) == 3
    tier.close()


def test_writers_of_one_tenant_do_not_share_a_room(buffer: FrameBuffer) -> None:
    class Watched(MemoryTier):
        """Records the maximum bytes of a tenant."""

        most = 0

        def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
            super().write(key, header, payload)
            self.most = max(self.most, sum(nbytes for _, nbytes in self.usage()))

    inner = Watched()
    tier = TenantQuotas(inner, {"a": 3 * FRAME})

    def work(turn: int) -> None:
        mine = FrameBuffer(8192)
        for number in range(turn, 200, 4):
            tier.write(*mine.fill(key("a", number), 8192))

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inner.most <= (3 + 4) * FRAME, "more than the writes in progress"
    assert sum(nbytes for _, nbytes in inner.usage()) == 3 * FRAME


steps = st.lists(
    st.tuples(st.sampled_from("wrd"), st.sampled_from("ab"), st.integers(0, 7), st.integers(1, 3)),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_against_a_plain_model(program: list[tuple[str, str, int, int]]) -> None:
    """Only tenant a has a quota. Blocks have one to three sectors."""
    quota = 9 * IO_ALIGNMENT
    tier = TenantQuotas(MemoryTier(), {"a": quota})
    model: dict[str, OrderedDict[Key, int]] = {"a": OrderedDict(), "b": OrderedDict()}
    mine = FrameBuffer(3 * IO_ALIGNMENT)
    for operation, tenant, number, pages in program:
        cached, name = model[tenant], key(tenant, number)
        if operation == "w":
            nbytes = cached.get(
                name, (1 + pages) * IO_ALIGNMENT
            )  # writing an existing key changes nothing
            tier.write(*mine.fill(name, nbytes - IO_ALIGNMENT))
            cached.pop(name, 0)
            while tenant == "a" and sum(cached.values()) + nbytes > quota:
                cached.popitem(last=False)
            cached[name] = nbytes
        elif operation == "r":
            assert bool(tier.read(name, mine.header, mine.payload)) == (name in cached)
            if name in cached:
                cached.move_to_end(name)
        else:
            tier.delete([name])
            cached.pop(name, None)
        assert dict(tier.usage()) == {**model["a"], **model["b"]}
        assert tier.used_bytes().get("a", 0) == sum(model["a"].values())


# --- L2 ------------------------------------------------------------------------------------------


def manager_of(slots: int, quotas: dict[str, int], tiers: int = 0) -> L2Manager:
    manager = L2Manager(
        slots,
        LRU(),
        write_policy("write_through"),
        tiers=tiers,
        max_loads_per_tier=4,
        quotas=quotas,
    )
    manager.add_client(1)
    return manager


def put(manager: L2Manager, tenant: str, *numbers: int) -> int:
    """Save these blocks; returns how many found no slot."""
    answer = manager.allocate_save(1, keys_of(tenant, numbers), 4096)
    manager.commit(1, [slot for _, slot in answer.slot_assignments])
    manager.check()
    return answer.dropped


def cached_blocks(manager: L2Manager, tenant: str) -> set[int]:
    return {n for n in range(16) if manager.match([key(tenant, n)], 4096)}


def test_l2_a_tenant_over_its_quota_evicts_its_own() -> None:
    manager = manager_of(6, {"a": 2})
    put(manager, "b", 0, 1, 2)
    put(manager, "a", 0, 1)
    put(manager, "a", 2)
    # The last block of a prefix is the coldest, so the first block of the first save stays.
    assert cached_blocks(manager, "a") == {0, 2}
    assert cached_blocks(manager, "b") == {0, 1, 2}
    assert manager.stats()["slots_free"] == 1, "a free slot was used beyond the quota"
    assert manager.stats()["tenants"] == {"a": 2, "b": 3}


def test_l2_a_run_longer_than_the_quota_keeps_its_head() -> None:
    manager = manager_of(8, {"*": 3})
    assert put(manager, "a", 0, 1, 2, 3, 4) == 2
    assert cached_blocks(manager, "a") == {0, 1, 2}
    assert manager.stats()["over_quota"] == 1
    assert put(manager, "b", 0, 1, 2) == 0


def test_l2_leased_blocks_are_not_evicted() -> None:
    manager = manager_of(8, {"a": 2})
    put(manager, "a", 0, 1)
    plan = manager.lease(1, keys_of("a", [0, 1]), 4096, [None, None], "operation")
    assert len(plan.ready) == 2
    assert put(manager, "a", 2) == 1
    assert cached_blocks(manager, "a") == {0, 1}
    manager.release(1, [slot for _, slot in plan.ready])
    assert put(manager, "a", 2) == 0
    assert len(cached_blocks(manager, "a")) == 2


def test_l2_loads_and_warmed_blocks_count_too() -> None:
    manager = manager_of(8, {"a": 1}, tiers=1)
    plan = manager.lease(1, keys_of("a", [0, 1]), 4096, [0, 0], "operation")
    assert len(plan.new_loads) == 1
    assert plan.reason == "no free slot"
    assert manager.reserve_for_warm(key("a", 2), 4096, 0) is None
    assert manager.reserve_for_warm(key("b", 2), 4096, 0) is not None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)
        ),
        max_size=40,
    )
)
def test_l2_nobody_ever_has_more_than_its_quota(saves: list[tuple[str, list[int]]]) -> None:
    manager = manager_of(7, {"a": 2, "*": 3})
    for tenant, numbers in saves:
        put(manager, tenant, *numbers)
        for name, most in (("a", 2), ("b", 3), ("c", 3)):
            assert len(cached_blocks(manager, name)) <= most
        # A save does not evict its own blocks, so they may fill the whole quota.
        assert numbers[0] in cached_blocks(manager, tenant) or cached_blocks(
            manager, tenant
        ) <= set(numbers)
