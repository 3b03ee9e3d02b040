"""Detects causes that only tokens show: moved token boundaries and partial blocks."""

from __future__ import annotations

from typing import Final

from kvstore.analysis.diagnose.diagnosis import Diagnosis, shown
from kvstore.analysis.diagnose.prompts import Prompt, common_length, common_tokens

AROUND: Final = 12
"""Characters shown before and after a token boundary."""


def boundary_moved(a: Prompt, b: Prompt) -> Diagnosis | None:
    """Detect equal text with different tokens.

    It happens at the end of a text, where a tokenizer merges the last letters with what follows. It
    also happens if generated tokens are written as text and tokenized again.
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
    return Diagnosis(
        "token boundary",
        f"the same text in different tokens: {shown(a.text[start : a.ends[shared]])} is one token "
        f"in the first, {shown(b.text[start : b.ends[shared]])} in the second, in "
        f"{shown(b.text[max(0, start - AROUND) : end + AROUND])}",
        "Send token ids instead of text, or end the shared text where tokens do not merge: at a "
        "newline, or at a special token of the template.",
    )


def partial_block(shared: int, a_tokens: int, b_tokens: int, block_tokens: int) -> Diagnosis | None:
    """Detect a shared prefix that ends inside a block. A partial block cannot be reused.

    shared: tokens of the common prefix. a_tokens, b_tokens: of the whole prompts.
    """
    over = min(shared, max(0, b_tokens - 1)) % block_tokens
    if not over:
        return None
    if shared < block_tokens:
        looks = f"the shared prefix of {shared} tokens is less than one block of {block_tokens}"
        advice = (
            "Make the shared prefix longer than a block, or use smaller blocks (--block-tokens; "
            "the engine's page size)."
        )
    else:
        end = "the first prompt ends" if shared >= a_tokens else "the prompts differ"
        looks = f"{end} {over} tokens into a block of {block_tokens}; those are recomputed"
        advice = "This is normal and costs less than a block per request. Smaller blocks lose less."
    return Diagnosis("partial block", looks, advice)
