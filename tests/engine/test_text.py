"""Streamed text: whole characters, no part of a stop string, no lost text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine.text import TextStream
from kvstore.engine.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def run(text: str, stop: tuple[str, ...]) -> tuple[str, list[str], bool]:
    """Stream the bytes of text; return the shown text, its pieces and whether it stopped."""
    stream = TextStream(TOKENIZER.stream(), stop)
    shown: list[str] = []
    for byte in text.encode():
        shown.append(stream.push(byte))
        if stream.stopped:
            break
    else:
        shown.append(stream.finish())
    return "".join(shown), shown, stream.stopped


@given(
    st.text(alphabet="abcé漢🙂", max_size=40),
    st.lists(st.text(alphabet="abcé", min_size=1, max_size=5), max_size=3),
)
def test_shown_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    shown, pieces, stopped = run(text, tuple(stop))
    assert stopped == any(one in text for one in stop)
    if not stopped:
        assert shown == text
        return
    # The stop string that is complete first counts; of several, the one that starts first.
    end = min(text.index(one) + len(one) for one in stop if one in text)
    whole = text[:end]
    assert shown == whole[: min(whole.index(one) for one in stop if one in whole)]
    assert "\ufffd" not in "".join(pieces)


def test_the_start_of_a_stop_string_is_delayed_then_shown() -> None:
    stream = TextStream(TOKENIZER.stream(), ("END",))
    assert [stream.push(byte) for byte in b"a EN"] == ["a", " ", "", ""]
    assert stream.push(ord("x")) == "ENx"
    assert stream.push(ord("E")) == ""
    assert stream.finish() == "E"


def test_a_character_appears_when_it_is_complete() -> None:
    stream = TextStream(TOKENIZER.stream())
    assert [stream.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]


def test_an_incomplete_character_at_the_end_is_shown() -> None:
    stream = TextStream(TOKENIZER.stream())
    assert stream.push("é".encode()[0]) == ""
    assert stream.finish() == "\ufffd"


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert stream.push(5) == ""
    assert stream.finish() == ""
