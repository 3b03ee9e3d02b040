"""The engine over the real model: greedy tokens do not depend on cache or preemption."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore.engine.loader import LoadedModel, random_model
from kvstore.engine.loop import Engine, collect
from kvstore.engine.lora import random_adapter
from kvstore.engine.request import Output, Request
from kvstore.engine.runner import Runner
from kvstore.testing.fake_engine import FakeHooks, FakePlan

torch.set_num_threads(1)
LORAS = ("", "red")
SALTS = ("", "pepper")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_model(11, layers=2, hidden=32, heads=4, kv_heads=2, vocab=300, device="cpu")


def make(
    loaded: LoadedModel,
    num_pages: int,
    *,
    page_tokens: int = 4,
    plan: FakePlan | None = None,
    blocks: dict | None = None,
    cache: bool = True,
    **options,
) -> Engine:
    runner = Runner(loaded, num_pages, page_tokens)
    for seed, name in enumerate(LORAS[1:]):
        runner.add_lora(name, random_adapter(seed, loaded.config))
    by_page = runner.pool.permute(2, 0, 1, 3, 4, 5).numpy()
    hooks = FakeHooks(by_page, page_tokens, 2 * page_tokens, plan, blocks) if cache else None
    return Engine(
        loaded,
        num_pages=num_pages,
        page_tokens=page_tokens,
        runner=runner,
        hooks=hooks,
        prefix_cache=cache,
        **options,
    )


def requests_of(rng: random.Random) -> list[Request]:
    trunks = [[rng.randrange(256) for _ in range(60)] for _ in range(2)]
    requests = []
    for index in range(14):
        prompt = rng.choice(trunks)[: rng.randint(1, 60)]
        prompt = prompt + [rng.randrange(256) for _ in range(rng.randint(0, 6))]
        requests.append(
            Request(
                request_id=str(index),
                prompt_tokens=prompt,
                max_tokens=rng.randint(1, 16),
                lora_name=rng.choice(LORAS),
                cache_salt=rng.choice(SALTS),
                ignore_eos=True,
            )
        )
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_greedy_tokens_do_not_depend_on_the_cache(loaded: LoadedModel, seed: int) -> None:
    rng = random.Random(seed)
    requests = requests_of(rng)
    names = [request.request_id for request in requests]
    plain = make(loaded, 1000, cache=False)
    right = []
    for request in requests:  # one at a time: no batch, no cache
        plain.add(request)
        right += collect(plain.run_until_idle(), [request.request_id])
    faults = random.Random(seed)
    plan = FakePlan(
        pending_calls=lambda: faults.randint(0, 2),
        event_delay=lambda: faults.randint(0, 3),
        load_cut=lambda: faults.choice([0, 0, 1]),
        lost=lambda: faults.random() < 0.05,
    )
    blocks: dict = {}
    hits: dict[str, int] = {}
    preemptions = 0
    for _ in range(2):
        outputs: list[Output] = []
        engine = make(loaded, 20, plan=plan, blocks=blocks, max_batch_tokens=24, max_running=4)
        for request in requests:
            engine.add(request)
            for _ in range(rng.randint(0, 2)):
                outputs += engine.step()
        outputs += engine.run_until_idle()
        made = collect(outputs, names)
        assert [output.tokens for output in made] == [output.tokens for output in right]
        assert [output.text for output in made] == [output.text for output in right]
        engine.check()
        preemptions += engine.stats()["preemptions"]
        for tier, tokens in engine.cached_tokens.items():
            hits[tier] = hits.get(tier, 0) + tokens
    assert hits["l1"] > 0
    assert hits["l2"] > 0
    assert preemptions > 0


def test_logits_of_a_batch_name_the_same_tokens_as_alone(loaded: LoadedModel) -> None:
    prompts = [[n, 2 * n, 3 * n] * 7 for n in range(1, 9)]
    alone = [make(loaded, 200).generate([prompt], max_tokens=20)[0] for prompt in prompts]
    together = make(loaded, 200, max_batch_tokens=30, max_running=8).generate(
        prompts, max_tokens=20
    )
    assert [output.tokens for output in together] == [output.tokens for output in alone]
    assert [output.text for output in together] == [output.text for output in alone]


def test_sampling_with_a_seed_survives_preemption(loaded: LoadedModel) -> None:
    prompts = [[n] * 20 for n in range(1, 4)]
    fields = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    roomy = make(loaded, 200).generate(prompts, max_tokens=24, **fields)
    tight = make(loaded, 14, max_running=3, max_batch_tokens=30)
    assert [o.tokens for o in tight.generate(prompts, max_tokens=24, **fields)] == [
        o.tokens for o in roomy
    ]
    assert tight.stats()["preemptions"] > 0
    assert roomy[0].tokens != roomy[1].tokens
