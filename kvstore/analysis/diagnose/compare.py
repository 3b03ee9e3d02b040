"""Compares two prompts: where they first differ, the likely cause, and its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.analysis.diagnose.content import shared_after
from kvstore.analysis.diagnose.diagnosis import Diagnosis, shown
from kvstore.analysis.diagnose.prompts import Prompt, common_length, common_tokens, reusable_tokens
from kvstore.analysis.diagnose.shapes import cut, inserted, reordered, replaced, rerendered
from kvstore.analysis.diagnose.tokens import boundary_moved, partial_block
from kvstore.analysis.diagnose.values import counter, identifier, timestamp, value

CONTEXT_CHARS: Final = 30

Classifier = Callable[[str, str, int], Diagnosis | None]

FORMS: Final[tuple[Classifier, ...]] = (reordered, rerendered)
VALUES: Final[tuple[Classifier, ...]] = (timestamp, identifier, counter)
GAPS: Final[tuple[Classifier, ...]] = (cut, inserted)
CLASSIFIERS: Final = (*FORMS, *GAPS, *VALUES, value, replaced)
"""Tried in this order; the first result counts. A cut or reordered text can start with a number by
chance, so the values come after those."""


@dataclass(frozen=True)
class Comparison:
    """Where a later prompt `b` first differs from `a`.

    char: characters before the difference. shared: tokens of those. reused: tokens of those in full
    blocks. lost: tokens of `b` after the difference that `a` also has after it, which is the cost
    of the difference per request. part: name of the message with the difference.
    """

    a: Prompt
    b: Prompt
    block_tokens: int
    char: int
    shared: int
    reused: int
    lost: int
    part: str
    diagnosis: Diagnosis

    @property
    def block(self) -> int:
        """Index of the first block that cannot be reused."""
        return self.reused // self.block_tokens

    def context(self) -> tuple[str, str]:
        """Return the text around the difference in both prompts, with a mark at the difference."""
        start = max(0, self.char - CONTEXT_CHARS)
        first, second = (
            repr(
                prompt.text[start : self.char]
                + "\u2038"
                + prompt.text[self.char : self.char + CONTEXT_CHARS]
            )
            for prompt in (self.a, self.b)
        )
        return first, second


@dataclass(frozen=True)
class Overlap:
    """Text that two prompts have in common. The fields are those of `Comparison`."""

    char: int
    shared: int
    reused: int
    lost: int


def overlap(a: Prompt, b: Prompt, block_tokens: int = 16) -> Overlap:
    """Return how much of `b` an earlier prompt has, at the start and elsewhere."""
    char = common_length(a.text, b.text)
    if check_isolation(a, b):
        return Overlap(0, 0, 0, b.tokens_at(char))
    shared = common_tokens(a, b)
    reused = reusable_tokens(shared, b.tokens, block_tokens)
    chars = shared_after(a.index, b.index, char)
    lost = min(round(chars * b.tokens / max(1, len(b.text))), b.tokens - reused)
    return Overlap(char, shared, reused, lost)


def compare(a: Prompt, b: Prompt, block_tokens: int = 16) -> Comparison:
    """Compare a prompt with an earlier one."""
    same = overlap(a, b, block_tokens)
    diagnosis = check_isolation(a, b) or _diagnose(a, b, same, block_tokens)
    part = b.part_at(same.char)
    return Comparison(
        a, b, block_tokens, same.char, same.shared, same.reused, same.lost, part, diagnosis
    )


def check_isolation(a: Prompt, b: Prompt) -> Diagnosis | None:
    """Detect different models, adapters or salts. Their blocks are never shared."""
    first, second = dict(a.isolation), dict(b.isolation)
    for name in sorted({*first, *second}):
        if first.get(name, "") != second.get(name, ""):
            return Diagnosis(
                "isolated",
                f"{name} differs: {shown(first.get(name, ''))} became "
                f"{shown(second.get(name, ''))}",
                "Only requests with the same model, adapter and cache salt share blocks. Use one "
                "salt for all users who may observe each other's timing, and one name per model.",
            )
    return None


def _diagnose(a: Prompt, b: Prompt, same: Overlap, block_tokens: int) -> Diagnosis:
    char, shared = same.char, same.shared
    ends = min(len(a.text), len(b.text))
    moved = boundary_moved(a, b)
    partial = partial_block(shared, a.tokens, b.tokens, block_tokens)
    if char >= ends:
        if moved is not None:
            return moved
        if a.text == b.text and partial is None:
            return Diagnosis(
                "same",
                "the same prompt twice",
                "Nothing to change: all but its last block is reused.",
            )
        return partial or Diagnosis(
            "continued",
            "the second prompt continues the first",
            "Nothing to change: this is the ideal case.",
        )
    classifiers = (reordered, *GAPS, replaced) if a.opaque or b.opaque else CLASSIFIERS
    for classify in classifiers:
        seen = classify(a.text, b.text, char)
        if seen is not None:
            return seen
    if moved is not None:
        return moved
    if shared < block_tokens and partial is not None and same.lost == 0:
        return partial
    return Diagnosis(
        "other",
        "different texts from here on",
        "If both should share more, put the shared text first. Otherwise nothing can be gained.",
    )
