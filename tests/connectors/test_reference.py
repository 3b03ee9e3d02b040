"""The reference connector against a store and a clock that the test controls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from manual_store import ManualClock, ManualStore

from kvstore.blocks.key import Namespace
from kvstore.connectors.common.dropped_blocks import RETRY_S
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.pending_lookups import MISS_CACHE_MS, ROUND_TRIP_MS, PendingLookups
from kvstore.connectors.reference.hooks import SAVES_MAX, ReferenceHooks
from kvstore.engine.hooks import HookEvent, LoadDone, SaveDone
from kvstore.errors import ConfigError
from kvstore.interface import HookMatch, Load, LookupStatus, Match, Save
from kvstore.kernels import PoolLayout, check_layout
from kvstore.prefetch.policy import BestEffort, Timeout, WaitComplete

torch.set_num_threads(1)

PAGE_TOKENS = 2
NAMESPACE = Namespace(
    model="tiny", dtype="float32", layers=2, kv_heads=1, head_dim=4, block_tokens=4
)
NUM_PAGES = 64
MAX_WAIT_MS = 500.0
HANG_LIMIT_S = 20.0


def chain(length: int, tag: int = 0) -> list[bytes]:
    return [bytes([tag, index]) * 16 for index in range(length)]


def block_of(value: int) -> bytes:
    """A block whose elements differ from those of every other block."""
    count = NAMESPACE.block_bytes // 4
    return (torch.arange(count, dtype=torch.float32) + 1000 * (value + 1)).numpy().tobytes()


class Rig:
    """Hooks over a manual store; `close` checks that nothing leaked."""

    def __init__(self, policy: Any, *, slots: int = 16, auto: tuple[str, ...] = (), **kw: Any):
        self.clock = ManualClock()
        self.store = ManualStore(NAMESPACE, slots, auto)
        self.pool = torch.zeros(2, 2, NUM_PAGES, PAGE_TOKENS, 1, 4)
        kw = {"max_wait_ms": MAX_WAIT_MS, "min_load_tokens": 0, **kw}
        self.hooks = ReferenceHooks(
            self.store, self.pool, PAGE_TOKENS, policy=policy, clock=self.clock, **kw
        )

    def match(
        self, hashes: list[bytes], first: int = 0, *, can_start: bool = False, name: str = "r"
    ) -> HookMatch:
        return self.hooks.match(name, hashes, first, can_start=can_start)

    def pass_ms(self, milliseconds: float) -> None:
        self.clock.advance(milliseconds / 1e3)

    def events(self, count: int = 1) -> list[HookEvent]:
        """The next `count` events; fails if they do not arrive."""
        found: list[HookEvent] = []
        end_s = time.monotonic() + HANG_LIMIT_S
        while len(found) < count:
            assert time.monotonic() < end_s, f"only {found}"
            found += self.hooks.poll(0.05)
        assert len(found) == count, found
        return found

    def block(self, pages: list[int]) -> bytes:
        """The bytes of these pages as a block."""
        return self.pool[:, :, pages].reshape(-1).contiguous().numpy().tobytes()

    def close(self) -> None:
        self.hooks.close()
        self.store.check_idle()


@pytest.fixture
def rigs() -> Iterator[Any]:
    made: list[Rig] = []

    def make(*args: Any, **kw: Any) -> Rig:
        made.append(Rig(*args, **kw))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


# Blocks in L2.


def test_blocks_in_l2_hit_at_once_and_scatters(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load"))
    hashes = chain(5)
    for index in range(3):
        rig.store.put(hashes[index], block_of(index))
    found = rig.match(hashes, 1, can_start=True)
    assert (found.status, found.blocks, found.tiers) == (LookupStatus.HIT, 2, ("l2", "l2"))
    rig.hooks.load("r", [7, 3, -1, 9], 2)
    assert rig.events() == [LoadDone("r", 2)]
    assert rig.block([7, 3]) == block_of(1)
    half = rig.pool[:, :, 9].reshape(-1).tolist()
    expected = torch.frombuffer(bytearray(block_of(2)), dtype=torch.float32)
    assert half == expected.view(2, 2, 4, 4)[:, :, 2:].reshape(-1).tolist()
    untouched = [page for page in range(NUM_PAGES) if page not in (7, 3, 9)]
    assert not rig.pool[:, :, untouched].any()
    rig.store.check_idle()
    assert rig.hooks.stats()["blocks_loaded_by_tier"] == {"l2": 2}


def test_an_empty_store_is_a_miss_at_once(rigs: Any) -> None:
    rig = rigs(WaitComplete(max_wait_ms=400.0), auto=("match",))
    assert rig.match(chain(4)).status is LookupStatus.MISS
    assert rig.match([]).status is LookupStatus.MISS
    assert rig.hooks.stats()["slots_leased_waiting"] == 0


def test_a_miss_is_cached_and_then_looked_up_again(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load"))
    hashes = chain(2)
    assert rig.match(hashes).status is LookupStatus.MISS
    rig.store.put(hashes[0], block_of(0))
    assert rig.match(hashes).status is LookupStatus.MISS
    assert len(rig.store.operations) == 1
    rig.pass_ms(MISS_CACHE_MS + 1)
    assert rig.match(hashes).blocks == 1


# How long to wait: round trip, policy, maximum wait.


def test_every_policy_waits_a_round_trip(rigs: Any) -> None:
    rig = rigs(BestEffort())
    hashes = chain(3)
    for index in range(3):
        rig.store.put(hashes[index], block_of(index))
    assert rig.match(hashes, can_start=True).status is LookupStatus.PENDING
    rig.store.answer(rig.store.last(Match))
    assert rig.match(hashes, can_start=True).status is LookupStatus.PENDING
    rig.store.answer(rig.store.last(Load), blocks=2, done=False)
    assert rig.match(hashes, can_start=True).status is LookupStatus.PENDING, (
        "the third is in L2 too"
    )
    rig.store.answer(rig.store.last(Load))
    assert rig.match(hashes, can_start=True).blocks == 3


def test_a_silent_store_costs_a_round_trip(rigs: Any) -> None:
    rig = rigs(BestEffort())
    assert rig.match(chain(3), can_start=True).status is LookupStatus.PENDING
    rig.pass_ms(ROUND_TRIP_MS + 1)
    assert rig.match(chain(3), can_start=True).status is LookupStatus.MISS


def test_best_effort_takes_what_has_arrived(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match",))
    hashes = chain(4)
    for index in range(4):
        rig.store.put(hashes[index], block_of(index), "disk")
    assert rig.match(hashes).status is LookupStatus.PENDING
    load = rig.store.last(Load)
    assert len(load.hashes) == 4, "the load starts with the first match"
    rig.store.answer(load, blocks=2, done=False)
    rig.pass_ms(10)
    assert rig.match(hashes, can_start=False).status is LookupStatus.PENDING, (
        "no page yet: continue"
    )
    found = rig.match(hashes, can_start=True)
    assert (found.status, found.blocks, found.tiers) == (LookupStatus.HIT, 2, ("disk", "disk"))
    rig.hooks.load("r", [0, 1, 2, 3], 2)
    assert rig.events() == [LoadDone("r", 2)]
    rig.store.answer(load)  # late: to no request
    assert load.operation_id not in rig.store.open


def test_wait_complete_waits_for_all_blocks_up_to_its_maximum(rigs: Any) -> None:
    rig = rigs(WaitComplete(max_wait_ms=300.0), auto=("match",))
    hashes = chain(2)
    for index in range(2):
        rig.store.put(hashes[index], block_of(index), "disk")
    rig.match(hashes, can_start=True)
    rig.store.answer(rig.store.last(Load), blocks=1, done=False)
    rig.pass_ms(200)
    assert rig.match(hashes, can_start=True).status is LookupStatus.PENDING
    rig.pass_ms(101)
    assert rig.match(hashes, can_start=True).blocks == 1


def test_timeout_grows_with_the_prefix(rigs: Any) -> None:
    rig = rigs(
        Timeout(base_wait_ms=60.0, per_1k_tokens_ms=1024.0, max_wait_ms=400.0), auto=("match",)
    )
    hashes = chain(10)  # 40 tokens: 60 + 40 ms
    for index in range(10):
        rig.store.put(hashes[index], block_of(index), "disk")
    rig.match(hashes, can_start=True)
    rig.store.answer(rig.store.last(Load), blocks=1, done=False)
    rig.pass_ms(95)
    assert rig.match(hashes, can_start=True).status is LookupStatus.PENDING
    rig.pass_ms(10)
    assert rig.match(hashes, can_start=True).blocks == 1


@pytest.mark.parametrize(
    "policy", [BestEffort(), WaitComplete(max_wait_ms=1e6), Timeout(1e6, 1e6, 1e6)], ids=repr
)
def test_never_pending_after_the_maximum_wait(rigs: Any, policy: Any) -> None:
    """Counted from the first match, for any answers of the store and any first block."""
    rig = rigs(policy)
    hashes = chain(6)
    for index in range(6):
        rig.store.put(hashes[index], block_of(index), "disk")
    assert rig.match(hashes).status is LookupStatus.PENDING
    rig.store.answer(rig.store.last(Match))
    rig.pass_ms(MAX_WAIT_MS - 10)
    assert rig.match(hashes).status is LookupStatus.PENDING
    assert rig.match(hashes, 1).status is LookupStatus.PENDING, (
        "another lookup, the same maximum wait"
    )
    rig.pass_ms(11)
    assert rig.match(hashes, 1).status is LookupStatus.MISS
    assert rig.match(hashes, 2).status is LookupStatus.MISS
    rig.store.check_idle()


def test_after_the_maximum_wait_arrived_blocks_still_count(rigs: Any) -> None:
    rig = rigs(WaitComplete(max_wait_ms=1e6), auto=("match", "load"))
    hashes = chain(2)
    rig.store.auto.discard("match")
    rig.store.put(hashes[0], block_of(0))
    rig.match(hashes)
    rig.store.answer(rig.store.last(Match), done=False)
    rig.pass_ms(MAX_WAIT_MS + 1)
    assert rig.match(hashes).blocks == 1


def test_after_a_load_the_maximum_wait_starts_again(rigs: Any) -> None:
    rig = rigs(WaitComplete(max_wait_ms=400.0), auto=("match", "load"))
    hashes = chain(1)
    rig.store.put(hashes[0], block_of(0))
    assert rig.match(hashes).blocks == 1
    rig.pass_ms(MAX_WAIT_MS + 1)
    rig.hooks.load("r", [0, 1], 1)
    rig.events()
    rig.store.auto.clear()
    assert rig.match(hashes).status is LookupStatus.PENDING


def test_below_the_minimum_length_only_l2_is_loaded(rigs: Any) -> None:
    rig = rigs(WaitComplete(max_wait_ms=400.0), auto=("match",), min_load_tokens=16)
    hashes, others = chain(3), chain(4, tag=1)
    for index, key in enumerate(hashes):
        rig.store.put(key, block_of(index), "l2" if index < 2 else "disk")
    rig.match(hashes, name="short")
    assert rig.store.last(Load).hashes == tuple(hashes[:2])
    for index, key in enumerate(others):
        rig.store.put(key, block_of(index), "disk")
    rig.match(others, name="long enough")
    assert rig.store.last(Load).hashes == tuple(others)
    assert rig.match(others[:3], name="short, disk only").status is LookupStatus.MISS


def test_queued_requests_leave_slots_for_others(rigs: Any) -> None:
    rig = rigs(WaitComplete(max_wait_ms=400.0), auto=("match", "load"), slots=16)
    for tag in range(3):
        for index, key in enumerate(chain(6, tag)):
            rig.store.put(key, block_of(index))
    assert rig.match(chain(6, 0), name="first").blocks == 6
    assert rig.match(chain(6, 1), name="second").blocks == 2, "half of 16 slots for the queue"
    assert rig.match(chain(6, 2), name="third").status is LookupStatus.PENDING
    assert rig.match(chain(6, 2), name="third", can_start=True).status is LookupStatus.MISS
    rig.hooks.abort("first")
    assert rig.match(chain(6, 2), name="fourth").blocks == 6


# Aborts, close and errors.


@pytest.mark.parametrize("stage", ["asked", "matched", "partly loaded", "hit", "missed"])
def test_abort_in_any_state_releases_everything(rigs: Any, stage: str) -> None:
    rig = rigs(WaitComplete(max_wait_ms=400.0))
    hashes = chain(2)
    for index in range(2):
        rig.store.put(hashes[index], block_of(index), "disk")
    rig.match(hashes)
    if stage != "asked":
        rig.store.answer(rig.store.last(Match), blocks=0 if stage == "missed" else None)
        rig.match(hashes)
    if stage == "partly loaded":
        rig.store.answer(rig.store.last(Load), blocks=1, done=False)
    if stage == "hit":
        rig.store.answer(rig.store.last(Load))
        assert rig.match(hashes).blocks == 2
    rig.hooks.abort("r")
    rig.hooks.abort("r")
    rig.hooks.abort("never seen")
    rig.store.check_idle()
    assert rig.hooks.stats()["requests_waiting"] == 0
    for operation in rig.store.operations:
        rig.store.answer(operation)  # late answers change nothing
    rig.store.check_idle()


def test_abort_while_a_copy_runs_still_reports_once(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load"))
    hashes = chain(2)
    rig.store.put(hashes[0], block_of(0))
    rig.match(hashes, can_start=True)
    rig.hooks.load("r", [0, 1], 1)
    rig.hooks.abort("r")
    assert rig.events() == [LoadDone("r", 1)]
    assert rig.hooks.poll(0.0) == []


def test_a_lookup_of_nothing_releases_everything(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load"))
    hashes = chain(2)
    rig.store.put(hashes[0], block_of(0))
    assert rig.match(hashes, can_start=True).blocks == 1
    assert rig.match(hashes, 2, can_start=True).status is LookupStatus.MISS
    rig.store.check_idle()


def test_a_slot_is_leased_while_its_copy_runs(rigs: Any) -> None:
    """Close while copies are queued: they end before the operations are released."""
    rig = rigs(BestEffort(), auto=("match", "load", "save"))
    hashes = chain(8)
    for index in range(4):
        rig.store.put(hashes[index], block_of(index))
    rig.match(hashes, can_start=True)
    rig.hooks.load("r", list(range(8)), 4)
    rig.pool[:, :, 20:28] = 5.0
    rig.hooks.save("r", hashes[4:], list(range(20, 28)))
    assert len(rig.store.open) == 2
    rig.hooks.close()
    rig.store.check_idle()
    assert rig.block([0, 1]) == block_of(0)
    assert rig.store.blocks[hashes[7]][1] == rig.block([26, 27])


def test_after_a_reconnect_an_operation_keeps_its_slab(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load", "save"))
    hashes = chain(1)
    rig.store.put(hashes[0], block_of(0))
    assert rig.match(hashes, can_start=True).blocks == 1
    rig.store.reconnect()
    rig.hooks.load("r", [4, 5], 1)
    assert rig.events() == [LoadDone("r", 1)]
    assert rig.block([4, 5]) == block_of(0)


def test_an_operation_with_an_error_keeps_its_blocks(rigs: Any) -> None:
    rig = rigs(WaitComplete(max_wait_ms=400.0), auto=("match",))
    hashes = chain(3)
    for index in range(3):
        rig.store.put(hashes[index], block_of(index), "disk")
    rig.match(hashes)
    rig.store.answer(rig.store.last(Load), blocks=1, done=False)
    rig.store.end(rig.store.last(Load), fault="the disk is gone")
    assert rig.match(hashes).blocks == 1


def test_an_exception_of_the_store_is_a_miss(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load", "save"))
    hashes = chain(2)
    rig.store.raising = True
    assert rig.match(hashes, can_start=True).status is LookupStatus.MISS
    assert rig.hooks.save("r", hashes, [0, 1, 2, 3]) == 1
    assert rig.hooks.poll(0.01) == [SaveDone(1, 0)]
    assert rig.hooks.stats()["store_errors"] >= 3
    rig.store.raising = False


def test_a_store_without_a_slab_misses(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match",))
    hashes = chain(1)
    rig.store.put(hashes[0], block_of(0))
    slab, rig.store.slab = rig.store.slab, None
    assert rig.match(hashes, can_start=True).status is LookupStatus.MISS
    rig.store.slab = slab


# Saves.


def test_a_save_copies_into_its_slots_and_commits(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("save",))
    hashes = chain(3)
    rig.store.put(hashes[1], block_of(1))
    rig.pool.copy_(torch.rand_like(rig.pool))
    save_id = rig.hooks.save("r", hashes, [0, 1, 2, 3, 4, 5])
    assert rig.events() == [SaveDone(save_id, 2)]
    assert rig.store.blocks[hashes[0]][1] == rig.block([0, 1])
    assert rig.store.blocks[hashes[1]][1] == block_of(1), "first writer wins"
    assert rig.store.blocks[hashes[2]][1] == rig.block([4, 5])
    rig.store.check_idle()


def test_slots_assigned_later_are_copied_then(rigs: Any) -> None:
    rig = rigs(BestEffort())
    save_id = rig.hooks.save("r", chain(1), [0, 1])
    assert rig.hooks.poll(0.01) == []
    rig.store.answer(rig.store.last(Save))
    assert rig.events() == [SaveDone(save_id, 1)]


@pytest.mark.parametrize("assigned", [0, 1])
def test_a_save_ends_after_the_maximum_wait(rigs: Any, assigned: int) -> None:
    rig = rigs(BestEffort())
    save_id = rig.hooks.save("r", chain(2), [0, 1, 2, 3])
    rig.store.answer(rig.store.last(Save), blocks=assigned, done=False)
    rig.pass_ms(MAX_WAIT_MS - 1)
    assert rig.hooks.poll(0.0) == []
    rig.pass_ms(2)
    assert rig.hooks.poll(0.0) == [SaveDone(save_id, 0)]
    rig.store.answer(rig.store.last(Save))  # the late slot is freed
    rig.store.check_idle()
    assert not rig.store.blocks


def test_a_save_of_stored_blocks_ends_at_once(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("save",), slots=1)
    hashes = chain(1)
    rig.store.put(hashes[0], block_of(0))
    save_id = rig.hooks.save("r", hashes, [0, 1])
    assert rig.hooks.poll(0.0) == [SaveDone(save_id, 0)]


def test_blocks_without_a_slot_are_saved_as_soon_as_there_is_one(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("save",), slots=1)
    hashes = chain(4)
    rig.store.put(hashes[1], block_of(1))
    save_id = rig.hooks.save("r", hashes, list(range(8)))
    events: list[HookEvent] = []
    while not events:
        rig.pass_ms(RETRY_S * 1e3)
        events = rig.hooks.poll(0.05)
    assert events == [SaveDone(save_id, 3)]
    for number in (0, 2, 3):
        assert rig.store.blocks[hashes[number]][1] == rig.block([2 * number, 2 * number + 1])
    assert rig.hooks.stats()["blocks_dropped"] == 0


def test_blocks_without_a_slot_are_dropped_after_the_maximum_wait(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("save",), slots=2)
    rig.store.free, free = [], rig.store.free
    save_id = rig.hooks.save("r", chain(3), list(range(6)))
    for _ in range(20):
        rig.pass_ms(MAX_WAIT_MS / 25)
        assert rig.hooks.poll(0.0) == []
    rig.pass_ms(MAX_WAIT_MS)
    assert rig.hooks.poll(0.0) == [SaveDone(save_id, 0)]
    assert rig.hooks.stats()["blocks_dropped"] == 3
    rig.store.free = free
    rig.store.check_idle()


def test_a_save_with_an_error_commits_nothing(rigs: Any) -> None:
    rig = rigs(BestEffort())
    save_id = rig.hooks.save("r", chain(1), [0, 1])
    rig.store.answer(rig.store.last(Save), done=False)
    rig.store.end(rig.store.last(Save), fault="the connection was lost")
    assert rig.events() == [SaveDone(save_id, 0)]
    assert not rig.store.blocks


def test_saves_under_way_are_bounded(rigs: Any) -> None:
    rig = rigs(BestEffort())
    for number in range(SAVES_MAX + 3):
        rig.hooks.save("r", [bytes([number]) * 32], [0, 1])
    assert len(rig.store.open) == SAVES_MAX
    assert rig.events(3) == [SaveDone(SAVES_MAX + 1 + index, 0) for index in range(3)]
    assert rig.hooks.stats()["saves_dropped"] == 3


def test_a_failed_copy_is_a_miss_and_commits_nothing(rigs: Any) -> None:
    """A page id that is out of range makes the copy fail on its thread."""
    rig = rigs(BestEffort(), auto=("match", "load", "save"))
    hashes = chain(2)
    rig.store.put(hashes[0], block_of(0))
    rig.match(hashes, can_start=True)
    rig.hooks.load("r", [0, NUM_PAGES], 1)
    assert rig.events() == [LoadDone("r", 0)]
    save_id = rig.hooks.save("r", hashes[1:], [0, NUM_PAGES])
    assert rig.events() == [SaveDone(save_id, 0)]
    assert list(rig.store.blocks) == hashes[:1]
    assert rig.hooks.stats()["copies_failed"] == 2
    rig.hooks.save("r", hashes[1:], [0, 1])
    assert rig.events() == [SaveDone(save_id + 1, 1)], "the thread continues"


def test_poll_returns_when_a_pending_match_is_updated(rigs: Any) -> None:
    rig = rigs(WaitComplete(max_wait_ms=400.0))
    rig.match(chain(2))
    rig.store.answer(rig.store.last(Match))
    start_s = time.monotonic()
    assert rig.hooks.poll(HANG_LIMIT_S) == []
    assert time.monotonic() - start_s < HANG_LIMIT_S / 2


@pytest.mark.parametrize(
    ("policy", "wait_ends_ms"),
    [
        (WaitComplete(max_wait_ms=300.0), 300.0),
        (Timeout(base_wait_ms=80.0, per_1k_tokens_ms=0.0, max_wait_ms=400.0), 80.0),
        (BestEffort(), None),
    ],
    ids=["wait_complete", "timeout", "best_effort"],
)
def test_a_lookup_expires_once_when_time_changes_its_answer(
    policy: Any, wait_ends_ms: float | None
) -> None:
    """If it were reported all the time, the engine would spin instead of sleeping in `poll`."""
    clock, store = ManualClock(), ManualStore(NAMESPACE, 8, ("match",))
    hashes = chain(2)
    for index in range(2):
        store.put(hashes[index], block_of(index), "disk")
    attempts = PendingLookups(
        GuardedStore(store),
        policy=policy,
        max_wait_ms=MAX_WAIT_MS,
        min_load_tokens=0,
        clock=clock,
    )

    def ask() -> LookupStatus:
        return attempts.match("r", hashes, 0, can_start=False).status

    assert not attempts.expired()
    assert ask() is LookupStatus.PENDING
    store.answer(store.last(Load), blocks=1, done=False)
    changes_ms = sorted({ROUND_TRIP_MS, MAX_WAIT_MS, wait_ends_ms or MAX_WAIT_MS})
    now_ms = 0.0
    for change_ms in changes_ms:
        for at_ms, due in ((change_ms - 1, False), (change_ms + 1, True), (change_ms + 2, False)):
            clock.advance((at_ms - now_ms) / 1e3)
            now_ms = at_ms
            assert attempts.expired() is due, f"at {at_ms} ms"
            assert not attempts.expired(), "reported once, with or without a match in between"
        over = change_ms >= (wait_ends_ms or MAX_WAIT_MS)
        assert ask() is (LookupStatus.HIT if over else LookupStatus.PENDING)
        assert not attempts.expired()
    attempts.close()
    store.check_idle()


def test_a_match_after_the_change_is_not_reported_again() -> None:
    clock, store = ManualClock(), ManualStore(NAMESPACE, 8)
    attempts = PendingLookups(
        GuardedStore(store),
        policy=WaitComplete(max_wait_ms=400.0),
        max_wait_ms=MAX_WAIT_MS,
        min_load_tokens=0,
        clock=clock,
    )
    for wait_s in (0.0, ROUND_TRIP_MS / 1e3 + 0.001):
        clock.advance(wait_s)
        assert attempts.match("r", chain(1), 0, can_start=True).status is LookupStatus.PENDING
        assert not attempts.expired()
    clock.advance(MAX_WAIT_MS / 1e3)
    assert attempts.match("r", chain(1), 0, can_start=True).status is LookupStatus.MISS
    assert not attempts.expired(), "time does not change a miss"
    attempts.close()


def test_calls_after_close_miss(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load", "save"))
    rig.hooks.close()
    assert rig.match(chain(1)).status is LookupStatus.MISS
    assert rig.hooks.save("r", chain(1), [0, 1]) == 1
    assert rig.hooks.poll(0.0) == [SaveDone(1, 0)]
    rig.hooks.close()


# Pools and namespaces.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": 3}, "layers is 3"),
        ({"kv_heads": 2}, "kv_heads is 2"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16"),
        ({"block_tokens": 3}, "block_tokens must be a multiple"),
        ({"layout": "LKHXD"}, "layout"),
        ({"attention": "mla", "head_dim_v": 0}, "mla"),
    ],
    ids=str,
)
def test_a_namespace_of_another_model_is_rejected(change: dict[str, Any], text: str) -> None:
    pool = torch.zeros(2, 2, 3, PAGE_TOKENS, 1, 4)
    with pytest.raises(ConfigError, match=text):
        check_layout(replace(NAMESPACE, **change), PoolLayout.reference(pool))


def test_pages_per_block() -> None:
    pool = torch.zeros(2, 2, 3, PAGE_TOKENS, 1, 4)
    _, pages_per_block = check_layout(NAMESPACE, PoolLayout.reference(pool))
    assert pages_per_block == 2
