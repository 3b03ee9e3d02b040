"""Changed values: what counts as a time, an id or a number, and what does not."""

from __future__ import annotations

import uuid
from datetime import datetime

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.analysis.diagnose.compare import compare
from kvstore.analysis.diagnose.content import RESYNC_CHARS, resync
from kvstore.analysis.diagnose.prompts import Prompt, common_length
from kvstore.analysis.diagnose.values import counter, identifier, timestamp, value

REST = " The rest of this prompt is the same in both, and it is long enough to be worth a block."
FORMATS = (
    "%Y-%m-%dT%H:%M:%SZ",
    "%Y-%m-%d %H:%M:%S.%f",
    "%A, %d %B %Y, %H:%M",
    "%b %d, %Y at %I:%M %p",
    "%d.%m.%Y",
    "%Y/%m/%d",
    "%H:%M:%S",
    "%A, %B %d",
)
times = st.datetimes(datetime(2001, 10, 1), datetime(2090, 1, 1))


def at(a: str, b: str) -> int:
    return common_length(a, b)


def kind(first: str, second: str, before: str = "You are a helper. ") -> str:
    a, b = (before + part + REST for part in (first, second))
    return compare(Prompt(a), Prompt(b)).diagnosis.kind


@pytest.mark.parametrize("form", FORMATS)
@given(first=times, second=times, before=st.sampled_from(["", "Now: ", "It is\n", "(as of "]))
def test_times_of_every_form_are_times(
    form: str, first: datetime, second: datetime, before: str
) -> None:
    a, b = (before + moment.strftime(form) for moment in (first, second))
    assume(a != b)
    found = timestamp(a + REST, b + REST, at(a, b))
    assert found is not None
    assert (found.kind, kind(a, b)) == ("timestamp", "timestamp")
    assert repr(first.strftime(form)) in found.looks


seconds = st.integers(1_001_000_000, 1_999_999_999)


@given(seconds, seconds, st.sampled_from([1, 1_000]))
def test_seconds_and_milliseconds_since_1970_are_times(first: int, second: int, unit: int) -> None:
    assume(first != second)
    assert kind(str(first * unit), str(second * unit)) == "timestamp"


@given(st.uuids(), st.uuids(), st.sampled_from([str, lambda u: u.hex, lambda u: f"req-{u.hex}"]))
def test_ids_are_ids(first: uuid.UUID, second: uuid.UUID, write) -> None:  # type: ignore[no-untyped-def]
    a, b = write(first), write(second)
    digits = [sum(letter.isdigit() for letter in word) for word in (a, b)]
    letters = [sum(letter.isalpha() for letter in word) for word in (a, b)]
    assume(a != b and min(digits) >= 4 and min(letters) >= 4)
    found = identifier(a + REST, b + REST, at(a, b))
    assert found is not None
    assert a in found.looks or a[:20] in found.looks
    assert kind(a, b) == "id"


@given(st.integers(0, 99_999), st.integers(0, 99_999))
def test_numbers_are_counters(first: int, second: int) -> None:
    assume(first != second)
    a, b = f"Turn {first} of many.", f"Turn {second} of many."
    found = counter(a + REST, b + REST, at(a, b))
    assert found is not None
    assert repr(str(first)) in found.looks
    assert kind(a, b) == "counter"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("User: Alice.", "User: Bob.", "value"),
        ("Monday is on.", "Tuesday is on.", "timestamp"),
        ("Monthly reports", "Weekly reports", "value"),
        ("Friend of mine", "Sunset of mine", "value"),
        ("Market 12 square", "Mayor 13 square", "value"),
        ("chatcmpl-a8Bz91Qx77", "chatcmpl-b8Cz92Qy70", "id"),
        ("[call_9aX81bQ2]", "[call_7bY11cR3]", "id"),
        ("word-by-word", "line-by-line", "value"),
        ("Retry 9 now", "Retry 10 now", "counter"),
        ("3,000 tokens left", "2,950 tokens left", "counter"),
    ],
)
def test_by_example(first: str, second: str, expected: str) -> None:
    assert kind(first, second) == expected


@pytest.mark.parametrize("classify", [timestamp, identifier, counter])
def test_words_are_not_values(classify) -> None:  # type: ignore[no-untyped-def]
    a, b = "Tell me about the cat", "Tell me about the dog"
    assert classify(a + REST, b + REST, at(a, b)) is None


def test_a_value_is_short_and_the_text_goes_on_alike() -> None:
    a, b = "Name: " + "x" * 300, "Name: " + "y" * 300
    assert value(a + REST, b + REST, 6) is None
    assert value("Name: Alice", "Name: Robert and then some", 6) is None
    found = value("Name: Alice." + REST, "Name: Robert." + REST, 6)
    assert found is not None
    assert "'Alice'" in found.looks
    assert "'Robert'" in found.looks


@given(st.text("abc", max_size=60), st.text("xyz", max_size=60))
def test_the_same_text_going_on_is_found(gap_a: str, gap_b: str) -> None:
    rest = "".join(chr(0x4E00 + number) for number in range(2 * RESYNC_CHARS))
    found = resync(gap_a + rest, gap_b + rest, 0)
    assert found == (len(gap_a), len(gap_b))


def test_values_at_different_positions_are_not_one_value() -> None:
    """One text has a date from "Monday" on, the other a time of day after it."""
    a, b = "It is Monday 3 May." + REST, "It is Monday 3:45." + REST
    assert timestamp(a, b, at(a, b)) is None
