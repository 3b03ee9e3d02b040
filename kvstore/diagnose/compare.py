"""Two prompts: where they part, what that looks like, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.diagnose.content import shared_after
from kvstore.diagnose.prompts import (
    Prompt,
    common_length,
    common_tokens,
    reusable_tokens,
)
from kvstore.diagnose.shapes import cut, inserted, reordered, rerendered
from kvstore.diagnose.tokens import boundary_moved, partial_block
from kvstore.diagnose.values import counter, identifier, timestamp, value
from kvstore.diagnose.verdict import Verdict, shown

CONTEXT_CHARS: Final = 30

Classifier = Callable[[str, str, int], Verdict | None]

FORMS: Final[tuple[Classifier, ...]] = (reordered, rerendered)
VALUES: Final[tuple[Classifier, ...]] = (timestamp, identifier, counter)
GAPS: Final[tuple[Classifier, ...]] = (cut, inserted)
CLASSIFIERS: Final = (*FORMS, *GAPS, *VALUES, value)
"""In the order they are asked: the first that sees something is right. A gap or another order may
begin with a number by chance, so numbers come after both."""


@dataclass(frozen=True)
class Comparison:
    """Where prompt `b`, the later one, parts from `a`.

    char: characters that both have in front; shared: tokens of those; reused: of which full blocks
    can be reused. lost: tokens of `b` behind the difference that `a` has too, somewhere behind it:
    what the difference costs each time. part: which message it lies in.
    """

    a: Prompt
    b: Prompt
    block_tokens: int
    char: int
    shared: int
    reused: int
    lost: int
    part: str
    verdict: Verdict

    @property
    def block(self) -> int:
        """Index of the first block that cannot be reused."""
        return self.reused // self.block_tokens

    def context(self) -> tuple[str, str]:
        """Text around the difference in both, a mark at the difference."""
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


def compare(a: Prompt, b: Prompt, block_tokens: int = 16) -> Comparison:
    """Compare a prompt with an earlier one."""
    char = common_length(a.text, b.text)
    kept_apart = apart(a, b)
    shared = 0 if kept_apart else common_tokens(a, b)
    reused = reusable_tokens(shared, b.tokens, block_tokens)
    if kept_apart:
        lost = b.tokens_at(char)
        char = 0
    else:
        chars = shared_after(a.text, b.text, char)
        lost = min(round(chars * b.tokens / max(1, len(b.text))), b.tokens - reused)
    verdict = kept_apart or _verdict(a, b, char, shared, block_tokens)
    return Comparison(a, b, block_tokens, char, shared, reused, lost, b.part_at(char), verdict)


def apart(a: Prompt, b: Prompt) -> Verdict | None:
    """Blocks of different models, adapters or salts are never shared, whatever the text."""
    first, second = dict(a.apart), dict(b.apart)
    for name in sorted({*first, *second}):
        if first.get(name, "") != second.get(name, ""):
            return Verdict(
                "apart",
                f"{name} differs: {shown(first.get(name, ''))} became "
                f"{shown(second.get(name, ''))}",
                "Only requests of one model, adapter and cache salt share blocks. Use one salt for "
                "all who may see one another's timing, and one name for one model.",
            )
    return None


def _verdict(a: Prompt, b: Prompt, char: int, shared: int, block_tokens: int) -> Verdict:
    ends = min(len(a.text), len(b.text))
    moved = boundary_moved(a, b)
    partial = partial_block(shared, a.tokens, b.tokens, block_tokens)
    if char >= ends:
        if moved is not None:
            return moved
        if a.text == b.text and partial is None:
            return Verdict(
                "same", "the same prompt twice", "Nothing: all but its last block is reused."
            )
        return partial or Verdict(
            "continued",
            "the second goes on where the first ends",
            "Nothing: this is as it should be.",
        )
    classifiers = (*FORMS[:1], *GAPS) if a.opaque or b.opaque else CLASSIFIERS
    for classify in classifiers:
        seen = classify(a.text, b.text, char)
        if seen is not None:
            return seen
    if moved is not None:
        return moved
    if shared < block_tokens and partial is not None and shared_after(a.text, b.text, char) == 0:
        return partial
    return Verdict(
        "other",
        "different texts from here on",
        "If both should share more, put what they share first; otherwise there is nothing to gain.",
    )
