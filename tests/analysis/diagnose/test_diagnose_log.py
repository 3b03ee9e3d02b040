"""Logs: every form is read, reuse equals a plain count, and causes are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.analysis.diagnose.compare import overlap
from kvstore.analysis.diagnose.log import LogAnalyzer
from kvstore.analysis.diagnose.prompts import Prompt, clean_tokens
from kvstore.analysis.diagnose.read import Reader
from kvstore.engine.tokenizer import byte_tokenizer
from kvstore.errors import ConfigError

SYSTEM = " ".join(
    f"Rule {chr(97 + n)}: never forget the {chr(97 + n)} part of it." for n in range(26)
)
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


def ids_of(prompt: Prompt) -> list[int]:
    assert prompt.ids is not None
    return list(prompt.ids)


def analyzer_of(*prompts: Prompt, block_tokens: int = 16) -> LogAnalyzer:
    analyzer = LogAnalyzer(block_tokens)
    for prompt in prompts:
        analyzer.add(prompt)
    return analyzer


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=12),
    st.integers(1, 4),
)
def test_reusable_tokens_equal_a_count_with_a_set_of_prefixes(
    log: list[list[int]], block: int
) -> None:
    cached: set[tuple[int, ...]] = set()
    expected = 0
    for ids in log:
        most = (len(ids) - 1) // block
        run = 0
        while run < most and tuple(ids[: (run + 1) * block]) in cached:
            run += 1
        expected += run * block
        cached.update(tuple(ids[:end]) for end in range(len(ids) + 1))
    analyzer = analyzer_of(
        *(Prompt("", (), *clean_tokens(ids, range(len(ids)))) for ids in log), block_tokens=block
    )
    assert analyzer.reusable == expected
    assert analyzer.tokens == sum(map(len, log))


def test_a_timestamp_in_front_of_all_is_the_cause() -> None:
    prompts = [
        Prompt(
            f"Now: 2026-11-30 12:{minute:02}:07. {SYSTEM}",
            where=f"line {minute}",
            at_s=60.0 * minute,
        )
        for minute in range(1, 11)
    ]
    analyzer = analyzer_of(*prompts)
    [cause] = analyzer.worst_first()
    assert (cause.kind, cause.requests) == ("timestamp", 9)
    assert cause.tokens > 0.8 * 9 * prompts[0].tokens
    assert analyzer.lost + analyzer.reusable <= analyzer.tokens
    # Ten requests in nine minutes are 1,600 per day.
    assert analyzer.per_day(cause.tokens) == pytest.approx(cause.tokens / 10 * 1600)
    assert analyzer.per_day(100, 50.0) == 500.0


def test_new_text_and_a_conversation_lose_nothing() -> None:
    turns = [f"user: {'question ' * 8}{n}\nassistant: {'answer ' * 20}{n}\n" for n in range(5)]
    talk = [Prompt(SYSTEM + "".join(turns[:n])) for n in range(1, 6)]
    other = Prompt("Entirely different from all that was said before, and said only once.")
    analyzer = analyzer_of(*talk, other)
    assert analyzer.causes == {}
    assert analyzer.reusable > 0


def test_figures_per_day_need_times_in_the_whole_log() -> None:
    assert analyzer_of(Prompt("x" * 100, at_s=0.0), Prompt("x" * 100)).per_day(10) is None
    assert analyzer_of(Prompt("x" * 100, at_s=0.0), Prompt("x" * 100, at_s=1.0)).per_day(10) is None


def test_salts_isolate_requests() -> None:
    a, b = (Prompt(SYSTEM, isolation=(("cache_salt", salt),)) for salt in "ab")
    analyzer = analyzer_of(a, b)
    assert analyzer.reusable == 0
    [cause] = analyzer.worst_first()
    assert cause.kind == "isolated"


# ---- reading ----


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"body": {"messages": CHAT}},
        {"request": {"messages": CHAT}, "timestamp": 1},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
                CHAT[1],
            ]
        },
    ],
)
def test_forms_of_a_chat(row: dict[str, Any]) -> None:
    [prompt] = Reader().request(row, "here")
    assert prompt.text == "system: Be kind.\nuser: Hello\nassistant:"
    assert [prompt.part_at(at) for at in (0, 20)] == ["message 1 (system)", "message 2 (user)"]


def test_tools_come_first_and_calls_are_part_of_the_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1"}]}
    [prompt] = Reader().request({"messages": [*CHAT, call], "tools": [{"name": "find"}]}, "")
    assert prompt.text.startswith('{"name": "find"}\nsystem:')
    assert '{"id": "call_1"}' in prompt.text
    assert prompt.part_at(0) == "tools"


def test_prompts_of_a_completions_call() -> None:
    reader = Reader(byte_tokenizer())
    assert [p.text for p in reader.request({"prompt": ["ab", "c"]}, "")] == ["ab", "c"]
    [prompt] = reader.request({"prompt": [104, 105]}, "")
    assert (prompt.text, ids_of(prompt), prompt.opaque) == ("hi", [104, 105], False)
    [opaque] = Reader().request({"tokens": [16, 5, 7]}, "")
    assert (opaque.text, opaque.opaque) == ("16\n5 7 ", True)


def test_token_ids_without_a_tokenizer_are_compared_by_content() -> None:
    middle = [(37 * n) % 1000 for n in range(200)]
    rows = [[1, *middle], [2, 3, *middle], [4, 5, 6, *middle]]
    analyzer = analyzer_of(*(Reader().request({"tokens": row}, "")[0] for row in rows))
    assert analyzer.reusable == 0
    assert analyzer.lost > 2 * 150


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(1_700_000_000, 1.7e9), (1_700_000_000_000, 1.7e9), ("1970-01-01T00:01:00Z", 60.0)],
)
def test_times(time: Any, seconds: float) -> None:
    [prompt] = Reader().request({"prompt": "x", "timestamp": time}, "")
    assert prompt.at_s == seconds


def test_token_counts_reported_by_the_server() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    for row in (
        {"usage": usage},
        {"response": {"usage": usage}},
        {"response": {"body": {"usage": usage}}},
    ):
        [prompt] = Reader().request({"prompt": "x", **row}, "")
        assert (prompt.prompt_tokens, prompt.cached_tokens) == (9, 4)
    [unreported] = Reader().request({"prompt": "x", "usage": {}}, "")
    assert unreported.cached_tokens is None


def test_an_argument_is_a_file_a_request_or_text(tmp_path: Path) -> None:
    reader = Reader()
    text, request, two = (tmp_path / name for name in ("a.txt", "b.json", "c.json"))
    text.write_text("{hello")
    request.write_text(json.dumps({"messages": CHAT}))
    two.write_text(json.dumps({"prompt": ["a", "b"]}))
    assert reader.argument(str(text)).text == "{hello"
    assert reader.argument(str(request)).text.startswith("system: Be kind.")
    assert reader.argument("what is / was this?").text == "what is / was this?"
    assert reader.argument("x" * 5000).tokens == 1250
    for wrong, words in ((str(two), "exactly one prompt"), (str(tmp_path / "none"), "not found")):
        with pytest.raises(ConfigError, match=words):
            reader.argument(wrong)


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"a": 1}', '{"prompt": 7}', '{"messages": 5}', '{"tokens": [-1]}']
)
def test_an_invalid_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps({"prompt": "fine"}) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match="line 3"):
        list(Reader().log(file))


def test_tokens_of_another_prompt_are_not_lost() -> None:
    """One prompt had the long text, another the beginning: the difference is lost."""
    front = "".join(f"Rule {n} of the house is to be kept by everyone.\n" for n in range(10))
    rest = "".join(f"Passage {n} tells what happened on that day.\n" for n in range(40))
    elsewhere, neighbour = Prompt("Another beginning.\n" + rest), Prompt(front + "And an end.\n")
    prompt = Prompt(front + rest)
    analyzer = LogAnalyzer()
    for each in (elsewhere, neighbour, prompt):
        analyzer.add(each)
    assert analyzer.reusable > 0
    assert analyzer.lost == overlap(elsewhere, prompt).lost - analyzer.reusable


def test_a_missing_file_is_an_error_and_not_a_prompt() -> None:
    with pytest.raises(ConfigError, match=r"file 'missing\.json' not found"):
        Reader().argument("missing.json")
    assert Reader().argument("see missing.json").text == "see missing.json"
