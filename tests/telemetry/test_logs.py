"""One line for each event, whatever is in it."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config.settings import LogSettings
from kvstore.errors import ConfigError
from kvstore.telemetry.logs import (
    MAX_FIELD_CHARS,
    REQUEST_ID,
    JsonLines,
    LogfmtLines,
    TextLines,
    check,
)


def record_of(message: str, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("kvstore.x", logging.WARNING, "f.py", 1, message, (), None)
    record.fields = fields
    return record


def test_logfmt() -> None:
    line = LogfmtLines().format(record_of("a tier is down", tier="disk", ms=1.5, ok=True))
    _, _, rest = line.partition(" ")
    assert line.startswith("ts=")
    assert "Z " in line
    assert rest == (
        'level=warning logger=kvstore.x event="a tier is down" tier=disk ms=1.5 ok=true'
    )


@given(st.text(), st.text())
def test_a_line_is_one_line_and_reads_back(message: str, value: str) -> None:
    record = record_of(message.replace("%", "%%"), value=value)
    written = JsonLines().format(record)
    assert written.splitlines() == [written]
    assert json.loads(written)["value"] == value
    written = LogfmtLines().format(record)
    assert "\n" not in written
    assert "\r" not in written


@given(st.text())
def test_what_outsiders_call_themselves_begins_no_line_at_a_terminal(name: str) -> None:
    record = logging.LogRecord("kvstore.x", logging.INFO, "f.py", 1, "%s joined", (name,), None)
    line = TextLines().format(record)
    assert line.splitlines() == [line]
    assert not any((ord(c) < 32 and c != "\t") or 127 <= ord(c) < 160 for c in line)


def test_a_terminals_codes_and_line_ends_are_escaped() -> None:
    for lines in (TextLines(), LogfmtLines()):
        written = lines.format(record_of("client \x1b[2J\nERROR all is lost \x9b1m"))
        assert "\x1b" not in written
        assert "\n" not in written
    assert TextLines().format(record_of("a\nb")) == "WARNING kvstore.x: a\\nb"
    assert "\x9b" not in LogfmtLines().format(record_of("x", name="\x9b1m"))


def test_the_request_and_an_exception_are_in_the_line() -> None:
    token = REQUEST_ID.set("r-1")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = record_of("it failed")
        record.exc_info = sys.exc_info()
        said = json.loads(JsonLines().format(record))
        line = LogfmtLines().format(record)
    finally:
        REQUEST_ID.reset(token)
    assert said["request_id"] == "r-1"
    assert said["exception"].endswith("ValueError: two\nlines")
    assert "\n" not in line
    assert "request_id=r-1 " in line


def test_fields_are_bounded_from_their_end() -> None:
    said = json.loads(JsonLines().format(record_of("x", value="a" * 100_000 + "end")))
    assert len(said["value"]) == MAX_FIELD_CHARS + 3
    assert said["value"].endswith("end")


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"log.format = 'jsn'.*'json'"):
        check(LogSettings(format="jsn"))
    with pytest.raises(ConfigError, match=r"log.level = 'warn'.*'warning'"):
        check(LogSettings(level="warn"))
