"""Causes that only tokens show: a boundary that moved, and what full blocks leave over."""

from __future__ import annotations

from typing import Final

from kvstore.analysis.diagnose.prompts import Prompt, common_length, common_tokens
from kvstore.analysis.diagnose.verdict import Verdict, shown

AROUND: Final = 12
"""Characters shown before and behind a token boundary."""


def boundary_moved(a: Prompt, b: Prompt) -> Verdict | None:
    """The text is the same further than its tokens are: one text was cut into tokens otherwise.

    It happens where one text ends (a tokenizer merges its last letters with what follows), and
    where generated tokens are written as text and tokenised anew.
    """
    if a.ends is None or b.ends is None:
        return None
    shared = common_tokens(a, b)
    text = common_length(a.text, b.text)
    if shared >= min(len(a.ends), len(b.ends)):
        return None
    start = a.ends[shared - 1] if shared else 0
    if min(a.ends[shared], b.ends[shared]) > text or a.ends[shared] == b.ends[shared]:
        return None
    end = max(a.ends[shared], b.ends[shared])
    return Verdict(
        "token boundary",
        f"the same text in other tokens: {shown(a.text[start : a.ends[shared]])} is one token in "
        f"the first, {shown(b.text[start : b.ends[shared]])} in the second, in "
        f"{shown(b.text[max(0, start - AROUND) : end + AROUND])}",
        "Send token ids instead of text, or end what is shared at a place where tokens do not "
        "merge: a newline, or a special token of the template.",
    )


def partial_block(shared: int, a_tokens: int, b_tokens: int, block_tokens: int) -> Verdict | None:
    """What is shared ends inside a block, and a part of a block cannot be reused.

    shared: tokens that both have in front; a_tokens, b_tokens: of the whole prompts.
    """
    over = min(shared, max(0, b_tokens - 1)) % block_tokens
    if not over:
        return None
    if shared < block_tokens:
        looks = f"what is shared, {shared} tokens, is less than one block of {block_tokens}"
        advice = (
            "Make the shared beginning longer than a block, or use smaller blocks (--block-tokens; "
            "the engine's page)."
        )
    else:
        end = "the first prompt ends" if shared >= a_tokens else "they part"
        looks = f"{end} {over} tokens into a block of {block_tokens}; those are computed again"
        advice = (
            "This is normal, and costs less than a block per request; smaller blocks lose less."
        )
    return Verdict("partial block", looks, advice)
