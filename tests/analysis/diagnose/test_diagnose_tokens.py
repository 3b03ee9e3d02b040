"""Tokens: lengths that are shared, boundaries that move, blocks that are left over."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.analysis.diagnose.compare import compare
from kvstore.analysis.diagnose.prompts import (
    Prompt,
    common_length,
    common_tokens,
    reusable_tokens,
    tokenised,
)
from kvstore.analysis.diagnose.tokens import boundary_moved, partial_block

letters = st.text("ab\u00e9", max_size=40)


def tokens_of(*words: str) -> Prompt:
    """A prompt of these words, each a token whose id follows from it."""
    ends, at = [], 0
    for word in words:
        at += len(word)
        ends.append(at)
    ids = [zlib.crc32(word.encode()) for word in words]
    return Prompt("".join(words), (("prompt", 0),), *tokenised(ids, ends))


@given(letters, letters)
def test_common_length_is_that_of_a_loop(a: str, b: str) -> None:
    def loop(a: Sequence[object], b: Sequence[object]) -> int:
        for place, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return place
        return min(len(a), len(b))

    assert common_length(a, b) == loop(a, b)
    assert common_length(a.encode(), b.encode()) == loop(a.encode(), b.encode())


@given(st.lists(st.integers(0, 1 << 20), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_shared_tokens_are_counted_whole(front: list[int], rest: list[int]) -> None:
    a = Prompt("", (), *tokenised(front + rest, range(len(front + rest))))
    b = Prompt("", (), *tokenised([*front, 1 << 21], range(len(front) + 1)))
    assert common_tokens(a, b) == len(front)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 64))
def test_what_is_reused_is_whole_blocks_and_never_the_last_token(
    shared: int, tokens: int, block: int
) -> None:
    found = reusable_tokens(shared, tokens, block)
    assert found % block == 0
    assert found <= min(shared, tokens - 1)
    assert found + block > min(shared, tokens - 1)


@given(st.text(max_size=100), st.integers(0, 100))
def test_estimated_tokens_grow_with_the_text(text: str, char: int) -> None:
    prompt = Prompt(text)
    assert prompt.tokens_at(min(char, len(text))) <= prompt.tokens
    assert prompt.tokens == len(text.encode("utf-8", "surrogatepass")) // 4


def test_a_boundary_that_moves_is_seen() -> None:
    a, b = tokens_of("Once ", "upon", " a ti"), tokens_of("Once ", "upon", " a time", " ago")
    found = boundary_moved(a, b)
    assert found is not None
    assert "' a ti'" in found.looks
    assert "' a time'" in found.looks
    assert compare(a, b, 1).verdict.kind == "token boundary"


@pytest.mark.parametrize(
    "second",
    [
        ("Once ", "upon", " a ti"),  # the same
        ("Once ", "upon", " a ti", "me"),  # goes on behind it
        ("Once ", "upon", " it"),  # another text
    ],
)
def test_a_boundary_that_stays_is_not(second: tuple[str, ...]) -> None:
    assert boundary_moved(tokens_of("Once ", "upon", " a ti"), tokens_of(*second)) is None


def test_without_a_tokenizer_no_boundary_is_seen() -> None:
    assert boundary_moved(Prompt("abc"), Prompt("abcd")) is None


@given(st.integers(0, 300), st.integers(0, 100), st.integers(1, 100), st.integers(1, 64))
def test_a_part_of_a_block_is_seen_where_there_is_one(
    shared: int, more_a: int, more_b: int, block: int
) -> None:
    found = partial_block(shared, shared + more_a, shared + more_b, block)
    assert (found is None) == (shared % block == 0)


def test_a_beginning_shorter_than_a_block_says_so() -> None:
    found = partial_block(7, 50, 50, 16)
    assert found is not None
    assert "less than one block of 16" in found.looks
    assert compare(Prompt("x" * 28 + " one"), Prompt("x" * 28 + " another"), 16).verdict.kind == (
        "partial block"
    )


def test_the_same_twice_and_one_that_goes_on() -> None:
    text = "x" * 4 * 33
    assert compare(Prompt(text), Prompt(text), 16).verdict.kind == "same"
    assert compare(Prompt(text[: 4 * 32]), Prompt(text * 2), 16).verdict.kind == "continued"


@pytest.mark.parametrize("name", ["model", "cache_salt"])
def test_other_models_and_salts_share_nothing(name: str) -> None:
    a, b = (Prompt("y" * 400, apart=((name, each),)) for each in ("one", "two"))
    seen = compare(a, b, 16)
    assert (seen.verdict.kind, seen.reused, seen.lost) == ("apart", 0, 100)
    assert f"{name} differs" in seen.verdict.looks


def test_marks_at_the_end_that_have_no_place_in_the_text_end_with_it() -> None:
    _, ends = tokenised([1, 2, 3], [3, 6, 0])
    assert list(ends) == [3, 6, 6]
