"""A prefix whose tail is loaded while its head is computed: the connector over a store that the
test controls, and whole engines over real stores whose tiers fail in the middle."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end_rig import (
    BLOCK_TOKENS,
    VOCAB,
    Baseline,
    CachedEngine,
    PromptRequest,
    check_slots_free,
    flush_store,
    tiny_model,
)
from manual_store import ManualClock, ManualStore

from kvstore.blocks.key import Namespace
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.load_ranges import RANGES_MAX
from kvstore.connectors.common.pending_lookups import ROUND_TRIP_MS
from kvstore.connectors.common.split_load import SplitLoads
from kvstore.engine.loader import LoadedModel
from kvstore.interface import HookMatch, Load, LookupStatus
from kvstore.prefetch.adaptive import WAIT, Action, Adaptive, Decision, LoadState, ModeChoice
from kvstore.prefetch.load_modes import LoadMode
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.testing.faults import Fault, FaultyTier, Schedule, always, in_turn
from kvstore.tiers.memory import MemoryTier

torch.set_num_threads(1)

SPACE = Namespace(model="tiny", dtype="float32", layers=2, kv_heads=1, head_dim=4, block_tokens=4)
MAX_WAIT_MS = 500.0
COMPUTE_2 = Decision(Action.COMPUTE, 2)


class Scripted(Adaptive):
    """A policy whose decisions the test sets. It records its calls."""

    def __init__(self, *choices: Decision, max_wait_ms: float = 1e6) -> None:
        super().__init__(max_wait_ms)
        self.choices = list(choices)
        self.states: list[LoadState] = []
        self.told: list[tuple[str, int, float, float]] = []
        self.begins = ModeChoice(LoadMode.BOTH)

    def decide_next(self, state: LoadState) -> Decision:
        self.states.append(state)
        return self.choices.pop(0) if len(self.choices) > 1 else self.choices[0]

    def choose_mode(self, state: LoadState) -> ModeChoice:
        """The first decision is the load mode."""
        cancel = self.decide_next(state).action is Action.CANCEL
        return ModeChoice(LoadMode.COMPUTE) if cancel else self.begins

    def record_arrival(
        self, tier: str, blocks: int, low_s: float, high_s: float, *, while_computing: bool = False
    ) -> None:
        self.told.append((tier, blocks, low_s, high_s))


class Rig:
    def __init__(self, policy: Adaptive, tiers: list[str], *, slots: int = 128) -> None:
        self.clock = ManualClock()
        self.store = ManualStore(SPACE, slots, ("match",))
        self.hashes = [bytes([index]) * 32 for index in range(len(tiers))]
        for name, tier in zip(self.hashes, tiers, strict=True):
            if tier:
                self.store.put(name, bytes(SPACE.block_bytes), tier)
        self.waits = SplitLoads(
            GuardedStore(self.store),
            policy=policy,
            max_wait_ms=MAX_WAIT_MS,
            min_load_tokens=0,
            clock=self.clock,
        )

    def match(self, first: int, *, can_start: bool = True) -> HookMatch:
        return self.waits.match("r", self.hashes, first, can_start=can_start)

    def loads(self) -> list[Any]:
        """Open loads, in the order of their requests."""
        return [
            t
            for t in self.store.operations
            if isinstance(t, Load) and t.operation_id in self.store.open
        ]

    def first_of(self, load: Any) -> int:
        return self.hashes.index(load.hashes[0])

    def take(self, blocks: int) -> list[int]:
        """Take the hit, as after its copy; returns the indices of the blocks."""
        loads = self.waits.take("r", blocks)
        names = [name for t in loads for name in t.hashes[: len(t.slots)]]
        for load in loads:
            self.store.release(load)
        return [self.hashes.index(name) for name in names][:blocks]

    def pass_ms(self, milliseconds: float) -> None:
        self.clock.advance(milliseconds / 1e3)

    def close(self) -> None:
        self.waits.abort("r")
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


def test_blocks_below_l2_are_loaded_from_the_end(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["l2"] * 3 + ["disk"] * 100)
    assert rig.match(0).status is LookupStatus.PENDING
    firsts = [rig.first_of(load) for load in rig.loads()]
    assert firsts[0] == 0
    assert firsts[1:] == sorted(firsts[1:], reverse=True)
    assert len(firsts) <= 1 + RANGES_MAX
    requested = sorted(name for load in rig.loads() for name in load.hashes)
    assert requested == rig.hashes, "each block once"


def test_computed_head_and_loaded_tail_meet(rigs: Any) -> None:
    """The part in L2 comes first. Then the head is computed two blocks at a time, and each range
    that was reached is released. The blocks that arrived beyond it are taken at once."""
    policy = Scripted(COMPUTE_2)
    rig = rigs(policy, ["l2"] * 2 + ["disk"] * 12)
    assert rig.match(0) == HookMatch(LookupStatus.PENDING), "L2 answers within a round trip"
    by_first = {rig.first_of(load): load for load in rig.loads()}
    assert sorted(by_first) == [0, 2, 6, 10]
    rig.store.answer(by_first[0])
    found = rig.match(0)
    assert (found.status, found.blocks, found.tiers, found.more) == (
        LookupStatus.HIT,
        2,
        ("l2", "l2"),
        True,
    )
    assert rig.take(2) == [0, 1]
    assert rig.match(2) == HookMatch(LookupStatus.PENDING, compute=2)
    assert policy.states[-1].start == 2 * 4
    assert list(policy.states[-1].pending) == ["disk"] * 12
    assert [rig.first_of(t) for t in rig.loads()] == [10, 6, 4], "the engine computes 2 and 3"
    rig.store.answer(by_first[10])
    assert rig.match(4) == HookMatch(LookupStatus.PENDING, compute=2)
    assert len(policy.states[-1].pending) == 6
    assert [rig.first_of(t) for t in rig.loads()] == [10, 6]
    rig.store.answer(by_first[6])
    found = rig.match(6)
    assert (found.status, found.blocks, found.more) == (LookupStatus.HIT, 8, False)
    assert rig.take(8) == list(range(6, 14))
    assert len(rig.waits) == 0
    assert rig.waits.counts["hits"] == 1


def test_blocks_in_the_middle_of_a_range_are_used(rigs: Any) -> None:
    """Half of a range has arrived when the engine reaches it. That half is taken, and the other one
    is loaded again if it is not computed."""
    rig = rigs(Scripted(COMPUTE_2, WAIT, COMPUTE_2), ["disk"] * 4)
    rig.match(0)
    [load] = rig.loads()
    rig.store.answer(load, blocks=2, done=False)
    assert rig.match(0).blocks == 2
    assert rig.take(2) == [0, 1]
    assert [rig.first_of(t) for t in rig.loads()] == [2]
    assert rig.match(2).compute == 2
    assert rig.loads() == []


def test_waiting_loads_everything_at_once(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2, WAIT), ["disk"] * 20)
    for segment in (None, *range(5)):
        assert rig.match(0).status is LookupStatus.PENDING or segment is None
        if segment is not None:
            rig.store.answer(rig.loads()[segment])
            rig.pass_ms(3)
    found = rig.match(0)
    assert (found.blocks, found.more) == (20, False)


def test_the_policy_may_skip_a_load(rigs: Any) -> None:
    rig = rigs(Scripted(Decision(Action.CANCEL)), ["l2"] * 2 + ["disk"] * 8)
    rig.match(0)
    [load] = rig.loads()
    assert load.hashes == tuple(rig.hashes[:2])
    rig.store.answer(load)
    found = rig.match(0)
    assert (found.blocks, found.more) == (2, False)


def test_cancelling_keeps_arrived_blocks(rigs: Any) -> None:
    """The engine computes up to it at once, without another decision of the policy."""
    policy = Scripted(COMPUTE_2, COMPUTE_2, Decision(Action.CANCEL))
    rig = rigs(policy, ["disk"] * 12)
    assert rig.match(0).compute == 2
    rig.store.answer(rig.loads()[0])
    assert rig.match(2) == HookMatch(LookupStatus.PENDING, compute=6)
    assert [rig.first_of(t) for t in rig.loads()] == [8]
    assert len(policy.states) == 3
    found = rig.match(8)
    assert (found.blocks, found.more) == (4, False)


@pytest.mark.parametrize("came", [False, True])
def test_no_request_waits_longer_than_the_maximum_wait(rigs: Any, came: bool) -> None:
    policy = Scripted(COMPUTE_2, WAIT)
    rig = rigs(policy, ["disk"] * 12)
    rig.match(0)
    assert rig.match(0) == HookMatch(LookupStatus.PENDING)
    if came:
        rig.store.answer(rig.loads()[0])
    rig.pass_ms(MAX_WAIT_MS)
    found = rig.match(0)
    if came:
        assert found == HookMatch(LookupStatus.PENDING, compute=8)
        assert rig.match(8).blocks == 4
    else:
        assert found.status is LookupStatus.MISS
        assert rig.loads() == []
    # The policy learns that no block arrived for so long.
    assert policy.told[-1][0] == "disk"
    assert policy.told[-1][2:] == (pytest.approx(MAX_WAIT_MS / 1e3), float("inf"))


def test_a_gap_is_computed_and_later_blocks_are_taken(rigs: Any) -> None:
    """A range ends early because a block in it was lost. The blocks beyond it are still loaded."""
    rig = rigs(Scripted(COMPUTE_2, WAIT), ["disk"] * 12)
    rig.match(0)
    by_first = {rig.first_of(load): load for load in rig.loads()}
    del rig.store.blocks[rig.hashes[1]]
    for load in by_first.values():
        rig.store.answer(load)
    found = rig.match(0)
    assert (found.blocks, found.more) == (1, True)
    rig.take(1)
    assert rig.match(1) == HookMatch(LookupStatus.PENDING, compute=3)
    found = rig.match(4)
    assert (found.blocks, found.more) == (8, False)


def test_an_engine_that_cannot_start_does_not_compute(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["disk"] * 12)
    assert rig.match(0, can_start=False) == HookMatch(LookupStatus.PENDING)
    assert len(rig.loads()) == 3, "but the blocks it will need are in flight"
    assert rig.match(0, can_start=True).compute == 2


def test_l1_that_shrank_starts_over(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["disk"] * 12)
    assert rig.match(4).compute == 2
    assert rig.match(2).compute == 2
    requested = sorted(name for load in rig.loads() for name in load.hashes)
    assert requested == rig.hashes[4:]


def test_arrivals_are_reported_with_the_times_of_the_checks(rigs: Any) -> None:
    policy = Scripted(COMPUTE_2, WAIT)
    rig = rigs(policy, ["disk"] * 8)
    rig.match(0)
    rig.pass_ms(10)
    rig.match(0)
    rig.pass_ms(4)
    rig.store.answer(rig.loads()[0])
    rig.match(0)
    assert policy.told == [("disk", 4, pytest.approx(0.010), pytest.approx(0.014))]


def test_a_silent_store_costs_a_round_trip(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["disk"] * 8)
    rig.store.auto.clear()
    assert rig.match(0) == HookMatch(LookupStatus.PENDING)
    rig.pass_ms(ROUND_TRIP_MS + 1)
    assert rig.match(0).status is LookupStatus.MISS


def test_a_store_that_fails_is_a_miss(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["disk"] * 8)
    rig.match(0)
    rig.store.reconnect()
    assert rig.match(0).status is LookupStatus.MISS
    rig.store.raising = True
    assert rig.match(2).status is LookupStatus.MISS
    rig.store.raising = False


def test_slots_of_one_slab_only_are_taken_together(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2, WAIT), ["disk"] * 8)
    rig.match(0)
    rig.store.answer(rig.loads()[1])
    before = rig.store.slab
    rig.store.reconnect()
    assert rig.store.slab is not before
    found = rig.match(0)
    assert found.blocks == 4


# Whole engines.


ROUNDS_MAX = 20
"""Run until every kind of decision was made: a busy machine makes fewer."""


class AnyChoice(Adaptive):
    """Decides at random, so that every split occurs."""

    def __init__(self, seed: int, max_wait_ms: float = 1e6) -> None:
        super().__init__(max_wait_ms)
        self.rng = random.Random(seed)
        self.made: set[Action | LoadMode] = set()

    def choose_mode(self, state: LoadState) -> ModeChoice:
        mode = self.rng.choice([*LoadMode, LoadMode.BOTH, LoadMode.BOTH])
        self.made.add(mode)
        return ModeChoice(mode)

    def decide_next(self, state: LoadState) -> Decision:
        action = self.rng.choice(
            [
                Action.WAIT,
                Action.WAIT,
                Action.COMPUTE,
                Action.COMPUTE,
                Action.COMPUTE,
                Action.CANCEL,
            ]
        )
        self.made.add(action)
        blocks = self.rng.randint(1, len(state.pending)) if action is Action.COMPUTE else 0
        return Decision(action, blocks)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model(layers=4)


@pytest.fixture(scope="module")
def baseline(loaded: LoadedModel) -> Baseline:
    return Baseline(loaded)


def asks(seed: int, count: int = 4) -> list[PromptRequest]:
    """Long prompts, two of which share a prefix."""
    rng = np.random.default_rng(seed)
    fronts = [rng.integers(0, VOCAB, 130).tolist() for _ in range(2)]
    return [
        PromptRequest(tuple(fronts[index % 2] + rng.integers(0, VOCAB, 10 + 9 * index).tolist()))
        for index in range(count)
    ]


def emptied(served: CachedEngine, store: Store) -> None:
    """All blocks are only in the lower tier."""
    flush_store(store)
    store.clear("l2")
    served.inner.reset_prefix_cache()


def reads(schedule: Schedule) -> Schedule:
    """These faults, for reads only."""
    return lambda call, keys: schedule(call, keys) if call == "read" else None


def over(loaded: LoadedModel, *, slots: int = 256) -> tuple[Store, FaultyTier]:
    tier = FaultyTier(MemoryTier(name="below"), slow_s=0.002)
    return Store(Slab.create(slots, loaded.namespace(BLOCK_TOKENS).block_bytes), [tier]), tier


@pytest.mark.parametrize("seed", range(8))
def test_output_is_the_same_for_every_split(
    loaded: LoadedModel, baseline: Baseline, seed: int
) -> None:
    """Prompts in a batch, steps smaller than a prompt, and a tier slow enough to race."""
    store, tier = over(loaded)
    policy = AnyChoice(seed)
    served = CachedEngine(
        loaded, store, policy=policy, max_batch_tokens=random.Random(seed).choice([24, 64, 512])
    )
    wanted = asks(seed)
    for ask in wanted:
        served.run([ask])
    spared: set[str] = set()
    for rounds in range(ROUNDS_MAX):
        if rounds >= 3 and "below" in spared and len(policy.made) > 3:
            break
        emptied(served, store)
        tier.schedule = always(Fault.SLOW, "read")
        for ask, output in zip(wanted, served.run(wanted), strict=True):
            assert output.tokens == baseline.tokens(ask)
            assert sum(output.cached.values()) < len(ask.tokens)
            spared |= {name for name, tokens in output.cached.items() if tokens}
        tier.schedule = None
    assert "below" in spared
    assert len(policy.made) > 3
    served.close()
    check_slots_free(store)
    store.close()


@pytest.mark.parametrize("seed", range(6))
def test_output_is_the_same_when_loads_fail_in_the_middle(
    loaded: LoadedModel, baseline: Baseline, seed: int
) -> None:
    store, tier = over(loaded)
    served = CachedEngine(
        loaded, store, policy=AnyChoice(seed, max_wait_ms=300.0), max_wait_ms=300.0
    )
    wanted = asks(seed + 100)
    served.run(wanted)
    rng = random.Random(seed)
    kinds = [Fault.REFUSED, Fault.ERROR, Fault.TRUNCATED, Fault.CORRUPTED, Fault.SLOW, None, None]
    for _ in range(3):
        emptied(served, store)
        tier.schedule = reads(in_turn([rng.choice(kinds) for _ in range(200)]))
        for ask, output in zip(wanted, served.run(wanted), strict=True):
            assert output.tokens == baseline.tokens(ask)
        tier.schedule = None
    served.close()
    check_slots_free(store)
    store.close()


def test_a_tier_that_hangs_in_the_middle_costs_at_most_the_maximum_wait(
    loaded: LoadedModel, baseline: Baseline
) -> None:
    store, tier = over(loaded)
    served = CachedEngine(loaded, store, policy=Adaptive(), max_wait_ms=200.0)
    [ask] = asks(7, 1)
    served.run([ask])
    for good in (0, 3, 9):
        emptied(served, store)
        tier.schedule = reads(in_turn([None] * good + [Fault.HUNG] * 200))
        [output] = served.run([ask])
        assert output.tokens == baseline.tokens(ask)
        tier.schedule = None
        tier.release()
    served.close()
    check_slots_free(store)
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_aborts_and_preemptions_in_the_middle_leak_nothing(
    loaded: LoadedModel, baseline: Baseline, seed: int
) -> None:
    """The pool is too small, so that running requests are preempted. One in four is aborted."""
    store, tier = over(loaded)
    served = CachedEngine(loaded, store, policy=AnyChoice(seed), num_pages=84, max_batch_tokens=40)
    rng = random.Random(seed)
    wanted = [PromptRequest(ask.tokens, max_tokens=16) for ask in asks(seed + 50, 6)]
    for ask in wanted:
        served.run([ask])
    for turn in range(12):
        if turn > 2 and served.inner.stats()["preemptions"]:
            break
        emptied(served, store)
        tier.schedule = always(Fault.SLOW, "read")
        names = served.submit(wanted)
        dead = set(rng.sample(names, 2))
        made: dict[str, list[int]] = {name: [] for name in names}
        ended: dict[str, str] = {}
        steps = 0
        while served.inner.busy:
            steps += 1
            for name in dead - set(ended):
                if rng.random() < 0.05 and steps > 3:
                    served.inner.abort(name)
            for output in served.inner.step():
                made[output.request_id] += output.tokens
                if output.finish_reason:
                    ended[output.request_id] = output.finish_reason
        for name, ask in zip(names, wanted, strict=True):
            right = baseline.tokens(ask)
            assert made[name] == right[: len(made[name])]
            assert ended[name] == "abort" or made[name] == right
        tier.schedule = None
    assert served.inner.stats()["preemptions"] > 0
    served.close()
    check_slots_free(store)
    store.close()


def test_the_real_policy_serves_and_learns(loaded: LoadedModel, baseline: Baseline) -> None:
    store, _ = over(loaded)
    served = CachedEngine(loaded, store, policy=Adaptive())
    wanted = asks(3, 1)
    end_s = time.monotonic() + 60.0
    while "below" not in served.hooks.stats()["adaptive"]["tiers"]:
        assert time.monotonic() < end_s
        emptied(served, store)
        for ask, output in zip(wanted, served.run(wanted), strict=True):
            assert output.tokens == baseline.tokens(ask)
    stats = served.hooks.stats()["adaptive"]
    assert stats["prefill_tokens_per_s"] > 0
    assert served.hooks.wants_times
    served.close()
    check_slots_free(store)
    store.close()
