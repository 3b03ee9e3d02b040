"""A prompt as text with named parts, and as tokens where a tokenizer was at hand."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from kvstore.analysis.diagnose.content import Held

BYTES_PER_TOKEN: Final = 4
"""Without a tokenizer a token is taken to be 4 bytes of UTF-8: about right for English prose in the
vocabularies of 30,000 to 200,000 tokens in use; code and most other languages take more tokens."""

APPROXIMATION: Final = f"tokens are an estimate, {BYTES_PER_TOKEN} bytes of UTF-8 each"


@dataclass(frozen=True)
class Prompt:
    """One request's prompt.

    parts: (name, start in characters) of its messages, in order. ids, ends: its tokens, and where
    in the text each ends; None: no tokenizer. apart: what keeps its blocks from those of others
    whatever the text (model, salt, adapter). opaque: the text stands for token ids and says nothing
    by itself. where: how to find it again. at_s: when it was sent. told_tokens, cached_tokens: what
    the server said of it.
    """

    text: str
    parts: tuple[tuple[str, int], ...] = (("prompt", 0),)
    ids: array[int] | None = None
    ends: array[int] | None = None
    apart: tuple[tuple[str, str], ...] = ()
    opaque: bool = False
    where: str = ""
    at_s: float | None = None
    told_tokens: int | None = None
    cached_tokens: int | None = None
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", tuple(start for _, start in self.parts))

    @property
    def tokens(self) -> int:
        """How many tokens it has, or about how many."""
        return len(self.ids) if self.ids is not None else self.tokens_at(len(self.text))

    def tokens_at(self, char: int) -> int:
        """Whole tokens before this character."""
        if self.ends is not None:
            return bisect_right(self.ends, char)
        if self._ascii:
            return char // BYTES_PER_TOKEN
        return len(self.text[:char].encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN

    def part_at(self, char: int) -> str:
        """Name of the part that this character lies in."""
        index = bisect_right(self._starts, char) - 1
        return self.parts[max(0, index)][0] if self.parts else "prompt"

    @cached_property
    def key(self) -> str | bytes:
        """Two prompts share as many tokens as their keys share characters (or 4 bytes each)."""
        return self.text if self.ids is None else self.ids.tobytes()

    @cached_property
    def held(self) -> Held:
        """Its pieces."""
        return Held.of(self.text)

    @cached_property
    def _ascii(self) -> bool:
        return self.text.isascii()


def tokenised(ids: Iterable[int], ends: Iterable[int]) -> tuple[array[int], array[int]]:
    """Tokens as a prompt keeps them. A tokenizer gives marks at the end no place in the text: they
    are put where the text ends."""
    last, kept = 0, array("I")
    for end in ends:
        last = max(last, end)
        kept.append(last)
    return array("I", ids), kept


def common_length(a: str | bytes, b: str | bytes) -> int:
    """How many leading characters (or bytes) are the same in both."""
    if len(a) > len(b):
        a, b = b, a
    if b[: len(a)] == a:
        return len(a)
    low, high = 0, len(a)  # the first `low` are the same, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def common_tokens(a: Prompt, b: Prompt) -> int:
    """Leading tokens that two prompts share; without a tokenizer, about."""
    shared = common_length(a.key, b.key)
    if a.ids is not None and b.ids is not None:
        return shared // a.ids.itemsize
    return b.tokens_at(shared)


def reusable_tokens(shared: int, prompt_tokens: int, block_tokens: int) -> int:
    """Tokens that full blocks spare of a shared beginning: the prompt's last is always computed."""
    return max(0, min(shared, prompt_tokens - 1)) // block_tokens * block_tokens
