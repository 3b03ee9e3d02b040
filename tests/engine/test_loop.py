"""The engine against a reference without cache: page operations never change the tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine.loop import Engine, collect
from kvstore.engine.request import Output, QueueFull, Request
from kvstore.errors import ConfigError
from kvstore.testing.fake_engine import (
    FakeConfig,
    FakeHooks,
    FakeLoaded,
    FakePlan,
    FakeRunner,
    reference_tokens,
)

VOCAB = 97
LORAS = ("", "red", "blue")
SALTS = ("", "pepper")


def fake_engine(
    num_pages: int = 64,
    page_tokens: int = 4,
    block_tokens: int = 8,
    *,
    plan: FakePlan | None = None,
    blocks: dict | None = None,
    hooks: bool = True,
    config: FakeConfig | None = None,
    **options,
) -> Engine:
    runner = FakeRunner(num_pages, page_tokens, VOCAB, loras=LORAS[1:])
    keeper = FakeHooks(runner.pool, page_tokens, block_tokens, plan, blocks) if hooks else None
    options = {"max_batch_tokens": 32, "max_running": 8, **options}
    return Engine(
        FakeLoaded(config or FakeConfig(VOCAB)),
        num_pages=num_pages,
        page_tokens=page_tokens,
        runner=runner,
        hooks=keeper,
        **options,
    )


# ---- random request sets under random faults ----


@dataclass
class Ask:
    """One request of a random set."""

    prompt: list[int]
    max_tokens: int
    lora: str
    salt: str
    arrives_step: int
    abort_step: int | None


@dataclass
class Scene:
    page_tokens: int
    pages_per_block: int
    num_pages: int
    batch_tokens: int
    max_running: int
    fault_seed: int
    faults: tuple[int, int, int, float] = (0, 0, 0, 0.0)
    asks: list[Ask] = field(default_factory=list)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    page_tokens = draw(st.sampled_from([1, 2, 4, 5]))
    scene = Scene(
        page_tokens=page_tokens,
        pages_per_block=draw(st.integers(1, 3)),
        num_pages=draw(st.integers(16, 60)) // min(page_tokens, 3),
        batch_tokens=draw(st.integers(4, 40)),
        max_running=draw(st.integers(1, 4)),
        fault_seed=draw(st.integers(0, 1 << 16)),
        faults=(
            draw(st.integers(0, 4)),
            draw(st.integers(0, 4)),
            draw(st.integers(0, 2)),
            draw(st.sampled_from([0.0, 0.1, 0.5])),
        ),
    )
    room = scene.num_pages * page_tokens
    trunks = draw(
        st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24), min_size=1, max_size=3
        )
    )
    for _ in range(draw(st.integers(1, 12))):
        trunk = draw(st.sampled_from(trunks))
        kept = draw(st.integers(0, len(trunk)))
        prompt = (trunk[:kept] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=8)))[:room]
        scene.asks.append(
            Ask(
                prompt=prompt,
                max_tokens=draw(st.integers(1, max(1, min(12, room + 1 - len(prompt))))),
                lora=draw(st.sampled_from(LORAS)),
                salt=draw(st.sampled_from(SALTS)),
                arrives_step=draw(st.sampled_from([0, 0, 0, 1, 5, 20])),
                abort_step=draw(st.sampled_from([None, None, None, 0, 1, 3, 8, 25])),
            )
        )
    return scene


def faulty_plan(scene: Scene) -> FakePlan:
    rng = random.Random(scene.fault_seed)
    pending, delay, cut, lost = scene.faults
    return FakePlan(
        pending_calls=lambda: rng.randint(0, pending),
        event_delay=lambda: rng.randint(0, delay),
        load_cut=lambda: rng.randint(0, cut),
        lost=lambda: rng.random() < lost,
    )


def play(engine: Engine, scene: Scene) -> dict[str, Output]:
    """Submit the scene's requests at their steps; return whole outputs by request id."""
    outputs: list[Output] = []
    step = 0
    left = dict(enumerate(scene.asks))
    while left or engine.busy:
        for index, ask in list(left.items()):
            if ask.arrives_step <= step:
                del left[index]
                engine.add(
                    Request(
                        request_id=str(index),
                        prompt_tokens=ask.prompt,
                        max_tokens=ask.max_tokens,
                        cache_salt=ask.salt,
                        lora_name=ask.lora,
                    )
                )
        for index, ask in enumerate(scene.asks):
            if ask.abort_step is not None and ask.arrives_step + ask.abort_step == step:
                engine.abort(str(index))
        outputs += engine.step()
        step += 1
        assert step < 20_000, f"no end: {engine!r}"
    names = [str(index) for index in range(len(scene.asks))]
    return dict(zip(names, collect(outputs, names), strict=True))


def check_outputs(engine: Engine, scene: Scene, outputs: dict[str, Output]) -> None:
    for name, output in outputs.items():
        ask = scene.asks[int(name)]
        right = reference_tokens(ask.prompt, ask.max_tokens, VOCAB, ask.lora)
        assert output.tokens == right[: len(output.tokens)]
        if output.finish_reason == "length":
            assert len(output.tokens) == ask.max_tokens
        else:
            assert output.finish_reason == "abort"
            assert ask.abort_step is not None
        assert sum(output.cached.values()) <= len(ask.prompt) - 1
    assert engine.hooks.aborted == dict.fromkeys(outputs, 1)
    engine.check()
    engine.cache.pool.check()


@settings(max_examples=150, deadline=None)
@given(scenes())
def test_outputs_do_not_depend_on_pages_faults_or_neighbours(scene: Scene) -> None:
    block_tokens = scene.page_tokens * scene.pages_per_block
    blocks: dict = {}
    for _engine in range(2):  # the second begins with what the first one stored
        engine = fake_engine(
            scene.num_pages,
            scene.page_tokens,
            block_tokens,
            plan=faulty_plan(scene),
            blocks=blocks,
            max_batch_tokens=max(scene.batch_tokens, scene.max_running),
            max_running=scene.max_running,
        )
        check_outputs(engine, scene, play(engine, scene))


def test_random_scenes_cover_every_situation() -> None:
    """The scenes above must include preemption, eviction, loads and aborts."""
    rng = random.Random(5)
    trunk = [rng.randrange(VOCAB) for _ in range(40)]
    asks = [
        Ask(trunk[: rng.randint(8, 40)] + [rng.randrange(4)], 14, "", "", rng.randint(0, 60), None)
        for _ in range(40)
    ]
    asks += [Ask([rng.randrange(VOCAB) for _ in range(36)], 14, "", "", 9, None) for _ in range(9)]
    asks.append(Ask(trunk, 14, "", "", 10, 3))
    scene = Scene(4, 2, 20, 16, 4, 1, (2, 2, 1, 0.1), asks)
    engine = fake_engine(20, 4, 8, plan=faulty_plan(scene), max_batch_tokens=16, max_running=4)
    check_outputs(engine, scene, play(engine, scene))
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["cached_tokens"]["l1"] > 0
    assert stats["cached_tokens"]["l2"] > 0
    assert stats["hooks"]["loads"] > 1
    assert stats["save_blocks"] > 0


# ---- exact counts of cached tokens ----


def common(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 9), st.integers(1, 9)),
        min_size=2,
        max_size=8,
    ),
    st.sampled_from([1, 3, 4]),
    st.integers(1, 3),
)
def test_l1_hits_are_the_longest_common_prefix_in_pages(
    rows: list[tuple[int, int, int, int]], page_tokens: int, pages_per_block: int
) -> None:
    engine = fake_engine(1000, page_tokens, page_tokens * pages_per_block)
    trunk = [(7 * n) % VOCAB for n in range(40)]
    seen: list[list[int]] = []
    for salt, kept, tail, made in rows:
        prompt = trunk[:kept] + [salt] * tail
        (output,) = engine.generate([prompt], max_tokens=made)
        hit = max((common(prompt[:-1], old) for old in seen), default=0)
        assert output.cached == {"l1": hit // page_tokens * page_tokens}
        # The KV of the last token made is never computed.
        seen.append((prompt + output.tokens)[:-1])
    engine.check()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 9), st.booleans()),
        min_size=2,
        max_size=8,
    ),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_l2_hits_are_whole_blocks_without_the_last_token(
    rows: list[tuple[int, int, int, bool]], page_tokens: int, pages_per_block: int
) -> None:
    block_tokens = page_tokens * pages_per_block
    engine = fake_engine(1000, page_tokens, block_tokens)
    trunk = [(7 * n) % VOCAB for n in range(60)]
    in_l1: list[list[int]] = []
    ever: list[list[int]] = []
    for salt, kept, tail, clear in rows:
        if clear:
            assert engine.reset_prefix_cache()
            in_l1 = []
        prompt = trunk[:kept] + [salt] * tail
        (output,) = engine.generate([prompt], max_tokens=5)
        usable = (len(prompt) - 1) // page_tokens * page_tokens
        l1 = max((common(prompt, old) for old in in_l1), default=0) // page_tokens * page_tokens
        l1 = min(l1, usable)
        stored = max((common(prompt, old) for old in ever), default=0)
        l2 = min(stored // block_tokens * block_tokens, usable)
        expected = {"l1": l1}
        if l2 > l1:
            expected["l2"] = l2 - l1
        assert output.cached == expected
        in_l1.append((prompt + output.tokens)[:-1])
        ever.append((prompt + output.tokens)[:-1])
    engine.check()


def test_salts_and_loras_never_share() -> None:
    prompt = list(range(40))
    engine = fake_engine(200)
    for clear in (False, True):
        for lora in LORAS:
            for salt in SALTS:
                fields = {"cache_salt": salt, "lora_name": lora}
                (first,) = engine.generate([prompt], **fields)
                (second,) = engine.generate([prompt], **fields)
                assert first.tokens == second.tokens == reference_tokens(prompt, 16, VOCAB, lora)
                assert first.cached == ({"l1": 0, "l2": 36} if clear else {"l1": 0})
                assert second.cached == {"l1": 36}
        engine.reset_prefix_cache()
    engine.check()


def test_a_second_engine_reuses_what_the_first_stored() -> None:
    blocks: dict = {}
    prompt = [n % VOCAB for n in range(100)]
    (cold,) = fake_engine(blocks=blocks).generate([prompt])
    (warm,) = fake_engine(blocks=blocks).generate([prompt])
    assert cold.tokens == warm.tokens
    assert warm.cached == {"l1": 0, "l2": 96}
    (longer,) = fake_engine(blocks=blocks).generate([prompt + warm.tokens])
    # 115 tokens of KV were computed: 14 full blocks, of which decoding filled two.
    assert longer.cached == {"l1": 0, "l2": 112}


def test_a_load_begins_inside_a_block_where_l1_ends() -> None:
    blocks: dict = {}
    prompt = list(range(60))
    fake_engine(64, 4, 16, blocks=blocks).generate([prompt])
    engine = fake_engine(64, 4, 16, blocks=blocks)
    engine.hooks.blocks = {}
    engine.generate([prompt[:21]], max_tokens=1)  # five pages in L1: a block and one page
    engine.hooks.blocks = blocks
    (output,) = engine.generate([prompt])
    assert output.cached == {"l1": 20, "l2": 28}
    assert output.tokens == reference_tokens(prompt, 16, VOCAB)
    engine.check()


def test_a_truncated_load_is_recomputed_and_counted() -> None:
    blocks: dict = {}
    prompt = list(range(60))
    fake_engine(blocks=blocks).generate([prompt])
    engine = fake_engine(blocks=blocks, plan=FakePlan(load_cut=lambda: 3))
    (output,) = engine.generate([prompt])
    assert output.cached == {"l1": 0, "l2": 32}  # seven blocks were found, four came
    assert output.tokens == reference_tokens(prompt, 16, VOCAB)
    nothing = fake_engine(blocks=blocks, plan=FakePlan(load_cut=lambda: 99))
    (output,) = nothing.generate([prompt])
    assert output.cached == {"l1": 0}
    assert output.tokens == reference_tokens(prompt, 16, VOCAB)
    nothing.check()


# ---- evicted nodes stay as stored ----


def test_evicted_nodes_stay_in_the_tree_while_the_store_has_them() -> None:
    engine = fake_engine(20, 4, 8)
    first = list(range(40))
    engine.generate([first], max_tokens=1)
    engine.generate([[90 - n for n in range(70)]], max_tokens=1)
    job = _job_like(engine, first)
    assert engine.cache.tree.stored_only_tokens > 0
    assert engine.cache.believed_tokens(job) == 36
    (output,) = engine.generate([first])
    assert output.cached["l2"] > 0
    engine.check()


def test_loaded_blocks_are_marked_as_stored() -> None:
    blocks: dict = {}
    first = list(range(41))
    fake_engine(64, 4, 8, blocks=blocks).generate([first], max_tokens=1)
    engine = fake_engine(20, 4, 8, blocks=blocks)
    (output,) = engine.generate([first], max_tokens=1)
    assert output.cached == {"l1": 0, "l2": 40}
    engine.generate([[90 - n for n in range(79)]], max_tokens=1)
    assert engine.cache.believed_tokens(_job_like(engine, first)) == 40


def test_the_tree_forgets_blocks_that_the_store_lost() -> None:
    engine = fake_engine(20, 4, 8)
    first = list(range(40))
    engine.generate([first], max_tokens=1)
    engine.generate([[90 - n for n in range(70)]], max_tokens=1)
    job = _job_like(engine, first)
    believed = engine.cache.believed_tokens(job)
    assert believed == 36
    engine.hooks.blocks.clear()
    engine.add(Request(request_id="again", prompt_tokens=first, max_tokens=1))
    assert engine.cache.believed_tokens(job) < believed
    engine.run_until_idle()
    engine.check()


def test_the_tree_forgets_blocks_that_a_load_did_not_deliver() -> None:
    plan = FakePlan(load_cut=lambda: 99)
    engine = fake_engine(20, 4, 8, plan=plan, max_batch_tokens=16)
    first = list(range(40))
    engine.generate([first], max_tokens=1)
    engine.generate([[90 - n for n in range(70)]], max_tokens=1)
    job = _job_like(engine, first)
    assert engine.cache.believed_tokens(job) == 36
    engine.add(Request(request_id="again", prompt_tokens=first, max_tokens=1))
    while not engine.scheduler.running:
        engine.step()
    assert engine.cache.believed_tokens(job) == engine.scheduler.running[0].computed < 36
    engine.run_until_idle()
    engine.check()


def test_the_tree_keeps_blocks_that_the_store_still_has() -> None:
    engine = fake_engine(20, 4, 8)
    first = list(range(40))
    engine.generate([first], max_tokens=1)
    engine.generate([[90 - n for n in range(70)]], max_tokens=1)
    job = _job_like(engine, first)
    for lost in job.hashes[2:]:
        engine.hooks.blocks.pop(lost)
    # The load of the two blocks left is not under way yet: this is only the match.
    engine.add(Request(request_id="again", prompt_tokens=first, max_tokens=1))
    assert engine.cache.believed_tokens(job) == 16
    engine.run_until_idle()
    engine.check()


def _job_like(engine: Engine, prompt: list[int]):
    """Return a job with this prompt that is not in the engine."""
    engine.add(Request(request_id="probe", prompt_tokens=prompt))
    job = engine.scheduler.waiting[-1]
    engine.abort("probe")
    engine.run_until_idle()
    return job


# ---- ends ----


def test_an_end_token_ends_the_request_unless_ignored() -> None:
    prompt = list(range(30))
    right = reference_tokens(prompt, 12, VOCAB)
    engine = fake_engine(config=FakeConfig(VOCAB, eos_ids=(right[4],)))
    cut = right.index(right[4]) + 1
    (output,) = engine.generate([prompt], max_tokens=12)
    assert (output.tokens, output.finish_reason) == (right[:cut], "stop")
    (output,) = engine.generate([prompt], max_tokens=12, ignore_eos=True)
    assert (output.tokens, output.finish_reason) == (right, "length")
    cut = right.index(right[2]) + 1
    (output,) = engine.generate([prompt], max_tokens=12, stop_token_ids=(right[2],))
    assert output.tokens == right[:cut]


def test_without_max_tokens_context_and_pool_set_the_limit() -> None:
    prompt = list(range(30))
    (output,) = fake_engine(10, 4, 4, hooks=False).generate([prompt], max_tokens=None)
    assert len(output.tokens) == 41 - 30
    context = FakeConfig(VOCAB, max_positions=33)
    (output,) = fake_engine(10, 4, 4, config=context).generate([prompt], max_tokens=None)
    assert len(output.tokens) == 3


@pytest.mark.parametrize("plan", [FakePlan(), FakePlan(event_delay=lambda: 3)])
@pytest.mark.parametrize("steps", range(9))
def test_an_abort_at_any_step_returns_every_page(plan: FakePlan, steps: int) -> None:
    blocks: dict = {}
    prompt = list(range(60))
    fake_engine(blocks=blocks).generate([prompt])
    engine = fake_engine(blocks=blocks, plan=plan)
    engine.add(Request(request_id="a", prompt_tokens=prompt, max_tokens=4))
    seen: list[Output] = []
    for _ in range(steps):
        seen += engine.step()
    engine.abort("a")
    engine.abort("a")
    seen += engine.run_until_idle()
    reasons = [output.finish_reason for output in seen if output.finish_reason]
    assert len(reasons) == 1
    assert engine.hooks.aborted == {"a": 1}
    engine.check()


def test_close_ends_every_request() -> None:
    engine = fake_engine()
    engine.add(Request(request_id="a", prompt_tokens=[1, 2, 3]))
    engine.step()
    engine.close()
    assert engine.step()[-1].finish_reason == "abort"


# ---- invalid input ----


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_tokens": []}, ["empty", "1"]),
        ({"prompt_tokens": [1] * 200}, ["200", "128"]),
        ({"prompt_tokens": [1] * 128}, ["128"]),
        ({"prompt_tokens": [1, 97]}, ["97", "0 to 96"]),
        ({"prompt_tokens": [1, -1]}, ["-1", "0 to 96"]),
        ({"prompt_tokens": [1, 1 << 70]}, ["0 to 96"]),
        ({"prompt_tokens": [1, 2.5]}, ["integers"]),
        ({"max_tokens": 0}, ["max_tokens", "0", "1"]),
        ({"max_tokens": 200}, ["200", "128"]),
        ({"max_tokens": 100}, ["do not fit", "64"]),
        ({"lora_name": "green"}, ["green", "blue, red"]),
        ({"temperature": -1.0}, ["temperature", "-1"]),
        ({"top_p": 0.0}, ["top_p"]),
        ({"stop": ("a",) * 17}, ["17", "16"]),
        ({"stop": ("",)}, ["stop"]),
        ({"stop": ("x",)}, ["tokenizer"]),
    ],
)
def test_invalid_requests_raise_one_line(fields: dict, words: list[str]) -> None:
    engine = fake_engine(64, 1, 4, config=FakeConfig(VOCAB, max_positions=128))
    request = Request(**{"request_id": "a", "prompt_tokens": [1, 2], **fields})
    with pytest.raises(ConfigError) as error:
        engine.add(request)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    assert not engine.busy
    engine.check()


def test_an_id_in_use_is_rejected_while_its_copy_runs() -> None:
    blocks: dict = {}
    prompt = list(range(60))
    fake_engine(blocks=blocks).generate([prompt])
    engine = fake_engine(blocks=blocks, plan=FakePlan(event_delay=lambda: 5))
    request = Request(request_id="a", prompt_tokens=prompt)
    engine.add(request)
    with pytest.raises(ConfigError, match="in use"):
        engine.add(request)
    engine.step()
    engine.abort("a")
    with pytest.raises(ConfigError, match="in use"):
        engine.add(request)
    engine.run_until_idle()
    engine.check()


def test_the_queue_is_bounded() -> None:
    engine = fake_engine(max_waiting=2)
    for name in "ab":
        engine.add(Request(request_id=name, prompt_tokens=[1, 2]))
    with pytest.raises(QueueFull, match="2 requests"):
        engine.add(Request(request_id="c", prompt_tokens=[1, 2]))
    engine.run_until_idle()
    engine.add(Request(request_id="c", prompt_tokens=[1, 2]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_tokens": 3, "block_tokens": 8}, ["block_tokens", "8", "3"]),
        ({"page_tokens": 8, "block_tokens": 4}, ["block_tokens", "4", "8"]),
        ({"max_batch_tokens": 4}, ["max_batch_tokens", "4", "8"]),
        ({"max_running": 0}, ["max_running"]),
        ({"max_context": 1 << 20}, ["max_context", "65536"]),
        ({"hash_algo": "sha257_cbor"}, ["sha256_cbor"]),
    ],
)
def test_invalid_sizes_raise_one_line(options: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        fake_engine(**options)
    for word in words:
        assert word in str(error.value)


def test_caching_can_be_disabled() -> None:
    engine = fake_engine(hooks=False, prefix_cache=False)
    prompt = list(range(40))
    for _ in range(2):
        (output,) = engine.generate([prompt])
        assert output.cached == {"l1": 0}
        assert output.tokens == reference_tokens(prompt, 16, VOCAB)
    engine.check()


@pytest.mark.parametrize("wanted", [True, False])
def test_step_times_are_recorded_only_on_request(wanted: bool) -> None:
    """Step times need a device synchronisation; only engines that request them pay for it."""
    engine = fake_engine()
    assert isinstance(engine.hooks, FakeHooks)
    engine.hooks.wants_times = wanted
    engine.generate([list(range(40))])
    prefills = [(start, tokens) for start, tokens, _ in engine.hooks.times]
    assert prefills == ([(0, 32), (32, 8)] if wanted else [])
