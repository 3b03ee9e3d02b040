"""A prompt as text with named parts, and as tokens if a tokenizer is given."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from kvstore.analysis.diagnose.content import TextIndex

BYTES_PER_TOKEN: Final = 4
"""Bytes of UTF-8 that count as one token without a tokenizer. About right for English prose and
vocabularies of 30,000 to 200,000 tokens. Code and most other languages need more tokens."""

APPROXIMATION: Final = f"token counts are estimates: {BYTES_PER_TOKEN} bytes of UTF-8 each"


@dataclass(frozen=True)
class Prompt:
    """One request's prompt.

    parts: (name, start in characters) of its messages, in order. ids, ends: its tokens, and the end
    of each in the text. None: no tokenizer. isolation: fields that prevent sharing with other
    requests whatever the text (model, salt, adapter). opaque: the text only encodes token ids.
    where: its place in the input. at_s: time it was sent. prompt_tokens, cached_tokens: as reported
    by the server.
    """

    text: str
    parts: tuple[tuple[str, int], ...] = (("prompt", 0),)
    ids: array[int] | None = None
    ends: array[int] | None = None
    isolation: tuple[tuple[str, str], ...] = ()
    opaque: bool = False
    where: str = ""
    at_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", tuple(start for _, start in self.parts))

    @property
    def tokens(self) -> int:
        """Return the number of tokens, estimated if there is no tokenizer."""
        return len(self.ids) if self.ids is not None else self.tokens_at(len(self.text))

    def tokens_at(self, char: int) -> int:
        """Return the number of complete tokens before this character."""
        if self.ends is not None:
            return bisect_right(self.ends, char)
        if self._ascii:
            return char // BYTES_PER_TOKEN
        return len(self.text[:char].encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN

    def part_at(self, char: int) -> str:
        """Return the name of the part with this character."""
        index = bisect_right(self._starts, char) - 1
        return self.parts[max(0, index)][0] if self.parts else "prompt"

    @cached_property
    def key(self) -> str | bytes:
        """Sort key. Prompts share as many tokens as their keys share characters (or 4 bytes)."""
        return self.text if self.ids is None else self.ids.tobytes()

    @cached_property
    def index(self) -> TextIndex:
        """Index of the prompt's pieces."""
        return TextIndex.of(self.text)

    @cached_property
    def _ascii(self) -> bool:
        return self.text.isascii()


def clean_tokens(ids: Iterable[int], ends: Iterable[int]) -> tuple[array[int], array[int]]:
    """Return tokens as a prompt stores them.

    A tokenizer gives special tokens at the end no position. They are put at the end of the text.
    """
    last, kept = 0, array("I")
    for end in ends:
        last = max(last, end)
        kept.append(last)
    return array("I", ids), kept


def common_length(a: str | bytes, b: str | bytes) -> int:
    """Return the number of leading characters (or bytes) that are equal."""
    if len(a) > len(b):
        a, b = b, a
    if b[: len(a)] == a:
        return len(a)
    low, high = 0, len(a)  # The first `low` are equal, the first `high` are not.
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def common_tokens(a: Prompt, b: Prompt) -> int:
    """Return the leading tokens that two prompts share. An estimate without a tokenizer."""
    shared = common_length(a.key, b.key)
    if a.ids is not None and b.ids is not None:
        return shared // a.ids.itemsize
    return b.tokens_at(shared)


def reusable_tokens(shared: int, prompt_tokens: int, block_tokens: int) -> int:
    """Return the shared tokens in full blocks. The prompt's last token is always computed."""
    return max(0, min(shared, prompt_tokens - 1)) // block_tokens * block_tokens
