"""Scheduling: order, token budget, preemption, pending matches and loads."""

from __future__ import annotations

import random

import pytest

from kvstore.engine import scheduler as rules
from kvstore.engine.loop import IDLE_POLL_S, Engine, collect
from kvstore.engine.request import Output, Request, State
from kvstore.testing.fake_engine import (
    FakeHooks,
    FakeLoaded,
    FakePlan,
    FakeRunner,
    reference_tokens,
)

VOCAB = 97


def fake_engine(
    num_pages: int = 100,
    *,
    page_tokens: int = 4,
    block_tokens: int = 8,
    plan: FakePlan | None = None,
    blocks: dict | None = None,
    **options,
) -> Engine:
    runner = FakeRunner(num_pages, page_tokens, VOCAB)
    hooks = FakeHooks(runner.pool, page_tokens, block_tokens, plan, blocks)
    options = {"max_batch_tokens": 32, "max_running": 8, **options}
    return Engine(
        FakeLoaded(),
        num_pages=num_pages,
        page_tokens=page_tokens,
        runner=runner,
        hooks=hooks,
        **options,
    )


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 4) -> None:
    engine.add(Request(request_id=name, prompt_tokens=prompt, max_tokens=max_tokens))


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def finish(engine: Engine, before: list[Output] | None = None) -> list[Output]:
    outputs = (before or []) + engine.run_until_idle()
    engine.check()
    return outputs


def first_token_order(outputs: list[Output]) -> list[str]:
    return list(dict.fromkeys(output.request_id for output in outputs if output.tokens))


# ---- the step ----


def test_a_long_prefill_is_split_over_steps_beside_decoding() -> None:
    engine = fake_engine(max_batch_tokens=10, max_running=4)
    ask(engine, "short", prompt_of(1, 6), 12)
    outputs = engine.step()
    ask(engine, "long", prompt_of(2, 60), 2)
    outputs = finish(engine, outputs)
    rows = engine.runner.rows_seen
    assert all(sum(tokens for _start, tokens in step) <= 10 for step in rows)
    # One token for the decoding request first, then nine of the long prompt's.
    assert rows[1] == [(6, 1), (0, 9)]
    assert rows[2] == [(7, 1), (9, 9)]
    whole = collect(outputs, ["short", "long"])
    assert whole[0].tokens == reference_tokens(prompt_of(1, 6), 12, VOCAB)
    assert whole[1].tokens == reference_tokens(prompt_of(2, 60), 2, VOCAB)


def test_several_prompts_share_a_step_up_to_the_slot_limit() -> None:
    engine = fake_engine(max_batch_tokens=32, max_running=2)
    for name in range(3):
        ask(engine, str(name), prompt_of(name, 8), 3)
    engine.step()
    assert engine.runner.rows_seen == [[(0, 8), (0, 8)]]
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (2, 1)
    finish(engine)


# ---- publication ----


def test_a_burst_hits_the_blocks_of_its_first_request() -> None:
    engine = fake_engine(max_batch_tokens=16)
    trunk = prompt_of(1, 40)
    for name in range(4):
        ask(engine, str(name), [*trunk, name], 2)
    outputs = collect(finish(engine), list("0123"))
    assert outputs[0].cached == {"l1": 0}
    assert [output.cached for output in outputs[1:]] == [{"l1": 40}] * 3
    assert engine.stats()["computed_tokens"] == 41 + 3 + 4  # the prompts, then a token each


def test_a_burst_in_one_step_computes_the_same_block_once() -> None:
    engine = fake_engine(max_batch_tokens=400)
    trunk = prompt_of(1, 40)
    for name in range(8):
        ask(engine, str(name), [*trunk, name], 1)
    outputs = collect(finish(engine), [str(name) for name in range(8)])
    assert sum(output.cached["l1"] for output in outputs) == 7 * 40


def test_decoding_publishes_too() -> None:
    engine = fake_engine()
    ask(engine, "a", prompt_of(1, 10), 30)
    outputs: list[Output] = []
    while sum(len(output.tokens) for output in outputs) < 20:
        outputs += engine.step()
    made = [token for output in outputs for token in output.tokens]
    ask(engine, "b", prompt_of(1, 10) + made[:17], 1)  # 26 tokens before its last
    (b,) = collect(finish(engine), ["b"])
    assert b.cached == {"l1": 24}


def test_requests_that_computed_the_same_pages_share_them() -> None:
    engine = fake_engine(block_tokens=40, max_batch_tokens=100)
    trunk = prompt_of(1, 20)  # no full block, so neither request waits for the other
    ask(engine, "a", [*trunk, 1], 30)
    ask(engine, "b", [*trunk, 2], 30)
    engine.step()
    a, b = engine.scheduler.running
    assert a.computed == b.computed == 21
    assert a.pages[:5].tolist() == b.pages[:5].tolist()
    assert a.pages[5] != b.pages[5]
    finish(engine)


# ---- order ----


def test_the_longest_prefix_goes_first() -> None:
    engine = fake_engine(max_running=1, max_batch_tokens=64)
    trunk = prompt_of(1, 40)
    engine.generate([trunk], max_tokens=1)
    ask(engine, "none", prompt_of(2, 41))
    ask(engine, "some", trunk[:20] + prompt_of(3, 21))
    ask(engine, "most", [*trunk, 5])
    assert first_token_order(finish(engine)) == ["most", "some", "none"]


def test_blocks_in_a_lower_tier_count_as_prefix() -> None:
    engine = fake_engine(num_pages=24, max_running=1, max_batch_tokens=64)
    trunk = prompt_of(1, 40)
    engine.generate([trunk], max_tokens=1)
    engine.generate([prompt_of(9, 90)], max_tokens=1)
    assert engine.cache.tree.stored_only_tokens > 0
    ask(engine, "none", prompt_of(2, 41))
    ask(engine, "stored", [*trunk, 5])
    outputs = finish(engine)
    assert first_token_order(outputs) == ["stored", "none"]


def test_a_long_queue_is_served_in_order_of_arrival() -> None:
    engine = fake_engine(1000, max_running=1, max_batch_tokens=64)
    trunk = prompt_of(1, 16)
    engine.generate([trunk], max_tokens=1)
    count = rules.PREFIX_ORDER_MAX_WAITING + 3
    for name in range(count):
        cached = name == count - 1
        ask(engine, str(name), [*trunk, 1] if cached else prompt_of(name + 2, 5), 1)
    outputs = []
    for _ in range(3):  # while longer than the limit: in order
        outputs += engine.step()
    assert first_token_order(outputs) == ["0", "1", "2"]
    outputs = engine.step()  # short enough: the cached one
    assert first_token_order(outputs) == [str(count - 1)]
    finish(engine)


def test_no_request_is_starved() -> None:
    engine = fake_engine(1000, max_running=1, max_batch_tokens=64)
    trunk = prompt_of(1, 40)
    engine.generate([trunk], max_tokens=1)
    ask(engine, "poor", prompt_of(2, 41), 1)
    outputs: list[Output] = []
    for name in range(3 * rules.MAX_PASSED_OVER):
        ask(engine, str(name), [*trunk, name], 1)
        outputs += engine.step()
    order = first_token_order(finish(engine, outputs))
    assert order.index("poor") == rules.MAX_PASSED_OVER


def test_no_request_is_starved_within_one_step() -> None:
    engine = fake_engine(1000, max_running=60, max_batch_tokens=64)
    trunk = prompt_of(1, 40)
    engine.generate([trunk], max_tokens=1)
    ask(engine, "poor", prompt_of(2, 41), 1)
    for name in range(50):
        ask(engine, str(name), [*trunk, name], 1)
    engine.step()
    poor = next(iter(engine.scheduler.waiting))
    assert poor.passed_over == rules.MAX_PASSED_OVER
    finish(engine)


# ---- pages run out ----


def test_the_latest_request_is_preempted_and_hits_its_own_pages_later() -> None:
    engine = fake_engine(14, max_running=2)
    ask(engine, "first", prompt_of(1, 20), 30)
    ask(engine, "second", prompt_of(2, 20), 12)
    outputs: list[Output] = []
    while not engine.scheduler.preemptions:
        outputs += engine.step()
    assert [job.id for job in engine.scheduler.running] == ["first"]
    assert [job.id for job in engine.scheduler.waiting] == ["second"]
    computed = engine.stats()["computed_tokens"]
    whole = collect(finish(engine, outputs), ["first", "second"])
    assert whole[0].tokens == reference_tokens(prompt_of(1, 20), 30, VOCAB)
    assert whole[1].tokens == reference_tokens(prompt_of(2, 20), 12, VOCAB)
    assert whole[1].cached == {"l1": 0}  # counted at its first start
    # Far fewer tokens are recomputed than the 20 or more of the second request.
    assert engine.stats()["computed_tokens"] - computed < 49 + 31 - computed + 12


def test_a_preempted_request_runs_before_new_ones() -> None:
    engine = fake_engine(14, max_running=2)
    ask(engine, "first", prompt_of(1, 20), 30)
    ask(engine, "second", prompt_of(2, 20), 12)
    outputs: list[Output] = []
    while not engine.scheduler.preemptions:
        outputs += engine.step()
    ask(engine, "new", prompt_of(1, 20), 8)  # with a prefix that is cached
    second, new = engine.scheduler.waiting
    assert (second.id, new.id) == ("second", "new")
    while second.state is State.WAITING:
        outputs += engine.step()
        assert new.start < 0 or new.start > second.start >= 0
    finish(engine, outputs)
    assert new.start > second.start


def test_preempted_requests_queue_in_the_order_of_their_starts() -> None:
    engine = fake_engine(15, max_running=3)
    for index in range(3):
        ask(engine, str(index), prompt_of(index, 18), 40)
    outputs = engine.step()
    while len(engine.scheduler.running) != 1:
        outputs += engine.step()
    assert [job.id for job in engine.scheduler.waiting] == ["1", "2"]
    finish(engine, outputs)


@pytest.mark.parametrize(("num_pages", "running"), [(12, 1), (13, 2)])
def test_a_new_request_leaves_one_page_per_running_request(num_pages: int, running: int) -> None:
    engine = fake_engine(num_pages, max_running=2)
    ask(engine, "first", prompt_of(1, 24), 2)
    engine.step()
    ask(engine, "second", prompt_of(2, 18), 2)
    # The first takes its seventh page before the second is considered, which needs five.
    engine.scheduler.schedule()
    assert len(engine.scheduler.running) == running


def test_a_request_alone_may_fill_the_whole_pool() -> None:
    engine = fake_engine(10, plan=FakePlan(event_delay=lambda: 2))
    for _ in range(3):
        (output,) = engine.generate([prompt_of(1, 20)], max_tokens=21)
        assert output.tokens == reference_tokens(prompt_of(1, 20), 21, VOCAB)
    assert engine.scheduler.preemptions == 0
    engine.check()


def test_two_requests_of_pool_size_both_finish() -> None:
    engine = fake_engine(10, plan=FakePlan(event_delay=lambda: 3, pending_calls=lambda: 2))
    for _ in range(3):
        prompts = [prompt_of(1, 20), prompt_of(2, 20), prompt_of(3, 20)]
        for output, prompt in zip(engine.generate(prompts, max_tokens=21), prompts, strict=True):
            assert output.tokens == reference_tokens(prompt, 21, VOCAB)
    engine.check()


def test_active_saves_stay_within_their_fraction_of_the_pool() -> None:
    engine = fake_engine(20, plan=FakePlan(event_delay=lambda: 400))
    for seed in range(4):
        ask(engine, str(seed), prompt_of(seed, 24), 8)
    for _ in range(60):
        engine.step()
        assert engine.transfers.save_pages <= 10
    assert engine.stats()["save_blocks_dropped"] > 0
    finish(engine)


def test_a_request_waits_for_pages_that_a_save_still_reads() -> None:
    engine = fake_engine(10, plan=FakePlan(event_delay=lambda: 60), max_running=1)
    ask(engine, "a", prompt_of(1, 20), 2)
    ask(engine, "b", prompt_of(2, 20), 21)
    outputs: list[Output] = []
    while not any(output.request_id == "b" for output in outputs):
        outputs += engine.step()
    assert engine.transfers.save_pages > 0
    outputs = collect(finish(engine, outputs), ["a", "b"])
    assert outputs[1].tokens == reference_tokens(prompt_of(2, 20), 21, VOCAB)
    assert engine.scheduler.preemptions == 0


# ---- pending matches and loads ----


def test_a_pending_match_delays_no_other_request() -> None:
    calls = iter([50] + [0] * 9)
    engine = fake_engine(plan=FakePlan(pending_calls=lambda: next(calls)), max_running=1)
    ask(engine, "slow", prompt_of(1, 40), 1)
    for name in range(4):
        ask(engine, str(name), prompt_of(name + 2, 20), 1)
    slow = engine.scheduler.waiting[0]
    assert first_token_order(finish(engine)) == ["0", "1", "2", "3", "slow"]
    assert slow.passed_over == 0  # it could not have started


def test_a_pending_load_delays_no_other_request() -> None:
    blocks: dict = {}
    fake_engine(blocks=blocks).generate([prompt_of(1, 40)])
    delays = iter([6] + [0] * 99)
    engine = fake_engine(blocks=blocks, plan=FakePlan(event_delay=lambda: next(delays)))
    ask(engine, "loads", prompt_of(1, 40), 2)
    ask(engine, "runs", prompt_of(2, 20), 2)
    outputs = engine.step()
    assert [job.state for job in engine.scheduler.loading] == [State.LOADING]
    assert first_token_order(finish(engine, outputs)) == ["runs", "loads"]


def test_the_same_block_is_loaded_once() -> None:
    blocks: dict = {}
    trunk = prompt_of(1, 40)
    fake_engine(blocks=blocks).generate([trunk])
    engine = fake_engine(blocks=blocks, plan=FakePlan(event_delay=lambda: 3))
    for name in range(4):
        ask(engine, str(name), [*trunk, name], 1)
    outputs = collect(finish(engine), list("0123"))
    assert engine.hooks.loads == 1
    assert [output.cached for output in outputs] == [{"l1": 0, "l2": 40}] + [{"l1": 40}] * 3


def test_a_match_that_the_tree_made_needless_is_aborted() -> None:
    """The store responds late; meanwhile another request computed the same prompt."""
    calls = iter([4, 0, 0])
    blocks: dict = {}
    trunk = prompt_of(1, 40)
    fake_engine(blocks=blocks).generate([trunk], max_tokens=1)
    engine = fake_engine(blocks=blocks, plan=FakePlan(pending_calls=lambda: next(calls)))
    ask(engine, "late", [*trunk, 1], 1)
    engine.hooks.blocks = {}
    ask(engine, "quick", [*trunk, 2], 1)
    late, quick = collect(finish(engine), ["late", "quick"])
    assert quick.cached == {"l1": 0}
    assert late.cached == {"l1": 40}
    assert engine.hooks.loads == 0


def test_loads_that_end_out_of_order_run_in_the_order_of_their_starts() -> None:
    blocks: dict = {}
    for seed in (1, 2):
        fake_engine(blocks=blocks).generate([prompt_of(seed, 40)], max_tokens=1)
    delays = iter([5, 1] + [0] * 99)
    engine = fake_engine(blocks=blocks, plan=FakePlan(event_delay=lambda: next(delays)))
    ask(engine, "first", prompt_of(1, 40), 30)
    ask(engine, "second", prompt_of(2, 40), 30)
    outputs = engine.step()
    assert [job.id for job in engine.scheduler.loading] == ["first", "second"]
    while engine.scheduler.loading:
        outputs += engine.step()
    assert first_token_order(outputs)[0] == "second"
    assert [job.id for job in engine.scheduler.running] == ["first", "second"]
    finish(engine, outputs)


def test_leases_of_a_needless_hit_are_released_at_once() -> None:
    blocks: dict = {}
    trunk = prompt_of(1, 40)
    fake_engine(blocks=blocks).generate([trunk], max_tokens=1)
    engine = fake_engine(max_running=1, max_batch_tokens=20)
    ask(engine, "quick", [*trunk, 2], 1)
    outputs = engine.step()
    engine.hooks.blocks = blocks
    ask(engine, "late", [*trunk, 1], 9)
    assert engine.hooks.leased == {"late"}
    while not any(output.request_id == "late" for output in outputs):
        outputs += engine.step()
    assert engine.hooks.leased == set()
    assert engine.hooks.loads == 0
    assert collect(finish(engine, outputs), ["late"])[0].cached == {"l1": 40}


def test_a_load_skips_the_page_that_is_computed_anyway() -> None:
    blocks: dict = {}
    prompt = prompt_of(1, 40)
    fake_engine(blocks=blocks).generate([prompt], max_tokens=1)
    engine = fake_engine(blocks=blocks)
    engine.generate([prompt], max_tokens=1)
    (pages,) = engine.hooks.load_pages
    assert len(pages) == 10
    assert min(pages[:9]) >= 0
    assert pages[9] == -1


def test_an_idle_engine_waits_for_its_copies_instead_of_spinning() -> None:
    blocks: dict = {}
    fake_engine(blocks=blocks).generate([prompt_of(1, 40)])
    engine = fake_engine(blocks=blocks, plan=FakePlan(event_delay=lambda: 4))
    ask(engine, "a", prompt_of(1, 40), 1)
    engine.step()  # the load starts, and nothing else can run
    assert engine.hooks.waits == [0.0, IDLE_POLL_S]
    ask(engine, "b", prompt_of(2, 20), 1)
    engine.step()  # something can run
    assert engine.hooks.waits == [0.0, IDLE_POLL_S, 0.0]
    finish(engine)
