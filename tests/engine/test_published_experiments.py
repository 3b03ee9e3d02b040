"""Two published experiments on prefix caches, with an unmodified OpenAI client, on this engine.

The first asks a question after a long text, another question after the same text, and then puts a
line in front of the text. The second sends prompts with lengths at block boundaries twice.
Both were published as times. Here the cached tokens in the usage must explain them, and the
output must not depend on the source of the KV.
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


class EngineClient:
    """An engine, its client and optionally a sidecar; pages and blocks have 16 tokens."""

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

    def empty_l1(self, *, saved: int = 0) -> None:
        """Empty the engine's own cache after the sidecar has `saved` blocks."""
        if self.sidecar is not None:
            sidecar = self.sidecar
            wait_until(lambda: sidecar.stats()["l2"]["slots_ready"] >= saved, "blocks are saved")
        self.engine.reset()


@pytest.fixture(scope="module")
def alone() -> Iterator[EngineClient]:
    with EngineProcess() as engine:
        yield EngineClient(engine, None)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineClient]:
    folder = tmp_path_factory.mktemp("sidecar")
    sidecar = ForkedSidecar(folder, {"l2": {"bytes": 512 << 16, "slot_bytes": 1 << 16}})
    try:
        wait = ["--prefetch", "wait_complete", "--max-wait", "60s", "--min-load-tokens", "0"]
        with EngineProcess(
            "--store", sidecar.socket, "--store-connect-timeout", "30s", *wait
        ) as engine:
            yield EngineClient(engine, sidecar)
    finally:
        assert sidecar.stop() == 0


@pytest.fixture(params=["alone", "stored"])
def served(request: pytest.FixtureRequest) -> EngineClient:
    found: EngineClient = request.getfixturevalue(request.param)
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


def output_text(answer: Completion | ChatCompletion) -> str:
    [choice] = answer.choices
    text: str = choice.message.content if isinstance(answer, ChatCompletion) else choice.text
    return text


def shared_tokens(*, name: str) -> int:
    """Return the tokens before either question; the model's tokens are bytes."""
    return len(f"system: {name}{DOCUMENT}\nuser: ")


def test_a_prefix_is_reused_unless_text_precedes_it(served: EngineClient) -> None:
    name = "alone " if served.sidecar is None else "stored "  # cold in each
    cold = served.chat(name + DOCUMENT, FIRST)
    same = served.chat(name + DOCUMENT, SECOND)
    front = served.chat("Today is Monday. " + name + DOCUMENT, SECOND)
    again = served.chat("Today is Monday. " + name + DOCUMENT, SECOND)

    assert cached(cold) < 2 * PAGE
    assert cached(same) == shared_tokens(name=name) // PAGE * PAGE
    assert cached(front) < 2 * PAGE  # "system: " at most: nothing after the new text
    assert cached(again) == (length(again) - 1) // PAGE * PAGE

    # The output does not depend on the cache.
    assert output_text(again) == output_text(front) != ""
    served.engine.reset()
    assert output_text(served.chat(name + DOCUMENT, SECOND)) == output_text(same)


def test_a_restarted_engine_finds_the_prefix_in_the_store(stored: EngineClient) -> None:
    before = stored.sidecar.stats()["l2"]["slots_ready"] if stored.sidecar else 0
    cold = stored.chat("store " + DOCUMENT, FIRST)
    full = shared_tokens(name="store ") // PAGE
    stored.empty_l1(saved=before + full)
    warm = stored.chat("store " + DOCUMENT, SECOND)
    assert cached(cold) < 2 * PAGE
    assert by_tier(warm) == {"l2": full * PAGE}


@pytest.mark.parametrize(("tokens", "hit"), [(16, 0), (96, 80), (97, 96)])
def test_block_boundaries(served: EngineClient, tokens: int, hit: int) -> None:
    prompt = [(7 * number + tokens) % 250 for number in range(tokens)]
    first, second = served.complete(prompt), served.complete(prompt)
    assert (length(first), length(second)) == (tokens, tokens)
    assert cached(first) == 0
    assert cached(second) == hit <= tokens - 1  # the last token is always computed
    assert output_text(first) == output_text(second)


@pytest.mark.parametrize("tokens", [16, 96, 97])
def test_block_boundaries_from_the_store(stored: EngineClient, tokens: int) -> None:
    prompt = [(11 * number + tokens) % 250 for number in range(tokens)]
    before = stored.sidecar.stats()["l2"]["slots_ready"] if stored.sidecar else 0
    first = stored.complete(prompt)
    stored.empty_l1(saved=before + tokens // PAGE)
    second = stored.complete(prompt)
    assert cached(first) == 0
    assert cached(second) <= tokens - 1
    assert by_tier(second).get("l2", 0) >= (tokens - 1) // PAGE * PAGE
    assert output_text(first) == output_text(second)
