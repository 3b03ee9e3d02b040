"""The reference connector against a store that answers as the test says, on a clock that the
test moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from manual_store import ManualClock, ManualStore

from kvstore.blocks.key import Namespace
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.pending_lookups import MISS_KEPT_MS, ROUND_TRIP_MS, Attempts
from kvstore.connectors.reference.hooks import SAVES_MAX, ReferenceHooks
from kvstore.engine.hooks import HookEvent, Loaded, Saved
from kvstore.errors import ConfigError
from kvstore.interface import Answer, HookMatch, Load, Match, Save
from kvstore.kernels import PoolLayout, check_layout
from kvstore.prefetch.policy import BestEffort, Timeout, WaitComplete

torch.set_num_threads(1)

PAGE_TOKENS = 2
NAMESPACE = Namespace(
    model="tiny", dtype="float32", layers=2, kv_heads=1, head_dim=4, block_tokens=4
)
NUM_PAGES = 64
DEADLINE_MS = 500.0
HANG_LIMIT_S = 20.0


def chain(length: int, tag: int = 0) -> list[bytes]:
    return [bytes([tag, index]) * 16 for index in range(length)]


def block_of(value: int) -> bytes:
    """A block whose every element differs from every other block's."""
    count = NAMESPACE.block_bytes // 4
    return (torch.arange(count, dtype=torch.float32) + 1000 * (value + 1)).numpy().tobytes()


class Rig:
    """Hooks over a manual store; `close` checks that nothing leaked."""

    def __init__(self, policy: Any, *, slots: int = 16, auto: tuple[str, ...] = (), **kw: Any):
        self.clock = ManualClock()
        self.store = ManualStore(NAMESPACE, slots, auto)
        self.pool = torch.zeros(2, 2, NUM_PAGES, PAGE_TOKENS, 1, 4)
        kw = {"deadline_ms": DEADLINE_MS, "min_load_tokens": 0, **kw}
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
        """The next `count` events; fails when they do not come."""
        found: list[HookEvent] = []
        end_s = time.monotonic() + HANG_LIMIT_S
        while len(found) < count:
            assert time.monotonic() < end_s, f"only {found}"
            found += self.hooks.poll(0.05)
        assert len(found) == count, found
        return found

    def block(self, pages: list[int]) -> bytes:
        """What lies in these pages, as a block."""
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


# What is there at once.


def test_a_run_in_l2_hits_at_once_and_scatters(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load"))
    hashes = chain(5)
    for index in range(3):
        rig.store.put(hashes[index], block_of(index))
    found = rig.match(hashes, 1, can_start=True)
    assert (found.answer, found.blocks, found.tiers) == (Answer.HIT, 2, ("l2", "l2"))
    rig.hooks.load("r", [7, 3, -1, 9], 2)
    assert rig.events() == [Loaded("r", 2)]
    assert rig.block([7, 3]) == block_of(1)
    half = rig.pool[:, :, 9].reshape(-1).tolist()
    expected = torch.frombuffer(bytearray(block_of(2)), dtype=torch.float32)
    assert half == expected.view(2, 2, 4, 4)[:, :, 2:].reshape(-1).tolist()
    untouched = [page for page in range(NUM_PAGES) if page not in (7, 3, 9)]
    assert not rig.pool[:, :, untouched].any()
    rig.store.check_idle()
    assert rig.hooks.stats()["blocks_loaded_by_tier"] == {"l2": 2}


def test_nothing_held_is_a_miss_at_once(rigs: Any) -> None:
    rig = rigs(WaitComplete(cap_ms=400.0), auto=("match",))
    assert rig.match(chain(4)).answer is Answer.MISS
    assert rig.match([]).answer is Answer.MISS
    assert rig.hooks.stats()["slots_leased_waiting"] == 0


def test_a_miss_is_kept_for_a_while_and_then_asked_again(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load"))
    hashes = chain(2)
    assert rig.match(hashes).answer is Answer.MISS
    rig.store.put(hashes[0], block_of(0))
    assert rig.match(hashes).answer is Answer.MISS
    assert len(rig.store.asked) == 1
    rig.pass_ms(MISS_KEPT_MS + 1)
    assert rig.match(hashes).blocks == 1


# How long to wait: round trip, policy, deadline.


def test_every_policy_grants_a_round_trip(rigs: Any) -> None:
    rig = rigs(BestEffort())
    hashes = chain(3)
    for index in range(3):
        rig.store.put(hashes[index], block_of(index))
    assert rig.match(hashes, can_start=True).answer is Answer.PENDING
    rig.store.answer(rig.store.last(Match))
    assert rig.match(hashes, can_start=True).answer is Answer.PENDING
    rig.store.answer(rig.store.last(Load), blocks=2, done=False)
    assert rig.match(hashes, can_start=True).answer is Answer.PENDING, "the third lies in L2 too"
    rig.store.answer(rig.store.last(Load))
    assert rig.match(hashes, can_start=True).blocks == 3


def test_a_silent_store_costs_a_round_trip(rigs: Any) -> None:
    rig = rigs(BestEffort())
    assert rig.match(chain(3), can_start=True).answer is Answer.PENDING
    rig.pass_ms(ROUND_TRIP_MS + 1)
    assert rig.match(chain(3), can_start=True).answer is Answer.MISS


def test_best_effort_takes_what_has_arrived(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match",))
    hashes = chain(4)
    for index in range(4):
        rig.store.put(hashes[index], block_of(index), "disk")
    assert rig.match(hashes).answer is Answer.PENDING
    load = rig.store.last(Load)
    assert len(load.hashes) == 4, "prefetch starts with the first match"
    rig.store.answer(load, blocks=2, done=False)
    rig.pass_ms(10)
    assert rig.match(hashes, can_start=False).answer is Answer.PENDING, "no page yet: go on"
    found = rig.match(hashes, can_start=True)
    assert (found.answer, found.blocks, found.tiers) == (Answer.HIT, 2, ("disk", "disk"))
    rig.hooks.load("r", [0, 1, 2, 3], 2)
    assert rig.events() == [Loaded("r", 2)]
    rig.store.answer(load)  # late: to nobody
    assert load.ticket_id not in rig.store.open


def test_wait_complete_waits_for_all_but_not_past_its_cap(rigs: Any) -> None:
    rig = rigs(WaitComplete(cap_ms=300.0), auto=("match",))
    hashes = chain(2)
    for index in range(2):
        rig.store.put(hashes[index], block_of(index), "disk")
    rig.match(hashes, can_start=True)
    rig.store.answer(rig.store.last(Load), blocks=1, done=False)
    rig.pass_ms(200)
    assert rig.match(hashes, can_start=True).answer is Answer.PENDING
    rig.pass_ms(101)
    assert rig.match(hashes, can_start=True).blocks == 1


def test_timeout_grows_with_the_run(rigs: Any) -> None:
    rig = rigs(Timeout(base_ms=60.0, per_ki_token_ms=1024.0, cap_ms=400.0), auto=("match",))
    hashes = chain(10)  # 40 tokens: 60 + 40 ms
    for index in range(10):
        rig.store.put(hashes[index], block_of(index), "disk")
    rig.match(hashes, can_start=True)
    rig.store.answer(rig.store.last(Load), blocks=1, done=False)
    rig.pass_ms(95)
    assert rig.match(hashes, can_start=True).answer is Answer.PENDING
    rig.pass_ms(10)
    assert rig.match(hashes, can_start=True).blocks == 1


@pytest.mark.parametrize(
    "policy", [BestEffort(), WaitComplete(cap_ms=1e6), Timeout(1e6, 1e6, 1e6)], ids=repr
)
def test_never_pending_past_the_deadline(rigs: Any, policy: Any) -> None:
    """Counted from the first match, whatever the store does and wherever the question moves."""
    rig = rigs(policy)
    hashes = chain(6)
    for index in range(6):
        rig.store.put(hashes[index], block_of(index), "disk")
    assert rig.match(hashes).answer is Answer.PENDING
    rig.store.answer(rig.store.last(Match))
    rig.pass_ms(DEADLINE_MS - 10)
    assert rig.match(hashes).answer is Answer.PENDING
    assert rig.match(hashes, 1).answer is Answer.PENDING, "another question, the same deadline"
    rig.pass_ms(11)
    assert rig.match(hashes, 1).answer is Answer.MISS
    assert rig.match(hashes, 2).answer is Answer.MISS
    rig.store.check_idle()


def test_at_the_deadline_what_is_in_slots_still_counts(rigs: Any) -> None:
    rig = rigs(WaitComplete(cap_ms=1e6), auto=("match", "load"))
    hashes = chain(2)
    rig.store.auto.discard("match")
    rig.store.put(hashes[0], block_of(0))
    rig.match(hashes)
    rig.store.answer(rig.store.last(Match), done=False)
    rig.pass_ms(DEADLINE_MS + 1)
    assert rig.match(hashes).blocks == 1


def test_a_new_life_after_a_load_has_a_deadline_of_its_own(rigs: Any) -> None:
    rig = rigs(WaitComplete(cap_ms=400.0), auto=("match", "load"))
    hashes = chain(1)
    rig.store.put(hashes[0], block_of(0))
    assert rig.match(hashes).blocks == 1
    rig.pass_ms(DEADLINE_MS + 1)
    rig.hooks.load("r", [0, 1], 1)
    rig.events()
    rig.store.auto.clear()
    assert rig.match(hashes).answer is Answer.PENDING


def test_below_the_least_length_only_l2_is_loaded(rigs: Any) -> None:
    rig = rigs(WaitComplete(cap_ms=400.0), auto=("match",), min_load_tokens=16)
    hashes, others = chain(3), chain(4, tag=1)
    for index, key in enumerate(hashes):
        rig.store.put(key, block_of(index), "l2" if index < 2 else "disk")
    rig.match(hashes, name="short")
    assert rig.store.last(Load).hashes == tuple(hashes[:2])
    for index, key in enumerate(others):
        rig.store.put(key, block_of(index), "disk")
    rig.match(others, name="long enough")
    assert rig.store.last(Load).hashes == tuple(others)
    assert rig.match(others[:3], name="short, disk only").answer is Answer.MISS


def test_queued_requests_leave_slots_for_others(rigs: Any) -> None:
    rig = rigs(WaitComplete(cap_ms=400.0), auto=("match", "load"), slots=16)
    for tag in range(3):
        for index, key in enumerate(chain(6, tag)):
            rig.store.put(key, block_of(index))
    assert rig.match(chain(6, 0), name="first").blocks == 6
    assert rig.match(chain(6, 1), name="second").blocks == 2, "half of 16 slots for the queue"
    assert rig.match(chain(6, 2), name="third").answer is Answer.PENDING
    assert rig.match(chain(6, 2), name="third", can_start=True).answer is Answer.MISS
    rig.hooks.abort("first")
    assert rig.match(chain(6, 2), name="fourth").blocks == 6


# Ends of every kind.


@pytest.mark.parametrize("stage", ["asked", "matched", "partly loaded", "hit", "missed"])
def test_abort_in_any_state_hands_everything_back(rigs: Any, stage: str) -> None:
    rig = rigs(WaitComplete(cap_ms=400.0))
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
    for ticket in rig.store.asked:
        rig.store.answer(ticket)  # late answers change nothing
    rig.store.check_idle()


def test_abort_while_a_copy_runs_still_reports_once(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load"))
    hashes = chain(2)
    rig.store.put(hashes[0], block_of(0))
    rig.match(hashes, can_start=True)
    rig.hooks.load("r", [0, 1], 1)
    rig.hooks.abort("r")
    assert rig.events() == [Loaded("r", 1)]
    assert rig.hooks.poll(0.0) == []


def test_asking_for_nothing_lets_go(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load"))
    hashes = chain(2)
    rig.store.put(hashes[0], block_of(0))
    assert rig.match(hashes, can_start=True).blocks == 1
    assert rig.match(hashes, 2, can_start=True).answer is Answer.MISS
    rig.store.check_idle()


def test_a_slot_is_leased_while_its_copy_runs(rigs: Any) -> None:
    """Close while copies are queued: they run to their end before the tickets go back."""
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


def test_after_a_reconnect_the_ticket_s_own_slab_is_used(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load", "save"))
    hashes = chain(1)
    rig.store.put(hashes[0], block_of(0))
    assert rig.match(hashes, can_start=True).blocks == 1
    rig.store.reconnect()
    rig.hooks.load("r", [4, 5], 1)
    assert rig.events() == [Loaded("r", 1)]
    assert rig.block([4, 5]) == block_of(0)


def test_a_ticket_that_ends_with_a_fault_is_what_it_holds(rigs: Any) -> None:
    rig = rigs(WaitComplete(cap_ms=400.0), auto=("match",))
    hashes = chain(3)
    for index in range(3):
        rig.store.put(hashes[index], block_of(index), "disk")
    rig.match(hashes)
    rig.store.answer(rig.store.last(Load), blocks=1, done=False)
    rig.store.end(rig.store.last(Load), fault="the disk is gone")
    assert rig.match(hashes).blocks == 1


def test_a_store_that_raises_is_a_store_that_misses(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load", "save"))
    hashes = chain(2)
    rig.store.raising = True
    assert rig.match(hashes, can_start=True).answer is Answer.MISS
    assert rig.hooks.save("r", hashes, [0, 1, 2, 3]) == 1
    assert rig.hooks.poll(0.01) == [Saved(1, 0)]
    assert rig.hooks.stats()["store_faults"] >= 3
    rig.store.raising = False


def test_a_store_without_a_slab_misses(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match",))
    hashes = chain(1)
    rig.store.put(hashes[0], block_of(0))
    slab, rig.store.slab = rig.store.slab, None
    assert rig.match(hashes, can_start=True).answer is Answer.MISS
    rig.store.slab = slab


# Saves.


def test_a_save_copies_what_is_granted_and_publishes(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("save",))
    hashes = chain(3)
    rig.store.put(hashes[1], block_of(1))
    rig.pool.copy_(torch.rand_like(rig.pool))
    save_id = rig.hooks.save("r", hashes, [0, 1, 2, 3, 4, 5])
    assert rig.events() == [Saved(save_id, 2)]
    assert rig.store.blocks[hashes[0]][1] == rig.block([0, 1])
    assert rig.store.blocks[hashes[1]][1] == block_of(1), "first writer wins"
    assert rig.store.blocks[hashes[2]][1] == rig.block([4, 5])
    rig.store.check_idle()


def test_grants_that_come_later_are_copied_then(rigs: Any) -> None:
    rig = rigs(BestEffort())
    save_id = rig.hooks.save("r", chain(1), [0, 1])
    assert rig.hooks.poll(0.01) == []
    rig.store.answer(rig.store.last(Save))
    assert rig.events() == [Saved(save_id, 1)]


@pytest.mark.parametrize("granted", [0, 1])
def test_a_save_is_given_up_at_the_deadline(rigs: Any, granted: int) -> None:
    rig = rigs(BestEffort())
    save_id = rig.hooks.save("r", chain(2), [0, 1, 2, 3])
    rig.store.answer(rig.store.last(Save), blocks=granted, done=False)
    rig.pass_ms(DEADLINE_MS - 1)
    assert rig.hooks.poll(0.0) == []
    rig.pass_ms(2)
    assert rig.hooks.poll(0.0) == [Saved(save_id, 0)]
    rig.store.answer(rig.store.last(Save))  # the late grant goes to nobody
    rig.store.check_idle()
    assert not rig.store.blocks


def test_a_save_of_what_is_held_or_finds_no_slot_ends_at_once(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("save",), slots=1)
    hashes = chain(3)
    rig.store.put(hashes[0], block_of(0))
    save_id = rig.hooks.save("r", hashes[:1], [0, 1])
    assert rig.hooks.poll(0.0) == [Saved(save_id, 0)]
    save_id = rig.hooks.save("r", hashes, [0, 1, 2, 3, 4, 5])
    assert rig.events() == [Saved(save_id, 1)]
    assert rig.hooks.stats()["blocks_refused"] == 1


def test_a_save_whose_ticket_faults_publishes_nothing(rigs: Any) -> None:
    rig = rigs(BestEffort())
    save_id = rig.hooks.save("r", chain(1), [0, 1])
    rig.store.answer(rig.store.last(Save), done=False)
    rig.store.end(rig.store.last(Save), fault="the connection was lost")
    assert rig.events() == [Saved(save_id, 0)]
    assert not rig.store.blocks


def test_saves_under_way_are_bounded(rigs: Any) -> None:
    rig = rigs(BestEffort())
    for number in range(SAVES_MAX + 3):
        rig.hooks.save("r", [bytes([number]) * 32], [0, 1])
    assert len(rig.store.open) == SAVES_MAX
    assert rig.events(3) == [Saved(SAVES_MAX + 1 + index, 0) for index in range(3)]
    assert rig.hooks.stats()["saves_dropped"] == 3


def test_a_copy_that_fails_is_a_miss_and_publishes_nothing(rigs: Any) -> None:
    """A page id that is out of range makes the copy itself fail, on its thread."""
    rig = rigs(BestEffort(), auto=("match", "load", "save"))
    hashes = chain(2)
    rig.store.put(hashes[0], block_of(0))
    rig.match(hashes, can_start=True)
    rig.hooks.load("r", [0, NUM_PAGES], 1)
    assert rig.events() == [Loaded("r", 0)]
    save_id = rig.hooks.save("r", hashes[1:], [0, NUM_PAGES])
    assert rig.events() == [Saved(save_id, 0)]
    assert list(rig.store.blocks) == hashes[:1]
    assert rig.hooks.stats()["copies_failed"] == 2
    rig.hooks.save("r", hashes[1:], [0, 1])
    assert rig.events() == [Saved(save_id + 1, 1)], "the thread lives on"


def test_poll_returns_when_a_pending_match_moves(rigs: Any) -> None:
    rig = rigs(WaitComplete(cap_ms=400.0))
    rig.match(chain(2))
    rig.store.answer(rig.store.last(Match))
    start_s = time.monotonic()
    assert rig.hooks.poll(HANG_LIMIT_S) == []
    assert time.monotonic() - start_s < HANG_LIMIT_S / 2


@pytest.mark.parametrize(
    ("policy", "wait_ends_ms"),
    [
        (WaitComplete(cap_ms=300.0), 300.0),
        (Timeout(base_ms=80.0, per_ki_token_ms=0.0, cap_ms=400.0), 80.0),
        (BestEffort(), None),
    ],
    ids=["wait_complete", "timeout", "best_effort"],
)
def test_waiting_is_due_when_time_changes_it_and_not_before_or_after(
    policy: Any, wait_ends_ms: float | None
) -> None:
    """An engine that is told so all the time spins instead of sleeping in `poll`."""
    clock, store = ManualClock(), ManualStore(NAMESPACE, 8, ("match",))
    hashes = chain(2)
    for index in range(2):
        store.put(hashes[index], block_of(index), "disk")
    attempts = Attempts(
        GuardedStore(store),
        policy=policy,
        deadline_ms=DEADLINE_MS,
        min_load_tokens=0,
        clock=clock,
    )

    def ask() -> Answer:
        return attempts.match("r", hashes, 0, can_start=False).answer

    assert not attempts.due()
    assert ask() is Answer.PENDING
    store.answer(store.last(Load), blocks=1, done=False)
    changes_ms = sorted({ROUND_TRIP_MS, DEADLINE_MS, wait_ends_ms or DEADLINE_MS})
    now_ms = 0.0
    for change_ms in changes_ms:
        for at_ms, due in ((change_ms - 1, False), (change_ms + 1, True), (change_ms + 2, False)):
            clock.advance((at_ms - now_ms) / 1e3)
            now_ms = at_ms
            assert attempts.due() is due, f"at {at_ms} ms"
            assert not attempts.due(), "reported once, asked meanwhile or not"
        over = change_ms >= (wait_ends_ms or DEADLINE_MS)
        assert ask() is (Answer.HIT if over else Answer.PENDING)
        assert not attempts.due()
    attempts.close()
    store.check_idle()


def test_a_question_told_the_time_is_not_due_for_it_again() -> None:
    clock, store = ManualClock(), ManualStore(NAMESPACE, 8)
    attempts = Attempts(
        GuardedStore(store),
        policy=WaitComplete(cap_ms=400.0),
        deadline_ms=DEADLINE_MS,
        min_load_tokens=0,
        clock=clock,
    )
    for wait_s in (0.0, ROUND_TRIP_MS / 1e3 + 0.001):
        clock.advance(wait_s)
        assert attempts.match("r", chain(1), 0, can_start=True).answer is Answer.PENDING
        assert not attempts.due()
    clock.advance(DEADLINE_MS / 1e3)
    assert attempts.match("r", chain(1), 0, can_start=True).answer is Answer.MISS
    assert not attempts.due(), "a miss does not change by the clock"
    attempts.close()


def test_verbs_after_close_miss(rigs: Any) -> None:
    rig = rigs(BestEffort(), auto=("match", "load", "save"))
    rig.hooks.close()
    assert rig.match(chain(1)).answer is Answer.MISS
    assert rig.hooks.save("r", chain(1), [0, 1]) == 1
    assert rig.hooks.poll(0.0) == [Saved(1, 0)]
    rig.hooks.close()


# Pools and namespaces.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": 3}, "layers is 3"),
        ({"kv_heads": 2}, "kv_heads is 2"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16"),
        ({"block_tokens": 3}, "block_tokens is 3"),
        ({"layout": "LKHXD"}, "layout"),
        ({"attention": "mla", "head_dim_v": 0}, "mla"),
    ],
    ids=str,
)
def test_a_namespace_of_another_model_is_refused(change: dict[str, Any], text: str) -> None:
    pool = torch.zeros(2, 2, 3, PAGE_TOKENS, 1, 4)
    with pytest.raises(ConfigError, match=text):
        check_layout(replace(NAMESPACE, **change), PoolLayout.reference(pool))


def test_pages_per_block() -> None:
    pool = torch.zeros(2, 2, 3, PAGE_TOKENS, 1, 4)
    _, pages_per_block = check_layout(NAMESPACE, PoolLayout.reference(pool))
    assert pages_per_block == 2
