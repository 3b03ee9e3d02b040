"""Two published experiments on prefix caches, with an unmodified OpenAI client, on our engine.

The first asks a question after a long text, another question after the same text, and then puts a
line in front of the text. The second sends prompts whose lengths lie at block boundaries twice.
Both were published as times; here the cached tokens that the usage tells must explain them, and
the output must not depend on where the KV came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import openai
import pytest
from engine_rig import EngineProcess
from openai.types import Completion
from openai.types.chat import ChatCompletion
from sidecar_rig import ForkedSidecar, wait_until

PAGE = 16
DOCUMENT = topics["class"][:1500]
FIRST, SECOND = "How is a class made?", "What is a metaclass good for?"


class Asked:
    """An engine, its client, and maybe a sidecar; page and block are 16 tokens."""

    def __init__(self, engine: EngineProcess, sidecar: ForkedSidecar | None) -> None:
        self.engine = engine
        self.sidecar = sidecar
        self.client = openai.OpenAI(base_url=engine.url, api_key="none", max_retries=0)

    def chat(self, text: str, question: str) -> ChatCompletion:
        return self.client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "system", "content": text},
                {"role": "user", "content": question},
            ],
            temperature=0,
            max_tokens=8,
        )

    def complete(self, tokens: list[int]) -> Completion:
        return self.client.completions.create(
            model="tiny", prompt=tokens, temperature=0, max_tokens=8
        )

    def forget(self, *, saved: int = 0) -> None:
        """Empty the engine's own cache, once the sidecar holds so many blocks."""
        if self.sidecar is not None:
            sidecar = self.sidecar
            wait_until(lambda: sidecar.stats()["l2"]["slots_ready"] >= saved, "blocks are saved")
        self.engine.reset()


@pytest.fixture(scope="module")
def alone() -> Iterator[Asked]:
    with EngineProcess() as engine:
        yield Asked(engine, None)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("sidecar")
    sidecar = ForkedSidecar(folder, {"l2": {"bytes": 512 << 16, "slot_bytes": 1 << 16}})
    try:
        wait = ["--prefetch", "wait_complete", "--max-wait", "60s", "--min-load-tokens", "0"]
        with EngineProcess(
            "--store", sidecar.socket, "--store-connect-timeout", "30s", *wait
        ) as engine:
            yield Asked(engine, sidecar)
    finally:
        assert sidecar.stop() == 0


@pytest.fixture(params=["alone", "stored"])
def asked(request: pytest.FixtureRequest) -> Asked:
    found: Asked = request.getfixturevalue(request.param)
    found.engine.reset()
    return found


def cached(answer: Completion | ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    tokens = answer.usage.prompt_tokens_details.cached_tokens
    assert tokens is not None
    return tokens


def by_tier(answer: Completion | ChatCompletion) -> dict[str, int]:
    assert answer.usage is not None
    found: dict[str, int] = answer.usage.prompt_tokens_details.cached_tokens_by_tier
    return {tier: tokens for tier, tokens in found.items() if tokens}


def length(answer: Completion | ChatCompletion) -> int:
    assert answer.usage is not None
    return answer.usage.prompt_tokens


def made(answer: Completion | ChatCompletion) -> str:
    [choice] = answer.choices
    text: str = choice.message.content if isinstance(answer, ChatCompletion) else choice.text
    return text


def shared(*, name: str) -> int:
    """Tokens that both questions have in front of them; the model's tokens are bytes."""
    return len(f"system: {name}{DOCUMENT}\nuser: ")


def test_same_prefix_is_reused_and_text_in_front_of_it_undoes_that(asked: Asked) -> None:
    name = "alone " if asked.sidecar is None else "stored "  # cold in each
    cold = asked.chat(name + DOCUMENT, FIRST)
    same = asked.chat(name + DOCUMENT, SECOND)
    front = asked.chat("Today is Monday. " + name + DOCUMENT, SECOND)
    again = asked.chat("Today is Monday. " + name + DOCUMENT, SECOND)

    assert cached(cold) < 2 * PAGE
    assert cached(same) == shared(name=name) // PAGE * PAGE
    assert cached(front) < 2 * PAGE  # "system: " at most: nothing after the new text
    assert cached(again) == (length(again) - 1) // PAGE * PAGE

    # Nobody's output depends on what was cached.
    assert made(again) == made(front) != ""
    asked.engine.reset()
    assert made(asked.chat(name + DOCUMENT, SECOND)) == made(same)


def test_a_second_engine_run_finds_the_prefix_in_the_store(stored: Asked) -> None:
    before = stored.sidecar.stats()["l2"]["slots_ready"] if stored.sidecar else 0
    cold = stored.chat("store " + DOCUMENT, FIRST)
    full = shared(name="store ") // PAGE
    stored.forget(saved=before + full)
    warm = stored.chat("store " + DOCUMENT, SECOND)
    assert cached(cold) < 2 * PAGE
    assert by_tier(warm) == {"l2": full * PAGE}


@pytest.mark.parametrize(("tokens", "hit"), [(16, 0), (96, 80), (97, 96)])
def test_block_boundaries(asked: Asked, tokens: int, hit: int) -> None:
    prompt = [(7 * number + tokens) % 250 for number in range(tokens)]
    first, second = asked.complete(prompt), asked.complete(prompt)
    assert (length(first), length(second)) == (tokens, tokens)
    assert cached(first) == 0
    assert cached(second) == hit <= tokens - 1  # the last token is always computed
    assert made(first) == made(second)


@pytest.mark.parametrize("tokens", [16, 96, 97])
def test_block_boundaries_from_the_store(stored: Asked, tokens: int) -> None:
    prompt = [(11 * number + tokens) % 250 for number in range(tokens)]
    before = stored.sidecar.stats()["l2"]["slots_ready"] if stored.sidecar else 0
    first = stored.complete(prompt)
    stored.forget(saved=before + tokens // PAGE)
    second = stored.complete(prompt)
    assert cached(first) == 0
    assert cached(second) <= tokens - 1
    assert by_tier(second).get("l2", 0) >= (tokens - 1) // PAGE * PAGE
    assert made(first) == made(second)
