"""Two prompts: where they part, what that looks like, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.analysis.diagnose.content import shared_after
from kvstore.analysis.diagnose.prompts import Prompt, common_length, common_tokens, reusable_tokens
from kvstore.analysis.diagnose.shapes import cut, inserted, reordered, replaced, rerendered
from kvstore.analysis.diagnose.tokens import boundary_moved, partial_block
from kvstore.analysis.diagnose.values import counter, identifier, timestamp, value
from kvstore.analysis.diagnose.verdict import Verdict, shown

CONTEXT_CHARS: Final = 30

Classifier = Callable[[str, str, int], Verdict | None]

FORMS: Final[tuple[Classifier, ...]] = (reordered, rerendered)
VALUES: Final[tuple[Classifier, ...]] = (timestamp, identifier, counter)
GAPS: Final[tuple[Classifier, ...]] = (cut, inserted)
CLASSIFIERS: Final = (*FORMS, *GAPS, *VALUES, value, replaced)
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


@dataclass(frozen=True)
class Overlap:
    """What two prompts have in common; the fields are those of `Comparison`."""

    char: int
    shared: int
    reused: int
    lost: int


def overlap(a: Prompt, b: Prompt, block_tokens: int = 16) -> Overlap:
    """How much of `b` an earlier prompt has, in front and elsewhere."""
    char = common_length(a.text, b.text)
    if apart(a, b):
        return Overlap(0, 0, 0, b.tokens_at(char))
    shared = common_tokens(a, b)
    reused = reusable_tokens(shared, b.tokens, block_tokens)
    chars = shared_after(a.held, b.held, char)
    lost = min(round(chars * b.tokens / max(1, len(b.text))), b.tokens - reused)
    return Overlap(char, shared, reused, lost)


def compare(a: Prompt, b: Prompt, block_tokens: int = 16) -> Comparison:
    """Compare a prompt with an earlier one."""
    same = overlap(a, b, block_tokens)
    verdict = apart(a, b) or _verdict(a, b, same, block_tokens)
    part = b.part_at(same.char)
    return Comparison(
        a, b, block_tokens, same.char, same.shared, same.reused, same.lost, part, verdict
    )


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


def _verdict(a: Prompt, b: Prompt, same: Overlap, block_tokens: int) -> Verdict:
    char, shared = same.char, same.shared
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
    classifiers = (reordered, *GAPS, replaced) if a.opaque or b.opaque else CLASSIFIERS
    for classify in classifiers:
        seen = classify(a.text, b.text, char)
        if seen is not None:
            return seen
    if moved is not None:
        return moved
    if shared < block_tokens and partial is not None and same.lost == 0:
        return partial
    return Verdict(
        "other",
        "different texts from here on",
        "If both should share more, put what they share first; otherwise there is nothing to gain.",
    )
