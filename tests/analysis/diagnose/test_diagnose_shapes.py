"""The same content in another form: each form by example, and by generated texts."""

from __future__ import annotations

import html
import json
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.analysis.diagnose.compare import compare
from kvstore.analysis.diagnose.content import TextIndex, pieces, shared_after
from kvstore.analysis.diagnose.prompts import Prompt, common_length
from kvstore.analysis.diagnose.shapes import cut, inserted, reordered, replaced, rerendered

WORDS = [f"word{chr(97 + a)}{chr(97 + b)}" for a in range(26) for b in range(26)]


def sentence(seed: int, words: int = 12) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words)).capitalize() + "."


DOCUMENTS = [f"Document about {WORDS[7 * n]}\n{sentence(n)}\n{sentence(n + 100)}" for n in range(6)]
HEAD = "Answer from these documents.\n\n"
ASK = "\n\nWhat do they say?"


def kind(a: str, b: str) -> str:
    return compare(Prompt(a), Prompt(b)).diagnosis.kind


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_documents_in_another_order_are_reordered(first: list[int], second: list[int]) -> None:
    assume(first != second)
    a, b = (HEAD + "\n\n".join(DOCUMENTS[n] for n in order) + ASK for order in (first, second))
    assert kind(a, b) == "reordered"
    char = common_length(a, b)
    assert shared_after(TextIndex.of(a), TextIndex.of(b), char) > 0


@given(st.sets(st.integers(0, 600), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_a_list_in_another_order_is_reordered(chosen: set[int], draw: random.Random) -> None:
    names = [WORDS[n] for n in sorted(chosen)]
    other = draw.sample(names, len(names))
    assume(other != names)
    a, b = (f"Tools: {', '.join(items)}.\n{sentence(1)}" for items in (names, other))
    assert kind(a, b) == "reordered"


def test_reordered_and_cut_text_can_start_with_a_number_or_a_date() -> None:
    """The first different letters are part of a number or a date by chance."""
    sections = [f"{n + 1}. of 2026-01-0{n + 1}: {sentence(n)}" for n in range(4)]
    a, b = ("\n".join([HEAD, *order, ASK]) for order in (sections, sections[::-1]))
    assert kind(a, b) == "reordered"
    a, b = ("\n".join([HEAD, *rest, ASK]) for rest in (sections, sections[2:]))
    assert kind(a, b) == "cut"
    assert kind(b, a) == "inserted"


def test_json_lists_in_another_order_are_reordered() -> None:
    tools = [{"name": name, "args": [1, 2]} for name in ("find", "read")]
    a, b = (json.dumps(order) + sentence(2) for order in (tools, tools[::-1]))
    assert kind(a, b) == "reordered"


def test_the_same_order_with_one_document_more_is_not_reordered() -> None:
    a = HEAD + "\n\n".join(DOCUMENTS[1:4]) + ASK
    b = HEAD + "\n\n".join(DOCUMENTS[0:4]) + ASK
    assert reordered(a, b, common_length(a, b)) is None
    assert kind(a, b) in ("inserted", "other", "value")


THOUGHT = "<think>\nFirst I look at it.\n</think>\n\n"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"assistant\n{THOUGHT}{sentence(3)}", f"assistant\n{sentence(3)}"),
        (f"assistant\n{sentence(3)}", f"assistant\n{THOUGHT}{sentence(3)}"),
        (
            f"<|channel|>analysis<|message|>hm<|end|>{sentence(3)} and so on",
            f"{sentence(3)} and so on",
        ),
        (f"assistant\n\n{sentence(3)}", f"assistant\n{sentence(3)}"),
        (f"{sentence(4)} \nuser: {sentence(3)}", f"{sentence(4)}\nuser: {sentence(3)}"),
        ('call {"a": 1, "b": [2, 3]} done', 'call {"a":1,"b":[2,3]} done'),
        ('call {"a": 1, "b": 2} done', 'call {"b": 2, "a": 1} done'),
        (f"caf\u00e9 au lait {sentence(5)}", f"cafe\u0301 au lait {sentence(5)}"),
        (f"a &amp; b {sentence(5)}", f"a & b {sentence(5)}"),
        (f"\\u00fcber {sentence(5)}", f"\u00fcber {sentence(5)}"),
    ],
)
def test_history_written_otherwise(first: str, second: str) -> None:
    assert kind(sentence(9) + "\n" + first, sentence(9) + "\n" + second) == "rerendered"


@given(st.text("abc<>&", min_size=1, max_size=20), st.sampled_from("<>&"))
def test_escaped_text_is_the_same_text(text: str, sign: str) -> None:
    text = f"{text}{sign} c"
    escaped = html.escape(text)
    assume(html.unescape(text) == text)
    a, b = text + sentence(6), escaped + sentence(6)
    found = rerendered(a, b, common_length(a, b))
    assert found is not None
    assert found.kind == "rerendered"


def test_other_answers_are_not_the_same_history() -> None:
    a, b = f"assistant\n{sentence(3)}", f"assistant\n{sentence(4)}"
    assert rerendered(a, b, common_length(a, b)) is None


@given(st.integers(1, 4), st.integers(1, 3))
def test_a_window_over_the_last_turns_is_a_cut(turns: int, gone: int) -> None:
    said = [f"user: {sentence(n)}\nassistant: {sentence(n + 50)}\n" for n in range(turns + gone)]
    system = "system: Be kind.\n"
    a, b = system + "".join(said), system + "".join(said[gone:]) + "user: And then?\n"
    char = common_length(a, b)
    found = cut(a, b, char)
    assert found is not None
    assert f"{sum(map(len, said[:gone])):,} characters" in found.looks
    assert kind(a, b) == "cut"


@given(st.integers(0, 400))
def test_text_in_front_is_inserted(seed: int) -> None:
    a = " ".join(sentence(n) for n in range(5))
    front = f"Note: {sentence(1000 + seed)} "
    found = inserted(a, front + a, common_length(a, front + a))
    assert found is not None
    assert f"{len(front):,} characters were put in front" in found.looks
    assert kind(a, front + a) == "inserted"


def test_neither_cut_nor_inserted_without_a_continuation() -> None:
    a, b = sentence(1) + sentence(2), sentence(1) + sentence(3)
    char = common_length(a, b)
    assert (cut(a, b, char), inserted(a, b, char)) == (None, None)


@given(st.permutations(range(6)))
def test_another_document_in_front_of_the_same_one_is_replaced(order: list[int]) -> None:
    first, last, one, other = (DOCUMENTS[n] for n in order[:4])
    a, b = (HEAD + "\n\n".join((first, middle, last)) + ASK for middle in (one, other))
    char = common_length(a, b)
    found = replaced(a, b, char)
    assert found is not None
    assert repr(last.partition("\n")[0])[:-1] in found.looks
    assert kind(a, b) in ("replaced", "value")  # A small difference is a value.
    assert replaced(first, other, common_length(first, other)) is None


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=300))
def test_any_two_texts_get_a_diagnosis(front: str, first: str, second: str) -> None:
    seen = compare(Prompt(front + first), Prompt(front + second), 4)
    assert seen.diagnosis.kind
    assert seen.char >= len(front)
    assert seen.reused % 4 == 0
    assert seen.reused <= seen.shared
    assert 0 <= seen.lost <= seen.b.tokens


@given(st.text(max_size=400))
def test_pieces_are_in_the_text_in_order(text: str) -> None:
    at = 0
    for piece in pieces(text):
        at = text.index(piece, at) + len(piece)
    index = TextIndex.of(text)
    assert [hash(piece) for piece in pieces(text)] == list(index.hashes)
    assert shared_after(index, index, 0) == sum(map(len, pieces(text)))
