"""A run loaded from its end while its front is computed: the connector's side, on a store that
answers as the test says, and whole engines over real stores whose tiers fail half way."""

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
    Ask,
    Baseline,
    Served,
    check_slots_free,
    settle,
    tiny_model,
)
from manual_store import ManualClock, ManualStore

from kvstore.blocks.key import Namespace
from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.connectors.common.load_ranges import SEGMENTS_MAX
from kvstore.connectors.common.pending_lookups import ROUND_TRIP_MS
from kvstore.connectors.common.split_load import TwoEnds
from kvstore.engine.loader import LoadedModel
from kvstore.interface import Answer, HookMatch, Load
from kvstore.prefetch.adaptive import WAIT, Adaptive, Begin, Choice, Do, Outlook
from kvstore.prefetch.load_modes import Way
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.testing.faults import Fault, FaultyTier, Schedule, always, in_turn
from kvstore.tiers.memory import MemoryTier

torch.set_num_threads(1)

SPACE = Namespace(model="tiny", dtype="float32", layers=2, kv_heads=1, head_dim=4, block_tokens=4)
DEADLINE_MS = 500.0
COMPUTE_2 = Choice(Do.COMPUTE, 2)


class Scripted(Adaptive):
    """A policy whose choices the test gives; it keeps what it was told and asked."""

    def __init__(self, *choices: Choice, cap_ms: float = 1e6) -> None:
        super().__init__(cap_ms)
        self.choices = list(choices)
        self.outlooks: list[Outlook] = []
        self.told: list[tuple[str, int, float, float]] = []
        self.begins = Begin(Way.BOTH)

    def choose(self, outlook: Outlook) -> Choice:
        self.outlooks.append(outlook)
        return self.choices.pop(0) if len(self.choices) > 1 else self.choices[0]

    def begin(self, outlook: Outlook) -> Begin:
        """The first choice is about how to begin."""
        let_go = self.choose(outlook).do is Do.LET_GO
        return Begin(Way.COMPUTE) if let_go else self.begins

    def arrived(
        self, tier: str, blocks: int, low_s: float, high_s: float, *, beside: bool = False
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
        self.waits = TwoEnds(
            GuardedStore(self.store),
            policy=policy,
            deadline_ms=DEADLINE_MS,
            min_load_tokens=0,
            clock=self.clock,
        )

    def match(self, first: int, *, can_start: bool = True) -> HookMatch:
        return self.waits.match("r", self.hashes, first, can_start=can_start)

    def loads(self) -> list[Any]:
        """Tickets that are out, in the order in which they were asked for."""
        return [
            t for t in self.store.asked if isinstance(t, Load) and t.ticket_id in self.store.open
        ]

    def first_of(self, ticket: Any) -> int:
        return self.hashes.index(ticket.hashes[0])

    def take(self, blocks: int) -> list[int]:
        """Take the hit, as after its copy; the places of the blocks taken."""
        tickets = self.waits.take("r", blocks)
        names = [name for t in tickets for name in t.hashes[: len(t.slots)]]
        for ticket in tickets:
            self.store.release(ticket)
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


def test_what_lies_below_is_asked_for_from_its_end(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["l2"] * 3 + ["disk"] * 100)
    assert rig.match(0).answer is Answer.PENDING
    firsts = [rig.first_of(ticket) for ticket in rig.loads()]
    assert firsts[0] == 0
    assert firsts[1:] == sorted(firsts[1:], reverse=True)
    assert len(firsts) <= 1 + SEGMENTS_MAX
    asked = sorted(name for ticket in rig.loads() for name in ticket.hashes)
    assert asked == rig.hashes, "each block once"


def test_two_ends_meet(rigs: Any) -> None:
    """L2's part first; then the front is computed two blocks at a time, and each segment that was
    reached is let go; what has come behind is taken in one."""
    policy = Scripted(COMPUTE_2)
    rig = rigs(policy, ["l2"] * 2 + ["disk"] * 12)
    assert rig.match(0) == HookMatch(Answer.PENDING), "L2 answers within a round trip"
    by_first = {rig.first_of(ticket): ticket for ticket in rig.loads()}
    assert sorted(by_first) == [0, 2, 6, 10]
    rig.store.answer(by_first[0])
    found = rig.match(0)
    assert (found.answer, found.blocks, found.tiers, found.more) == (
        Answer.HIT,
        2,
        ("l2", "l2"),
        True,
    )
    assert rig.take(2) == [0, 1]
    assert rig.match(2) == HookMatch(Answer.PENDING, compute=2)
    assert policy.outlooks[-1].start == 2 * 4
    assert list(policy.outlooks[-1].missing) == ["disk"] * 12
    assert [rig.first_of(t) for t in rig.loads()] == [10, 6, 4], "2 and 3 are the engine's now"
    rig.store.answer(by_first[10])
    assert rig.match(4) == HookMatch(Answer.PENDING, compute=2)
    assert len(policy.outlooks[-1].missing) == 6
    assert [rig.first_of(t) for t in rig.loads()] == [10, 6]
    rig.store.answer(by_first[6])
    found = rig.match(6)
    assert (found.answer, found.blocks, found.more) == (Answer.HIT, 8, False)
    assert rig.take(8) == list(range(6, 14))
    assert len(rig.waits) == 0
    assert rig.waits.counts["hits"] == 1


def test_what_comes_in_the_middle_of_a_segment_is_used(rigs: Any) -> None:
    """Half of a segment has come when the engine reaches it: that half is taken, and the other
    asked for anew, if it is not computed."""
    rig = rigs(Scripted(COMPUTE_2, WAIT, COMPUTE_2), ["disk"] * 4)
    rig.match(0)
    [ticket] = rig.loads()
    rig.store.answer(ticket, blocks=2, done=False)
    assert rig.match(0).blocks == 2
    assert rig.take(2) == [0, 1]
    assert [rig.first_of(t) for t in rig.loads()] == [2]
    assert rig.match(2).compute == 2
    assert rig.loads() == []


def test_waiting_hands_over_all_at_once(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2, WAIT), ["disk"] * 20)
    for segment in (None, *range(5)):
        assert rig.match(0).answer is Answer.PENDING or segment is None
        if segment is not None:
            rig.store.answer(rig.loads()[segment])
            rig.pass_ms(3)
    found = rig.match(0)
    assert (found.blocks, found.more) == (20, False)


def test_what_is_not_worth_loading_is_not_asked_for(rigs: Any) -> None:
    rig = rigs(Scripted(Choice(Do.LET_GO)), ["l2"] * 2 + ["disk"] * 8)
    rig.match(0)
    [ticket] = rig.loads()
    assert ticket.hashes == tuple(rig.hashes[:2])
    rig.store.answer(ticket)
    found = rig.match(0)
    assert (found.blocks, found.more) == (2, False)


def test_letting_go_keeps_what_has_come(rigs: Any) -> None:
    """Computing reaches it in one go, without asking the policy again."""
    policy = Scripted(COMPUTE_2, COMPUTE_2, Choice(Do.LET_GO))
    rig = rigs(policy, ["disk"] * 12)
    assert rig.match(0).compute == 2
    rig.store.answer(rig.loads()[0])
    assert rig.match(2) == HookMatch(Answer.PENDING, compute=6)
    assert [rig.first_of(t) for t in rig.loads()] == [8]
    assert len(policy.outlooks) == 3
    found = rig.match(8)
    assert (found.blocks, found.more) == (4, False)


@pytest.mark.parametrize("came", [False, True])
def test_past_the_deadline_nobody_waits(rigs: Any, came: bool) -> None:
    policy = Scripted(COMPUTE_2, WAIT)
    rig = rigs(policy, ["disk"] * 12)
    rig.match(0)
    assert rig.match(0) == HookMatch(Answer.PENDING)
    if came:
        rig.store.answer(rig.loads()[0])
    rig.pass_ms(DEADLINE_MS)
    found = rig.match(0)
    if came:
        assert found == HookMatch(Answer.PENDING, compute=8)
        assert rig.match(8).blocks == 4
    else:
        assert found.answer is Answer.MISS
        assert rig.loads() == []
    # That nothing came for so long is told.
    assert policy.told[-1][0] == "disk"
    assert policy.told[-1][2:] == (pytest.approx(DEADLINE_MS / 1e3), float("inf"))


def test_a_hole_is_computed_and_what_follows_it_is_taken(rigs: Any) -> None:
    """A segment ends early, because a block in it was lost: the load goes on behind it."""
    rig = rigs(Scripted(COMPUTE_2, WAIT), ["disk"] * 12)
    rig.match(0)
    by_first = {rig.first_of(ticket): ticket for ticket in rig.loads()}
    del rig.store.blocks[rig.hashes[1]]
    for ticket in by_first.values():
        rig.store.answer(ticket)
    found = rig.match(0)
    assert (found.blocks, found.more) == (1, True)
    rig.take(1)
    assert rig.match(1) == HookMatch(Answer.PENDING, compute=3)
    found = rig.match(4)
    assert (found.blocks, found.more) == (8, False)


def test_an_engine_that_cannot_start_does_not_compute(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["disk"] * 12)
    assert rig.match(0, can_start=False) == HookMatch(Answer.PENDING)
    assert len(rig.loads()) == 3, "but what it will need is on its way"
    assert rig.match(0, can_start=True).compute == 2


def test_l1_that_shrank_starts_over(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["disk"] * 12)
    assert rig.match(4).compute == 2
    assert rig.match(2).compute == 2
    asked = sorted(name for ticket in rig.loads() for name in ticket.hashes)
    assert asked == rig.hashes[4:]


def test_arrivals_are_told_with_the_looks_between_which_they_came(rigs: Any) -> None:
    policy = Scripted(COMPUTE_2, WAIT)
    rig = rigs(policy, ["disk"] * 8)
    rig.match(0)
    rig.pass_ms(10)
    rig.match(0)
    rig.pass_ms(4)
    rig.store.answer(rig.loads()[0])
    rig.match(0)
    assert policy.told == [("disk", 4, pytest.approx(0.010), pytest.approx(0.014))]


def test_a_store_that_says_nothing_is_waited_for_a_round_trip(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["disk"] * 8)
    rig.store.auto.clear()
    assert rig.match(0) == HookMatch(Answer.PENDING)
    rig.pass_ms(ROUND_TRIP_MS + 1)
    assert rig.match(0).answer is Answer.MISS


def test_a_store_that_fails_is_a_miss(rigs: Any) -> None:
    rig = rigs(Scripted(COMPUTE_2), ["disk"] * 8)
    rig.match(0)
    rig.store.reconnect()
    assert rig.match(0).answer is Answer.MISS
    rig.store.raising = True
    assert rig.match(2).answer is Answer.MISS
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
"""Until some of each kind of choice was made: on a busy machine fewer are to be made."""


class AnyChoice(Adaptive):
    """Chooses at random: every split there can be."""

    def __init__(self, seed: int, cap_ms: float = 1e6) -> None:
        super().__init__(cap_ms)
        self.rng = random.Random(seed)
        self.made: set[Do | Way] = set()

    def begin(self, outlook: Outlook) -> Begin:
        way = self.rng.choice([*Way, Way.BOTH, Way.BOTH])
        self.made.add(way)
        return Begin(way)

    def choose(self, outlook: Outlook) -> Choice:
        do = self.rng.choice([Do.WAIT, Do.WAIT, Do.COMPUTE, Do.COMPUTE, Do.COMPUTE, Do.LET_GO])
        self.made.add(do)
        blocks = self.rng.randint(1, len(outlook.missing)) if do is Do.COMPUTE else 0
        return Choice(do, blocks)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model(layers=4)


@pytest.fixture(scope="module")
def baseline(loaded: LoadedModel) -> Baseline:
    return Baseline(loaded)


def asks(seed: int, count: int = 4) -> list[Ask]:
    """Long prompts of which two share a front."""
    rng = np.random.default_rng(seed)
    fronts = [rng.integers(0, VOCAB, 130).tolist() for _ in range(2)]
    return [
        Ask(tuple(fronts[index % 2] + rng.integers(0, VOCAB, 10 + 9 * index).tolist()))
        for index in range(count)
    ]


def emptied(served: Served, store: Store) -> None:
    """Everything lies in the lower tier alone."""
    settle(store)
    store.clear("l2")
    served.engine.reset_prefix_cache()


def reads(schedule: Schedule) -> Schedule:
    """These faults, of reads alone."""
    return lambda verb, keys: schedule(verb, keys) if verb == "read" else None


def over(loaded: LoadedModel, *, slots: int = 256) -> tuple[Store, FaultyTier]:
    tier = FaultyTier(MemoryTier(name="below"), slow_s=0.002)
    return Store(Slab.create(slots, loaded.namespace(BLOCK_TOKENS).block_bytes), [tier]), tier


@pytest.mark.parametrize("seed", range(8))
def test_output_is_the_same_for_every_split(
    loaded: LoadedModel, baseline: Baseline, seed: int
) -> None:
    """With prompts in a batch, steps smaller than a prompt, and a tier slow enough to race."""
    store, tier = over(loaded)
    policy = AnyChoice(seed)
    served = Served(
        loaded, store, policy=policy, max_batch_tokens=random.Random(seed).choice([24, 64, 512])
    )
    wanted = asks(seed)
    for ask in wanted:
        served.ask([ask])
    spared: set[str] = set()
    for rounds in range(ROUNDS_MAX):
        if rounds >= 3 and "below" in spared and len(policy.made) > 3:
            break
        emptied(served, store)
        tier.schedule = always(Fault.SLOW, "read")
        for ask, output in zip(wanted, served.ask(wanted), strict=True):
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
def test_output_is_the_same_when_loads_fail_half_way(
    loaded: LoadedModel, baseline: Baseline, seed: int
) -> None:
    store, tier = over(loaded)
    served = Served(loaded, store, policy=AnyChoice(seed, cap_ms=300.0), deadline_ms=300.0)
    wanted = asks(seed + 100)
    served.ask(wanted)
    rng = random.Random(seed)
    kinds = [Fault.REFUSED, Fault.ERROR, Fault.TRUNCATED, Fault.CORRUPTED, Fault.SLOW, None, None]
    for _ in range(3):
        emptied(served, store)
        tier.schedule = reads(in_turn([rng.choice(kinds) for _ in range(200)]))
        for ask, output in zip(wanted, served.ask(wanted), strict=True):
            assert output.tokens == baseline.tokens(ask)
        tier.schedule = None
    served.close()
    check_slots_free(store)
    store.close()


def test_a_tier_that_hangs_half_way_keeps_nobody_past_the_deadline(
    loaded: LoadedModel, baseline: Baseline
) -> None:
    store, tier = over(loaded)
    served = Served(loaded, store, policy=Adaptive(), deadline_ms=200.0)
    [ask] = asks(7, 1)
    served.ask([ask])
    for good in (0, 3, 9):
        emptied(served, store)
        tier.schedule = reads(in_turn([None] * good + [Fault.HUNG] * 200))
        [output] = served.ask([ask])
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
    """A pool too small for all, so that running ones are preempted, and one in four is aborted."""
    store, tier = over(loaded)
    served = Served(loaded, store, policy=AnyChoice(seed), num_pages=84, max_batch_tokens=40)
    rng = random.Random(seed)
    wanted = [Ask(ask.tokens, max_tokens=16) for ask in asks(seed + 50, 6)]
    for ask in wanted:
        served.ask([ask])
    for turn in range(12):
        if turn > 2 and served.engine.stats()["preemptions"]:
            break
        emptied(served, store)
        tier.schedule = always(Fault.SLOW, "read")
        names = served.submit(wanted)
        dead = set(rng.sample(names, 2))
        made: dict[str, list[int]] = {name: [] for name in names}
        ended: dict[str, str] = {}
        steps = 0
        while served.engine.busy:
            steps += 1
            for name in dead - set(ended):
                if rng.random() < 0.05 and steps > 3:
                    served.engine.abort(name)
            for output in served.engine.step():
                made[output.request_id] += output.tokens
                if output.finish_reason:
                    ended[output.request_id] = output.finish_reason
        for name, ask in zip(names, wanted, strict=True):
            right = baseline.tokens(ask)
            assert made[name] == right[: len(made[name])]
            assert ended[name] == "abort" or made[name] == right
        tier.schedule = None
    assert served.engine.stats()["preemptions"] > 0
    served.close()
    check_slots_free(store)
    store.close()


def test_the_real_policy_serves_and_learns(loaded: LoadedModel, baseline: Baseline) -> None:
    store, _ = over(loaded)
    served = Served(loaded, store, policy=Adaptive())
    wanted = asks(3, 1)
    end_s = time.monotonic() + 60.0
    while "below" not in served.hooks.stats()["adaptive"]["tiers"]:
        assert time.monotonic() < end_s
        emptied(served, store)
        for ask, output in zip(wanted, served.ask(wanted), strict=True):
            assert output.tokens == baseline.tokens(ask)
    stats = served.hooks.stats()["adaptive"]
    assert stats["prefill_tokens_per_s"] > 0
    assert served.hooks.wants_times
    served.close()
    check_slots_free(store)
    store.close()
