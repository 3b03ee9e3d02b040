"""Tokens: shared lengths, moved boundaries, partial blocks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.analysis.diagnose.compare import compare
from kvstore.analysis.diagnose.prompts import (
    Prompt,
    clean_tokens,
    common_length,
    common_tokens,
    reusable_tokens,
)
from kvstore.analysis.diagnose.tokens import boundary_moved, partial_block

letters = st.text("ab\u00e9", max_size=40)


def tokens_of(*words: str) -> Prompt:
    """Return a prompt of these words, each a token with an id derived from it."""
    ends, at = [], 0
    for word in words:
        at += len(word)
        ends.append(at)
    ids = [zlib.crc32(word.encode()) for word in words]
    return Prompt("".join(words), (("prompt", 0),), *clean_tokens(ids, ends))


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
    a = Prompt("", (), *clean_tokens(front + rest, range(len(front + rest))))
    b = Prompt("", (), *clean_tokens([*front, 1 << 21], range(len(front) + 1)))
    assert common_tokens(a, b) == len(front)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 64))
def test_reused_tokens_are_whole_blocks_without_the_last_token(
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


def test_a_moved_boundary_is_detected() -> None:
    a, b = tokens_of("Once ", "upon", " a ti"), tokens_of("Once ", "upon", " a time", " ago")
    found = boundary_moved(a, b)
    assert found is not None
    assert "' a ti'" in found.looks
    assert "' a time'" in found.looks
    assert compare(a, b, 1).diagnosis.kind == "token boundary"


@pytest.mark.parametrize(
    "second",
    [
        ("Once ", "upon", " a ti"),  # The same.
        ("Once ", "upon", " a ti", "me"),  # It continues.
        ("Once ", "upon", " it"),  # Another text.
    ],
)
def test_a_boundary_that_stays_is_not(second: tuple[str, ...]) -> None:
    assert boundary_moved(tokens_of("Once ", "upon", " a ti"), tokens_of(*second)) is None


def test_without_a_tokenizer_no_boundary_is_detected() -> None:
    assert boundary_moved(Prompt("abc"), Prompt("abcd")) is None


@given(st.integers(0, 300), st.integers(0, 100), st.integers(1, 100), st.integers(1, 64))
def test_a_partial_block_is_detected(shared: int, more_a: int, more_b: int, block: int) -> None:
    found = partial_block(shared, shared + more_a, shared + more_b, block)
    assert (found is None) == (shared % block == 0)


def test_a_beginning_shorter_than_a_block_says_so() -> None:
    found = partial_block(7, 50, 50, 16)
    assert found is not None
    assert "less than one block of 16" in found.looks
    assert compare(Prompt("x" * 28 + " one"), Prompt("x" * 28 + " another"), 16).diagnosis.kind == (
        "partial block"
    )


def test_the_same_twice_and_one_that_goes_on() -> None:
    text = "x" * 4 * 33
    assert compare(Prompt(text), Prompt(text), 16).diagnosis.kind == "same"
    assert compare(Prompt(text[: 4 * 32]), Prompt(text * 2), 16).diagnosis.kind == "continued"


@pytest.mark.parametrize("name", ["model", "cache_salt"])
def test_other_models_and_salts_share_nothing(name: str) -> None:
    a, b = (Prompt("y" * 400, isolation=((name, each),)) for each in ("one", "two"))
    seen = compare(a, b, 16)
    assert (seen.diagnosis.kind, seen.reused, seen.lost) == ("isolated", 0, 100)
    assert f"{name} differs" in seen.diagnosis.looks


def test_special_tokens_at_the_end_have_the_position_of_the_end() -> None:
    _, ends = clean_tokens([1, 2, 3], [3, 6, 0])
    assert list(ends) == [3, 6, 6]
