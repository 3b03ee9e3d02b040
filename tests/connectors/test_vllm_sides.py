"""The connector's two sides against stores that the test controls, without vLLM."""

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
from kvstore.connectors.common.dropped_blocks import RETRY_S
from kvstore.connectors.common.pending_lookups import ROUND_TRIP_MS
from kvstore.connectors.vllm.connector.lora import Adapters
from kvstore.connectors.vllm.connector.metadata import RequestBlocks, StepMetadata, StepResult
from kvstore.connectors.vllm.connector.rank_stores import RankStores
from kvstore.connectors.vllm.connector.scheduler import SchedulerSide
from kvstore.connectors.vllm.connector.worker import WorkerSide, pool_of
from kvstore.errors import ConfigError
from kvstore.interface import Load, Match, Operation, Save
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
MAX_WAIT_MS = 500.0
ALL = ("match", "load", "save")
HANG_LIMIT_S = 20.0


def chain(length: int, tag: int = 0) -> list[bytes]:
    return [bytes([tag, index]) * 16 for index in range(length)]


def bytes_of(value: int) -> bytes:
    """A block whose elements differ from those of every other block."""
    count = NAMESPACE.block_bytes // 4
    return (torch.arange(count, dtype=torch.float32) + 1000 * (value + 1)).numpy().tobytes()


@dataclass
class FakeRequest:
    """The attributes of vLLM's request that the scheduler's side reads."""

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
            policy=WaitComplete(max_wait_ms=MAX_WAIT_MS),
            max_wait_ms=MAX_WAIT_MS,
            min_load_tokens=0,
            clock=self.clock,
            **{"adapters": Adapters(), **more},
        )

    def put(self, blocks: int, tier: str = "l2", tag: int = 0) -> None:
        for index, key in enumerate(chain(blocks, tag)):
            self.store.put(key, bytes_of(index), tier)

    def next_step(
        self, scheduled: Sequence[tuple[str, int]] = (), preempted: Sequence[str] = ()
    ) -> StepMetadata:
        return self.side.build_step_metadata(
            scheduled, lambda name: range(100, 100 + NUM_BLOCKS), preempted
        )


def test_the_worker_loads_a_hit_while_the_scheduler_leases_it() -> None:
    rig = Scheduling(*ALL)
    rig.put(4)
    req = request()
    assert rig.side.match(req, 0) == 4 * BLOCK
    assert rig.side.match(req, 0) == 4 * BLOCK, "a second lookup changes nothing"
    assert rig.side.start_load(req, range(7, 12), 4 * BLOCK) == {"l2": 4 * BLOCK}
    metadata = rig.next_step()
    assert metadata.idle
    assert [(each.hashes, each.block_ids) for each in metadata.loads] == [
        (tuple(chain(4)), (7, 8, 9, 10))
    ]
    assert len(rig.store.free) == 12, "leased until the worker has loaded"
    assert rig.next_step().loads == [], "reported once"
    rig.side.update_from_workers(["r"], [])
    rig.store.check_idle()


class AnswersWhenPolled(ManualStore):
    """Operations from before a poll are answered in it, as over a fast socket."""

    def poll(self, timeout_s: float = 0.0) -> list[Operation]:
        for operation in self.operations:
            if not operation.done:
                self.answer(operation)
        return super().poll(timeout_s)


def test_a_match_and_the_load_it_leads_to_are_answered_within_one_step() -> None:
    rig = Scheduling(kind=AnswersWhenPolled)
    rig.put(4)
    req = request()
    assert rig.side.match(req, 0) is None
    assert rig.next_step().idle
    assert rig.side.match(req, 0) == 4 * BLOCK
    rig.side.finish_request(req)
    rig.store.check_idle()


def test_a_reset_hides_saved_blocks_and_changes_the_hashes() -> None:
    rig = Scheduling(*ALL)
    rig.put(4)
    waiting = request("waiting")
    assert rig.side.match(waiting, 0) == 4 * BLOCK
    running = request("running", tag=9)
    rig.side.match(running, 0)
    rig.side.start_load(running, range(4), 0)
    assert rig.side.reset()
    rig.store.check_idle()
    assert rig.side.match(waiting, 0) == 0
    rig.side.start_load(waiting, range(4), 0)
    # A running request has blocks from before the reset: they are not saved.
    metadata = rig.next_step([("running", 4 * BLOCK), ("waiting", 4 * BLOCK)])
    (save,) = metadata.saves
    assert save.request_id == "waiting"
    assert not set(save.hashes) & set(waiting.block_hashes)
    assert len(set(save.hashes)) == 4
    (save,) = rig.next_step([("running", 4 * BLOCK)], preempted=["running"]).saves
    assert not set(save.hashes) & set(running.block_hashes)
    # Blocks saved after the reset are found.
    for name in save.hashes:
        rig.store.put(name, bytes_of(0), "l2")
    assert rig.side.match(request("later", tag=9), 0) == 4 * BLOCK
    assert rig.side.reset()
    assert rig.side.match(request("latest", tag=9), 0) == 0, "each reset has another epoch"
    for each in (waiting, running):
        rig.side.finish_request(each)
    rig.store.check_idle()


def test_a_reset_waits_for_loads() -> None:
    rig = Scheduling(*ALL)
    rig.put(4)
    req = request()
    rig.side.match(req, 0)
    rig.side.start_load(req, range(5), 4 * BLOCK)
    assert not rig.side.reset()
    rig.side.finish_request(req)
    assert rig.side.reset(), "its request has ended"
    rig.side.update_from_workers(["r"], [])
    rig.store.check_idle()


def test_a_resumed_request_has_its_whole_maximum_wait() -> None:
    rig = Scheduling(*ALL)
    req = request()
    assert rig.side.match(req, 0) == 0
    rig.side.start_load(req, range(5), 0)
    rig.next_step([("r", 4 * BLOCK)])
    rig.clock.advance(20 * MAX_WAIT_MS / 1e3)
    rig.next_step(preempted=["r"])
    rig.put(4)
    assert rig.side.match(req, 0) == 4 * BLOCK
    rig.side.start_load(req, range(5), 4 * BLOCK)
    (load,) = rig.next_step().loads
    assert load.max_wait_ms == MAX_WAIT_MS
    rig.side.update_from_workers(["r"], [])
    rig.store.check_idle()


def test_only_missing_blocks_are_loaded_and_the_last_token_never() -> None:
    rig = Scheduling(*ALL)
    rig.put(4)
    req = request(tokens=4 * BLOCK)
    assert rig.side.match(req, BLOCK) == 2 * BLOCK
    rig.side.start_load(req, [5, 6, 7, 8], 2 * BLOCK)
    (load,) = rig.next_step().loads
    assert load.block_ids == (6, 7)
    assert load.hashes == tuple(chain(3)[1:])


def test_pending_is_none_until_an_answer_or_the_maximum_wait() -> None:
    rig = Scheduling()
    req = request()
    assert rig.side.match(req, 0) is None
    rig.put(4, tier="disk")
    rig.store.answer(rig.store.last(Match))
    assert rig.side.match(req, 0) is None, "blocks in flight from disk"
    rig.store.answer(rig.store.last(Load), blocks=2, done=False)
    assert rig.side.match(req, 0) is None
    rig.clock.advance(MAX_WAIT_MS / 1e3)
    assert rig.side.match(req, 0) == 2 * BLOCK, "arrived blocks after the maximum wait"
    rig.side.finish_request(req)
    rig.store.check_idle()


def test_an_answer_starts_the_load_before_the_next_lookup() -> None:
    rig = Scheduling()
    req = request()
    rig.put(4, tier="disk")
    assert rig.side.match(req, 0) is None
    rig.store.answer(rig.store.last(Match))
    rig.next_step()
    assert isinstance(rig.store.operations[-1], Load)
    rig.store.answer(rig.store.last(Load))
    assert rig.side.match(req, 0) == 4 * BLOCK
    rig.side.finish_request(req)
    rig.next_step()
    rig.store.check_idle()


class Counted(list[bytes]):
    """vLLM's hashes of a request; counts how often they are iterated."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += isinstance(index, slice)
        return super().__getitem__(index)


def test_the_hashes_of_a_waiting_request_are_not_read_in_every_step() -> None:
    rig = Scheduling()
    req = request()
    req.block_hashes = hashes = Counted(req.block_hashes)
    for _ in range(5):
        assert rig.side.match(req, 0) is None
        rig.next_step()
    assert hashes.read == 1
    assert rig.side.match(req, BLOCK) is None
    assert rig.store.last(Match).hashes == tuple(hashes[1:4]), "vLLM has the first block by now"
    req.block_hashes = chain(4, tag=1)
    assert rig.side.match(req, BLOCK) is None
    assert rig.store.last(Match).hashes == tuple(chain(4, tag=1)[1:4]), "another prompt"
    req.num_tokens -= BLOCK
    assert rig.side.match(req, BLOCK) is None
    assert rig.store.last(Match).hashes == tuple(chain(4, tag=1)[1:3])
    rig.side.finish_request(req)
    rig.store.check_idle()


def test_requests_that_must_compute_everything_are_never_looked_up() -> None:
    rig = Scheduling(*ALL)
    rig.put(4)
    req = replace(request(), skip_reading_prefix_cache=True)
    assert rig.side.match(req, 0) == 0
    assert rig.store.operations == []


def test_a_failed_load_is_computed_and_not_repeated() -> None:
    rig = Scheduling(*ALL)
    rig.put(4)
    req = request()
    assert rig.side.match(req, 0)
    rig.side.start_load(req, range(8), 4 * BLOCK)
    rig.next_step()
    rig.side.update_from_workers(["r"], ["r"])
    assert rig.side.match(req, 0) == 0
    rig.store.check_idle()
    rig.side.finish_request(req)
    assert rig.side.match(req, 0) == 4 * BLOCK, "another request with that id is separate"


def test_the_load_has_the_rest_of_the_maximum_wait() -> None:
    rig = Scheduling("match", "save")
    req = request()
    rig.put(4, tier="disk")
    assert rig.side.match(req, 0) is None
    rig.clock.advance(0.3)
    rig.store.answer(rig.store.last(Load))
    assert rig.side.match(req, 0) == 4 * BLOCK
    rig.side.start_load(req, range(8), 4 * BLOCK)
    (load,) = rig.next_step().loads
    assert load.max_wait_ms == pytest.approx(MAX_WAIT_MS - 300)
    rig.side.update_from_workers(["r"], [])
    late = request("late")
    assert rig.side.match(late, 0) is None
    rig.clock.advance(9.0)
    rig.store.answer(rig.store.last(Load))
    rig.side.match(late, 0)
    rig.side.start_load(late, range(8), 4 * BLOCK)
    assert rig.next_step().loads[0].max_wait_ms == ROUND_TRIP_MS


def test_full_blocks_are_saved_once_as_prefill_and_decode_fill_them() -> None:
    rig = Scheduling(*ALL)
    req = request(tokens=3 * BLOCK + 2)
    rig.side.start_load(req, range(4), 0)
    first = rig.next_step([("r", 2 * BLOCK + 1)])
    assert [(each.hashes, each.block_ids) for each in first.saves] == [
        (tuple(chain(2)), (100, 101))
    ]
    assert not first.idle
    second = rig.next_step([("r", 3 * BLOCK + 2)])
    assert [each.block_ids for each in second.saves] == [(102,)]
    req.block_hashes = chain(4)  # a decoded token has filled the fourth
    third = rig.next_step([("r", 4 * BLOCK)])
    assert [(each.hashes, each.block_ids) for each in third.saves] == [((chain(4)[3],), (103,))]
    assert rig.next_step([("r", 4 * BLOCK + 1)]).saves == []


def test_a_block_without_a_hash_is_not_saved() -> None:
    """Drafted tokens may be rejected; only known ones have hashes."""
    rig = Scheduling(*ALL)
    req = request(tokens=2 * BLOCK + 3)
    rig.side.start_load(req, range(4), 0)
    assert len(rig.next_step([("r", 3 * BLOCK + 2)]).saves[0].hashes) == 2


def test_blocks_wait_for_their_saves_only() -> None:
    rig = Scheduling(*ALL)
    quiet, busy = request("quiet", tokens=3), request("busy")
    for each in (quiet, busy):
        rig.side.start_load(each, range(8), 0)
    rig.next_step([("quiet", 3), ("busy", 4 * BLOCK + 1)])
    assert rig.side.finish_request(quiet) is False
    assert rig.side.finish_request(busy) is True
    assert rig.next_step().finishing == {"busy"}
    assert rig.next_step().finishing == frozenset(), "reported once"
    assert rig.side.stats()["requests_tracked"] == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_blocks_are_free_at_once_when_their_saves_have_ended_in_every_worker(
    workers: int,
) -> None:
    """vLLM in one process makes no step after the last request, so a later report would be lost."""
    rig = Scheduling(*ALL, workers=workers)
    req = {name: request(name) for name in ("all", "one", "again")}
    for each in req.values():
        rig.side.start_load(each, range(8), 0)
    first = [each.save_number for each in rig.next_step([(name, 2 * BLOCK) for name in req]).saves]
    second = [each.save_number for each in rig.next_step([(name, 4 * BLOCK) for name in req]).saves]
    numbers = {
        name: [(name, one), (name, two)] for name, one, two in zip(req, first, second, strict=True)
    }
    assert len({*first, *second}) == 6
    rig.side.update_from_workers([], [], dict.fromkeys(numbers["all"] + numbers["one"], 1))
    assert rig.side.finish_request(req["one"]) is (workers > 1)
    rig.side.update_from_workers([], [], dict.fromkeys(numbers["all"], workers - 1))
    assert rig.side.finish_request(req["all"]) is False
    # The result of an earlier save does not count for a later one, with the same id or another.
    rig.side.update_from_workers([], [], dict.fromkeys(numbers["again"], workers))
    assert rig.next_step(preempted=["again"]).finishing == ({"one"} if workers > 1 else set())
    rig.next_step([("again", 4 * BLOCK)])
    rig.side.update_from_workers([], [], dict.fromkeys(numbers["again"], workers))
    assert rig.side.finish_request(req["again"]) is True
    assert rig.next_step().finishing == {"again"}


def test_an_aborted_load_is_freed_by_its_report_only() -> None:
    """vLLM frees such a request when its load has ended. A second report would crash the engine."""
    rig = Scheduling(*ALL)
    rig.put(4)
    req = request()
    rig.side.start_load(req, range(8), 0)
    rig.next_step([("r", 2 * BLOCK)])  # a save, then a preemption
    rig.next_step(preempted=["r"])
    rig.side.match(req, 0)
    rig.side.start_load(req, range(8), 4 * BLOCK)
    rig.next_step()
    assert rig.side.finish_request(req) is False
    assert rig.next_step().finishing == frozenset()
    rig.side.update_from_workers(["r"], ["r"])
    rig.store.check_idle()


def test_aborts_before_and_during_a_match_release_everything() -> None:
    rig = Scheduling("match")
    rig.put(4)
    for moment in range(3):
        req = request(f"r{moment}")
        for _ in range(moment):
            rig.side.match(req, 0)
        if moment == 2:
            rig.store.answer(rig.store.last(Load), blocks=2, done=False)
        assert rig.side.finish_request(req) is False
    rig.store.check_idle()
    rig.side.close()


def test_a_preempted_request_saves_its_blocks_again() -> None:
    rig = Scheduling(*ALL)
    req = request()
    rig.side.start_load(req, range(8), 0)
    rig.next_step([("r", 4 * BLOCK)])
    assert rig.next_step(preempted=["r"]).preempted == {"r"}
    assert len(rig.next_step([("r", 4 * BLOCK)]).saves[0].hashes) == 4


def test_a_block_of_several_hashes_has_the_last_one() -> None:
    rig = Scheduling(*ALL, hashes_per_block=2)
    names = chain(9)
    req = FakeRequest("r", 4 * BLOCK + 2, names)
    for index, key in enumerate(names[1:4:2]):
        rig.store.put(key, bytes_of(index))
    assert rig.side.match(req, 0) == 2 * BLOCK
    rig.side.start_load(req, range(8), 2 * BLOCK)
    assert rig.next_step().loads[0].hashes == (names[1], names[3])
    rig.side.update_from_workers(["r"], [])
    assert rig.next_step([("r", 4 * BLOCK + 2)]).saves[0].hashes == tuple(names[1::2])


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
            self.store, self.caches, NUM_BLOCKS, max_save_wait_ms=MAX_WAIT_MS, clock=self.clock
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

    def step(self, metadata: StepMetadata | None = None) -> StepResult:
        metadata = metadata or StepMetadata()
        self.side.handle_preemptions(metadata)
        self.side.start_loads(metadata)
        self.side.start_saves(metadata)
        return self.side.collect(metadata)

    def until(self, true: Any) -> StepResult:
        """Run steps that compute nothing until a result fulfils the condition."""
        end_s = time.monotonic() + HANG_LIMIT_S
        while not true(report := self.step(StepMetadata(idle=True))):
            assert time.monotonic() < end_s, "the condition is never fulfilled"
        return report


@pytest.fixture
def working() -> Iterator[Working]:
    rig = Working()
    yield rig
    rig.side.close()
    rig.store.check_idle()


def loads(
    count: int, first: int = 3, name: str = "r", left_ms: float = MAX_WAIT_MS
) -> StepMetadata:
    blocks = RequestBlocks(name, tuple(chain(count)), tuple(range(first, first + count)), left_ms)
    return StepMetadata(loads=[blocks])


def saves(count: int, first: int = 3, name: str = "r", tag: int = 0) -> StepMetadata:
    blocks = RequestBlocks(name, tuple(chain(count, tag)), tuple(range(first, first + count)))
    return StepMetadata(saves=[blocks])


def test_saved_blocks_are_loaded_bit_for_bit_elsewhere(working: Working) -> None:
    written = [working.fill(3 + index, index) for index in range(4)]
    working.step(saves(4))
    if not working.side.counts().get("blocks_saved"):
        working.until(lambda _: working.side.counts().get("blocks_saved"))
    assert [working.store.blocks[key][1] for key in chain(4)] == written
    report = working.step(loads(4, first=20))
    report = report if report.recved else working.until(lambda r: r.recved)
    assert (report.recved, report.bad_blocks, report.failed) == ({"r"}, set(), set())
    assert [working.block(20 + index) for index in range(4)] == written


def test_missing_blocks_of_a_load_are_reported(working: Working) -> None:
    for index, key in enumerate(chain(2)):
        working.store.put(key, bytes_of(index))
    report = working.step(loads(4))
    report = report if report.recved else working.until(lambda r: r.recved)
    assert report.bad_blocks == {5, 6}
    assert report.failed == {"r"}
    assert working.block(3) == bytes_of(0)


def test_with_a_silent_store_a_load_is_empty_after_the_maximum_wait() -> None:
    rig = Working(auto=())
    assert rig.step(loads(2)).recved == set()
    rig.clock.advance(MAX_WAIT_MS / 1e3)
    report = rig.step()
    assert (report.recved, report.bad_blocks) == ({"r"}, {3, 4})
    assert rig.side.counts()["loads_timed_out"] == 1
    rig.store.check_idle()
    rig.side.close()


def test_with_a_raising_store_a_load_is_empty_and_a_save_is_dropped(working: Working) -> None:
    working.store.raising = True
    (save,) = saves(2, first=9, name="s").saves
    both = replace(loads(2), saves=[replace(save, save_number=7)])
    report = working.step(replace(both, finishing=frozenset({"s"})))
    assert (report.recved, report.bad_blocks, report.sent) == ({"r"}, {3, 4}, {"s"})
    assert report.saved == [("s", 7)], "nothing to wait for"


def test_ended_requests_are_reported_once_when_their_saves_have_ended() -> None:
    rig = Working(auto=())
    rig.step(saves(2))
    report = rig.step(StepMetadata(finishing=frozenset({"r", "other"})))
    assert (report.sent, report.saved) == ({"other"}, [])
    assert rig.step().sent == set()
    rig.store.answer(rig.store.last(Save))
    report = rig.until(lambda report: report.sent)
    assert (report.sent, report.saved) == ({"r"}, [("r", 0)])
    report = rig.step()
    assert (report.sent, report.saved) == (set(), [])
    rig.side.close()
    rig.store.check_idle()


def test_a_save_without_slots_is_dropped_after_the_maximum_wait() -> None:
    rig = Working(auto=())
    rig.step(saves(2))
    rig.clock.advance(MAX_WAIT_MS / 1e3)
    assert rig.step(StepMetadata(finishing=frozenset({"r"}))).sent == {"r"}
    assert rig.side.counts()["saves_timed_out"] == 1
    rig.store.check_idle()
    rig.side.close()


def test_blocks_without_a_slot_are_saved_as_soon_as_there_is_one() -> None:
    rig = Working(slots=1)
    written = [rig.fill(3 + index, index) for index in range(4)]
    rig.store.put(chain(4)[1], bytes_of(1))
    ended = rig.step(replace(saves(4), finishing=frozenset({"r"})))
    end_s = time.monotonic() + HANG_LIMIT_S
    while not ended.sent:
        assert ended.saved == [], "its blocks may be overwritten"
        assert time.monotonic() < end_s
        rig.clock.advance(RETRY_S)
        ended = rig.step(StepMetadata(idle=True))
    assert (ended.sent, ended.saved) == ({"r"}, [("r", 0)])
    assert [rig.store.blocks[key][1] for key in chain(4)] == written
    counts = rig.side.counts()
    assert (counts["blocks_saved"], counts["blocks_dropped"]) == (3, 0)
    rig.side.close()
    rig.store.check_idle()


def test_blocks_without_a_slot_are_dropped_after_the_maximum_wait() -> None:
    rig = Working()
    rig.store.free, free = [], rig.store.free
    assert rig.step(saves(3)).saved == []
    for _ in range(20):
        rig.clock.advance(MAX_WAIT_MS / 25e3)
        assert rig.step(StepMetadata(idle=True)).saved == []
    rig.clock.advance(MAX_WAIT_MS / 1e3)
    assert rig.step(StepMetadata(idle=True)).saved == [("r", 0)]
    assert rig.side.counts()["blocks_dropped"] == 3
    rig.store.free = free
    rig.side.close()
    rig.store.check_idle()


def test_preempted_blocks_do_not_wait_for_slots() -> None:
    """They are overwritten in the next step."""
    rig = Working(slots=1)
    rig.step(saves(3))
    rig.step(replace(StepMetadata(), preempted=frozenset({"r"})))
    assert rig.side.stats()["saves_under_way"] == 0
    rig.side.close()
    rig.store.check_idle()


def test_preemption_drops_saves_before_their_blocks_are_overwritten() -> None:
    rig = Working(auto=())
    for index in range(2):
        rig.fill(3 + index, index)
    rig.step(saves(2))
    rig.side.handle_preemptions(StepMetadata(preempted=frozenset({"r"})))
    rig.store.check_idle()
    assert rig.side.counts()["saves_preempted"] == 1
    rig.side.close()


class GatedSlab(ManualSlab):
    """`view` blocks until the gate is open; a broken slab raises."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        super().__init__(slots, slot_bytes)
        self.gate = threading.Event()
        self.wanted = threading.Event()
        self.broken = False

    def view(self, slot: int) -> memoryview:
        self.wanted.set()
        assert self.gate.wait(HANG_LIMIT_S), "the gate was not opened"
        if self.broken:
            raise OSError("no such memory")
        return super().view(slot)


def test_a_copy_under_way_ends_before_preempted_blocks_are_reused() -> None:
    rig = Working()
    slab = rig.store.slab = GatedSlab(16, NAMESPACE.block_bytes)
    before = [rig.fill(3 + index, index) for index in range(4)]
    rig.side.start_saves(saves(4))
    assert slab.wanted.wait(HANG_LIMIT_S)
    opener = threading.Timer(0.1, slab.gate.set)
    opener.start()
    rig.side.handle_preemptions(StepMetadata(preempted=frozenset({"r"})))
    for index in range(4):
        rig.fill(3 + index, 9999)
    assert [rig.store.blocks[key][1] for key in chain(4)] == before
    rig.side.close()
    rig.store.check_idle()
    opener.join()


def test_preemption_withdraws_a_copy_that_has_not_started() -> None:
    """Otherwise the engine's step would wait for all earlier copies of other requests."""
    rig = Working()
    slab = rig.store.slab = GatedSlab(16, NAMESPACE.block_bytes)
    rig.side.start_saves(saves(2, name="other"))
    assert slab.wanted.wait(HANG_LIMIT_S)
    rig.side.start_saves(saves(2, first=9, tag=1))
    rig.side.handle_preemptions(StepMetadata(preempted=frozenset({"r"})))  # the gate is still shut
    assert rig.side.counts()["saves_preempted"] == 1
    assert rig.side.stats()["copies_under_way"] == 1
    slab.gate.set()
    until_stored(rig.side, rig.store, chain(2))
    rig.side.close()
    assert not set(chain(2, 1)) & set(rig.store.blocks)
    rig.store.check_idle()


def test_a_failed_copy_is_an_empty_load_and_an_empty_save(
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
    # Tokens before heads, all layers of a block contiguous: another layout of vLLM.
    raw = torch.zeros(NUM_BLOCKS, LAYERS, BLOCK, HEADS, WIDTH)
    caches = {
        f"model.layers.{layer}.attn": raw[:, place].transpose(1, 2)
        for place, layer in enumerate((2, 9, 10))
    }
    for name, cache in caches.items():
        cache.copy_(rig.caches[name])
    side = WorkerSide(rig.store, caches, NUM_BLOCKS, max_save_wait_ms=MAX_WAIT_MS, clock=rig.clock)
    side.start_saves(saves(3, first=0))
    until_stored(side, rig.store, chain(3))
    assert [rig.store.blocks[key][1] for key in chain(3)] == before
    side.close()
    rig.side.close()


def until_stored(side: WorkerSide, store: ManualStore, names: Sequence[bytes]) -> None:
    end_s = time.monotonic() + HANG_LIMIT_S
    while not set(names) <= set(store.blocks):
        side.collect(StepMetadata(idle=True))
        assert time.monotonic() < end_s, "never stored"


def test_blocks_that_the_kernels_cut_into_pages_are_put_together() -> None:
    rig = Working()
    pages = {name: cache.reshape(-1, HEADS, BLOCK, WIDTH) for name, cache in rig.caches.items()}
    half = {name: torch.zeros(2 * NUM_BLOCKS, HEADS, BLOCK // 2, WIDTH) for name in pages}
    side = WorkerSide(rig.store, half, NUM_BLOCKS, max_save_wait_ms=MAX_WAIT_MS, clock=rig.clock)
    for layer, cache in half.items():
        for block in (6, 7):
            cache[block] = pages[layer].new_full((HEADS, BLOCK // 2, WIDTH), float(block))
    side.start_saves(StepMetadata(saves=[RequestBlocks("r", tuple(chain(1)), (3,))]))
    until_stored(side, rig.store, chain(1))
    data = torch.frombuffer(bytearray(rig.store.blocks[chain(1)[0]][1]), dtype=torch.float32)
    tokens = data.view(LAYERS, HEADS, BLOCK, WIDTH)[0, 0, :, 0].tolist()
    assert tokens == [6.0, 6.0, 7.0, 7.0]
    side.close()
    rig.side.close()


def test_tensors_that_do_not_match_the_namespace_are_rejected() -> None:
    store = ManualStore(NAMESPACE, 4)
    good = {f"l.{n}": torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH) for n in range(LAYERS)}
    for caches, words in (
        ({**good, "l.9": torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH)}, "layers is 3"),
        ({k: v.to(torch.float16) for k, v in good.items()}, "dtype is float32"),
        ({k: v[:-1] for k, v in good.items()}, "do not match"),
        ({**good, "l.0": torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH + 2)}, "one shape"),
        ({**good, "l.0": torch.zeros(2, NUM_BLOCKS, HEADS, BLOCK, WIDTH)}, "is not \\[blocks"),
    ):
        with pytest.raises(ConfigError, match=words):
            WorkerSide(store, caches, NUM_BLOCKS, max_save_wait_ms=1.0)


def test_layers_that_share_a_tensor_count_once() -> None:
    one = torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
    two = torch.zeros(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
    assert pool_of({"l.0": one, "l.1": two, "l.2": one}).layers == 2


# Ranks.


def test_a_prefix_is_cached_as_far_as_every_rank_has_it() -> None:
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
