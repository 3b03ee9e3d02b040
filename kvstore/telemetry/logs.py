"""Log lines: one per event, as logfmt or JSON, with the request it belongs to.

    ts=2026-02-03T04:05:06.789Z level=info logger=kvstore.service.http.request_log event=request
    request_id=0f3c status=200 ms=1.2                                     (all on one line)

Pass the fields of an event as `extra={"fields": {...}}`. Line ends in messages and exceptions are
escaped, so a line is always one event.
"""

from __future__ import annotations

import json
import logging
import re
import time
from contextvars import ContextVar
from typing import Any, Final

from kvstore.config.settings import LogSettings, suggest
from kvstore.errors import ConfigError

REQUEST_ID: Final[ContextVar[str]] = ContextVar("kvstore_request_id", default="")
"""Id of the HTTP request in progress; "": none."""
TRACE_ID: Final[ContextVar[str]] = ContextVar("kvstore_trace_id", default="")
"""Id of the request's trace; "": traces are off."""

LEVELS: Final = ("debug", "info", "warning", "error")
MAX_FIELD_CHARS: Final = 16_384
"""Maximum length of a field's value. Of longer ones the end is kept: it has a traceback's error."""

_BARE = re.compile(r"[^\s\"=\x00-\x1f\x7f-\x9f]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record, in the order in which they are written."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    fields: dict[str, Any] = {
        "ts": f"{seconds}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    for name, variable in (("request_id", REQUEST_ID), ("trace_id", TRACE_ID)):
        if variable.get():
            fields[name] = variable.get()
    fields.update(getattr(record, "fields", {}))
    if record.exc_info:
        fields["exception"] = logging.Formatter().formatException(record.exc_info)
    return {name: _bounded(value) for name, value in fields.items()}


class LogfmtLines(logging.Formatter):
    """`key=value` pairs. A value that is not one plain word is quoted as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_word(value)}" for name, value in fields_of(record).items())


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(fields_of(record), default=str)


class TextLines(logging.Formatter):
    """Plain text for a terminal. An exception takes several lines.

    Control characters and line ends in a message are escaped, because names come from outside.
    """

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _CONTROL.sub(_escaped, record.message)
        return super().formatMessage(record)


FORMATS: Final[dict[str, type[logging.Formatter]]] = {
    "logfmt": LogfmtLines,
    "json": JsonLines,
    "text": TextLines,
}


def check(settings: LogSettings) -> None:
    """Check the settings. Raises ConfigError: unknown format or level."""
    for name, value, known in (
        ("log.format", settings.format, FORMATS),
        ("log.level", settings.level, LEVELS),
    ):
        if value not in known:
            raise ConfigError(f"{name} = {value!r}: {suggest(value, known)}")


def configure(settings: LogSettings) -> None:
    """Set up the process's log on stderr, at a server's start.

    Raises ConfigError: unknown format or level.
    """
    check(settings)
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATS[settings.format]())
    root = logging.getLogger()
    for other in list(root.handlers):
        root.removeHandler(other)
    root.addHandler(handler)
    logging.getLogger("kvstore").setLevel(settings.level.upper())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _bounded(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_FIELD_CHARS:
        return "..." + value[-MAX_FIELD_CHARS:]
    return value
