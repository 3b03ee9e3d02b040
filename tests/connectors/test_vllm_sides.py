"""The connector's two sides against stores that answer as the test says, without vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from manual_store import ManualClock, ManualSlab, ManualStore

from kvstore.blocks.key import Namespace
from kvstore.connectors.common.pending_lookups import ROUND_TRIP_MS
from kvstore.connectors.vllm.connector.metadata import Blocks, StepPlan, StepReport
from kvstore.connectors.vllm.connector.rank_stores import RankStores
from kvstore.connectors.vllm.connector.scheduler import SchedulerSide
from kvstore.connectors.vllm.connector.worker import WorkerSide, pool_of
from kvstore.connectors.vllm.lora import Adapters
from kvstore.errors import ConfigError
from kvstore.interface import Load, Match, Save, Ticket
from kvstore.prefetch.policy import WaitComplete

torch.set_num_threads(1)

BLOCK = 4
LAYERS, HEADS, WIDTH = 3, 2, 6
NAMESPACE = Namespace(
    model="tiny",
    dtype="float32",
    layers=LAYERS,
    kv_heads=HEADS,
    head_dim=3,
    head_dim_v=3,
    block_tokens=BLOCK,
    layout="LHTC",
)
NUM_BLOCKS = 32
DEADLINE_MS = 500.0
ALL = ("match", "load", "save")
HANG_LIMIT_S = 20.0


def chain(length: int, tag: int = 0) -> list[bytes]:
    return [bytes([tag, index]) * 16 for index in range(length)]


def bytes_of(value: int) -> bytes:
    """A block whose every element differs from every other block's."""
    count = NAMESPACE.block_bytes // 4
    return (torch.arange(count, dtype=torch.float32) + 1000 * (value + 1)).numpy().tobytes()


@dataclass
class FakeRequest:
    """What the scheduler's side reads of vLLM's request."""

    request_id: str
    num_tokens: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None


def request(name: str = "r", tokens: int = 4 * BLOCK + 1, tag: int = 0) -> FakeRequest:
    return FakeRequest(name, tokens, chain(tokens // BLOCK, tag))


class Scheduling:
    """A scheduler's side over a manual store."""

    def __init__(
        self, *auto: str, slots: int = 16, kind: type[ManualStore] = ManualStore, **more: Any
    ) -> None:
        self.clock = ManualClock()
        self.store = kind(NAMESPACE, slots, auto)
        self.side = SchedulerSide(
            self.store,
            policy=WaitComplete(cap_ms=DEADLINE_MS),
            deadline_ms=DEADLINE_MS,
            min_load_tokens=0,
            clock=self.clock,
            **{"adapters": Adapters(), **more},
        )

    def hold(self, blocks: int, tier: str = "l2", tag: int = 0) -> None:
        for index, key in enumerate(chain(blocks, tag)):
            self.store.put(key, bytes_of(index), tier)

    def plan(
        self, scheduled: Sequence[tuple[str, int]] = (), preempted: Sequence[str] = ()
    ) -> StepPlan:
        return self.side.plan(scheduled, lambda name: range(100, 100 + NUM_BLOCKS), preempted)


def test_a_hit_is_loaded_by_the_worker_while_its_lease_is_held_here() -> None:
    rig = Scheduling(*ALL)
    rig.hold(4)
    asked = request()
    assert rig.side.match(asked, 0) == 4 * BLOCK
    assert rig.side.match(asked, 0) == 4 * BLOCK, "asking again changes nothing"
    assert rig.side.allocated(asked, range(7, 12), 4 * BLOCK) == {"l2": 4 * BLOCK}
    plan = rig.plan()
    assert plan.idle
    assert [(each.hashes, each.block_ids) for each in plan.loads] == [
        (tuple(chain(4)), (7, 8, 9, 10))
    ]
    assert len(rig.store.free) == 12, "leased until the worker has loaded"
    assert rig.plan().loads == [], "told once"
    rig.side.heard(["r"], [])
    rig.store.check_idle()


class AnswersWhenPolled(ManualStore):
    """What was asked before a poll is answered in it, as over a quick socket."""

    def poll(self, timeout_s: float = 0.0) -> list[Ticket]:
        for ticket in self.asked:
            if not ticket.done:
                self.answer(ticket)
        return super().poll(timeout_s)


def test_a_match_and_the_load_it_leads_to_are_answered_within_one_step() -> None:
    rig = Scheduling(kind=AnswersWhenPolled)
    rig.hold(4)
    asked = request()
    assert rig.side.match(asked, 0) is None
    assert rig.plan().idle
    assert rig.side.match(asked, 0) == 4 * BLOCK
    rig.side.finished(asked)
    rig.store.check_idle()


def test_a_reset_hides_all_that_was_saved_and_names_blocks_anew() -> None:
    rig = Scheduling(*ALL)
    rig.hold(4)
    waiting = request("waiting")
    assert rig.side.match(waiting, 0) == 4 * BLOCK
    running = request("running", tag=9)
    rig.side.match(running, 0)
    rig.side.allocated(running, range(4), 0)
    assert rig.side.reset()
    rig.store.check_idle()
    assert rig.side.match(waiting, 0) == 0
    rig.side.allocated(waiting, range(4), 0)
    # What was running computes with what it computed before: nothing of that is saved.
    plan = rig.plan([("running", 4 * BLOCK), ("waiting", 4 * BLOCK)])
    (save,) = plan.saves
    assert save.request_id == "waiting"
    assert not set(save.hashes) & set(waiting.block_hashes)
    assert len(set(save.hashes)) == 4
    (save,) = rig.plan([("running", 4 * BLOCK)], preempted=["running"]).saves
    assert not set(save.hashes) & set(running.block_hashes)
    # What is saved under the new names is found by them.
    for name in save.hashes:
        rig.store.put(name, bytes_of(0), "l2")
    assert rig.side.match(request("later", tag=9), 0) == 4 * BLOCK
    assert rig.side.reset()
    assert rig.side.match(request("latest", tag=9), 0) == 0, "each reset is another"
    for each in (waiting, running):
        rig.side.finished(each)
    rig.store.check_idle()


def test_a_reset_waits_for_loads() -> None:
    rig = Scheduling(*ALL)
    rig.hold(4)
    asked = request()
    rig.side.match(asked, 0)
    rig.side.allocated(asked, range(5), 4 * BLOCK)
    assert not rig.side.reset()
    rig.side.finished(asked)
    assert rig.side.reset(), "it loads for nobody"
    rig.side.heard(["r"], [])
    rig.store.check_idle()


def test_a_request_that_is_resumed_has_its_whole_deadline() -> None:
    rig = Scheduling(*ALL)
    asked = request()
    assert rig.side.match(asked, 0) == 0
    rig.side.allocated(asked, range(5), 0)
    rig.plan([("r", 4 * BLOCK)])
    rig.clock.advance(20 * DEADLINE_MS / 1e3)
    rig.plan(preempted=["r"])
    rig.hold(4)
    assert rig.side.match(asked, 0) == 4 * BLOCK
    rig.side.allocated(asked, range(5), 4 * BLOCK)
    (load,) = rig.plan().loads
    assert load.left_ms == DEADLINE_MS
    rig.side.heard(["r"], [])
    rig.store.check_idle()


def test_only_what_vllm_lacks_is_loaded_and_the_last_token_never() -> None:
    rig = Scheduling(*ALL)
    rig.hold(4)
    asked = request(tokens=4 * BLOCK)
    assert rig.side.match(asked, BLOCK) == 2 * BLOCK
    rig.side.allocated(asked, [5, 6, 7, 8], 2 * BLOCK)
    (load,) = rig.plan().loads
    assert load.block_ids == (6, 7)
    assert load.hashes == tuple(chain(3)[1:])


def test_pending_is_none_until_the_store_has_answered_or_the_deadline() -> None:
    rig = Scheduling()
    asked = request()
    assert rig.side.match(asked, 0) is None
    rig.hold(4, tier="disk")
    rig.store.answer(rig.store.last(Match))
    assert rig.side.match(asked, 0) is None, "blocks on their way from disk"
    rig.store.answer(rig.store.last(Load), blocks=2, done=False)
    assert rig.side.match(asked, 0) is None
    rig.clock.advance(DEADLINE_MS / 1e3)
    assert rig.side.match(asked, 0) == 2 * BLOCK, "at the deadline, what has come"
    rig.side.finished(asked)
    rig.store.check_idle()


def test_an_answer_leads_to_the_next_question_before_vllm_asks_again() -> None:
    rig = Scheduling()
    asked = request()
    rig.hold(4, tier="disk")
    assert rig.side.match(asked, 0) is None
    rig.store.answer(rig.store.last(Match))
    rig.plan()
    assert isinstance(rig.store.asked[-1], Load)
    rig.store.answer(rig.store.last(Load))
    assert rig.side.match(asked, 0) == 4 * BLOCK
    rig.side.finished(asked)
    rig.plan()
    rig.store.check_idle()


class Counted(list[bytes]):
    """vLLM's hashes of a request; counts how often they are read through."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += isinstance(index, slice)
        return super().__getitem__(index)


def test_a_request_that_waits_is_not_read_through_in_every_step() -> None:
    rig = Scheduling()
    asked = request()
    asked.block_hashes = hashes = Counted(asked.block_hashes)
    for _ in range(5):
        assert rig.side.match(asked, 0) is None
        rig.plan()
    assert hashes.read == 1
    assert rig.side.match(asked, BLOCK) is None
    assert rig.store.last(Match).hashes == tuple(hashes[1:4]), "vLLM has the first by now"
    asked.block_hashes = chain(4, tag=1)
    assert rig.side.match(asked, BLOCK) is None
    assert rig.store.last(Match).hashes == tuple(chain(4, tag=1)[1:4]), "another prompt"
    asked.num_tokens -= BLOCK
    assert rig.side.match(asked, BLOCK) is None
    assert rig.store.last(Match).hashes == tuple(chain(4, tag=1)[1:3])
    rig.side.finished(asked)
    rig.store.check_idle()


def test_requests_that_must_compute_everything_never_ask() -> None:
    rig = Scheduling(*ALL)
    rig.hold(4)
    asked = replace(request(), skip_reading_prefix_cache=True)
    assert rig.side.match(asked, 0) == 0
    assert rig.store.asked == []


def test_a_failed_load_is_computed_and_not_tried_again() -> None:
    rig = Scheduling(*ALL)
    rig.hold(4)
    asked = request()
    assert rig.side.match(asked, 0)
    rig.side.allocated(asked, range(8), 4 * BLOCK)
    rig.plan()
    rig.side.heard(["r"], ["r"])
    assert rig.side.match(asked, 0) == 0
    rig.store.check_idle()
    rig.side.finished(asked)
    assert rig.side.match(asked, 0) == 4 * BLOCK, "another request of that name is another"


def test_the_load_inherits_what_is_left_of_the_deadline() -> None:
    rig = Scheduling("match", "save")
    asked = request()
    rig.hold(4, tier="disk")
    assert rig.side.match(asked, 0) is None
    rig.clock.advance(0.3)
    rig.store.answer(rig.store.last(Load))
    assert rig.side.match(asked, 0) == 4 * BLOCK
    rig.side.allocated(asked, range(8), 4 * BLOCK)
    (load,) = rig.plan().loads
    assert load.left_ms == pytest.approx(DEADLINE_MS - 300)
    rig.side.heard(["r"], [])
    late = request("late")
    assert rig.side.match(late, 0) is None
    rig.clock.advance(9.0)
    rig.store.answer(rig.store.last(Load))
    rig.side.match(late, 0)
    rig.side.allocated(late, range(8), 4 * BLOCK)
    assert rig.plan().loads[0].left_ms == ROUND_TRIP_MS


def test_full_blocks_are_offered_once_as_prefill_and_decode_fill_them() -> None:
    rig = Scheduling(*ALL)
    asked = request(tokens=3 * BLOCK + 2)
    rig.side.allocated(asked, range(4), 0)
    first = rig.plan([("r", 2 * BLOCK + 1)])
    assert [(each.hashes, each.block_ids) for each in first.saves] == [
        (tuple(chain(2)), (100, 101))
    ]
    assert not first.idle
    second = rig.plan([("r", 3 * BLOCK + 2)])
    assert [each.block_ids for each in second.saves] == [(102,)]
    asked.block_hashes = chain(4)  # a decoded token has filled the fourth
    third = rig.plan([("r", 4 * BLOCK)])
    assert [(each.hashes, each.block_ids) for each in third.saves] == [((chain(4)[3],), (103,))]
    assert rig.plan([("r", 4 * BLOCK + 1)]).saves == []


def test_a_block_without_a_hash_is_not_offered_however_far_the_step_goes() -> None:
    """Drafted tokens may be rejected; only known ones have hashes."""
    rig = Scheduling(*ALL)
    asked = request(tokens=2 * BLOCK + 3)
    rig.side.allocated(asked, range(4), 0)
    assert len(rig.plan([("r", 3 * BLOCK + 2)]).saves[0].hashes) == 2


def test_blocks_wait_for_saves_exactly_when_something_was_offered() -> None:
    rig = Scheduling(*ALL)
    quiet, busy = request("quiet", tokens=3), request("busy")
    for each in (quiet, busy):
        rig.side.allocated(each, range(8), 0)
    rig.plan([("quiet", 3), ("busy", 4 * BLOCK + 1)])
    assert rig.side.finished(quiet) is False
    assert rig.side.finished(busy) is True
    assert rig.plan().finishing == {"busy"}
    assert rig.plan().finishing == frozenset(), "told once"
    assert rig.side.stats()["requests_known"] == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_blocks_are_free_at_once_when_every_worker_has_told_that_their_saves_ended(
    workers: int,
) -> None:
    """vLLM used in one process steps no more after the last request, and would hear it never."""
    rig = Scheduling(*ALL, workers=workers)
    asked = {name: request(name) for name in ("all", "one", "again")}
    for each in asked.values():
        rig.side.allocated(each, range(8), 0)
    first = [each.number for each in rig.plan([(name, 2 * BLOCK) for name in asked]).saves]
    second = [each.number for each in rig.plan([(name, 4 * BLOCK) for name in asked]).saves]
    numbers = {
        name: [(name, one), (name, two)]
        for name, one, two in zip(asked, first, second, strict=True)
    }
    assert len({*first, *second}) == 6
    rig.side.heard([], [], dict.fromkeys(numbers["all"] + numbers["one"], 1))
    assert rig.side.finished(asked["one"]) is (workers > 1)
    rig.side.heard([], [], dict.fromkeys(numbers["all"], workers - 1))
    assert rig.side.finished(asked["all"]) is False
    # What is told of an earlier save says nothing of a later one, under the same name or not.
    rig.side.heard([], [], dict.fromkeys(numbers["again"], workers))
    assert rig.plan(preempted=["again"]).finishing == ({"one"} if workers > 1 else set())
    rig.plan([("again", 4 * BLOCK)])
    rig.side.heard([], [], dict.fromkeys(numbers["again"], workers))
    assert rig.side.finished(asked["again"]) is True
    assert rig.plan().finishing == {"again"}


def test_an_aborted_load_is_freed_by_its_report_only() -> None:
    """vLLM frees such a request when its load has ended; a second report would end the engine."""
    rig = Scheduling(*ALL)
    rig.hold(4)
    asked = request()
    rig.side.allocated(asked, range(8), 0)
    rig.plan([("r", 2 * BLOCK)])  # something offered, then preempted
    rig.plan(preempted=["r"])
    rig.side.match(asked, 0)
    rig.side.allocated(asked, range(8), 4 * BLOCK)
    rig.plan()
    assert rig.side.finished(asked) is False
    assert rig.plan().finishing == frozenset()
    rig.side.heard(["r"], ["r"])
    rig.store.check_idle()


def test_aborts_before_and_while_matching_give_everything_back() -> None:
    rig = Scheduling("match")
    rig.hold(4)
    for moment in range(3):
        asked = request(f"r{moment}")
        for _ in range(moment):
            rig.side.match(asked, 0)
        if moment == 2:
            rig.store.answer(rig.store.last(Load), blocks=2, done=False)
        assert rig.side.finished(asked) is False
    rig.store.check_idle()
    rig.side.close()


def test_a_preempted_request_offers_its_blocks_again() -> None:
    rig = Scheduling(*ALL)
    asked = request()
    rig.side.allocated(asked, range(8), 0)
    rig.plan([("r", 4 * BLOCK)])
    assert rig.plan(preempted=["r"]).preempted == {"r"}
    assert len(rig.plan([("r", 4 * BLOCK)]).saves[0].hashes) == 4


def test_a_block_of_several_hashes_is_named_by_its_last() -> None:
    rig = Scheduling(*ALL, hashes_per_block=2)
    names = chain(9)
    asked = FakeRequest("r", 4 * BLOCK + 2, names)
    for index, key in enumerate(names[1:4:2]):
        rig.store.put(key, bytes_of(index))
    assert rig.side.match(asked, 0) == 2 * BLOCK
    rig.side.allocated(asked, range(8), 2 * BLOCK)
    assert rig.plan().loads[0].hashes == (names[1], names[3])
    rig.side.heard(["r"], [])
    assert rig.plan([("r", 4 * BLOCK + 2)]).saves[0].hashes == tuple(names[1::2])


# The workers' side.


@dataclass
class Working:
    """A worker's side over vLLM-like tensors and a manual store."""

    auto: tuple[str, ...] = ALL
    slots: int = 16
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.store = ManualStore(NAMESPACE, self.slots, self.auto)
        self.caches = {
            f"model.layers.{layer}.attn": torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
            for layer in (10, 9, 2)
        }
        self.side = WorkerSide(
            self.store, self.caches, NUM_BLOCKS, save_ms=DEADLINE_MS, clock=self.clock
        )

    def block(self, number: int) -> bytes:
        """A block's bytes in the store's order: layers by number, then heads, tokens, K‖V."""
        parts = [self.caches[f"model.layers.{layer}.attn"][number] for layer in (2, 9, 10)]
        return b"".join(part.contiguous().numpy().tobytes() for part in parts)

    def fill(self, number: int, value: int) -> bytes:
        flat = torch.frombuffer(bytearray(bytes_of(value)), dtype=torch.float32)
        blocks = flat.view(LAYERS, HEADS, BLOCK, WIDTH)
        for layer, part in zip((2, 9, 10), blocks, strict=True):
            self.caches[f"model.layers.{layer}.attn"][number] = part
        return bytes_of(value)

    def step(self, plan: StepPlan | None = None) -> StepReport:
        plan = plan or StepPlan()
        self.side.begin(plan)
        self.side.start_loads(plan)
        self.side.start_saves(plan)
        return self.side.collect(plan)

    def until(self, true: Any) -> StepReport:
        """Steps that compute nothing, until a report in which something is true."""
        end_s = time.monotonic() + HANG_LIMIT_S
        while not true(report := self.step(StepPlan(idle=True))):
            assert time.monotonic() < end_s, "it never comes"
        return report


@pytest.fixture
def working() -> Iterator[Working]:
    rig = Working()
    yield rig
    rig.side.close()
    rig.store.check_idle()


def loads(count: int, first: int = 3, name: str = "r", left_ms: float = DEADLINE_MS) -> StepPlan:
    blocks = Blocks(name, tuple(chain(count)), tuple(range(first, first + count)), left_ms)
    return StepPlan(loads=[blocks])


def saves(count: int, first: int = 3, name: str = "r", tag: int = 0) -> StepPlan:
    blocks = Blocks(name, tuple(chain(count, tag)), tuple(range(first, first + count)))
    return StepPlan(saves=[blocks])


def test_blocks_saved_by_one_are_loaded_bit_for_bit_by_another_place(working: Working) -> None:
    written = [working.fill(3 + index, index) for index in range(4)]
    working.step(saves(4))
    if not working.side.counts().get("blocks_saved"):
        working.until(lambda _: working.side.counts().get("blocks_saved"))
    assert [working.store.blocks[key][1] for key in chain(4)] == written
    report = working.step(loads(4, first=20))
    report = report if report.recved else working.until(lambda r: r.recved)
    assert (report.recved, report.bad_blocks, report.failed) == ({"r"}, set(), set())
    assert [working.block(20 + index) for index in range(4)] == written


def test_what_a_load_does_not_bring_is_reported_block_by_block(working: Working) -> None:
    for index, key in enumerate(chain(2)):
        working.store.put(key, bytes_of(index))
    report = working.step(loads(4))
    report = report if report.recved else working.until(lambda r: r.recved)
    assert report.bad_blocks == {5, 6}
    assert report.failed == {"r"}
    assert working.block(3) == bytes_of(0)


def test_a_store_that_says_nothing_is_a_load_of_nothing_at_the_deadline() -> None:
    rig = Working(auto=())
    assert rig.step(loads(2)).recved == set()
    rig.clock.advance(DEADLINE_MS / 1e3)
    report = rig.step()
    assert (report.recved, report.bad_blocks) == ({"r"}, {3, 4})
    assert rig.side.counts()["loads_past_deadline"] == 1
    rig.store.check_idle()
    rig.side.close()


def test_a_store_that_raises_is_a_load_of_nothing_and_a_save_dropped(working: Working) -> None:
    working.store.raising = True
    (save,) = saves(2, first=9, name="s").saves
    both = replace(loads(2), saves=[replace(save, number=7)])
    report = working.step(replace(both, finishing=frozenset({"s"})))
    assert (report.recved, report.bad_blocks, report.sent) == ({"r"}, {3, 4}, {"s"})
    assert report.saved == [("s", 7)], "there is nothing to wait for"


def test_ended_requests_are_reported_once_when_their_saves_have_ended() -> None:
    rig = Working(auto=())
    rig.step(saves(2))
    report = rig.step(StepPlan(finishing=frozenset({"r", "other"})))
    assert (report.sent, report.saved) == ({"other"}, [])
    assert rig.step().sent == set()
    rig.store.answer(rig.store.last(Save))
    report = rig.until(lambda report: report.sent)
    assert (report.sent, report.saved) == ({"r"}, [("r", 0)])
    report = rig.step()
    assert (report.sent, report.saved) == (set(), [])
    rig.side.close()
    rig.store.check_idle()


def test_a_save_without_slots_in_time_is_given_up() -> None:
    rig = Working(auto=())
    rig.step(saves(2))
    rig.clock.advance(DEADLINE_MS / 1e3)
    assert rig.step(StepPlan(finishing=frozenset({"r"}))).sent == {"r"}
    assert rig.side.counts()["saves_past_deadline"] == 1
    rig.store.check_idle()
    rig.side.close()


def test_preemption_cuts_saves_off_before_their_blocks_are_overwritten() -> None:
    rig = Working(auto=())
    for index in range(2):
        rig.fill(3 + index, index)
    rig.step(saves(2))
    rig.side.begin(StepPlan(preempted=frozenset({"r"})))
    rig.store.check_idle()
    assert rig.side.counts()["saves_cut_by_preemption"] == 1
    rig.side.close()


class GatedSlab(ManualSlab):
    """Nobody sees a slot before the gate is open; a broken one can never be seen."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        super().__init__(slots, slot_bytes)
        self.gate = threading.Event()
        self.wanted = threading.Event()
        self.broken = False

    def view(self, slot: int) -> memoryview:
        self.wanted.set()
        assert self.gate.wait(HANG_LIMIT_S), "the gate is never opened"
        if self.broken:
            raise OSError("no such memory")
        return super().view(slot)


def test_a_copy_under_way_ends_before_preempted_blocks_are_given_away() -> None:
    rig = Working()
    slab = rig.store.slab = GatedSlab(16, NAMESPACE.block_bytes)
    before = [rig.fill(3 + index, index) for index in range(4)]
    rig.side.start_saves(saves(4))
    assert slab.wanted.wait(HANG_LIMIT_S)
    opener = threading.Timer(0.1, slab.gate.set)
    opener.start()
    rig.side.begin(StepPlan(preempted=frozenset({"r"})))
    for index in range(4):
        rig.fill(3 + index, 9999)
    assert [rig.store.blocks[key][1] for key in chain(4)] == before
    rig.side.close()
    rig.store.check_idle()
    opener.join()


def test_preemption_takes_back_a_copy_that_has_not_begun() -> None:
    """Else the engine's step would wait for every copy before it, of other requests."""
    rig = Working()
    slab = rig.store.slab = GatedSlab(16, NAMESPACE.block_bytes)
    rig.side.start_saves(saves(2, name="other"))
    assert slab.wanted.wait(HANG_LIMIT_S)
    rig.side.start_saves(saves(2, first=9, tag=1))
    rig.side.begin(StepPlan(preempted=frozenset({"r"})))  # the gate is still shut
    assert rig.side.counts()["saves_cut_by_preemption"] == 1
    assert rig.side.stats()["copies_under_way"] == 1
    slab.gate.set()
    until_stored(rig.side, rig.store, chain(2))
    rig.side.close()
    assert not set(chain(2, 1)) & set(rig.store.blocks)
    rig.store.check_idle()


def test_a_copy_that_fails_is_a_load_of_nothing_and_a_save_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Working(auto=())
    for index, key in enumerate(chain(2)):
        rig.store.put(key, bytes_of(index))
    slab = rig.store.slab = GatedSlab(16, NAMESPACE.block_bytes)
    slab.gate.set()
    rig.side.start_loads(loads(2, first=20))
    rig.side.start_saves(saves(2, tag=1))
    rig.store.answer(rig.store.last(Load))
    rig.store.answer(rig.store.last(Save))
    slab.broken = True
    report = rig.until(lambda r: r.recved)
    assert (report.bad_blocks, report.failed) == ({20, 21}, {"r"})
    assert not any(key in rig.store.blocks for key in chain(2, 1))
    assert "failed" in caplog.text
    rig.side.close()
    rig.store.check_idle()


def test_layers_in_any_physical_order_become_the_same_bytes() -> None:
    rig = Working()
    before = [rig.fill(index, index) for index in range(3)]
    # Tokens before heads, all layers of a block behind one another: another of vLLM's layouts.
    raw = torch.zeros(NUM_BLOCKS, LAYERS, BLOCK, HEADS, WIDTH)
    caches = {
        f"model.layers.{layer}.attn": raw[:, place].transpose(1, 2)
        for place, layer in enumerate((2, 9, 10))
    }
    for name, cache in caches.items():
        cache.copy_(rig.caches[name])
    side = WorkerSide(rig.store, caches, NUM_BLOCKS, save_ms=DEADLINE_MS, clock=rig.clock)
    side.start_saves(saves(3, first=0))
    until_stored(side, rig.store, chain(3))
    assert [rig.store.blocks[key][1] for key in chain(3)] == before
    side.close()
    rig.side.close()


def until_stored(side: WorkerSide, store: ManualStore, names: Sequence[bytes]) -> None:
    end_s = time.monotonic() + HANG_LIMIT_S
    while not set(names) <= set(store.blocks):
        side.collect(StepPlan(idle=True))
        assert time.monotonic() < end_s, "never stored"


def test_blocks_that_the_kernels_cut_into_pages_are_put_together() -> None:
    rig = Working()
    pages = {name: cache.reshape(-1, HEADS, BLOCK, WIDTH) for name, cache in rig.caches.items()}
    half = {name: torch.zeros(2 * NUM_BLOCKS, HEADS, BLOCK // 2, WIDTH) for name in pages}
    side = WorkerSide(rig.store, half, NUM_BLOCKS, save_ms=DEADLINE_MS, clock=rig.clock)
    for layer, cache in half.items():
        for block in (6, 7):
            cache[block] = pages[layer].new_full((HEADS, BLOCK // 2, WIDTH), float(block))
    side.start_saves(StepPlan(saves=[Blocks("r", tuple(chain(1)), (3,))]))
    until_stored(side, rig.store, chain(1))
    data = torch.frombuffer(bytearray(rig.store.blocks[chain(1)[0]][1]), dtype=torch.float32)
    tokens = data.view(LAYERS, HEADS, BLOCK, WIDTH)[0, 0, :, 0].tolist()
    assert tokens == [6.0, 6.0, 7.0, 7.0]
    side.close()
    rig.side.close()


def test_tensors_that_are_not_the_namespace_are_refused() -> None:
    store = ManualStore(NAMESPACE, 4)
    good = {f"l.{n}": torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH) for n in range(LAYERS)}
    for caches, words in (
        ({**good, "l.9": torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH)}, "layers is 3"),
        ({k: v.to(torch.float16) for k, v in good.items()}, "dtype is float32"),
        ({k: v[:-1] for k, v in good.items()}, "do not agree"),
        ({**good, "l.0": torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH + 2)}, "one shape"),
        ({**good, "l.0": torch.zeros(2, NUM_BLOCKS, HEADS, BLOCK, WIDTH)}, "another kind"),
    ):
        with pytest.raises(ConfigError, match=words):
            WorkerSide(store, caches, NUM_BLOCKS, save_ms=1.0)


def test_layers_that_share_a_tensor_count_once() -> None:
    one = torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
    two = torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
    assert pool_of({"l.0": one, "l.1": two, "l.2": one}).layers == 2


# Ranks.


def test_a_run_is_held_as_far_as_every_rank_holds_it() -> None:
    stores = [ManualStore(NAMESPACE, 16, ("match",)) for _ in range(2)]
    for rank, blocks in ((0, 3), (1, 2)):
        for index, key in enumerate(chain(blocks)):
            stores[rank].put(key, bytes_of(index), "l2" if rank == 0 or index else "disk")
    ranks = RankStores(stores)
    match = ranks.match(chain(4))
    assert (match.done, match.tiers) == (True, ["disk", "l2"])
    load = ranks.load(chain(2))
    stores[0].answer(stores[0].last(Load))
    assert ranks.poll() == []
    stores[1].answer(stores[1].last(Load), blocks=1, done=False)
    assert ranks.poll() == [load]
    assert (load.done, load.tiers) == (False, ["disk"])
    stores[1].answer(stores[1].last(Load))
    ranks.poll()
    assert (load.done, len(load.slots)) == (True, 2)
    slab = ranks.slab
    assert slab is not None
    assert slab.slots == 8
    ranks.release(load)
    for store in stores:
        store.check_idle()
    with pytest.raises(AssertionError, match="twice"):
        ranks.release(load)
